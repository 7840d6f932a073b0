"""Groupings of devices: each core a device, or several cores merged into one device; the fastest is chosen."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import Alternative, Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.deadline import OutOfTime
from bapipe.planner.inputs import Profiles, listed
from bapipe.planner.solution import Solution, sort_alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """A cluster whose devices have the number of threads that the profiles were measured with.

    Attributes:
        name: in words, such as "1 device of 2 threads".
    """

    name: str
    profiles: Mapping[str, ModelProfile]
    cluster: Cluster


def groupings(profiles: Profiles, cluster: Cluster) -> tuple[Grouping, ...]:
    """Returns the cluster as it is, and one with merged devices for each number of threads of the other profiles.

    Of the profiles of a kind, the one with the fewest threads is that of the cluster's devices as they are. A mapping
    of profiles by kind allows one grouping only.

    Raises:
        BapipeError: no profile, two of a kind with the same number of threads, or one with more threads than
            any number of the cluster's devices has together.
    """
    if isinstance(profiles, Mapping):
        return (_grouping(profiles, cluster),)
    of_kind = _by_threads(listed(profiles))
    finest = {kind: known[min(known)] for kind, known in of_kind.items()}
    found = [_grouping(finest, cluster)]
    for kind, known in of_kind.items():
        for num in sorted(known)[1:]:
            found.append(_grouping({**finest, kind: known[num]}, _merge_devices(cluster, kind, num, min(known))))
    return tuple(found)


def profiles_with_fewest_threads(profiles: Profiles) -> dict[str, ModelProfile]:
    """Returns by kind the profiles with the fewest threads: those of the cluster's devices as they are."""
    if isinstance(profiles, Mapping):
        return dict(profiles)
    return {kind: known[min(known)] for kind, known in _by_threads(listed(profiles)).items()}


def _by_threads(profiles: Iterable[ModelProfile]) -> dict[str, dict[int, ModelProfile]]:
    of_kind: dict[str, dict[int, ModelProfile]] = {}
    for profile in profiles:
        known, num = of_kind.setdefault(profile.device.kind, {}), profile.threads
        if num in known:
            raise BapipeError(f"two profiles are of device kind '{profile.device.kind}'; give one for each kind")
        known[num] = profile
    if not of_kind:
        raise BapipeError("no profile given")
    return of_kind


def best_grouping(
    candidates: Iterable[Grouping], solve: Callable[[Mapping[str, ModelProfile], Cluster], Solution]
) -> Solution:
    """Returns the best solution over the groupings, with those of the other groupings among its alternatives.

    Raises:
        Infeasible: nothing fits with any grouping; the message is that of the first one.
        OutOfTime: the deadline passed before any plan was found that fits.
    """
    solutions: dict[str, Solution] = {}
    refused: list[BapipeError] = []
    for grouping in candidates:
        try:
            solutions[grouping.name] = solve(grouping.profiles, grouping.cluster)
        except (Infeasible, OutOfTime) as error:
            refused.append(error)
    if not solutions:
        raise refused[0]
    best = min(solutions.values(), key=lambda solution: solution.objective_ns)
    others = tuple(_alternative(name, other, best) for name, other in solutions.items() if other is not best)
    return replace_fields(best, alternatives=sort_alternatives((*best.alternatives, *others)))


def profiles_used_by(plan: Plan, profiles: Iterable[ModelProfile]) -> dict[str, ModelProfile]:
    """Returns, by device kind, the profiles that a plan was made from."""
    return {one.device.kind: one for one in profiles if plan.profiles.get(one.device.kind) == fingerprint(one)}


def _grouping(profiles: Mapping[str, ModelProfile], cluster: Cluster) -> Grouping:
    kinds = [device.kind for device in cluster.devices]
    parts = []
    for kind in dict.fromkeys(kinds):
        num, threads = kinds.count(kind), profiles[kind].threads if kind in profiles else 1
        parts.append(f"{num} {kind} device{'s' * (num > 1)} of {threads} thread{'s' * (threads > 1)}")
    return Grouping(name=", ".join(parts), profiles=profiles, cluster=cluster)


def _merge_devices(cluster: Cluster, kind: str, threads: int, own_threads: int) -> Cluster:
    """Returns the cluster with devices of a kind merged, host by host, into devices of this many threads."""
    num, rest = divmod(threads, own_threads)
    hosts = {device.host for device in cluster.devices if device.kind == kind}
    cores = {host: sum(d.kind == kind and d.host == host for d in cluster.devices) for host in hosts}
    if rest or any(count % num for count in cores.values()):
        counted = ", ".join(f"{host} has {cores[host]}" for host in sorted(cores)) or "there is none"
        raise BapipeError(
            f"a profile of {kind} devices has {threads} threads and another {own_threads}, so its devices are "
            f"{threads / own_threads:g} of the cluster's taken together; {counted}: leave it out, or measure with a "
            "number of threads that divides them"
        )
    devices = tuple(_merged(cluster, kind, num))
    left = {device.name for device in devices}
    links = tuple(link for link in cluster.links if {link.source, link.target} <= left)
    return replace(cluster, devices=devices, links=links)


def _merged(cluster: Cluster, kind: str, num: int) -> Iterator[Device]:
    groups: dict[str, tuple[Device, ...]] = {}
    for host in dict.fromkeys(device.host for device in cluster.devices):
        devices_of_host = [device for device in cluster.devices if device.kind == kind and device.host == host]
        groups |= {
            devices_of_host[i].name: tuple(devices_of_host[i : i + num]) for i in range(0, len(devices_of_host), num)
        }
    for device in cluster.devices:
        if device.kind != kind:
            yield device
        elif device.name in groups:
            group = groups[device.name]
            yield replace(
                device, memory_bytes=sum(d.memory_bytes for d in group), speed=min(one.speed for one in group)
            )


def _alternative(name: str, solution: Solution, best: Solution) -> Alternative:
    slower = solution.objective_ns / max(best.objective_ns, 1) - 1
    return Alternative(
        name=name,
        step_ns=solution.prediction.step_ns,
        peak_bytes=solution.peak_bytes,
        feasible=True,
        why_not=f"{slower:.1%} slower",
    )
