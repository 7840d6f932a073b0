"""Symmetry of the cluster: classes of devices that the simulator cannot distinguish, and hosts with equal devices.

Exchanging two devices of one class changes no step time and no memory peak, so a placement only counts devices per
class. Devices that differ in nothing but their host have the same *type*, but not the same class: the host decides
which link joins two of them. `ClassSymmetry` recognizes placements that differ only in which of such hosts they use.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.profile import ProfilesByKind

_TypeKey = tuple[str, float, bool, int, Hashable]
"""Kind, speed, whether transfers overlap with compute, memory limit in bytes, and what constraints allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Interchangeable devices.

    Attributes:
        ranks: their ranks in the cluster, ascending.
        device: the first of them.
        limit_bytes: the memory limit of each of them.
        type_number: the type, given as the number of its first class: classes that differ in nothing but their host
            have the same type.
        host: the host of all of them; None if no link depends on it.
    """

    ranks: tuple[int, ...]
    device: Device
    limit_bytes: int
    type_number: int
    host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSymmetry:
    """Recognizes choices of devices that differ only in an exchange of hosts.

    Attributes:
        types: the type number of each class. [classes]
        hosts: the host of each class; None if no link depends on it. [classes]
    """

    types: tuple[int, ...]
    hosts: tuple[str | None, ...]

    def key(self, taken: Sequence[int], remaining: Sequence[int]) -> Hashable:
        """Returns a key that is equal for symmetric choices of devices.

        If two keys are equal, there is a one-to-one map between the devices of both choices. It keeps the type of each
        device, whether two of them share a host, and the order of the classes; if all classes have one type, it may
        reverse that order. The order matters because it is that of the replicas: micro-batch m goes from replica
        m mod R of a stage to replica m mod R' of the next one. If both orders are reversed, the same pairs exchange
        micro-batches. With any other order, pairs on one host could become pairs on two hosts.

        Args:
            taken: how many devices of each class the stage has. [classes]
            remaining: how many of each class remain for later stages. [classes]
        """
        used = [c for c, (now, later) in enumerate(zip(taken, remaining, strict=True)) if now or later]
        ascending = self._in_order(used, taken, remaining)
        if len({self.types[c] for c in used}) > 1:
            return ascending
        return min(ascending, self._in_order(used[::-1], taken, remaining))

    def _in_order(
        self, classes: Sequence[int], taken: Sequence[int], remaining: Sequence[int]
    ) -> tuple[tuple[int, int, int, int], ...]:
        """Returns (type, host, taken, remaining) for each class; hosts are numbered by first occurrence."""
        numbers: dict[Hashable, int] = {}
        return tuple(
            (
                self.types[c],
                numbers.setdefault(c if self.hosts[c] is None else self.hosts[c], len(numbers)),
                taken[c],
                remaining[c],
            )
            for c in classes
        )


def device_classes(
    cluster: Cluster, limits: Sequence[int], distinctions: Sequence[Hashable], ns_per_sample: Sequence[float]
) -> tuple[DeviceClass, ...]:
    """Returns the classes of a cluster's devices, the fastest first, then in the cluster's order.

    Args:
        limits: the memory limit of each rank, in bytes. [ranks]
        distinctions: ranks that differ in this are in different classes. [ranks]
        ns_per_sample: the time that each rank takes for the same work. [ranks]
    """
    # A link that the cluster lists individually makes the devices at both of its ends unlike all others.
    linked = {end for link in cluster.links for end in (link.source, link.target)}
    linked |= {device.name for device in cluster.devices if not linked.isdisjoint(device.members or ())}
    num_on_host = Counter(device.host for device in cluster.devices)
    ranks_of: dict[tuple[_TypeKey, str | None, str | None], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        # The host matters only if a link depends on it; the name, only if the device has an individual link.
        host = None if cluster.hosts_are_alike or num_on_host[device.host] == 1 else device.host
        name = device.name if device.name in linked else None
        alike = (device.kind, device.speed, device.overlaps_transfers, limits[rank], distinctions[rank])
        ranks_of.setdefault((alike, host, name), []).append(rank)
    # The fastest class comes first, so replicas in the order of their classes have the fastest first.
    groups = sorted(ranks_of.items(), key=lambda group: (ns_per_sample[group[1][0]], group[1][0]))
    first_class: dict[Hashable, int] = {}
    classes = []
    for number, ((alike, host, own_name), ranks) in enumerate(groups):
        # A class without a host, or with an individual link, has a type of its own.
        type_key = number if host is None or own_name is not None else alike
        classes.append(
            DeviceClass(
                ranks=tuple(ranks),
                device=cluster.devices[ranks[0]],
                limit_bytes=limits[ranks[0]],
                type_number=first_class.setdefault(type_key, number),
                host=host,
            )
        )
    return tuple(classes)


def fastest_first(profiles: ProfilesByKind, cluster: Cluster) -> tuple[str, ...]:
    """Returns the names of the devices, the fastest first: of replicas the first ones may run one micro-batch more."""
    return tuple(cluster.devices[rank].name for rank in ranks_fastest_first(profiles, cluster))


def ranks_fastest_first(profiles: ProfilesByKind, cluster: Cluster) -> tuple[int, ...]:
    """Returns all ranks, the fastest first, equally fast ones in the cluster's order."""
    times_ns = ns_per_sample(profiles, cluster)
    return tuple(sorted(range(len(times_ns)), key=times_ns.__getitem__))


