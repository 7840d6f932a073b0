"""Explains a plan in sentences: what it does, what limits it, what would help.

The sentences follow BaPipe's list of ways to balance a pipeline (Zhao et al. 2020, arXiv:2012.12544): cuts
between layers, coarser cuts where links are slow, memory, splits inside layers, data parallelism. Each states whether
the plan uses it and what leaving it out would cost, measured with the simulator or by planning again.
"""

from collections.abc import Sequence

from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.analysis.critical_path import time_shares
from bapipe.planner.analysis.exchange import fixed_exchange_words
from bapipe.planner.analysis.gap import explain_gap
from bapipe.planner.analysis.intra_layer import intra_layer
from bapipe.planner.analysis.sensitivity import UNLIMITED_MEMORY, Effect, changes_of_resources, sensitivity
from bapipe.planner.analysis.time_balanced import time_balanced_plan
from bapipe.planner.baselines import slowdown_text
from bapipe.planner.compute.deadline import Deadline, OutOfTime, deadline_of
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_schedules
from bapipe.printable import and_others
from bapipe.simulator.simulate import simulate
from bapipe.simulator.stage_cost import build_stages
from bapipe.simulator.timeline import Timeline

MAX_RESOURCES_NAMED = 5
"""Maximum number of resources that are listed as shortening the step."""

MAX_CUTS_NAMED = 8
"""Of more cuts the bytes are not listed one by one."""

MIN_TIME_SHARE_NAMED = 0.0005
"""A smaller difference, as a share of the step, is not mentioned."""

TOPICS = (
    "strategy",
    "critical path",
    "stages",
    "cuts",
    "memory",
    "layers",
    "data parallelism",
    "resources",
    "gap",
)
"""What each text of `explain` is about; the function that writes it has the same name."""


