"""Searches the partition with the shortest step: layouts x micro-batch sizes x schedules, along one order of layers."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.action_order.improve_plan import SEARCH, improve_plan
from bapipe.planner.baselines import baseline_alternatives
from bapipe.planner.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.decision import stage_plan
from bapipe.planner.options import PlanOptions
from bapipe.planner.partition_space import partition_space
from bapipe.planner.searched_space import ActionOrderSpace, PartitionSpace, SearchedSpace, on_first_devices
from bapipe.planner.solution import Rival, Solution, make_plan, sort_alternatives
from bapipe.planner.validation import check_inputs, microbatch_sizes, named_schedules
from bapipe.planner.work_bound import step_bound_ns
from bapipe.progress import SearchProgress
from bapipe.schedules.placement import permute_ranks

if TYPE_CHECKING:
    from bapipe.planner.branch_and_bound.problem import SearchResult
    from bapipe.planner.branch_and_bound.space import SearchSpace
    from bapipe.planner.line_solution import LineSolution

MAX_NODES = 30_000
"""Node budget of a search without a time limit: some seconds."""

INTERVALS_PER_S = 10_000_000
"""Exact searches are not begun if the time that is left allows for fewer than this many intervals a second."""

MAX_TABLE_BYTES = 2**31
"""Of the times of all intervals on all kinds and speeds of many devices, at all micro-batch sizes."""

UNLIMITED_NODES = 10**12
"""Node budget of a search with a time limit, which ends it earlier."""


def plan_step_time(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the fastest plan along the profile's order of the layers; see `solve_step_time`.

    Raises:
        Infeasible: nothing fits; the message names the closest plan and what each device lacks.
        BapipeError: an unknown schedule, a device kind without a profile, profiles of different models, or sizes that
            do not divide.
    """
    check_inputs(profiles, cluster, options)
    solution = solve_step_time(profiles, cluster, options, deadline=deadline, progress=progress)
    return make_plan(add_baselines(solution, options, deadline))


def solve_step_time(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
    rival: Rival | None = None,
) -> Solution:
    """Returns the stages and the order with the shortest step, by an exact search.

    The space: the layers in the profile's order, cut into the stages of a schedule at any layers, each stage on some
    devices of the cluster; every measured or interpolated micro-batch size that divides the mini-batch.

    Args:
        profiles: one for each kind of device in the cluster; `check_inputs` accepts them.
        deadline: ends the search with the best solution so far. If no user gave it, the search ends after `MAX_NODES`.
        rival: of another way to see the cluster; a search for many devices ends when it can be no better.

    Raises:
        Infeasible: nothing fits; the message names the closest plan and what each device lacks.
        BapipeError: constraints that cannot be met, or sizes that do not divide.
        OutOfTime: the deadline passed before any plan was found that fits, or an exact search needs too much memory,
            and no naive plan fits.
    """
    searches_order = SEARCH in options.schedules
    if searches_order:
        options = replace(options, replicas=False)  # the order search has stages of one device each
    solution = solve_partition(profiles, cluster, options, deadline=deadline, progress=progress, rival=rival)
    if not searches_order:
        return solution
    limits, may_move = options.limits(cluster), not options.constraints
    effort = options.search_effort
    improved = improve_plan(solution, profiles, limits, effort, may_move=may_move, deadline=deadline)
    return _with_step_bound(improved, options)


def solve_partition(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
    rival: Rival | None = None,
) -> Solution:
    """Returns the best stages under the named schedules; `solve_step_time` without the search for an order."""
    found = _solve_partition(profiles, cluster, options, deadline, progress, rival)
    return _with_step_bound(found, options)


def _with_step_bound(solution: Solution, options: PlanOptions) -> Solution:
    """Returns a solution whose bound is at least the one that needs no search."""
    bound_ns = max(solution.lower_bound_ns, step_bound_ns(solution.profiles, solution.cluster, options))
    return replace(solution, lower_bound_ns=min(bound_ns, solution.prediction.step_ns))


