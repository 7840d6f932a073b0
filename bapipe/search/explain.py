"""A plan in plain words: what it does, what limits it, what would help."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from bapipe.cost import stages_of
from bapipe.plan import Plan, StagePlan
from bapipe.profile import ModelProfile
from bapipe.search.chain import Chain
from bapipe.search.critical_path import shares
from bapipe.search.options import Options
from bapipe.search.sensitivity import Effect
from bapipe.simulate import simulate
from bapipe.timeline import Timeline

ALMOST_FULL = 0.9
"""Share of a device's memory from which on it is called full."""

MOST_HELP = 5
"""Resources named of those that would help."""


def explain(
    plan: Plan, profiles: Mapping[str, ModelProfile], options: Options, effects: Sequence[Effect]
) -> tuple[str, ...]:
    """Returns sentences: the strategy, what limits it, each of BaPipe's ways to balance, what would help most."""
    timeline = simulate(plan, profiles)
    sentences = [
        _strategy(plan),
        _limit(timeline),
        _inter_layer(plan),
        _coarse_grained(plan, profiles),
        _memory(plan, options),
        "Intra-layer split: left out, no layer is shared between stages; a device kind that can run a part of a layer "
        "shows it as several layers of its profile.",
        _data_parallel(plan),
        _help(plan, effects),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _strategy(plan: Plan) -> str:
    counts = [len(stage.devices) for stage in plan.stages]
    if len(counts) == 1:
        if counts[0] == 1:
            return f"One device: {plan.stages[0].devices[0]} runs all layers."
        return f"Data parallelism: {counts[0]} devices run all layers and sum their gradients."
    if max(counts) == 1:
        return f"A pipeline of {len(counts)} stages, one device each."
    replicated = [
        f"stage {s} ('{stage.layers[0]}' to '{stage.layers[-1]}') on {len(stage.devices)} devices"
        for s, stage in enumerate(plan.stages)
        if len(stage.devices) > 1
    ]
    return f"A pipeline of {len(counts)} stages with replicas: {', '.join(replicated)}."


def _limit(timeline: Timeline) -> str:
    found = shares(timeline)
    total = sum(time_ns for _, time_ns in found) or 1
    parts = [f"{name} ({time_ns / total:.0%})" for name, time_ns in found[:3] if time_ns * 20 >= total]
    return f"What limits it: a step waits for {', then '.join(parts)}." if parts else ""


def _inter_layer(plan: Plan) -> str:
    busy = {rank.device: rank.busy_ns for rank in plan.prediction.ranks}
    times = {s: max(busy[name] for name in stage.devices) for s, stage in enumerate(plan.stages)}
    most, least = max(times, key=lambda s: times[s]), min(times, key=lambda s: times[s])
    if len(times) == 1:
        return ""
    return (
        f"Inter-layer partition: the devices of stage {most} work longest, {times[most] / 1e6:,.1f} ms a step, those "
        f"of stage {least} shortest, {times[least] / 1e6:,.1f} ms."
    )


def _coarse_grained(plan: Plan, profiles: Mapping[str, ModelProfile]) -> str:
    if len(plan.stages) == 1:
        return ""
    profile = profiles[plan.cluster.devices[plan.cluster.index[plan.stages[0].devices[0]]].kind]
    stages = stages_of(plan.stages, profiles, plan.cluster, plan.microbatch_size)
    sent = [stage.send_bytes for stage in stages[:-1]]
    inner = sorted(Chain(profile, plan.microbatch_size, 1.0).send_bytes[1:-1])
    slow = [num for num, (a, b) in zip(sent, pairwise(plan.stages), strict=True) if _crosses_hosts(plan, a, b)]
    hosts = f"; between hosts {_megabytes(slow)}" if slow else ""
    return (
        f"Coarse-grained cuts: a micro-batch takes {_megabytes(sent)} across the cuts{hosts}; half of all cuts carry "
        f"more than {_megabytes([inner[len(inner) // 2]])}, the largest {_megabytes([inner[-1]])}."
    )


def _megabytes(sizes: Sequence[int]) -> str:
    return ", ".join(f"{num_bytes / 1e6:,.3g}" for num_bytes in sizes) + " MB"


def _crosses_hosts(plan: Plan, stage: StagePlan, following: StagePlan) -> bool:
    hosts = {device.name: device.host for device in plan.cluster.devices}
    return any(hosts[a] != hosts[b] for a in stage.devices for b in following.devices)


def _memory(plan: Plan, options: Options) -> str:
    limits = dict(zip((d.name for d in plan.cluster.devices), options.limits(plan.cluster), strict=True))
    used = {name for stage in plan.stages for name in stage.devices}
    filled = {
        rank.device: rank.peak_bytes / max(limits[rank.device], 1)
        for rank in plan.prediction.ranks
        if rank.device in used
    }
    fullest = max(filled, key=lambda name: filled[name])
    again = [str(s) for s, stage in enumerate(plan.stages) if stage.recompute]
    does = (
        f"; stage{'s' if len(again) > 1 else ''} {', '.join(again)} would not fit without recomputation"
        if again
        else ""
    )
    limit = "memory limits the plan" if again or filled[fullest] >= ALMOST_FULL else "memory does not limit the plan"
    return f"Memory fine-tuning: {limit}: {fullest} is fullest, {filled[fullest]:.0%} of what it may hold{does}."


def _data_parallel(plan: Plan) -> str:
    if len(plan.stages) == 1 and len(plan.stages[0].devices) > 1:
        return "Fall-back to data parallelism: taken, no pipeline of the space is faster."
    for other in plan.alternatives:
        if other.name == "data-parallel":
            return f"Fall-back to data parallelism: {other.step_ns / 1e6:,.1f} ms a step, {other.why_not}."
    return ""


def _help(plan: Plan, effects: Sequence[Effect]) -> str:
    now_ns = max(plan.prediction.step_ns, 1)
    lines = [
        f"{effect.resource}: {1 - effect.step_ns / now_ns:+.1%} time saved"
        + (" with another plan" if effect.planned_again else "")
        for effect in effects
        if effect.step_ns < now_ns
    ][:MOST_HELP]
    worse = [effect.resource for effect in effects if effect.step_ns > now_ns]
    text = f"What 10 % more would help: {'; '.join(lines) or 'nothing by itself'}."
    return text + (f" With the same order it would even delay: {', '.join(worse)}." if worse else "")
