"""The devices and the links between them: the cluster/1 file."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import permutations
from typing import Annotated

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.field_types import check_fields
from bapipe.units import NonNegative, NonNegativeFloat, Positive


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device, or a group of devices that run every micro-batch together.

    Attributes:
        memory_bytes: the memory of the device; of a group, that of each member.
        model: its name, as its driver gives it, such as NVIDIA H200.
        speed: what the profile of its kind says of the device's own work is divided by this; times of its host, and of
            what members of a group exchange, are not.
        overlaps_transfers: whether it computes while it transfers.
        side_by_side: whether it can run a forward and a backward at the same time, each on a share of its compute; in
            a plan, whether it does. docs/simulator.md defines what that means.
        members: of a group, the names of the devices in it, all on one host. Left out for a single device.

    Raises:
        BapipeError: a value of another type, or out of range.
    """

    name: str
    host: str
    kind: str
    memory_bytes: NonNegative
    model: str | msgspec.UnsetType = msgspec.UNSET
    speed: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    overlaps_transfers: bool = True
    side_by_side: bool = False
    members: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_members(self) -> int:
        """The number of devices that it stands for."""
        return 1 if self.members is msgspec.UNSET else len(self.members)


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of a message: latency plus bytes divided by bandwidth.

    Raises:
        BapipeError: a value of another type, or out of range.
    """

    bytes_per_s: Positive
    latency_ns: NonNegative

    def __post_init__(self) -> None:
        check_fields(self)

    def transfer_ns(self, num_bytes: int) -> int:
        """Returns the time of one message; bytes divided by bandwidth is rounded up to a nanosecond."""
        return self.latency_ns - (-int(num_bytes) * 1_000_000_000 // self.bytes_per_s)  # numpy's integers overflow


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A one-way link between two named devices, or two members of a group, that differs from the links of their hosts.

    A link between groups is that from each member of one to its partner in the other.

    Raises:
        BapipeError: a value of another type, or out of range.
    """

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    bytes_per_s: Positive
    latency_ns: NonNegative

    def __post_init__(self) -> None:
        check_fields(self)


class AllReduce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured time of an all-reduce of a tensor of some size over all devices."""

    num_bytes: Positive
    ns: NonNegative


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements besides the links; the simulator does not use them, they show how well its rules hold.

    Attributes:
        both_ways: the share of a link's bandwidth that remains while as much is sent in the opposite direction; 1 means
            all.
        compute_slowdown: how much longer computing takes while a device receives, as a share; 0 means no longer.
        all_reduce: the time of an all-reduce over all devices, for some sizes.
    """

    both_ways: NonNegativeFloat
    compute_slowdown: NonNegativeFloat
    all_reduce: tuple[AllReduce, ...]