def explain(
    plan: Plan,
    profiles: ProfilesByKind,
    options: PlanOptions,
    *,
    deadline: Deadline | None = None,
) -> tuple[str, ...]:
    """Returns in words what limits a plan and what would help: a sentence or two on each of `TOPICS`.

    Args:
        deadline: of what is simulated or planned again: a third of the time for other cuts, then half of what is left
            for more of each resource if the gap is to be explained as well. Sentences say what was left out. Without
            one it is as `options.time_limit_s` says.

    Raises:
        BapipeError: an unknown schedule in `options`.
    """
    check_schedules(options)
    deadline = deadline or deadline_of(options.time_limit_s)
    cuts = _cuts(plan, profiles, options, deadline.share(3))
    first = deadline if plan.certificate.proven_optimal else deadline.share(2)
    effects = sensitivity(plan, profiles, options, deadline=first)
    return (
        _strategy(plan),
        _critical_path(simulate(plan, profiles)),
        _stages(plan),
        cuts,
        _memory(plan, options, effects),
        intra_layer(plan, profiles),
        _data_parallelism(plan),
        _resources(plan, effects),
        explain_gap(plan, profiles, options, deadline=deadline),
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
        text = f"A pipeline of {len(counts)} stages with replicas: {_replicas(plan)}"
    unused = and_others([*plan.unused_devices], "devices")
    return f"{text}; unused: {', '.join(unused)}." if unused else f"{text}."


def _replicas(plan: Plan) -> str:
    """Returns on how many devices the stages are, of which some have replicas."""
    replicated = [
        f"stage {s} ('{stage.layers[0]}' to '{stage.layers[-1]}') on {len(stage.devices)} devices"
        for s, stage in enumerate(plan.stages)
        if len(stage.devices) > 1
    ]
    # The stages without replicas are counted, so that the devices of all stages are accounted for.
    num_others = len(plan.stages) - len(replicated)
    named = and_others(replicated, "stages with replicas")
    if num_others == 1:
        named.append("the other stage on one device")
    elif num_others:
        named.append(f"the other {num_others} stages on one device each")
    return ", ".join(named)


def _critical_path(timeline: Timeline) -> str:
    """Returns the largest shares of the critical path: only faster events on it can shorten the step."""
    shares = time_shares(timeline)
    total = sum(time_ns for _, time_ns in shares) or 1
    # At most three, each at least 5 % of the path.
    parts = [f"{name} ({time_ns / total:.0%})" for name, time_ns in shares[:3] if time_ns * 20 >= total]
    return f"Critical path of a step: {', '.join(parts) or 'many short events, none of 5 % or more'}."


def _stages(plan: Plan) -> str:
    if len(plan.stages) == 1:
        return "Inter-layer partition: none; all layers are in one stage."
    busy = {rank.device: rank.busy_ns for rank in plan.prediction.ranks}
    times = {s: max(busy[name] for name in stage.devices) for s, stage in enumerate(plan.stages)}
    longest, shortest = max(times, key=lambda s: times[s]), min(times, key=lambda s: times[s])
    return (
        f"Inter-layer partition: the devices of stage {longest} are busy longest ({times[longest] / 1e6:,.1f} ms per "
        f"step), those of stage {shortest} shortest ({times[shortest] / 1e6:,.1f} ms)."
    )


def _cuts(plan: Plan, profiles: ProfilesByKind, options: PlanOptions, deadline: Deadline) -> str:
    """Compares the plan's cuts with those that balance compute alone: the best cuts send less if links matter."""
    if len(plan.stages) == 1:
        return "Coarse-grained cuts: none; all layers are in one stage."
    sent = _sent_bytes(plan, profiles)
    sends = f"each micro-batch sends {_over_cuts(sent)}"
    try:
        other = time_balanced_plan(plan, profiles, deadline)
        deadline.check()
    except OutOfTime:
        return f"Coarse-grained cuts: not known; no time was left to compare with cuts that balance compute; {sends}."
    if other is None:
        return f"Coarse-grained cuts: {sends}."
    if [set(stage.layers) for stage in other.stages] == [set(stage.layers) for stage in plan.stages]:
        return f"Coarse-grained cuts: not needed; the plan's cuts balance compute, and {sends}."
    other_sent = _sent_bytes(other, profiles)
    # Other cuts under the same order, on the same devices: the difference is due to the cuts alone.
    timeline = simulate(other, profiles)
    lack = max(m.total - limit for m, limit in zip(timeline.memory, options.limits(plan.cluster), strict=True))
    is_slower = timeline.step_ns > plan.prediction.step_ns * (1 + MIN_TIME_SHARE_NAMED)
    change = slowdown_text(timeline.step_ns, plan.prediction.step_ns) if is_slower else "as long"
    change = f"a device would lack {lack:,} bytes" if lack > 0 else f"a step would be {change}"
    used = "used" if (is_slower or lack > 0) and sum(sent) < sum(other_sent) else "not needed"
    return (
        f"Coarse-grained cuts: {used}; {sends}. Cuts that balance compute alone would send "
        f"{_over_cuts(other_sent)}, and {change}."
    )


def _sent_bytes(plan: Plan, profiles: ProfilesByKind) -> list[int]:
    """Returns the activation bytes per micro-batch that each cut sends; [stages - 1]."""
    stages = build_stages(plan.stages, profiles, plan.cluster, plan.microbatch_size)
    return [stage.send_bytes for stage in stages[:-1]]


def _over_cuts(sizes: Sequence[int]) -> str:
    """Returns in words how many bytes the cuts send: each, or of many the least and the most."""
    if len(sizes) <= MAX_CUTS_NAMED:
        return f"{', '.join(map(_megabytes, sizes))} MB over the cuts"
    # Cut s is the one behind stage s.
    most = max(range(len(sizes)), key=sizes.__getitem__)
    least_sent, most_sent = _megabytes(min(sizes)), _megabytes(sizes[most])
    if least_sent == most_sent:
        return f"{most_sent} MB over each of {len(sizes)} cuts"
    return f"{least_sent} to {most_sent} MB over each of {len(sizes)} cuts (most behind stage {most})"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.3g}"


