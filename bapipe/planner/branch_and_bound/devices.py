"""Which devices are alike: exchanging two of one class changes nothing that the judge looks at."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from bapipe.formats.cluster import Bandwidth, Cluster, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Devices that are alike.

    Attributes:
        ranks: their places in the cluster, ascending.
        device: the first of them.
        limit_bytes: what each of them may hold.
        twin: the first of the classes that this one can be exchanged with as a whole, by number: those of hosts alike.
    """

    ranks: tuple[int, ...]
    device: Device
    limit_bytes: int
    twin: int


def classes_of(
    cluster: Cluster, limits: Sequence[int], apart: Sequence[Hashable], pace: Sequence[float]
) -> tuple[DeviceClass, ...]:
    """Returns the classes of a cluster's devices, the fastest first, then in the cluster's order.

    Args:
        apart: devices for which this differs are not alike.
        pace: time of each device for the same work.
    """
    named = {end for link in cluster.links for end in (link.source, link.target)}
    on_host = Counter(device.host for device in cluster.devices)
    same_links = cluster.intra_host == cluster.inter_host and cluster.intra_host_sum is UNSET
    found: dict[tuple[Hashable, ...], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        host = None if same_links or on_host[device.host] == 1 else device.host
        own = device.name if device.name in named else None
        key = (device.kind, device.speed, device.overlaps_transfers, limits[rank], apart[rank], host, own)
        found.setdefault(key, []).append(rank)
    groups = sorted(found.items(), key=lambda group: (pace[group[1][0]], group[1][0]))
    first: dict[Hashable, int] = {}
    twins = []
    for number, ((*kind, at, name), ranks) in enumerate(groups):
        whole_host = at is not None and name is None
        twins.append(first.setdefault((*kind, len(ranks)), number) if whole_host else number)
    return tuple(
        DeviceClass(ranks=tuple(ranks), device=cluster.devices[ranks[0]], limit_bytes=limits[ranks[0]], twin=twin)
        for (_, ranks), twin in zip(groups, twins, strict=True)
    )


class Links:
    """The links between classes of devices: between two of one class too, where it has two."""

    def __init__(self, cluster: Cluster, classes: Sequence[DeviceClass]) -> None:
        self._links: dict[tuple[int, int], Bandwidth] = {}
        self._cluster, self._classes = cluster, classes
        for a, own in enumerate(classes):
            for b, other in enumerate(classes):
                if a != b or len(own.ranks) > 1:
                    self._links[a, b] = cluster.link(own.ranks[0], other.ranks[-1])

    def between(self, some: Iterable[int], others: Iterable[int]) -> list[Bandwidth]:
        """Returns the different links from some classes to others."""
        pairs = {(a, b) for a in some for b in others}
        return sorted({self._links[pair] for pair in pairs if pair in self._links}, key=_rate)

    def ring(self, devices: Sequence[int]) -> list[Bandwidth]:
        """Returns the different links among devices of these classes, and what summing on their host is like."""
        pairs = {(a, b) for i, a in enumerate(devices) for j, b in enumerate(devices) if i != j}
        own = self.host_sum_link(devices)
        return sorted({self._links[pair] for pair in pairs} | ({own} if own is not None else set()), key=_rate)

    def host_sum_link(self, devices: Sequence[int]) -> Bandwidth | None:
        """Returns what `Cluster.host_sum_link` does for devices of these classes."""
        return self._cluster.host_sum_link([self._classes[c].ranks[0] for c in devices])


def _rate(link: Bandwidth) -> tuple[int, int]:
    return link.bytes_per_s, link.latency_ns
