"""Baselines, predicted by the same simulator: one device, data parallelism, stages with the same number of layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.plan import Alternative, Plan
from bapipe.formats.prediction import Prediction
from bapipe.formats.profile import LOSS, ProfilesByKind
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.compute.pace import Pace
from bapipe.planner.results.solution import Solution
from bapipe.planner.stages.devices import fastest_first
from bapipe.schedules import SCHEDULES
from bapipe.schedules.placement import distribute_replicas
from bapipe.schedules.table import Schedule
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage_cost import build_stages
from bapipe.simulator.tied_weights import inseparable_layers
from bapipe.simulator.timeline import StepColumns

BASELINES = ("one-device", "data-parallel", "equal-layers")

Planned = Solution | Plan
"""What baselines are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages, schedule and micro-batch size of a baseline, for a plan's mini-batch and cluster."""

    stages: tuple[StagePlan, ...]
    schedule: str
    microbatch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCandidate:
    """The step time of a candidate, its largest peak memory, and its largest memory shortfall."""

    step_ns: int
    peak_bytes: int
    shortfall_bytes: int

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Sort key: candidates that fit come first, by step time; the others follow, by memory shortfall."""
        return max(self.shortfall_bytes, 0), self.step_ns, self.peak_bytes


class Baselines(NamedTuple):
    """The best baseline of each kind, its stages and schedule, and the names of those for which no time was left."""

    alternatives: tuple[Alternative, ...]
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]


def baseline_alternatives(
    plan: Planned,
    profiles: ProfilesByKind,
    microbatch_sizes: Sequence[int],
    schedules: Sequence[str],
    limits: Sequence[int],
    deadline: Deadline,
) -> Baselines:
    """Returns the best baseline of each kind over the micro-batch sizes.

    Args:
        limits: the memory limit of each device, in bytes.
        deadline: baselines for which no time is left are left out.
    """
    layers = next(iter(profiles.values())).layers
    kinds = (
        _one_device(plan, microbatch_sizes, limits),
        _data_parallel(plan, microbatch_sizes, profiles),
        _equal_layers(plan, microbatch_sizes, layers, schedules),
    )
    alternatives, chosen, left_out, pace = [], [], [], Pace()
    for name, candidates in zip(BASELINES, kinds, strict=True):
        simulated = [
            (candidate, _simulate_candidate(candidate, plan, profiles, limits))
            for candidate in sorted(candidates, key=partial(_num_actions, plan))
            if not deadline.is_over and pace.has_time_for(_num_actions(plan, candidate), deadline)
        ]
        if not simulated:
            left_out += [name] * bool(candidates)
            continue
        candidate, best = min(simulated, key=lambda each: each[1].sort_key)
        chosen.append(candidate)
        alternatives.append(
            Alternative(
                name=name,
                step_ns=best.step_ns,
                peak_bytes=best.peak_bytes,
                feasible=best.shortfall_bytes <= 0,
                why_not=_why_not(best, plan),
            )
        )
    return Baselines(tuple(alternatives), tuple(chosen), tuple(left_out))


def _num_actions(plan: Planned, candidate: Candidate) -> int:
    """Forwards and backwards of a step."""
    return 2 * len(candidate.stages) * (plan.minibatch_size // candidate.microbatch_size)


def _one_device(plan: Planned, microbatch_sizes: Sequence[int], limits: Sequence[int]) -> list[Candidate]:
    """Returns all layers on a single device, of those that are alike only on the first."""
    distinct_devices: dict[object, str] = {}
    for device, limit in zip(plan.cluster.devices, limits, strict=True):
        distinct_devices.setdefault((device.kind, device.speed, limit), device.name)
    return [
        Candidate(
            stages=(StagePlan(layers=_layer_names(plan), devices=(name,)),), schedule="1f1b", microbatch_size=size
        )
        for name in distinct_devices.values()
        for size in microbatch_sizes
    ]


def _data_parallel(plan: Planned, microbatch_sizes: Sequence[int], profiles: ProfilesByKind) -> list[Candidate]:
    """Returns all layers on a replica on each device; none with one device, or if some layer cannot be replicated."""
    devices, layers = plan.cluster.devices, next(iter(profiles.values())).layers
    are_alike = len({device.num_members for device in devices}) == 1  # as the replicas of a stage must be
    if len(devices) == 1 or not are_alike or not all(layer.allows_replicas for layer in layers):
        return []
    stage = StagePlan(layers=_layer_names(plan), devices=fastest_first(profiles, plan.cluster))
    return [Candidate(stages=(stage,), schedule="1f1b", microbatch_size=size) for size in microbatch_sizes]


def _equal_layers(
    plan: Planned, microbatch_sizes: Sequence[int], layers: Sequence[LayerProfile], schedules: Sequence[str]
) -> list[Candidate]:
    """Returns stages with equal numbers of layers on as many devices as the plan uses, but two at least.

    None if there are too few layers or devices, or if a cut would separate layers that must stay together.
    """
    names, devices = _layer_names(plan), [device.name for device in plan.cluster.devices]
    num_stages = max(len({name for stage in plan.stages for name in stage.devices}), 2)
    stages = equal_layer_stages(names, devices[: min(num_stages, len(devices), len(names) - (names[-1] == LOSS))])
    inseparable = [(layers[a].name, layers[b].name) for a, b in inseparable_layers(layers)]
    splits_inseparable = any((a in stage.layers) != (b in stage.layers) for a, b in inseparable for stage in stages)
    if len(stages) < num_stages or splits_inseparable:
        return []
    return [
        Candidate(stages=stages, schedule=schedule, microbatch_size=size)
        for schedule in [name for name in schedules if name in SCHEDULES] or ["1f1b"]
        for size in microbatch_sizes
    ]


def _layer_names(plan: Planned) -> tuple[str, ...]:
    return tuple(name for stage in plan.stages for name in stage.layers)


def _simulate_candidate(
    candidate: Candidate, plan: Planned, profiles: ProfilesByKind, limits: Sequence[int]
) -> SimulatedCandidate:
    timeline = _timeline(candidate, _table(candidate, plan), plan, profiles)
    peaks = [memory.total for memory in timeline.memory]
    return SimulatedCandidate(
        step_ns=timeline.step_ns,
        peak_bytes=max(peaks),
        shortfall_bytes=max(peak - limit for peak, limit in zip(peaks, limits, strict=True)),
    )


def _table(candidate: Candidate, plan: Planned) -> Schedule:
    index = plan.cluster.index
    return distribute_replicas(
        SCHEDULES[candidate.schedule](len(candidate.stages), plan.minibatch_size // candidate.microbatch_size),
        tuple(tuple(index[name] for name in stage.devices) for stage in candidate.stages),
        len(index),
    )


def _timeline(candidate: Candidate, table: Schedule, plan: Planned, profiles: ProfilesByKind) -> StepColumns:
    costs = build_stages(candidate.stages, profiles, plan.cluster, candidate.microbatch_size)
    return simulate_columns(table, costs, plan.cluster)


def as_solution(candidate: Candidate, solution: Solution) -> Solution:
    """Returns a candidate that is as fast as a solution of the same space, with what is proven of that."""
    table = _table(candidate, solution)
    return replace(
        solution,
        stages=candidate.stages,
        schedule=candidate.schedule,
        microbatch_size=candidate.microbatch_size,
        table=table,
        prediction=_timeline(candidate, table, solution, solution.profiles).prediction(solution.minibatch_size),
    )


def _why_not(simulated: SimulatedCandidate, plan: Planned) -> str:
    if simulated.shortfall_bytes > 0:
        return f"does not fit: a device lacks {simulated.shortfall_bytes:,} bytes"
    if simulated.step_ns >= plan.prediction.step_ns:
        return slower_than_this(simulated.step_ns, plan.prediction.step_ns)
    bound_ns = plan.certificate.lower_bound_ns if isinstance(plan, Plan) else plan.lower_bound_ns
    stopped = "" if simulated.step_ns < bound_ns else ", or not reached before the search ended"
    return f"{1 - simulated.step_ns / plan.prediction.step_ns:.1%} faster, but outside the searched space{stopped}"


def compared_with(alternatives: Iterable[Alternative], this: Prediction) -> tuple[Alternative, ...]:
    """Returns the alternatives of another plan of the same problem, with reasons that compare them with this one's."""
    return tuple(_compared_with(other, this.step_ns, this.peak_bytes) for other in alternatives)


