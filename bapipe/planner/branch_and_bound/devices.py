"""Symmetry of the cluster: classes of devices that the simulator cannot distinguish, and classes that can be exchanged.

Exchanging two devices of one class leaves every step time and every memory peak as it is, so a placement counts devices
per class. If two hosts are isomorphic (the same number of the same devices, the same links), exchanging all of their
devices leaves everything as it is as well: their classes are symmetric.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from bapipe.formats.cluster import Bandwidth, Cluster, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Devices that can be exchanged with each other.

    Attributes:
        ranks: their ranks in the cluster, ascending.
        device: the first of them.
        limit_bytes: the memory limit of each of them.
        symmetric_to: the number of the first class that this one can be exchanged with as a whole, maybe itself: those
            of isomorphic hosts.
    """

    ranks: tuple[int, ...]
    device: Device
    limit_bytes: int
    symmetric_to: int


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
    num_on_host = Counter(device.host for device in cluster.devices)
    same_links = cluster.intra_host == cluster.inter_host and cluster.intra_host_sum is UNSET
    ranks_of: dict[tuple[Hashable, ...], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        # The host matters only if it makes a difference to a link; a link of its own makes a device unique.
        host = None if same_links or num_on_host[device.host] == 1 else device.host
        name = device.name if device.name in linked else None
        key = (device.kind, device.speed, device.overlaps_transfers, limits[rank], distinctions[rank], host, name)
        ranks_of.setdefault(key, []).append(rank)
    # Ascending numbers of classes mean descending speed: replicas in this order are the fastest first.
    groups = sorted(ranks_of.items(), key=lambda group: (ns_per_sample[group[1][0]], group[1][0]))
    first_class: dict[Hashable, int] = {}
    symmetric_to = []
    for number, ((*kind, on_host, own_name), ranks) in enumerate(groups):
        is_exchangeable = on_host is not None and own_name is None
        symmetric_to.append(first_class.setdefault((*kind, len(ranks)), number) if is_exchangeable else number)
    return tuple(
        DeviceClass(ranks=tuple(ranks), device=cluster.devices[ranks[0]], limit_bytes=limits[ranks[0]], symmetric_to=to)
        for (_, ranks), to in zip(groups, symmetric_to, strict=True)
    )


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
        return self._cluster.host_sum_link([self._classes[c].ranks[0] for c in devices])


def _sort_key(link: Bandwidth) -> tuple[int, int]:
    return link.bytes_per_s, link.latency_ns
