"""Choices of some of a cluster's devices that differ in more than which of several alike devices they hold."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import msgspec

from bapipe.formats.cluster import Cluster, Device, Link

MAX_CHOICES = 100
"""With more choices of some number of devices than this, only the fastest devices are tried."""

_Type = tuple[str, float, int, bool, bool, int, str]
"""Kind, speed, memory, whether transfers overlap, whether F and B run side by side, number of members; the name of a
device with links of its own."""

_Part = tuple[tuple[_Type, int], ...]
"""How many devices of each type a choice takes from one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubClusters:
    """Choices of some number of devices.

    Attributes:
        clusters: one for each, those with the most speed first.
        has_all: whether every other choice is like one of them; else it is only that of the fastest devices, of equal
            ones the first in the cluster.
    """

    clusters: tuple[Cluster, ...]
    has_all: bool


def sub_clusters(
    cluster: Cluster, num_devices: int, ns_per_sample: Sequence[float], *, in_order: bool = False
) -> SubClusters:
    """Returns the choices of `num_devices` devices; of those that differ only in alike devices or hosts, one.

    Args:
        ns_per_sample: time of each device for the same work. [devices]
        in_order: whether plans take devices in the cluster's order: choices of alike devices then differ, too.
    """
    choices = _all_choices(cluster, num_devices) if in_order else _choices(cluster, num_devices)
    if choices is None:
        fastest = sorted(range(len(cluster.devices)), key=lambda rank: (ns_per_sample[rank], rank))[:num_devices]
        return SubClusters(clusters=(with_devices(cluster, fastest),), has_all=False)
    speed = [1 / max(ns, 1.0) for ns in ns_per_sample]
    ordered = sorted(choices, key=lambda ranks: (-sum(speed[rank] for rank in ranks), ranks))
    return SubClusters(clusters=tuple(with_devices(cluster, ranks) for ranks in ordered), has_all=True)


def with_devices(cluster: Cluster, ranks: Iterable[int]) -> Cluster:
    """Returns a cluster of some of the devices, in the same order, with the links between them."""
    devices = tuple(cluster.devices[rank] for rank in sorted(ranks))
    return msgspec.structs.replace(cluster, devices=devices, links=links_among(cluster, devices))


def links_among(cluster: Cluster, devices: Sequence[Device]) -> tuple[Link, ...]:
    """Returns the cluster's links between some devices, and between the members of groups among them."""
    names = {name for device in devices for name in (device.name, *(device.members or ()))}
    return tuple(link for link in cluster.links if {link.source, link.target} <= names)


def _all_choices(cluster: Cluster, num_devices: int) -> list[list[int]] | None:
    """Returns the ranks of all choices; None if there are too many."""
    if comb(len(cluster.devices), num_devices) > MAX_CHOICES:
        return None
    return [list(ranks) for ranks in combinations(range(len(cluster.devices)), num_devices)]


def _choices(cluster: Cluster, num_devices: int) -> list[list[int]] | None:
    """Returns the ranks of each choice; None if there are too many."""
    # What can be taken from the hosts so far: of choices that take the same from each, in any order of the hosts, one.
    so_far: dict[tuple[_Part, ...], list[int]] = {(): []}
    num_left = len(cluster.devices)
    for host in _devices_by_host_and_type(cluster):
        num_left -= sum(map(len, host.values()))
        longer: dict[tuple[_Part, ...], list[int]] = {}
        for parts, ranks in so_far.items():
            num_wanted = num_devices - len(ranks)
            for part in _parts(list(host.items()), max(num_wanted - num_left, 0), num_wanted):
                taken = [rank for type_key, count in part for rank in host[type_key][:count]]
                longer.setdefault(tuple(sorted((*parts, part))), ranks + taken)
                if len(longer) > MAX_CHOICES:
                    return None
        so_far = longer
    return list(so_far.values())


def _parts(types: Sequence[tuple[_Type, list[int]]], low: int, high: int) -> Iterator[_Part]:
    """Yields what can be taken of the types of a host: from `low` to `high` devices."""
    if not types:
        if low <= 0:
            yield ()
        return
    (type_key, ranks), *others = types
    num_others = sum(len(of_other) for _, of_other in others)
    for count in range(min(max(low - num_others, 0), len(ranks)), min(high, len(ranks)) + 1):
        for part in _parts(others, low - count, high - count):
            yield ((type_key, count), *part) if count else part


def _devices_by_host_and_type(cluster: Cluster) -> list[dict[_Type, list[int]]]:
    """Returns the ranks of alike devices of each host; all on one where the hosts make no difference."""
    linked = {end for link in cluster.links for end in (link.source, link.target)}
    same_links = cluster.intra_host == cluster.inter_host and cluster.intra_host_sum is msgspec.UNSET
    hosts: dict[str, dict[_Type, list[int]]] = {}
    for rank, device in enumerate(cluster.devices):
        members = () if device.members is msgspec.UNSET else device.members
        is_unlike = not linked.isdisjoint((device.name, *members))  # a link of its own makes it unlike all others
        key = (
            device.kind,
            device.speed,
            device.memory_bytes,
            device.overlaps_transfers,
            device.side_by_side,
            device.num_members,
            device.name if is_unlike else "",
        )
        hosts.setdefault("" if same_links else device.host, {}).setdefault(key, []).append(rank)
    return list(hosts.values())