def _compared_with(other: Alternative, step_ns: int, peak_bytes: int) -> Alternative:
    if not other.feasible:
        return other
    if other.step_ns >= step_ns:
        why_not = slower_than_this(other.step_ns, step_ns)
    elif other.peak_bytes > peak_bytes:
        why_not = f"{1 - other.step_ns / step_ns:.1%} faster, but needs more memory"
    else:
        _, outside, tail = other.why_not.partition(", but outside")
        why_not = f"{1 - other.step_ns / step_ns:.1%} faster{outside}{tail}"
    return msgspec.structs.replace(other, why_not=why_not)


def slower_than_this(other_ns: int, this_ns: int) -> str:
    """Returns why another plan, which is not faster, was not chosen."""
    return "as fast as this plan" if other_ns == this_ns else slowdown_text(other_ns, this_ns)


def slowdown_text(longer_ns: int, than_ns: int) -> str:
    """Returns in words how much longer a step is than a shorter one."""
    ratio = longer_ns / max(than_ns, 1)
    if ratio < 1.0005:
        return "as long"
    return f"{ratio - 1:.1%} slower" if ratio < 2 else f"{ratio:,.1f} times as long"


def equal_layer_stages(names: Sequence[str], devices: Sequence[str]) -> tuple[StagePlan, ...]:
    """Returns stages with equal numbers of the model's layers; the loss goes with the last."""
    num_layers = len(names) - (names[-1] == LOSS)
    ends = [*(num_layers * (s + 1) // len(devices) for s in range(len(devices) - 1)), len(names)]
    return tuple(
        StagePlan(layers=tuple(names[begin:end]), devices=(device,))
        for device, begin, end in zip(devices, [0, *ends], ends, strict=False)
    )
