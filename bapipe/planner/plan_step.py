"""Searches the partition with the shortest step: layouts x micro-batch sizes x schedules, along one order of layers."""

from dataclasses import replace
from typing import TYPE_CHECKING

from bapipe.errors import Infeasible
from bapipe.formats.plan import Alternative
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.action_order.improve_plan import improve_plan
from bapipe.planner.baselines import baseline_alternatives, slower_than_this
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.compute.pace import ACTIONS_PER_S
from bapipe.planner.inputs.options import SEARCH, PlanOptions
from bapipe.planner.least_memory import or_baseline
from bapipe.planner.make import balanced_decision
from bapipe.planner.results.searched_space import ActionOrderSpace, partitions_in
from bapipe.planner.results.solution import Solution, sort_alternatives
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.whole_progress import bounded_progress
from bapipe.progress import SearchProgress

if TYPE_CHECKING:
    from bapipe.planner.line_solution import LineSolution

NUM_PLANS_AFTER = 1.5
"""What follows an exact search, its result's simulation and naive plans, takes as long as so many plans with all
stages, as measured."""


def solve_step_time(request: SearchRequest) -> Solution:
    """Returns the stages and the order with the shortest step, by an exact search.

    The space: the layers in the profile's order, cut into the stages of a schedule at any layers, each stage on some
    devices of the cluster; every measured or interpolated micro-batch size that divides the mini-batch. If an order of
    the actions is to be searched, too, that is done for stages of one device each, and the faster plan is returned.

    Args:
        request: inputs that `check_inputs` accepts. If no user gave its deadline, the search ends after
            `exact_search.MAX_NODES`.

    Raises:
        Infeasible: nothing fits; the message names the closest plan and what each device lacks.
        BapipeError: constraints that cannot be met, or sizes that do not divide.
        OutOfTime: the deadline passed before any plan was found that fits, or an exact search needs too much memory,
            and no naive plan fits.
    """
    if SEARCH not in request.options.schedules:
        return solve_partition(request)
    if request.progress is not None:  # other orders of actions may beat what is proven of the named ones
        request = replace(request, progress=bounded_progress(request.progress, request.step_bound_ns))
    has_replicas = request.options.replicas
    try:
        named = solve_partition(replace(request, deadline=request.deadline.share(2)) if has_replicas else request)
    except Infeasible as error:
        schedules = ", ".join(request.schedules)
        raise Infeasible(f"under {schedules}, whose stages `{SEARCH}` begins with, {error}", is_proven=False) from None
    if not has_replicas:
        return _with_searched_order(named, request)
    try:
        start = _without_replicas(named, request)
    except (Infeasible, OutOfTime):
        return named
    return _joined(named, start, _with_searched_order(start, request))


def _without_replicas(named: Solution, request: SearchRequest) -> Solution:
    """Returns the best stages of one device each, as the search for an order of the actions has them."""
    if all(len(stage.devices) == 1 for stage in named.stages):
        return named
    options = replace(request.options, replicas=False)
    progress = _joined_progress(request.progress, named)
    return solve_partition(replace(request, options=options, deadline=request.deadline.share(2), progress=progress))


def _with_searched_order(solution: Solution, request: SearchRequest) -> Solution:
    """Returns stages of one device each with the fastest order found for them, or for neighbouring ones."""
    options = request.options
    improved = improve_plan(
        solution,
        request.profiles,
        options.limits(request.cluster),
        options.search_effort,
        may_move=not options.constraints,
        others=[_equal_stages(solution, request)],
        deadline=request.deadline,
    )
    return with_step_bound(improved, request)


def _equal_stages(solution: Solution, request: SearchRequest) -> tuple[StagePlan, ...]:
    """Returns stages on the devices of a solution that take about equally long.

    A named schedule may be fastest with unequal stages, as where its first or last ones wait least, and leave an order
    of their actions nothing to gain.
    """
    devices = tuple(stage.devices for stage in solution.stages)
    sizes = solution.minibatch_size, solution.microbatch_size
    return balanced_decision(request.profiles, request.cluster, devices, solution.schedule, *sizes).stages


def _joined(named: Solution, start: Solution, improved: Solution) -> Solution:
    """Returns the fastest of the plans of three searches, the next one among its alternatives.

    Args:
        named: the best plan with a named schedule, whose stages may have replicas.
        start: the best one without replicas, from which an order of actions was searched.
        improved: that with the searched order; `start` itself if none was faster.
    """
    if improved.schedule != SEARCH:
        if start.preference >= named.preference:
            return named
        bound_ns = min(named.lower_bound_ns, start.prediction.step_ns)
        return replace(start, lower_bound_ns=bound_ns, space=named.space, asked_bound_ns=named.asked_bound_ns)
    if start is named:
        return improved
    if improved.preference < named.preference:
        assert isinstance(improved.space, ActionOrderSpace)
        space = replace(improved.space, named_bound_ns=named.lower_bound_ns)
        return replace(
            improved, space=space, alternatives=_with_slower(improved, f"{named.schedule} with replicas", named)
        )
    return replace(named, alternatives=_with_slower(named, f"{SEARCH} without replicas", improved))


def _with_slower(best: Solution, name: str, other: Solution) -> tuple[Alternative, ...]:
    """Returns the alternatives of the best of two solutions, with the other one under a name."""
    step_ns = other.prediction.step_ns
    slower = Alternative(
        name=name,
        step_ns=step_ns,
        peak_bytes=other.prediction.peak_bytes,
        feasible=True,
        why_not=slower_than_this(step_ns, best.prediction.step_ns),
    )
    return (*best.alternatives, slower)


