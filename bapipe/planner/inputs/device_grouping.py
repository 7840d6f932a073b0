"""Groupings of a cluster's devices: each by itself, several cores merged into one device, or groups."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from bapipe.device_types import type_of_kind
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, ProfilesByKind, have_common_settings, is_estimate
from bapipe.planner.inputs.device_groups import consecutive_devices, with_groups
from bapipe.planner.inputs.profiles import Profiles, listed, two_of_a_kind
from bapipe.planner.inputs.sub_clusters import links_among
from bapipe.printable import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """A cluster whose devices have as many threads and members as the profiles.

    Attributes:
        name: in words, such as "1 device of 2 threads".
    """

    name: str
    profiles: ProfilesByKind
    cluster: Cluster


def groupings(profiles: Profiles, cluster: Cluster, num_members: int | None = None) -> tuple[Grouping, ...]:
    """Returns the cluster as it is, and one with merged devices or groups for each of the other profiles.

    Of the profiles of a kind, the one with the fewest members and threads is that of the cluster's devices as they are;
    if it is of groups, and the devices are single ones, these are grouped. A mapping of profiles by kind allows one
    grouping only. There is none with other threads on one kind of CPU than on another: a plan has one number.

    Args:
        num_members: allows only groups of this size; 1 for single devices, None for any.

    Raises:
        BapipeError: no profile, or none of so many members; two of a kind with the same number of threads and members;
            one with more of them than any number of a host's devices has together.
    """
    if isinstance(profiles, Mapping):
        return (_grouping(profiles, cluster),)
    of_kind = _by_size(listed(profiles))
    finest = {kind: known[min(known)] for kind, known in of_kind.items()}
    for kind, profile in finest.items():
        if profile.device.num_members > 1 and all(d.num_members == 1 for d in cluster.devices if d.kind == kind):
            cluster = with_groups(cluster, kind, profile.device.num_members)
    found = [_grouping(finest, cluster)]
    for kind, known in of_kind.items():
        for size in sorted(known)[1:]:
            chosen = {**finest, kind: known[size]}
            if have_common_settings(chosen.values()):
                found.append(_grouping(chosen, _with_devices_of(cluster, kind, known[size], finest[kind])))
    return tuple(found) if num_members is None else _of_size(found, num_members)


def _of_size(found: Iterable[Grouping], num_members: int) -> tuple[Grouping, ...]:
    fitting = tuple(each for each in found if max(device.num_members for device in each.cluster.devices) == num_members)
    if not fitting:
        raise BapipeError(
            f"`group` {num_members}: no profile is of {num_members} members; measure one, or estimate it with "
            "`bapipe estimate`"
        )
    return fitting


def profiles_with_fewest_threads(profiles: Profiles) -> dict[str, ModelProfile]:
    """Returns by kind the profiles with the fewest members and threads: those of the devices as they are."""
    if isinstance(profiles, Mapping):
        return dict(profiles)
    return {kind: known[min(known)] for kind, known in _by_size(listed(profiles)).items()}


_Size = tuple[int, int, str]
"""Members, threads, and how the members split layers."""


def _by_size(profiles: Iterable[ModelProfile]) -> dict[str, dict[_Size, ModelProfile]]:
    """The profiles of each kind by their size; of a measured and an estimated one, the measured one."""
    of_kind: dict[str, dict[_Size, ModelProfile]] = {}
    for profile in profiles:
        known, split = of_kind.setdefault(profile.device.kind, {}), profile.device.split
        size = profile.device.num_members, profile.threads, "" if split is UNSET else split
        if size in known and is_estimate(profile) == is_estimate(known[size]):
            raise two_of_a_kind(profile.device.kind)
        if size not in known or is_estimate(known[size]):
            known[size] = profile
    return of_kind


def profiles_used_by(plan: Plan, profiles: Iterable[ModelProfile]) -> dict[str, ModelProfile]:
    """Returns, by device kind, the profiles that a plan was made from."""
    return {one.device.kind: one for one in profiles if plan.profiles.get(one.device.kind) == fingerprint(one)}


def _grouping(profiles: ProfilesByKind, cluster: Cluster) -> Grouping:
    kinds = [device.kind for device in cluster.devices]
    parts = []
    for kind in dict.fromkeys(kinds):
        parts.append(_counted(kind, kinds.count(kind), profiles.get(kind)))
    return Grouping(name=", ".join(parts), profiles=profiles, cluster=cluster)


def _counted(kind: str, num: int, profile: ModelProfile | None) -> str:
    """How many devices there are, in words; the threads of each, where it has them and they are known."""
    if profile is not None and profile.device.num_members > 1:
        return f"{counted(num, f'{kind} group')} of {profile.device.num_members} ({profile.device.split})"
    devices = counted(num, f"{kind} device")
    if type_of_kind(kind) == "cuda" or profile is None or profile.settings is UNSET:
        return devices
    return f"{devices} of {counted(profile.threads, 'thread')}"


def _with_devices_of(cluster: Cluster, kind: str, profile: ModelProfile, finest: ModelProfile) -> Cluster:
    """Returns the cluster with its devices of a kind merged into those that a profile is of."""
    if profile.device.num_members == finest.device.num_members == 1:
        return _merge_devices(cluster, kind, profile.threads, finest.threads)
    if profile.device.num_members == finest.device.num_members:
        return cluster  # groups of as many members, which split layers in another way
    return with_groups(cluster, kind, profile.device.num_members)


def _merge_devices(cluster: Cluster, kind: str, threads: int, own_threads: int) -> Cluster:
    """Returns the cluster with devices of a kind merged, host by host, into devices of this many threads."""
    num, rest = divmod(threads, own_threads)
    cores = Counter(device.host for device in cluster.devices if device.kind == kind)
    if rest or any(count % num for count in cores.values()):
        of_hosts = ", ".join(f"{host} has {cores[host]}" for host in sorted(cores)) or "there is none"
        raise BapipeError(
            f"a profile of {kind} devices has {threads} threads and another {own_threads}, so its devices are "
            f"{threads / own_threads:g} of the cluster's taken together; {of_hosts}: leave it out, or measure with a "
            "number of threads that divides them"
        )
    devices = tuple(map(_merged, consecutive_devices(cluster, kind, num)))
    return replace(cluster, devices=devices, links=links_among(cluster, devices))


def _merged(devices: Sequence[Device]) -> Device:
    """Some devices as one, which has the memory of all."""
    memory_bytes = sum(device.memory_bytes for device in devices)
    return replace(devices[0], memory_bytes=memory_bytes, speed=min(device.speed for device in devices))
