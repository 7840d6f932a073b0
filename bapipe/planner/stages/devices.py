"""Symmetry of the cluster: classes of devices that the simulator cannot distinguish, and devices that hosts have alike.

Exchanging two devices of one class leaves every step time and every memory peak as it is, so a placement counts devices
per class. Devices of several hosts that differ in their host alone are of one type, but not of one class: the host
decides which link joins two of them. `ClassSymmetry` tells which placements on such hosts have equal futures.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.profile import ModelProfile

_TypeKey = tuple[str, float, bool, int, Hashable]
"""Kind, speed, whether transfers overlap, memory limit, and what constraints distinguish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Devices that can be exchanged with each other.

    Attributes:
        ranks: their ranks in the cluster, ascending.
        device: the first of them.
        limit_bytes: the memory limit of each of them.
        type_number: the number of the first class of such devices, maybe this one: classes that differ in nothing but
            their host are of one type.
        host: the host that all of them are on, if it makes a difference to a link, else None.
    """

    ranks: tuple[int, ...]
    device: Device
    limit_bytes: int
    type_number: int
    host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSymmetry:
    """Which choices of devices differ only in which of several hosts has which role.

    Attributes:
        types: the type of each class. [classes]
        hosts: the host of each class; None if it makes no difference. [classes]
    """

    types: tuple[int, ...]
    hosts: tuple[str | None, ...]

    def key(self, taken: Sequence[int], remaining: Sequence[int]) -> Hashable:
        """Returns a key of the devices of a stage and those that remain for later ones, by class.

        Equal keys promise a one-to-one map between the devices of both choices that keeps the type of each, whether two
        share a host, and the order of the classes or, if all are of one type, reverses it. The order is that of
        replicas, so it decides which replicas of two stages meet: replica m mod R and replica m mod R'. With both
        orders reversed, the same pairs meet. An exchange of hosts that orders them in another way may make replicas
        meet on one host that were on two, so it is no symmetry.
        """
        used = [c for c, (now, later) in enumerate(zip(taken, remaining, strict=True)) if now or later]
        ascending = self._in_order(used, taken, remaining)
        if len({self.types[c] for c in used}) > 1:
            return ascending
        return min(ascending, self._in_order(used[::-1], taken, remaining))

    def _in_order(
        self, classes: Sequence[int], taken: Sequence[int], remaining: Sequence[int]
    ) -> tuple[tuple[int, int, int, int], ...]:
        """The type, host, devices taken and devices that remain of each class; hosts by number, as they occur."""
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
        limits: the memory limit of each rank, in bytes.
        distinctions: ranks for which this differs are in different classes.
        ns_per_sample: time of each rank for the same work.
    """
    # A link that the cluster lists by itself distinguishes the devices at both of its ends from all others.
    linked = {end for link in cluster.links for end in (link.source, link.target)}
    linked |= {device.name for device in cluster.devices if not linked.isdisjoint(device.members or ())}
    num_on_host = Counter(device.host for device in cluster.devices)
    ranks_of: dict[tuple[_TypeKey, str | None, str | None], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        # The host matters only if it makes a difference to a link; a link of its own makes a device unique.
        host = None if cluster.hosts_are_alike or num_on_host[device.host] == 1 else device.host
        name = device.name if device.name in linked else None
        alike = (device.kind, device.speed, device.overlaps_transfers, limits[rank], distinctions[rank])
        ranks_of.setdefault((alike, host, name), []).append(rank)
    # Ascending numbers of classes mean descending speed: replicas in this order are the fastest first.
    groups = sorted(ranks_of.items(), key=lambda group: (ns_per_sample[group[1][0]], group[1][0]))
    first_class: dict[Hashable, int] = {}
    classes = []
    for number, ((alike, host, own_name), ranks) in enumerate(groups):
        # A device with a link of its own, or in a class without a host, is like no device of another class.
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


def fastest_first(profiles: Mapping[str, ModelProfile], cluster: Cluster) -> tuple[str, ...]:
    """Returns the names of the devices in an order for replicas, of which the first ones run more micro-batches."""
    times_ns = ns_per_sample(profiles, cluster)
    return tuple(cluster.devices[rank].name for rank in sorted(range(len(times_ns)), key=times_ns.__getitem__))


def ns_per_sample(profiles: Mapping[str, ModelProfile], cluster: Cluster) -> list[float]:
    """Returns F and B of all layers per sample, at the largest measured micro-batch size. [ranks]"""
    at_speed_1 = {
        kind: sum(m.forward_ns + m.whole_backward_ns for m in profile.at(profile.microbatch_sizes[-1]))
        / profile.microbatch_sizes[-1]
        for kind, profile in profiles.items()
    }
    return [at_speed_1[device.kind] / device.speed for device in cluster.devices]


def are_sorted(classes: Sequence[DeviceClass]) -> bool:
    """Returns whether a cluster has its devices by classes, in the order in which stages take theirs."""
    ranks = [rank for each in classes for rank in each.ranks]
    return ranks == sorted(ranks)


class ClassLinks:
    """The links between classes of devices, and between two devices of one class if it has two."""

    def __init__(self, cluster: Cluster, classes: Sequence[DeviceClass]) -> None:
        self._links: dict[tuple[int, int], Bandwidth] = {}
        self._cluster, self._classes = cluster, classes
        for a, source in enumerate(classes):
            for b, target in enumerate(classes):
                # All pairs of devices of two classes have equal links, so one pair stands for all; in one class the
                # first and the last device are two different ones.
                if a != b or len(source.ranks) > 1:
                    self._links[a, b] = cluster.link(source.ranks[0], target.ranks[-1])

    def between(self, sources: Iterable[int], targets: Iterable[int]) -> list[Bandwidth]:
        """Returns the distinct links from some classes to others."""
        pairs = {(a, b) for a in sources for b in targets}
        return sorted({self._links[pair] for pair in pairs if pair in self._links}, key=_sort_key)

    def ring(self, devices: Sequence[int]) -> list[Bandwidth]:
        """Returns the distinct links among devices of these classes, and the one of sums on their host if it counts."""
        pairs = {(a, b) for i, a in enumerate(devices) for j, b in enumerate(devices) if i != j}
        host_sum = self.host_sum_link(devices)
        return sorted(
            {self._links[pair] for pair in pairs} | ({host_sum} if host_sum is not None else set()), key=_sort_key
        )

    def host_sum_link(self, devices: Sequence[int]) -> Bandwidth | None:
        """Returns `Cluster.host_sum_link` of devices of these classes."""
        # A class that occurs more than once stands for different devices, which may be on different hosts.
        twice = [self._classes[c].ranks[-1] for c in set(devices) if devices.count(c) > 1]
        return self._cluster.host_sum_link([self._classes[c].ranks[0] for c in devices] + twice)

    def members(self, devices: Sequence[int]) -> list[Bandwidth]:
        """Returns the distinct links among the members of groups of these classes."""
        links = {link for c in devices for link in self._cluster.member_links(self._classes[c].ranks[0])}
        return sorted(links, key=_sort_key)


def _sort_key(link: Bandwidth) -> tuple[int, int]:
    return link.bytes_per_s, link.latency_ns
