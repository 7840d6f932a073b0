"""Evaluates a hand-made plan: its prediction, and a lower bound on all plans of the space."""

import msgspec

from bapipe.errors import ConstraintsUnmet, Infeasible
from bapipe.formats.certificate import NOT_CERTIFIED, certify, pinned_beside
from bapipe.formats.plan import Alternative, Plan, with_certificate
from bapipe.formats.profile import ProfilesByKind
from bapipe.formats.stage_plan import has_idle_replicas
from bapipe.planner.branch_and_bound.partition_space import line_space
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes, named_schedules
from bapipe.planner.plan_step import solve_partition
from bapipe.planner.results.decision import decision_of
from bapipe.planner.results.searched_space import in_words, memory_limit
from bapipe.planner.results.solution import Solution
from bapipe.planner.search_request import SearchRequest
from bapipe.printable import and_others
from bapipe.progress import SearchProgress
from bapipe.simulator.simulate import simulate

BEST_FOUND = "best found"
"""Name of the alternative to a pinned plan that a search finds."""


def certify_pinned(
    plan: Plan,
    profiles: ProfilesByKind,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the plan as it is, with its prediction, and the bound on all plans for its cluster and mini-batch.

    Raises:
        Infeasible: a device lacks memory.
        BapipeError: as `simulate`.
    """
    timeline = simulate(plan, profiles)
    short = [
        f"{device.name} needs {held.total:,} bytes and has {limit:,} ({held.total - limit:,} bytes short)"
        for device, held, limit in zip(plan.cluster.devices, timeline.memory, options.limits(plan.cluster), strict=True)
        if held.total > limit
    ]
    if short:
        named = "; ".join(and_others(short, "devices lack memory, too"))
        raise Infeasible(f"the pinned plan does not fit: {named}. Plan without `pin` for one that does")
    check_inputs(profiles, plan.cluster, options)
    # The bound is that of the whole space, so the gap is the most that planning could gain.
    best: tuple[Alternative, ...] = ()
    request = SearchRequest(
        profiles=profiles, cluster=plan.cluster.sequential, options=options, deadline=deadline, progress=progress
    )
    try:
        found = solve_partition(request)
        best, space, bound_ns = (_best_found(found, timeline.step_ns),), found.space, found.bound_of_all_ns
        if found.asked_bound_ns is not None:  # the search was cut off, and the pinned plan may be of what it left out
            space = line_space(*request.inputs)
    except OutOfTime as error:  # then the pinned plan is the only one known
        space, bound_ns = line_space(*request.inputs), error.lower_bound_ns
    except (Infeasible, ConstraintsUnmet):  # no plan of the space fits, or keeps the constraints
        space, bound_ns = line_space(*request.inputs), request.step_bound_ns
    judged = msgspec.structs.replace(
        plan,
        objective=msgspec.UNSET,  # the bound is of steps
        prediction=timeline.prediction(plan.minibatch_size),
        certificate=NOT_CERTIFIED,
        alternatives=best,
    )
    # The pinned plan may lie outside the space and be faster: a bound above its step time would be false.
    bound_ns = min(timeline.step_ns, bound_ns)
    words = pinned_beside(in_words(space), reasons_outside(plan, profiles, options))
    return with_certificate(judged, certify(timeline.step_ns, bound_ns, words, memory_limit(space)))


def reasons_outside(plan: Plan, profiles: ProfilesByKind, options: PlanOptions) -> list[str]:
    """Returns what a plan decides otherwise than the options allow."""
    from bapipe.planner.stages.constraints import parse_constraints  # loads numpy

    rules, sizes = parse_constraints(options.constraints), microbatch_sizes(profiles, plan.cluster, options)
    rules.check_layers(next(iter(profiles.values())))
    num_stages, size = len(plan.stages), plan.microbatch_size
    # Whether the space has the plan's order of devices is not looked at: spaces of many devices leave most orders out,
    # which their words say.
    reasons = [f"it breaks '{text}'" for text in rules.broken_by(plan.stages, plan.cluster)]
    if options.num_stages not in (None, num_stages):
        reasons.append(f"{num_stages} stage{'s' * (num_stages > 1)}, not {options.num_stages}")
    if size not in sizes:
        reasons.append(f"micro-batches of {size}")
    if plan.schedule not in named_schedules(options):
        reasons.append(f"schedule {plan.schedule}")
    elif decision_of(plan).own_table is not None:
        reasons.append(f"an order of its own, not that of {plan.schedule}")
    if any(device.side_by_side for device in plan.cluster.devices):
        reasons.append("forwards and backwards side by side")
    in_profile = [layer.name for layer in next(iter(profiles.values())).layers]
    if [name for stage in plan.stages for name in stage.layers] != in_profile:
        reasons.append("its layers in another order")
    if not options.replicas and any(len(stage.devices) > 1 for stage in plan.stages):
        reasons.append("replicas")
    elif has_idle_replicas((len(stage.devices) for stage in plan.stages), plan.num_microbatches):
        reasons.append("replicas without a micro-batch")
    if any(stage.recompute for stage in plan.stages):
        if not options.recompute:
            reasons.append("recomputation")
        elif _recomputes_needlessly(plan, profiles, options):
            reasons.append("recomputation that is not needed")
    return reasons


def _recomputes_needlessly(plan: Plan, profiles: ProfilesByKind, options: PlanOptions) -> bool:
    """Returns whether a stage recomputes, all devices of which hold their stages without."""
    replace = msgspec.structs.replace
    stages = tuple(replace(stage, recompute=False, recompute_layers=msgspec.UNSET) for stage in plan.stages)
    memory, limits = simulate(replace(plan, stages=stages), profiles).memory, options.limits(plan.cluster)
    held = zip(plan.cluster.devices, memory, limits, strict=True)
    fit = {device.name for device, needed, limit in held if needed.total <= limit}
    return any(stage.recompute and fit.issuperset(stage.devices) for stage in plan.stages)


def _best_found(found: Solution, pinned_ns: int) -> Alternative:
    """The best plan of the search beside the pinned one."""
    step_ns = found.prediction.step_ns
    change = pinned_ns / step_ns - 1 if step_ns else 0.0
    return Alternative(
        name=BEST_FOUND,
        step_ns=step_ns,
        peak_bytes=found.prediction.peak_bytes,
        feasible=True,
        why_not=f"the pinned plan takes {change:.1%} longer" if change > 0 else "not faster than the pinned plan",
    )