def ns_per_sample(profiles: ProfilesByKind, cluster: Cluster) -> list[float]:
    """Returns the time of F and B of all layers per sample, at the largest measured micro-batch size. [ranks]"""
    at_speed_1 = {
        kind: sum(m.forward_backward_ns for m in profile.at(profile.microbatch_sizes[-1]))
        / profile.microbatch_sizes[-1]
        for kind, profile in profiles.items()
    }
    return [at_speed_1[device.kind] / device.speed for device in cluster.devices]


def are_sorted(classes: Sequence[DeviceClass]) -> bool:
    """Returns whether the cluster lists its devices class by class, in the order of the classes."""
    ranks = [rank for each in classes for rank in each.ranks]
    return ranks == sorted(ranks)


class ClassLinks:
    """The links between devices of two classes, and between two devices of one class.

    They are looked up when they are asked for: thousands of unlike devices have millions of pairs.
    """

    def __init__(self, cluster: Cluster, classes: Sequence[DeviceClass]) -> None:
        self._links: dict[tuple[int, int], Bandwidth] = {}
        self._cluster, self._classes = cluster, classes

    def _link(self, a: int, b: int) -> Bandwidth:
        """Returns the link from a device of one class to one of another, or to another one of the same class."""
        if (a, b) not in self._links:
            # All pairs of devices of two classes have equal links, so one pair represents all. Within one class the
            # first and the last device are two different devices.
            self._links[a, b] = self._cluster.link(self._classes[a].ranks[0], self._classes[b].ranks[-1])
        return self._links[a, b]

    def between(self, sources: Iterable[int], targets: Iterable[int]) -> list[Bandwidth]:
        """Returns the distinct links from some classes to others."""
        pairs = {(a, b) for a in sources for b in targets if a != b or len(self._classes[a].ranks) > 1}
        return sorted({self._link(a, b) for a, b in pairs}, key=_sort_key)

    def ring(self, devices: Sequence[int]) -> list[Bandwidth]:
        """Returns the distinct links between any two of these devices, and their `host_sum_link` if there is one."""
        pairs = {(a, b) for i, a in enumerate(devices) for j, b in enumerate(devices) if i != j}
        host_sum = self.host_sum_link(devices)
        return sorted(
            {self._link(a, b) for a, b in pairs} | ({host_sum} if host_sum is not None else set()), key=_sort_key
        )

    def host_sum_link(self, devices: Sequence[int]) -> Bandwidth | None:
        """Returns `Cluster.host_sum_link` for devices of these classes."""
        # If a class occurs more than once, two of its devices are passed, because they may be on different hosts.
        twice = [self._classes[c].ranks[-1] for c in set(devices) if devices.count(c) > 1]
        return self._cluster.host_sum_link([self._classes[c].ranks[0] for c in devices] + twice)

    def members(self, devices: Sequence[int]) -> list[Bandwidth]:
        """Returns the distinct links among the members of groups of these classes."""
        links = {link for c in devices for link in self._cluster.member_links(self._classes[c].ranks[0])}
        return sorted(links, key=_sort_key)


def _sort_key(link: Bandwidth) -> tuple[int, int]:
    return link.bytes_per_s, link.latency_ns
