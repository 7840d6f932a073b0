"""A plan in plain words: what it does, what limits it, what would help."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.analysis.critical_path import time_shares
from bapipe.planner.analysis.sensitivity import UNLIMITED_MEMORY, Effect
from bapipe.planner.baselines import in_words
from bapipe.planner.branch_and_bound.chain import Chain
from bapipe.planner.options import PlanOptions
from bapipe.simulator.simulate import simulate
from bapipe.simulator.stage_cost import build_stages
from bapipe.simulator.timeline import Timeline

MAX_RESOURCES_NAMED = 5
"""Resources named of those that would help."""

MAX_LAYERS_TO_BALANCE = 400
"""Up to how many layers the cuts that balance time alone are looked for."""

MIN_TIME_SHARE_NAMED = 0.0005
"""Share of a step that is worth a word."""


def explain(
    plan: Plan, profiles: Mapping[str, ModelProfile], options: PlanOptions, effects: Sequence[Effect]
) -> tuple[str, ...]:
    """Returns sentences: the strategy, what limits it, each of BaPipe's ways to balance, what would help most."""
    return (
        _strategy(plan),
        _limit(simulate(plan, profiles)),
        _inter_layer(plan),
        _coarse_grained(plan, profiles, options),
        _memory(plan, options, effects),
        "Intra-layer split: not searched, every layer runs whole in one stage; a profile may hold the parts of a layer "
        "as layers of their own.",
        _data_parallel(plan),
        _help(plan, effects),
    )


def _strategy(plan: Plan) -> str:
    counts = [len(stage.devices) for stage in plan.stages]
    if len(counts) == 1:
        if counts[0] == 1:
            text = f"One device: {plan.stages[0].devices[0]} runs all layers"
        else:
            text = f"Data parallelism: {counts[0]} devices run all layers and sum their gradients"
    elif max(counts) == 1:
        num_devices = len({stage.devices for stage in plan.stages})
        text = f"A pipeline of {len(counts)} stages, " + (
            "one device each" if num_devices == len(counts) else f"several on each of {num_devices} devices"
        )
    else:
        replicated = [
            f"stage {s} ('{stage.layers[0]}' to '{stage.layers[-1]}') on {len(stage.devices)} devices"
            for s, stage in enumerate(plan.stages)
            if len(stage.devices) > 1
        ]
        text = f"A pipeline of {len(counts)} stages with replicas: {', '.join(replicated)}"
    used = {name for stage in plan.stages for name in stage.devices}
    idle = [device.name for device in plan.cluster.devices if device.name not in used]
    return f"{text}; {', '.join(idle)} not used." if idle else f"{text}."


def _limit(timeline: Timeline) -> str:
    found = time_shares(timeline)
    total = sum(time_ns for _, time_ns in found) or 1
    parts = [f"{name} ({time_ns / total:.0%})" for name, time_ns in found[:3] if time_ns * 20 >= total]
    return f"What limits it: a step waits for {', '.join(parts) or 'many things for a short time each'}."


def _inter_layer(plan: Plan) -> str:
    if len(plan.stages) == 1:
        return "Inter-layer partition: none, all layers are one stage."
    busy = {rank.device: rank.busy_ns for rank in plan.prediction.ranks}
    times = {s: max(busy[name] for name in stage.devices) for s, stage in enumerate(plan.stages)}
    most, least = max(times, key=lambda s: times[s]), min(times, key=lambda s: times[s])
    return (
        f"Inter-layer partition: the devices of stage {most} work longest, {times[most] / 1e6:,.1f} ms a step, those "
        f"of stage {least} shortest, {times[least] / 1e6:,.1f} ms."
    )


def _coarse_grained(plan: Plan, profiles: Mapping[str, ModelProfile], options: PlanOptions) -> str:
    """What the cuts carry beside those of `time_balanced_plan`: the best cuts are coarser where links count."""
    if len(plan.stages) == 1:
        return "Coarse-grained cuts: none, all layers are one stage."
    own = _sent(plan, profiles)
    carries = f"a micro-batch takes {_megabytes(own)} across the cuts"
    other = time_balanced_plan(plan, profiles)
    if other is None:
        return f"Coarse-grained cuts: {carries}."
    if [set(stage.layers) for stage in other.stages] == [set(stage.layers) for stage in plan.stages]:
        return f"Coarse-grained cuts: not needed, the plan has the cuts that balance time alone; {carries}."
    theirs = _sent(other, profiles)
    timeline = simulate(other, profiles)
    lack = max(m.total - limit for m, limit in zip(timeline.memory, options.limits(plan.cluster), strict=True))
    counts = timeline.step_ns > plan.prediction.step_ns * (1 + MIN_TIME_SHARE_NAMED)
    change = in_words(timeline.step_ns, plan.prediction.step_ns) if counts else "as long"
    change = f"a device would lack {lack:,} bytes" if lack > 0 else f"a step is {change}"
    taken = "taken" if (counts or lack > 0) and sum(own) < sum(theirs) else "not needed"
    return (
        f"Coarse-grained cuts: {taken}, {carries}; with the cuts that balance time alone it takes "
        f"{_megabytes(theirs)}, and {change}."
    )


