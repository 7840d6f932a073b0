"""Explores stages x cuts x micro-batch sizes x schedules, and makes the best of them a plan."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from bapipe.cluster import Cluster, Device
from bapipe.codec import fingerprint
from bapipe.errors import BapipeError, Infeasible
from bapipe.plan import Plan, StagePlan, certify
from bapipe.profile import ModelProfile
from bapipe.schedules import ALL, SCHEDULES
from bapipe.search.alternatives import alternatives
from bapipe.search.best_first import Progress, best_first
from bapipe.search.chain import Chain
from bapipe.search.closest import closest
from bapipe.search.problem import Found, Problem
from bapipe.search.reorder import SEARCH, reorder
from bapipe.units import MAX_INT

MAX_CHOICES = 500
"""How many choices of devices are looked at for one number of devices."""

MAX_MICROBATCHES = 1024
"""Most micro-batches in a step; more would make tables that nobody runs."""


def explore(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    *,
    minibatch_size: int,
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    num_stages: int | None = None,
    microbatch_size: int | None = None,
    memory_limit_bytes: int | None = None,
    search_effort: float = 10.0,
    progress: Progress | None = None,
) -> Plan:
    """Returns the fastest plan of the space that its certificate names, by an exact search.

    The space: the layers in the profile's order, cut anywhere into the stages of a schedule on 1 to D of the cluster's
    D devices, in the cluster's order; every measured or interpolated micro-batch size that divides the mini-batch.

    Args:
        profiles: one for each kind of device in the cluster.
        num_stages, microbatch_size: fixed where given.
        schedules: names in `bapipe.schedules`; with `search` among them, the order of the best plan's stages is then
            searched for a faster one, starting from the named schedules (all of one stage a device where no other is
            given).
        memory_limit_bytes: caps what every device may hold, beside its own memory.
        search_effort: about the seconds that the search of an order takes; see `search_order`.

    Raises:
        Infeasible: nothing fits; the message names the closest plan and what each device lacks.
        BapipeError: an unknown schedule, a device kind without a profile, profiles of different models, or sizes that
            do not divide.
    """
    searched = SEARCH in schedules
    schedules = [name for name in schedules if name != SEARCH] or list(SCHEDULES)
    _check(profiles, cluster, schedules)
    sizes = _microbatch_sizes(profiles, cluster, minibatch_size, microbatch_size)
    limits = [min(d.memory_bytes, memory_limit_bytes or d.memory_bytes) for d in cluster.devices]
    names = _names(profiles)
    counts = range(1, min(len(cluster.devices), len(names)) + 1)
    found_choices = [distinct_choices(cluster, limits, count) for count in counts]
    choices = [ranks for of_count, _ in found_choices for ranks in of_count]
    problems = _problems(profiles, cluster, choices, schedules, num_stages, minibatch_size, sizes, limits)
    found = best_first(problems, progress=progress)
    if found is None:
        raise Infeasible(closest(problems, names))
    some = "" if all(whole for _, whole in found_choices) else ", of too many choices only the first devices"
    space = (
        f"every cut of {len(names)} layers, in the profile's order, into {_span([p.num_stages for p in problems])} on "
        f"{_span([len(p.ranks) for p in problems], 'device')} of {len(cluster.devices)}, in the cluster's order{some}; "
        f"micro-batches of {', '.join(map(str, sizes))}; schedules {', '.join(schedules)}; no replicas, no "
        "recomputation"
    )
    plan = _plan(profiles, found, minibatch_size, space)
    if plan.prediction.step_ns > MAX_INT:
        raise BapipeError("the step takes longer than a file can say (292 years): check the profile and device speeds")
    if searched:
        plan = reorder(plan, profiles, limits, search_effort)
    others = (*plan.alternatives, *alternatives(plan, profiles, sizes, schedules, limits))
    return msgspec.structs.replace(plan, alternatives=tuple(sorted(others, key=lambda a: (not a.feasible, a.step_ns))))


def _problems(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    choices: Sequence[tuple[int, ...]],
    schedules: Sequence[str],
    num_stages: int | None,
    minibatch_size: int,
    sizes: Sequence[int],
    limits: Sequence[int],
) -> list[Problem]:
    chains: dict[tuple[str, int, float], Chain] = {}
    problems = [
        Problem(
            chains=tuple(_chain(chains, profiles, cluster.devices[rank], size) for rank in ranks),
            ranks=ranks,
            cluster=cluster,
            memory_bytes=tuple(limits[rank] for rank in ranks),
            schedule=schedule,
            microbatch_size=size,
            num_microbatches=minibatch_size // size,
        )
        for ranks in choices
        for size in reversed(sizes)
        for schedule in schedules
    ]
    possible = [problem for problem in problems if problem.num_stages <= len(problem.legal_cuts) + 1]
    chosen = [problem for problem in possible if num_stages in (None, problem.num_stages)]
    if not chosen:
        counts = ", ".join(map(str, sorted({problem.num_stages for problem in possible}))) or "none"
        asked = "any number of" if num_stages is None else num_stages
        raise BapipeError(
            f"{asked} stages asked for; {len(cluster.devices)} devices, {len(_names(profiles))} layers and "
            f"{', '.join(schedules)} allow {counts}"
        )
    return chosen


def distinct_choices(cluster: Cluster, limits: Sequence[int], count: int) -> tuple[list[tuple[int, ...]], bool]:
    """Returns the ascending choices of `count` devices, the first of each set of choices that are alike, and True.

    Where there are more than `MAX_CHOICES`, only the first devices of the cluster, and False.
    """
    kinds = _kinds(cluster, limits)
    choices: dict[object, tuple[int, ...]] = {(): ()}
    for _ in range(count):
        longer: dict[object, tuple[int, ...]] = {}
        for key, ranks in choices.items():
            seen: set[int] = set()
            for rank in range(ranks[-1] + 1 if ranks else 0, len(kinds)):
                if kinds[rank] not in seen:  # the first of a kind leaves the most to choose from
                    seen.add(kinds[rank])
                    longer.setdefault((key, kinds[rank]), (*ranks, rank))
        if len(longer) > MAX_CHOICES:
            return [tuple(range(count))], False
        choices = longer
    found: dict[object, tuple[int, ...]] = {}
    for ranks in choices.values():
        devices = [cluster.devices[rank] for rank in ranks]
        same = tuple(
            (d.kind, d.speed, d.overlaps_transfers, limits[rank]) for d, rank in zip(devices, ranks, strict=True)
        )
        links = tuple((cluster.link(a, b), cluster.link(b, a)) for a, b in pairwise(ranks))
        found.setdefault((same, links), ranks)
    return list(found.values()), True


def _kinds(cluster: Cluster, limits: Sequence[int]) -> list[int]:
    """A number for each device, the same for devices that nothing but their place tells apart."""
    named = {end for link in cluster.links for end in (link.source, link.target)}
    numbers: dict[object, int] = {}
    kinds = []
    for device, limit in zip(cluster.devices, limits, strict=True):
        own = device.name if device.name in named else None
        key = (device.kind, device.speed, device.overlaps_transfers, limit, device.host, own)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _check(profiles: Mapping[str, ModelProfile], cluster: Cluster, schedules: Sequence[str]) -> None:
    for name in schedules:
        if name not in ALL:
            raise BapipeError(f"unknown schedule '{name}'; choose from {', '.join(ALL)}, {SEARCH}")
    for device in cluster.devices:
        if device.kind not in profiles:
            raise BapipeError(
                f"no profile for device '{device.name}' of kind '{device.kind}'; given: "
                f"{', '.join(sorted(profiles)) or 'none'}"
            )
    first = next(iter(profiles.values()))
    for profile in profiles.values():
        if (profile.model, _shape(profile)) != (first.model, _shape(first)):
            raise BapipeError(
                f"the profiles of {first.device.kind} and {profile.device.kind} are of different models: "
                "their names, layers or tensors differ"
            )


def _microbatch_sizes(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, minibatch_size: int, wanted: int | None
) -> list[int]:
    used = [profiles[kind] for kind in sorted({device.kind for device in cluster.devices})]
    if wanted is not None and minibatch_size % wanted:
        raise BapipeError(f"a mini-batch of {minibatch_size} does not divide into micro-batches of {wanted}")
    low = max(profile.microbatch_sizes[0] for profile in used)
    high = min(profile.microbatch_sizes[-1] for profile in used)
    sizes = [b for b in range(low, high + 1) if minibatch_size % b == 0 and wanted in (None, b)]
    if sizes and minibatch_size // sizes[-1] > MAX_MICROBATCHES:
        raise BapipeError(
            f"a mini-batch of {minibatch_size} is {minibatch_size // sizes[-1]} micro-batches of {sizes[-1]}; want at "
            f"most {MAX_MICROBATCHES}: choose a smaller --minibatch-size, or profile larger micro-batches"
        )
    sizes = [b for b in sizes if minibatch_size // b <= MAX_MICROBATCHES]
    if not sizes:
        known = "; ".join(f"{p.device.kind}: {', '.join(map(str, p.microbatch_sizes))}" for p in used)
        raise BapipeError(
            f"no micro-batch size divides the mini-batch of {minibatch_size} and lies within those profiled ({known}): "
            "change --minibatch-size, or profile more sizes"
        )
    return sizes


def _chain(
    chains: dict[tuple[str, int, float], Chain], profiles: Mapping[str, ModelProfile], device: Device, size: int
) -> Chain:
    key = (device.kind, size, device.speed)
    if key not in chains:
        chains[key] = Chain(profiles[device.kind], size, device.speed)
    return chains[key]


def _plan(profiles: Mapping[str, ModelProfile], found: Found, minibatch_size: int, space: str) -> Plan:
    problem = found.problem
    names = _names(profiles)
    first = profiles[problem.cluster.devices[problem.ranks[0]].kind]
    return Plan(
        model=first.model,
        factory=first.factory,
        arguments=first.arguments,
        profiles={kind: fingerprint(profile) for kind, profile in sorted(profiles.items())},
        cluster=problem.cluster,
        minibatch_size=minibatch_size,
        microbatch_size=problem.microbatch_size,
        num_microbatches=problem.num_microbatches,
        schedule=problem.schedule,
        stages=tuple(
            StagePlan(layers=tuple(names[start:stop]), devices=(problem.cluster.devices[problem.ranks[place]].name,))
            for place, (start, stop) in zip(problem.places, pairwise(found.cuts), strict=True)
        ),
        order=tuple(tuple(map(str, actions)) for actions in problem.table.order),
        prediction=problem.judge(found.cuts).prediction(minibatch_size),
        certificate=certify(found.step_ns, found.lower_bound_ns, space),
        alternatives=(),
    )


def _shape(profile: ModelProfile) -> object:
    return [(layer.name, layer.inputs, layer.outputs) for layer in profile.layers]


def _names(profiles: Mapping[str, ModelProfile]) -> list[str]:
    """The layers' names, the same in every profile."""
    return [layer.name for layer in next(iter(profiles.values())).layers]


def _span(counts: Sequence[int], noun: str = "stage") -> str:
    low, high = min(counts), max(counts)
    return f"{low} {noun}{'s' if low > 1 else ''}" if low == high else f"{low} to {high} {noun}s"
