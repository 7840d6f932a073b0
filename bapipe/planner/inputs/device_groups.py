"""A cluster of single devices, seen as one of groups: consecutive devices of a host are the members of a group."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations

from msgspec.structs import replace

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.planner.inputs.sub_clusters import links_among


def with_groups(cluster: Cluster, kind: str, num_members: int) -> Cluster:
    """Returns the cluster with its devices of a kind in groups of `num_members`, each within a host.

    A link between groups is the slowest of those from each member to its partner.

    Raises:
        BapipeError: a host has another number of devices of the kind than groups need, or its devices are groups.
    """
    _check_tiles(cluster, kind, num_members)
    parts = consecutive_devices(cluster, kind, num_members)
    devices = tuple(_group(part) if len(part) > 1 else part[0] for part in parts)
    return replace(cluster, devices=devices, links=tuple(_links(cluster, parts, devices)))


def _check_tiles(cluster: Cluster, kind: str, num_members: int) -> None:
    of_kind = [device for device in cluster.devices if device.kind == kind]
    for device in of_kind:
        if device.num_members > 1:
            raise BapipeError(
                f"device '{device.name}' is a group of {device.num_members} already: give the profile of such "
                f"groups alone, or a cluster of single devices, to plan for groups of {num_members}"
            )
    for host, num_devices in Counter(device.host for device in of_kind).items():
        if num_devices % num_members:
            raise BapipeError(
                f"groups of {num_members} do not tile the host '{host}', which has {num_devices} devices of kind "
                f"'{kind}': leave the profile of {num_members} members out, or write the groups into the cluster file"
            )


def consecutive_devices(cluster: Cluster, kind: str, num: int) -> list[tuple[Device, ...]]:
    """Returns the devices of a kind, `num` of a host together, and each of another kind, in the cluster's order."""
    on_host: dict[str, list[Device]] = {}
    for device in cluster.devices:
        if device.kind == kind:
            on_host.setdefault(device.host, []).append(device)
    starts = {
        devices[begin].name: tuple(devices[begin : begin + num])
        for devices in on_host.values()
        for begin in range(0, len(devices), num)
    }
    first = [device for device in cluster.devices if device.kind != kind or device.name in starts]
    return [starts.get(device.name, (device,)) for device in first]


def _group(members: Sequence[Device]) -> Device:
    """The group of some devices: as slow, and with as little memory, as the least of them."""
    return replace(
        members[0],
        name=f"{members[0].name}..{members[-1].name}",
        memory_bytes=min(device.memory_bytes for device in members),
        speed=min(device.speed for device in members),
        overlaps_transfers=all(device.overlaps_transfers for device in members),
        side_by_side=all(device.side_by_side for device in members),
        members=tuple(device.name for device in members),
    )


def _links(cluster: Cluster, parts: Sequence[Sequence[Device]], devices: Sequence[Device]) -> Iterator[Link]:
    """The links between groups that differ from those of their hosts, and the cluster's own among members."""
    if not cluster.links:
        return
    index = cluster.index
    for (a, group), (b, other) in permutations(enumerate(parts), 2):
        pairs = zip(_partners(group, len(other)), _partners(other, len(group)), strict=True)
        slowest = min((cluster.link(index[x.name], index[y.name]) for x, y in pairs), key=_speed)
        usual = cluster.intra_host if devices[a].host == devices[b].host else cluster.inter_host
        if slowest != usual:
            yield Link(
                source=devices[a].name,
                target=devices[b].name,
                bytes_per_s=slowest.bytes_per_s,
                latency_ns=slowest.latency_ns,
            )
    inside = {link for part in parts for link in links_among(cluster, part)}
    yield from (link for link in cluster.links if link in inside)


def _partners(members: Sequence[Device], num_others: int) -> list[Device]:
    """The members, each as often as it has partners in a group of another size."""
    return [members[i % len(members)] for i in range(max(len(members), num_others))]


def _speed(link: Bandwidth) -> tuple[int, int]:
    return link.bytes_per_s, -link.latency_ns