def solve_partition(request: SearchRequest) -> Solution:
    """Returns the best stages under the named schedules; `solve_step_time` without the search for an order.

    However early a search ends, its plan is no slower than the naive ones that there is still time for.
    """
    from bapipe.planner.branch_and_bound.space import check_num_stages  # these load numpy
    from bapipe.planner.line_solution import naive_solution, no_slower_than_naive

    check_num_stages(*request.inputs)  # a search that ends early would not tell this from too little time
    try:
        found = with_step_bound(_by_size_of_problem(request), request)
    except OutOfTime as error:
        return with_step_bound(naive_solution(request, error), request)
    except Infeasible as error:
        if error.is_proven:
            raise
        return with_step_bound(_naive_after(error, request), request)
    # Within its budget of work, a search for many devices has timed the naive plans that may be faster.
    is_cut_short = request.deadline.is_given or request.deadline.is_over
    return no_slower_than_naive(found, request) if is_cut_short or not _has_many_devices(request) else found


def with_step_bound(solution: Solution, request: SearchRequest) -> Solution:
    """Returns a solution whose bound is at least the one that needs no search."""
    bound_ns = max(solution.lower_bound_ns, request.step_bound_ns)
    is_of_all = solution.asked_bound_ns is None and not isinstance(solution.space, ActionOrderSpace)
    return replace(
        solution,
        lower_bound_ns=min(bound_ns, solution.prediction.step_ns),
        asked_bound_ns=None if is_of_all else request.step_bound_ns,
    )


def _by_size_of_problem(request: SearchRequest) -> Solution:
    """Returns the best stages by a search on consecutive devices, where they are many, or an exact one, or both."""
    from bapipe.planner.line_solution import solve_first, solve_on_line  # loads numpy

    if _has_many_devices(request):
        found = solve_on_line(request)
        if found is not None:
            return found.solution
    else:
        first = solve_first(request)
        if first is not None:
            return _solve_after(first, request)
    return _solve_exactly(request)


def _has_many_devices(request: SearchRequest) -> bool:
    from bapipe.planner.device_line.search import has_many_devices  # loads numpy

    num_layers, minibatch_size = request.num_layers, request.options.minibatch_size
    return has_many_devices(request.cluster, request.schedules, num_layers=num_layers, minibatch_size=minibatch_size)


def _solve_exactly(request: SearchRequest) -> Solution:
    from bapipe.planner.exact_search import find_best_layout, solution_of

    space, result = find_best_layout(_ending_earlier(request))
    return solution_of(request.profiles, result, request.options.minibatch_size, space)


def _ending_earlier(request: SearchRequest) -> SearchRequest:
    """Returns the request with a deadline that leaves time for what follows an exact search, if a user gave one.

    Raises:
        OutOfTime: that takes more than half of the time that remains.
    """
    from bapipe.planner.stages.placements import most_stages

    deadline = request.deadline
    if not deadline.is_given:
        return request
    num_stages = most_stages(request.schedules, len(request.cluster.devices))
    num_microbatches = request.options.minibatch_size // min(request.microbatch_sizes)
    num_actions = NUM_PLANS_AFTER * 3 * num_stages * num_microbatches  # an F, I and W each
    if not deadline.has_time_for(2 * num_actions, ACTIONS_PER_S):
        raise OutOfTime(f"the time left is too short for a full search: {deadline.advice}")
    return replace(request, deadline=deadline.earlier(num_actions / ACTIONS_PER_S))


def _naive_after(error: Infeasible, request: SearchRequest) -> Solution:
    """Returns the best naive plan where a search has found none that fits, without a proof; else raises its error."""
    from bapipe.planner.line_solution import naive_solution

    try:
        return naive_solution(request, OutOfTime("nothing was found"))
    except OutOfTime:
        raise error from None


def _solve_after(first: "LineSolution", request: SearchRequest) -> Solution:
    """Returns the first solution joined with that of an exact search of the same orders of devices, or of any order."""
    from bapipe.planner.branch_and_bound.space import tries_any_order

    try:
        exact = _solve_exactly(replace(request, progress=_joined_progress(request.progress, first.solution)))
    except (OutOfTime, Infeasible):
        if first.has_every_schedule and (first.has_every_order or not tries_any_order(*request.inputs)):
            return first.solution
        return replace(first.solution, asked_bound_ns=request.step_bound_ns)
    return first.joined(exact)


def _joined_progress(progress: SearchProgress | None, first: Solution) -> SearchProgress | None:
    """Returns the progress of a search that follows another one: its best plan is the best of both."""
    if progress is None:
        return progress
    first_ns = first.prediction.step_ns

    def report(num_simulated: int, best_ns: int, bound_ns: int) -> None:
        progress(num_simulated, min(first_ns, best_ns), min(first_ns, bound_ns))

    return report


def add_baselines(solution: Solution, options: PlanOptions, deadline: Deadline) -> Solution:
    """Returns the solution with the baselines among its alternatives, those that the deadline leaves time for.

    One that is as fast and preferred takes its place.
    """
    partitions = partitions_in(solution.space)
    baselines = baseline_alternatives(
        solution,
        solution.profiles,
        partitions.microbatch_sizes,
        partitions.schedules,
        options.limits(solution.cluster),
        deadline,
    )
    alternatives = sort_alternatives((*solution.alternatives, *baselines.alternatives))
    return replace(or_baseline(solution, baselines), alternatives=alternatives)