def _solve_partition(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    deadline: Deadline,
    progress: SearchProgress | None,
    rival: Rival | None,
) -> Solution:
    from bapipe.planner.device_line.search import has_many_devices  # these load numpy
    from bapipe.planner.line_solution import naive_solution, no_slower_than_naive, solve_first, solve_on_line

    num_layers = len(next(iter(profiles.values())).layers)
    if has_many_devices(
        cluster, named_schedules(options), num_layers=num_layers, minibatch_size=options.minibatch_size
    ):
        found = solve_on_line(profiles, cluster, options, deadline=deadline, progress=progress, rival=rival)
        if found is not None:
            return found.solution
    else:
        first = solve_first(profiles, cluster, options, deadline=deadline, progress=progress)
        if first is not None:
            return _solve_after(first, profiles, cluster, options, deadline, progress)
    try:
        space, result = find_best_layout(profiles, cluster, options, deadline=deadline, progress=progress)
    except OutOfTime as error:
        return naive_solution(profiles, cluster, options, deadline, error.lower_bound_ns)
    solution = solution_of(profiles, result, options.minibatch_size, space)
    if result.lower_bound_ns == result.step_ns:
        return solution
    return no_slower_than_naive(solution, profiles, cluster, options, deadline)


def _solve_after(
    first: "LineSolution",
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    deadline: Deadline,
    progress: SearchProgress | None,
) -> Solution:
    """Returns the first solution joined with that of an exact search of the same order of devices, or of any order."""
    from bapipe.planner.branch_and_bound.space import tries_any_order

    has_any = tries_any_order(profiles, cluster, options)
    ordered, ranks = (cluster, tuple(range(len(cluster.devices)))) if has_any else (first.cluster, first.ranks)
    try:
        space, result = find_best_layout(
            profiles, ordered, options, deadline=deadline, progress=_without_worse(progress, first)
        )
    except OutOfTime:
        return first.solution
    if not has_any:
        space = replace(space, device_order=on_first_devices([first.order]))
    exact = solution_of(profiles, result, options.minibatch_size, space, given=(cluster, ranks))
    return first.joined(exact)


def _without_worse(progress: SearchProgress | None, first: "LineSolution | None") -> SearchProgress | None:
    """Returns the progress of a search that follows another one: its best plan is the best of both."""
    if progress is None or first is None:
        return progress
    first_ns = first.solution.prediction.step_ns

    def report(num_simulated: int, best_ns: int, bound_ns: int) -> None:
        progress(num_simulated, min(first_ns, best_ns), min(first_ns, bound_ns))

    return report


