"""The differences between two plans: only what is not equal."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec

from bapipe.formats.plan import Plan
from bapipe.formats.stage_plan import StagePlan
from bapipe.printable import MAX_LINE, counted, printable
from bapipe.report.formatting import mib, ms, rate
from bapipe.report.plans import proof
from bapipe.units import percent_change

MAX_DEVICES_NAMED = 8
"""Maximum number of devices whose memory is listed, those with the largest changes."""


def render_changes(before: Plan, after: Plan) -> Iterator[str]:
    """Yields a line for each difference, the step time first; one line if there is none."""
    parts = _step, _inputs, _choices, _stages, _memory
    lines = [line for part in parts for line in part(before, after)]
    if lines:
        lines.append(proof(after.certificate))
    yield from (printable(line, MAX_LINE) for line in lines or ["no difference"])


def changes_json(before: Plan, after: Plan) -> dict[str, object]:
    """Returns prediction and certificate before and after, and the differences in words."""
    return {
        "before": _judged(before),
        "after": _judged(after),
        "changes": list(render_changes(before, after)),
    }


def _judged(plan: Plan) -> dict[str, object]:
    return {"prediction": msgspec.to_builtins(plan.prediction), "certificate": msgspec.to_builtins(plan.certificate)}


def _step(before: Plan, after: Plan) -> Iterator[str]:
    old, new = before.prediction, after.prediction
    if not (before.is_judged and after.is_judged):
        if before.is_judged != after.is_judged:
            old_step, new_step = (ms(p.prediction.step_ns) if p.is_judged else "not simulated" for p in (before, after))
            yield f"step: {old_step} -> {new_step}"
        return
    if old.step_ns != new.step_ns:
        share = f" ({percent_change(new.step_ns / old.step_ns - 1)})" if old.step_ns else ""
        yield f"step: {ms(old.step_ns)} -> {ms(new.step_ns)}{share}"
    if old.samples_per_s != new.samples_per_s:
        old_rate, new_rate = (rate(plan.minibatch_size, plan.prediction.step_ns) for plan in (before, after))
        yield f"samples/s: {old_rate} -> {new_rate}"
    if f"{old.bubble:.1%}" != f"{new.bubble:.1%}":
        yield f"bubble: {old.bubble:.1%} -> {new.bubble:.1%}"
    longest = _longest_stage(after)
    if longest is not None and longest != _longest_stage(before):
        yield f"stage {longest} is now the longest"


def _longest_stage(plan: Plan) -> int | None:
    """Returns the stage whose devices compute longest in a step; None if plans have one stage."""
    busy_ns = {rank.device: rank.busy_ns for rank in plan.prediction.ranks}
    loads = [max(busy_ns[name] for name in stage.devices) for stage in plan.stages]
    return loads.index(max(loads)) if len(loads) > 1 else None


def _inputs(before: Plan, after: Plan) -> Iterator[str]:
    """Yields what the plans were made for, as far as they were made for different things."""
    if before.model != after.model:
        yield f"model: {before.model} -> {after.model}"
    both = before.profiles.keys() & after.profiles.keys()
    if changed := sorted(kind for kind in both if before.profiles[kind] != after.profiles[kind]):
        yield f"another profile of {', '.join(changed)}"
    if before.cluster != after.cluster:
        yield "another cluster"
    old, new = ("step" if plan.objective is msgspec.UNSET else plan.objective for plan in (before, after))
    if old != new:
        yield f"objective: {old} -> {new}"


def _choices(before: Plan, after: Plan) -> Iterator[str]:
    if before.schedule != after.schedule:
        yield f"schedule: {before.schedule} -> {after.schedule}"
    elif _shape(before) == _shape(after) and _orders(before) != _orders(after):
        yield "the order of the actions"
    sizes = [f"{plan.num_microbatches} of {plan.microbatch_size}" for plan in (before, after)]
    if sizes[0] != sizes[1]:
        yield f"micro-batches: {sizes[0]} -> {sizes[1]}"


def _shape(plan: Plan) -> tuple[int, list[int]]:
    """Returns what decides which actions there are: the micro-batches, and the number of replicas of each stage."""
    return plan.num_microbatches, [len(stage.devices) for stage in plan.stages]


def _orders(plan: Plan) -> list[tuple[str, ...]]:
    """Returns the order of the actions of each device that has a stage, whichever device that is."""
    return sorted(filter(None, plan.order))


def _stages(before: Plan, after: Plan) -> Iterator[str]:
    for s, (old, new) in enumerate(zip_longest(before.stages, after.stages)):
        if old == new:
            continue
        yield f"stage {s}: {_stage(old, new)} -> {_stage(new, old)}"


def _stage(stage: StagePlan | None, other: StagePlan | None) -> str:
    """Returns in words what a stage does, as far as the other one does something else."""
    if stage is None:
        return "none"
    parts = []
    if other is None or stage.layers != other.layers:
        parts.append(f"{counted(len(stage.layers), 'layer')} '{stage.layers[0]}' to '{stage.layers[-1]}'")
    if other is None or stage.devices != other.devices:
        parts.append(f"on {', '.join(stage.devices)}")
    if (other is None and stage.recompute) or (other is not None and stage.recomputed != other.recomputed):
        parts.append(_recomputation(stage))
    return ", ".join(parts)


def _recomputation(stage: StagePlan) -> str:
    num = len(stage.recomputed)
    if num in (0, len(stage.layers)):
        return "recomputes" if num else "keeps its activations"
    return f"recomputes {num} of {counted(len(stage.layers), 'layer')}"


def _memory(before: Plan, after: Plan) -> Sequence[str]:
    old = before.prediction.peaks_bytes
    changed = [
        (abs(rank.peak_bytes - old[rank.device]), rank.device, rank.peak_bytes)
        for rank in after.prediction.ranks
        if old.get(rank.device, rank.peak_bytes) != rank.peak_bytes
    ]
    named = sorted(changed, key=lambda change: -change[0])[:MAX_DEVICES_NAMED]
    lines = [f"peak memory of {device}: {mib(old[device])} -> {mib(peak)}" for _, device, peak in named]
    rest = len(changed) - len(named)
    return [*lines, *([f"peak memory of {counted(rest, 'more device')}, by less"] if rest else [])]