def _memory(plan: Plan, options: PlanOptions, effects: Sequence[Effect]) -> str:
    limits = dict(zip((d.name for d in plan.cluster.devices), options.limits(plan.cluster), strict=True))
    used = set(plan.used_devices)
    shares = {
        rank.device: rank.peak_bytes / max(limits[rank.device], 1)
        for rank in plan.prediction.ranks
        if rank.device in used
    }
    # The device closest to its own limit, not the one that holds most.
    fullest = max(shares, key=lambda name: shares[name])
    recomputed = [str(s) for s, stage in enumerate(plan.stages) if stage.recompute]
    numbers = f"s {', '.join(and_others(recomputed, 'stages'))}" if len(recomputed) > 1 else f" {''.join(recomputed)}"
    recompute = f"Recomputed to fit: stage{numbers}. " if recomputed else ""
    limit = f", {limits[fullest]:,} bytes" if options.memory.in_words else ""
    usage = f"{recompute}{fullest} is the fullest device, with {shares[fullest]:.0%} of its limit{limit}"
    unlimited = next((effect for effect in effects if effect.resource == UNLIMITED_MEMORY), None)
    if unlimited is None:
        return f"Memory fine-tuning: not known; no time was left to plan with more memory. {usage}."
    if unlimited.step_ns >= unlimited.without_ns:
        return f"Memory fine-tuning: not needed; no plan found is faster with more memory. {usage}."
    has_better = unlimited.without_ns < plan.prediction.step_ns
    best = f", {unlimited.without_ns / 1e6:,.1f} ms with this memory and the best plan" * has_better
    unlimited_ms = f"{unlimited.step_ns / 1e6:,.1f} ms"
    return f"Memory fine-tuning: used; with unlimited memory a step would take {unlimited_ms}{best}. {usage}."


def _data_parallelism(plan: Plan) -> str:
    if len(plan.stages) == 1 and len(plan.stages[0].devices) > 1:
        # Without a proof a faster pipeline may exist that the search did not reach.
        known = "no pipeline in the searched space" if plan.certificate.proven_optimal else "no pipeline found"
        return f"Fallback to data parallelism: used; {known} is faster."
    for other in plan.alternatives:
        if other.name == "data-parallel":
            time = f"{other.step_ns / 1e6:,.1f} ms per step, " if other.feasible else ""
            return f"Fallback to data parallelism: not used; {time}{other.why_not}."
    reason = "not used" if len(plan.cluster.devices) > 1 else "none; there is only one device"
    return f"Fallback to data parallelism: {reason}."


def _resources(plan: Plan, effects: Sequence[Effect]) -> str:
    saved = [
        f"{effect.resource} {1 - effect.ratio:.1%}{' with another plan' if effect.is_replanned else ''}"
        for effect in effects
        if effect.resource != UNLIMITED_MEMORY and effect.ratio <= 1 - MIN_TIME_SHARE_NAMED
    ]
    # With a fixed order a faster device can delay a step: its transfers take another's place in the queue of a link.
    delaying = [effect.resource for effect in effects if effect.ratio >= 1 + MIN_TIME_SHARE_NAMED]
    num_tried = sum(not effect.is_replanned for effect in effects)
    num_all = len(changes_of_resources(plan))
    left_out = f"; no time was left for {num_all - num_tried} of {num_all} speeds and links" * (num_tried < num_all)
    named = ", ".join(saved[:MAX_RESOURCES_NAMED]) or ("none" if num_tried else "not known")
    fixed = f"; {words}" if (words := fixed_exchange_words(plan.cluster.devices)) else ""
    text = f"Step time saved by 10 % more of one resource: {named}{left_out}{fixed}."
    if not delaying:
        return text
    longer = ", ".join(and_others(delaying, "resources"))
    return f"{text} It would be longer, in the same order, with more of: {longer}."
