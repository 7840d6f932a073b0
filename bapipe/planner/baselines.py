"""Baselines, predicted by the same simulator: one device, data parallelism, stages of equally many layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bapipe.formats.plan import Alternative, StagePlan
from bapipe.formats.profile import LOSS, ModelProfile
from bapipe.planner.schedule_placement import distribute_replicas
from bapipe.planner.solution import Solution
from bapipe.schedules import SCHEDULES
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages
from bapipe.simulator.tied_weights import inseparable_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train the plan's mini-batch on the plan's cluster."""

    stages: tuple[StagePlan, ...]
    schedule: str
    microbatch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCandidate:
    """A candidate's step time, and its largest memory and lack of memory over the devices."""

    step_ns: int
    peak_bytes: int
    lack_bytes: int

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts by time among those that fit, the rest by what they lack."""
        return max(self.lack_bytes, 0), self.step_ns


def baseline_alternatives(
    plan: Solution,
    profiles: Mapping[str, ModelProfile],
    microbatch_sizes: Sequence[int],
    schedules: Sequence[str],
    limits: Sequence[int],
) -> tuple[Alternative, ...]:
    """Returns the best of each kind over the micro-batch sizes."""
    names = tuple(name for stage in plan.stages for name in stage.layers)
    devices = [device.name for device in plan.cluster.devices]
    different: dict[object, str] = {}
    for device, limit in zip(plan.cluster.devices, limits, strict=True):
        different.setdefault((device.kind, device.speed, limit), device.name)
    kinds: dict[str, Iterable[Candidate]] = {
        "one-device": (
            Candidate(stages=(StagePlan(layers=names, devices=(name,)),), schedule="1f1b", microbatch_size=size)
            for name in different.values()
            for size in microbatch_sizes
        )
    }
    if len(devices) > 1:
        kinds["data-parallel"] = (
            Candidate(stages=(StagePlan(layers=names, devices=tuple(devices)),), schedule="1f1b", microbatch_size=size)
            for size in microbatch_sizes
        )
    named = [name for name in schedules if name in SCHEDULES] or ["1f1b"]
    layers = next(iter(profiles.values())).layers
    joined = [(layers[a].name, layers[b].name) for a, b in inseparable_layers(layers)]
    num_stages = max(len({name for stage in plan.stages for name in stage.devices}), 2)
    equal = equal_layer_stages(names, devices[: min(num_stages, len(devices), len(names) - (names[-1] == LOSS))])
    apart = any((a in stage.layers) != (b in stage.layers) for a, b in joined for stage in equal)
    if len(equal) == num_stages and not apart:
        kinds["equal-layers"] = (
            Candidate(stages=equal, schedule=schedule, microbatch_size=size)
            for schedule in named
            for size in microbatch_sizes
        )
    found = []
    for name, candidates in kinds.items():
        best = min(
            (_simulate_candidate(candidate, plan, profiles, limits) for candidate in candidates), key=lambda j: j.rank
        )
        found.append(
            Alternative(
                name=name,
                step_ns=best.step_ns,
                peak_bytes=best.peak_bytes,
                feasible=best.lack_bytes <= 0,
                why_not=_why_not(best, plan),
            )
        )
    return tuple(found)


def _simulate_candidate(
    candidate: Candidate, plan: Solution, profiles: Mapping[str, ModelProfile], limits: Sequence[int]
) -> SimulatedCandidate:
    index = plan.cluster.index
    table = distribute_replicas(
        SCHEDULES[candidate.schedule](len(candidate.stages), plan.minibatch_size // candidate.microbatch_size),
        tuple(tuple(index[name] for name in stage.devices) for stage in candidate.stages),
        len(index),
    )
    costs = build_stages(candidate.stages, profiles, plan.cluster, candidate.microbatch_size)
    timeline = simulate_schedule(table, costs, plan.cluster)
    peaks = [memory.total for memory in timeline.memory]
    return SimulatedCandidate(
        step_ns=timeline.step_ns,
        peak_bytes=max(peaks),
        lack_bytes=max(peak - limit for peak, limit in zip(peaks, limits, strict=True)),
    )


def _why_not(simulated: SimulatedCandidate, plan: Solution) -> str:
    if simulated.lack_bytes > 0:
        return f"does not fit: a device lacks {simulated.lack_bytes:,} bytes"
    if simulated.step_ns == plan.prediction.step_ns:
        return "as fast as this plan"
    if simulated.step_ns > plan.prediction.step_ns:
        return in_words(simulated.step_ns, plan.prediction.step_ns)
    stopped = "" if simulated.step_ns < plan.lower_bound_ns else ", or not reached before the search ended"
    return f"{1 - simulated.step_ns / plan.prediction.step_ns:.1%} faster, but outside the searched space{stopped}"


def in_words(longer_ns: int, than_ns: int) -> str:
    """Returns how much slower a step is than a shorter one."""
    ratio = longer_ns / max(than_ns, 1)
    return f"{ratio - 1:.1%} slower" if ratio < 2 else f"{ratio:,.1f} times as long"


def equal_layer_stages(names: Sequence[str], devices: Sequence[str]) -> tuple[StagePlan, ...]:
    """Returns stages with equal numbers of the model's layers; the loss goes with the last."""
    num_layers = len(names) - (names[-1] == LOSS)
    ends = [*(num_layers * (s + 1) // len(devices) for s in range(len(devices) - 1)), len(names)]
    return tuple(
        StagePlan(layers=tuple(names[start:stop]), devices=(device,))
        for device, start, stop in zip(devices, [0, *ends], ends, strict=False)
    )