def time_balanced_plan(plan: Plan, profiles: Mapping[str, ModelProfile]) -> Plan | None:
    """Returns the plan with the cuts whose slowest stage is fastest, transfers and memory left out.

    None where devices have several stages, or more layers than `MAX_LAYERS_TO_BALANCE`.
    """
    devices = [device for stage in plan.stages for device in stage.devices]
    index, layers = plan.cluster.index, next(iter(profiles.values())).layers
    if len(set(devices)) < len(devices) or len(layers) > MAX_LAYERS_TO_BALANCE:
        return None
    used = [plan.cluster.devices[index[stage.devices[0]]] for stage in plan.stages]
    chains = [Chain(profiles[device.kind], plan.microbatch_size, device.speed) for device in used]
    legal = [cut for cut in range(len(layers) + 1) if cut in (0, len(layers)) or chains[0].legal[cut]]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for s, (stage, chain) in enumerate(zip(plan.stages, chains, strict=True)):
        ends = legal[-1:] if s + 1 == len(chains) else legal[1:-1]
        found = {}
        for stop in ends:
            ways = (
                (max(load, _work_ns(chain, start, stop) / len(stage.devices)), (*cuts, stop))
                for start, (load, cuts) in best.items()
                if start < stop
            )
            if (way := min(ways, default=None)) is not None:
                found[stop] = way
        best = found
    (_, cuts) = best[len(layers)]
    stages = tuple(
        msgspec.structs.replace(stage, layers=tuple(layer.name for layer in layers[start:stop]))
        for stage, (start, stop) in zip(plan.stages, pairwise(cuts), strict=True)
    )
    return msgspec.structs.replace(plan, stages=stages)


def _work_ns(chain: Chain, start: int, stop: int) -> int:
    cost = chain.cost(start, stop)
    return cost.forward_ns + cost.backward_ns


def _sent(plan: Plan, profiles: Mapping[str, ModelProfile]) -> list[int]:
    stages = build_stages(plan.stages, profiles, plan.cluster, plan.microbatch_size)
    return [stage.send_bytes for stage in stages[:-1]]


def _megabytes(sizes: Sequence[int]) -> str:
    return ", ".join(f"{num_bytes / 1e6:,.3g}" for num_bytes in sizes) + " MB"


def _memory(plan: Plan, options: PlanOptions, effects: Sequence[Effect]) -> str:
    limits = dict(zip((d.name for d in plan.cluster.devices), options.limits(plan.cluster), strict=True))
    used = {name for stage in plan.stages for name in stage.devices}
    filled = {
        rank.device: rank.peak_bytes / max(limits[rank.device], 1)
        for rank in plan.prediction.ranks
        if rank.device in used
    }
    fullest = max(filled, key=lambda name: filled[name])
    again = [str(s) for s, stage in enumerate(plan.stages) if stage.recompute]
    does = f"stage{'s' if len(again) > 1 else ''} {', '.join(again)} recompute{'' if len(again) > 1 else 's'} to fit; "
    most = f"{does if again else ''}{fullest} is fullest, {filled[fullest]:.0%} of what it may hold"
    least_ns = next(effect.step_ns for effect in effects if effect.resource == UNLIMITED_MEMORY)
    if least_ns >= plan.prediction.step_ns:
        return f"Memory fine-tuning: not needed, no plan found is faster with more memory; {most}."
    return f"Memory fine-tuning: taken, a step would take {least_ns / 1e6:,.1f} ms with memory without limit; {most}."


def _data_parallel(plan: Plan) -> str:
    if len(plan.stages) == 1 and len(plan.stages[0].devices) > 1:
        known = (
            "no pipeline of the space is faster" if plan.certificate.proven_optimal else "no pipeline found is faster"
        )
        return f"Fall-back to data parallelism: taken, {known}."
    for other in plan.alternatives:
        if other.name == "data-parallel":
            time = f"{other.step_ns / 1e6:,.1f} ms a step, " if other.feasible else ""
            return f"Fall-back to data parallelism: not taken, {time}{other.why_not}."
    return (
        "Fall-back to data parallelism: not taken."
        if len(plan.cluster.devices) > 1
        else ("Fall-back to data parallelism: none, there is one device.")
    )


def _help(plan: Plan, effects: Sequence[Effect]) -> str:
    now_ns = max(plan.prediction.step_ns, 1)
    saved = [
        f"{effect.resource} {1 - effect.step_ns / now_ns:.1%}{' with another plan' if effect.is_replanned else ''}"
        for effect in effects
        if effect.resource != UNLIMITED_MEMORY and effect.step_ns <= now_ns * (1 - MIN_TIME_SHARE_NAMED)
    ]
    worse = [effect.resource for effect in effects if effect.step_ns >= now_ns * (1 + MIN_TIME_SHARE_NAMED)]
    named = ", ".join(saved[:MAX_RESOURCES_NAMED]) or "nothing by itself"
    text = f"What 10 % more would save with the same plan: {named}."
    return text + (f" It would even delay, in the same order: {', '.join(worse)}." if worse else "")