def _has_too_large_tables(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> bool:
    """Whether exact searches would tabulate more than memory should hold: five times of each interval.

    Of many devices that differ, only: one of each kind and speed has tables of its own.
    """
    from bapipe.planner.device_line.search import MIN_DEVICES

    unlike = {(device.kind, device.speed) for device in cluster.devices}
    if len(unlike) == 1 or len(cluster.devices) < MIN_DEVICES:
        return False
    num_intervals = _num_intervals(profiles, cluster, options)
    num_tables = len(unlike) * len(microbatch_sizes(profiles, cluster, options))
    return 5 * 8 * num_intervals * num_tables > MAX_TABLE_BYTES


def _num_intervals(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> int:
    from bapipe.planner.device_line.line import DeviceLine

    num_boundaries: int = len(DeviceLine(profiles, cluster, options).cuts)
    return num_boundaries * (num_boundaries - 1) // 2


def add_baselines(solution: Solution, options: PlanOptions, deadline: Deadline = UNLIMITED) -> Solution:
    """Returns the solution with the baselines among its alternatives, those that the deadline leaves time for."""
    space = solution.space
    partitions = space.stages_from if isinstance(space, ActionOrderSpace) else space
    assert isinstance(partitions, PartitionSpace)
    baselines = baseline_alternatives(
        solution,
        solution.profiles,
        partitions.microbatch_sizes,
        partitions.schedules,
        options.limits(solution.cluster),
        deadline,
    )
    return replace(solution, alternatives=sort_alternatives((*solution.alternatives, *baselines)))


def find_best_layout(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> "tuple[PartitionSpace, SearchResult]":
    """Returns the searched space, and the best layout of it; see `solve_step_time`."""
    from bapipe.planner.branch_and_bound.infeasible import fitting_layout, infeasible_error, least_infeasible
    from bapipe.planner.branch_and_bound.space import search_space  # these load numpy
    from bapipe.planner.constraints import check_constraints, parse_constraints
    from bapipe.planner.layout_search import search_layouts

    check_constraints(parse_constraints(options.constraints), next(iter(profiles.values())), cluster)
    if _has_too_large_tables(profiles, cluster, options):
        raise OutOfTime("the search of so many layers on so many unlike devices needs too much memory")
    if deadline.remaining_s is not None and _num_intervals(profiles, cluster, options) > (
        INTERVALS_PER_S * deadline.remaining_s
    ):
        raise OutOfTime("the time left is too short for a table of all intervals of so many layers")
    space = search_space(profiles, cluster, options, deadline)
    max_nodes = UNLIMITED_NODES if deadline.is_given else MAX_NODES
    result = search_layouts(space.problems, max_nodes=max_nodes, deadline=deadline, progress=progress)
    if result is None:
        closest = least_infeasible(space.problems, deadline)
        result = fitting_layout(closest)
        if result is None:
            raise infeasible_error(profiles, cluster, options, closest, deadline)
        bound_ns = step_bound_ns(profiles, cluster, options)
        result = replace(result, lower_bound_ns=min(result.step_ns, bound_ns))
    return space_of_problems(space, profiles, cluster, options), result


def space_of_problems(
    space: "SearchSpace", profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions
) -> PartitionSpace:
    """Returns what a certificate says of the problems of a search."""
    return partition_space(
        profiles,
        cluster,
        options,
        stage_counts=(space.stage_counts[0], space.stage_counts[-1]),
        device_counts=(space.device_counts[0], space.device_counts[-1]),
        device_order=space.order,
    )


def solution_of(
    profiles: Mapping[str, ModelProfile],
    result: "SearchResult",
    minibatch_size: int,
    space: SearchedSpace,
    *,
    given: tuple[Cluster, tuple[int, ...]] | None = None,
) -> Solution:
    """Returns the result of a branch and bound as a solution, without alternatives.

    Args:
        given: the cluster and its ranks in the order in which the search had them, if that is another order.
    """
    problem, layout = result.problem, result.layout
    names = [layer.name for layer in next(iter(profiles.values())).layers]
    table, _ = problem.compiled(layout.placements)
    cluster, prediction = problem.cluster, problem.simulate(layout).prediction(minibatch_size)
    if given is not None:
        from bapipe.simulator.simulate import simulate_columns  # loads numpy

        cluster, ranks = given
        table = permute_ranks(table, ranks, len(ranks))
        prediction = simulate_columns(table, problem.stages(layout), cluster).prediction(minibatch_size)
    return Solution(
        profiles=profiles,
        cluster=cluster,
        minibatch_size=minibatch_size,
        microbatch_size=problem.microbatch_size,
        schedule=problem.schedule,
        table=table,
        stages=tuple(
            stage_plan(
                tuple(names[begin:end]),
                tuple(cluster.devices[rank].name for rank in of_stage),
                recompute=bool(recompute),
                recompute_layers=frozenset(names[i] for i in recompute),
            )
            for (begin, end), of_stage, recompute in zip(
                pairwise(layout.cuts), table.devices, layout.recompute, strict=True
            )
        ),
        prediction=prediction,
        lower_bound_ns=min(result.lower_bound_ns, prediction.step_ns),
        space=space,
    )