class Cluster(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="bapipe",
    tag="cluster/1",
    dict=True,  # stores the cached properties once they are computed; not part of the file nor of equality
):
    """The devices in rank order, and the links between them.

    Attributes:
        intra_host_sum: if set, the devices of a host sum gradients with their own compute. An all-reduce among
            them then begins when the last backward of its stage has ended on each, and no message of it is faster
            than over this link.
        links: links that differ from those within and between hosts.
        probe: further measurements, for information only.
        assumed_links: what the links are taken to be, if nobody measured them.

    Raises:
        InvalidFile: no device, a name used twice, a group of fewer than two members, or a link that joins neither two
            devices nor two members of a group.
        BapipeError: a value of another type.
    """

    devices: tuple[Device, ...]
    intra_host: Bandwidth
    inter_host: Bandwidth
    intra_host_sum: Bandwidth | msgspec.UnsetType = msgspec.UNSET
    links: tuple[Link, ...] = ()
    probe: Probe | msgspec.UnsetType = msgspec.UNSET
    assumed_links: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.devices:
            raise InvalidFile("a cluster needs at least one device", "$.devices")
        names: set[str] = set()
        for index, device in enumerate(self.devices):
            if device.name in names:
                raise InvalidFile(f"a second device is named '{device.name}'", f"$.devices[{index}].name")
            names.add(device.name)
            if device.side_by_side and not device.overlaps_transfers:
                raise InvalidFile(
                    f"'{device.name}' runs forward and backward side by side and does not overlap transfers; "
                    "set overlaps_transfers to true, or leave side_by_side out",
                    f"$.devices[{index}].side_by_side",
                )
        group_of = _groups(self.devices)
        pairs: set[tuple[str, str]] = set()
        for index, link in enumerate(self.links):
            where = f"$.links[{index}]"
            for end in (link.source, link.target):
                if end not in names and end not in group_of:
                    raise InvalidFile(f"'{end}' is not a device of the cluster ({', '.join(sorted(names))})", where)
            if group_of.get(link.source) != group_of.get(link.target):
                raise InvalidFile(
                    f"a link from '{link.source}' to '{link.target}': want two devices, or two members of one group; a "
                    "link between groups is written with the groups' names",
                    where,
                )
            if link.source == link.target:
                raise InvalidFile(f"a link from '{link.source}' to itself", where)
            if (link.source, link.target) in pairs:
                raise InvalidFile(f"a second link from '{link.source}' to '{link.target}'", where)
            pairs.add((link.source, link.target))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The rank of each device by name."""
        return {device.name: rank for rank, device in enumerate(self.devices)}

    @property
    def hosts_are_alike(self) -> bool:
        """Whether it makes no difference to a link, but for those listed by themselves, if it is within a host."""
        return self.intra_host == self.inter_host and self.intra_host_sum is msgspec.UNSET

    @property
    def sequential(self) -> "Cluster":
        """The same devices, each running one action at a time."""
        if not any(device.side_by_side for device in self.devices):
            return self
        devices = tuple(msgspec.structs.replace(device, side_by_side=False) for device in self.devices)
        return msgspec.structs.replace(self, devices=devices)

    def link(self, source: int, target: int) -> Bandwidth:
        """Returns the link between two ranks: the one in `links` if there is one, else that within or between hosts.

        Raises:
            BapipeError: something else than two ranks of the cluster.
        """
        try:
            a, b = self.devices[source], self.devices[target]
        except (TypeError, IndexError):
            most = len(self.devices) - 1
            raise BapipeError(f"no link from {source!r} to {target!r}: want ranks, from 0 to {most}") from None
        listed = self._listed.get((a.name, b.name))
        return listed or (self.intra_host if a.host == b.host else self.inter_host)

    def member_links(self, rank: int) -> list[Bandwidth]:
        """Returns the distinct links among the members of a group; none for a single device."""
        members = self.devices[rank].members
        if members is msgspec.UNSET:
            return []
        if not self.links:
            return [self.intra_host]
        return [*dict.fromkeys(self._listed.get((a, b), self.intra_host) for a, b in permutations(members, 2))]

    def links_among(self, ranks: Sequence[int]) -> list[Bandwidth]:
        """Returns the distinct links between any two of some ranks; O(ranks) if no two devices have their own."""
        if self.links:
            return [*{self.link(a, b) for a, b in permutations(ranks, 2)}]
        hosts = {self.devices[rank].host for rank in ranks}
        within = [self.intra_host] if len(hosts) < len(ranks) else []
        return within + ([self.inter_host] if len(hosts) > 1 else [])

    @cached_property
    def _listed(self) -> Mapping[tuple[str, str], Bandwidth]:
        return {
            (link.source, link.target): Bandwidth(bytes_per_s=link.bytes_per_s, latency_ns=link.latency_ns)
            for link in self.links
        }

    def host_sum_link(self, ranks: Sequence[int]) -> Bandwidth | None:
        """Returns the fastest link of an all-reduce within a host; None if it takes no compute or spans hosts."""
        if self.intra_host_sum is msgspec.UNSET or len({self.devices[rank].host for rank in ranks}) > 1:
            return None
        return self.intra_host_sum


def _groups(devices: Sequence[Device]) -> dict[str, str]:
    """Returns the group of each member, by their names; raises InvalidFile if a device is named twice."""
    names = {device.name for device in devices}
    group_of: dict[str, str] = {}
    for index, device in enumerate(devices):
        where = f"$.devices[{index}].members"
        if device.members is msgspec.UNSET:
            continue
        if len(device.members) < 2:
            raise InvalidFile(
                f"the group '{device.name}' has {len(device.members)} members; want two or more, or no `members`",
                where,
            )
        for name in device.members:
            if name in group_of:
                raise InvalidFile(f"'{name}' is a member of '{group_of[name]}' already", where)
            if name in names:
                raise InvalidFile(f"'{name}' is a member of '{device.name}' and a device by itself", where)
            group_of[name] = device.name
    return group_of
