"""Explains the gap of a plan: what its lower bound leaves out, and how much of it other choices account for."""

from dataclasses import replace

from bapipe.errors import BapipeError
from bapipe.formats.certificate import outside_of
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.graph.layer_graph import of_layers
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import microbatch_sizes, named_schedules
from bapipe.planner.plan_step import solve_partition
from bapipe.planner.results.work_bound import work_bound_ns
from bapipe.planner.search_request import SearchRequest
from bapipe.units import percent_up


def explain_gap(plan: Plan, profiles: ProfilesByKind, options: PlanOptions, *, deadline: Deadline = UNLIMITED) -> str:
    """Returns what the gap of a plan consists of and what would close it.

    The plan's schedule and micro-batch size are searched again, alone: if little of the gap is left then, other
    schedules and sizes keep the bound down, and fixing them closes it.
    """
    if plan.certificate.proven_optimal:
        if outside_of(plan.certificate) is not None:
            return "Gap: none; no plan of the searched space is faster than the pinned one."
        limit = options.memory.in_words
        return f"Gap: none; the plan is proven optimal in the searched space{f', {limit}' if limit else ''}."
    return f"Gap: {_shares(plan, profiles, options)} To close it, {_remedy(plan, profiles, options, deadline)}"


def _shares(plan: Plan, profiles: ProfilesByKind, options: PlanOptions) -> str:
    """What the bound and the step are made of, and which part of the difference is the largest."""
    step_ns, bound_ns = plan.prediction.step_ns, plan.certificate.lower_bound_ns
    work_ns = min(work_bound_ns(profiles, plan.cluster, options.minibatch_size), bound_ns)
    busiest = max(plan.prediction.ranks, key=lambda rank: rank.busy_ns)
    uneven_ns, waiting_ns = max(busiest.busy_ns - work_ns, 0), max(step_ns - busiest.busy_ns, 0)
    counted = "only that" if bound_ns <= work_ns else f"that and {_ms(bound_ns - work_ns)} ms more"
    loosest = (
        "the work that is not shared equally (unequal stages, idle devices, recomputation)"
        if uneven_ns > waiting_ns
        else "the waiting (warm-up and cool-down, transfers, all-reduces)"
    )
    return (
        f"the bound is {_ms(bound_ns)} ms and the step {_ms(step_ns)} ms. All devices need {_ms(work_ns)} ms for an "
        f"equal share of the work, and the bound counts {counted}. {busiest.device}, the busiest device, works "
        f"{_ms(uneven_ns)} ms longer than an equal share and waits {_ms(waiting_ns)} ms: {loosest} is where the bound "
        "may be too low or the plan too slow."
    )


def _remedy(plan: Plan, profiles: ProfilesByKind, options: PlanOptions, deadline: Deadline) -> str:
    longer = _longer(plan, options)
    num_choices = len(named_schedules(options)) * len(microbatch_sizes(profiles, plan.cluster, options))
    if num_choices == 1 or plan.schedule not in named_schedules(options):
        return f"{longer}."
    if not of_layers(next(iter(profiles.values()))).has_single_order:
        return f"{longer}."  # what is searched here is along the profile's order only
    alone = replace(options, schedules=(plan.schedule,), microbatch_size=plan.microbatch_size)
    if deadline.is_over:
        return (
            f"{longer}. No time was left to search {plan.schedule} and micro-batches of {plan.microbatch_size} alone."
        )
    try:
        found = solve_partition(
            SearchRequest(profiles=profiles, cluster=plan.cluster.sequential, options=alone, deadline=deadline)
        )
    except BapipeError:
        return f"{longer}."
    best_ns = min(found.prediction.step_ns, plan.prediction.step_ns)
    faster = f", and finds a step of {_ms(best_ns)} ms" if best_ns < plan.prediction.step_ns else ""
    return (
        f"{longer}. With {plan.schedule} and micro-batches of {plan.microbatch_size} alone, it leaves "
        f"{percent_up(best_ns / max(found.lower_bound_ns, 1) - 1, 1)}{faster}."
    )


def _longer(plan: Plan, options: PlanOptions) -> str:
    """What a longer time limit can do."""
    from bapipe.planner.device_line.search import has_many_devices  # loads numpy

    num_layers = sum(len(stage.layers) for stage in plan.stages)
    schedules, size = named_schedules(options), options.minibatch_size
    if has_many_devices(plan.cluster, schedules, num_layers=num_layers, minibatch_size=size):
        return (
            "a longer time limit helps only if the search was ended before it was done: for so many devices the bound "
            "is that of a relaxation, which counts for each stage what comes before and behind it, but not all that "
            "stages wait for one another, however long it is searched"
        )
    return "a longer time limit lets the search raise the bound and look for faster plans"


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.1f}"
