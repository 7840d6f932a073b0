"""The exact search of a request: its problems, the fastest layout of them, and that layout as a solution."""

from dataclasses import replace

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.branch_and_bound.infeasible import fitting_layout, infeasible_error, least_infeasible
from bapipe.planner.branch_and_bound.partition_space import disagree_at_cuts, partition_space
from bapipe.planner.branch_and_bound.problem import SearchResult
from bapipe.planner.branch_and_bound.space import SearchSpace, search_space
from bapipe.planner.compute.deadline import NothingFoundError, OutOfTime
from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import microbatch_sizes
from bapipe.planner.layout_search import search_layouts
from bapipe.planner.results.decision import stage_plans
from bapipe.planner.results.searched_space import PartitionSpace, SearchedSpace
from bapipe.planner.results.solution import Solution
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.stages.constraints import check_constraints, parse_constraints

MAX_NODES = 30_000
"""Node budget of a search without a time limit: some seconds."""

UNLIMITED_NODES = 10**12
"""Node budget of a search with a time limit, which ends it earlier."""

INTERVALS_PER_S = 10_000_000
"""No search is begun if the time that is left allows for fewer than this many intervals a second."""

BYTES_PER_SIZE, BYTES_PER_KIND = 300, 80
"""What tables take for each interval of layers, as measured: for each micro-batch size, and for each kind and speed of
devices."""

MAX_TABLE_BYTES = 2**32
"""Of these tables: with one size and devices alike 4,750 layers."""


def find_best_layout(request: SearchRequest) -> tuple[PartitionSpace, SearchResult]:
    """Returns the searched space, and the best layout of it.

    Raises:
        Infeasible: nothing fits, or was found that does; the message names the closest plan and what each device lacks.
        BapipeError: constraints that cannot be met, or sizes that do not divide.
        OutOfTime: the deadline passed before any layout was found that fits, or there is not enough time or memory to
            begin the search.
    """
    profiles, cluster, options, deadline = request.profiles, request.cluster, request.options, request.deadline
    check_constraints(parse_constraints(options.constraints), next(iter(profiles.values())), cluster)
    _check_table_size(request)
    space = search_space(profiles, cluster, options, deadline)
    max_nodes = UNLIMITED_NODES if deadline.is_given else MAX_NODES
    result, has_tried_all = None, True
    try:
        result = search_layouts(space.problems, max_nodes=max_nodes, deadline=deadline, progress=request.progress)
    except NothingFoundError:
        has_tried_all = False
    if result is None:
        closest = least_infeasible(space.problems, deadline)
        result = fitting_layout(closest)
        if result is None:
            raise infeasible_error(profiles, cluster, options, closest, deadline, has_tried_all=has_tried_all)
        result = replace(result, lower_bound_ns=min(result.step_ns, request.step_bound_ns))
    return space_of_problems(space, profiles, cluster, options), result


def _check_table_size(request: SearchRequest) -> None:
    """Raises OutOfTime if the tables of all intervals of layers need too much memory, or more time than is left."""
    num_boundaries = len(DeviceLine(*request.inputs).cuts)
    num_intervals = num_boundaries * (num_boundaries - 1) // 2
    unlike = {(device.kind, device.speed) for device in request.cluster.devices}
    num_bytes = num_intervals * (BYTES_PER_SIZE * len(request.microbatch_sizes) + BYTES_PER_KIND * len(unlike))
    if num_bytes > MAX_TABLE_BYTES:
        raise OutOfTime(
            f"the tables of a full search would take {num_bytes / 1e9:,.0f} GB, more than {MAX_TABLE_BYTES / 1e9:.1f}: "
            "profile larger layers, as whole blocks with `leaf_modules`"
        )
    remaining_s = request.deadline.remaining_s
    if remaining_s is not None and num_intervals > INTERVALS_PER_S * remaining_s:
        raise OutOfTime(f"the time left is too short for the tables of a full search: {request.deadline.advice}")


def space_of_problems(
    space: SearchSpace, profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions
) -> PartitionSpace:
    """Returns what a certificate says of the problems of a search."""
    return partition_space(
        profiles,
        cluster,
        options,
        stage_counts=(space.stage_counts[0], space.stage_counts[-1]),
        device_counts=(space.device_counts[0], space.device_counts[-1]),
        device_order=space.order,
        has_unlike_cuts=disagree_at_cuts(profiles, cluster, microbatch_sizes(profiles, cluster, options)),
    )


def solution_of(profiles: ProfilesByKind, result: SearchResult, minibatch_size: int, space: SearchedSpace) -> Solution:
    """Returns the result of a branch and bound as a solution, without alternatives."""
    problem, layout = result.problem, result.layout
    names = [layer.name for layer in next(iter(profiles.values())).layers]
    table, _ = problem.compiled(layout.placements)
    cluster, prediction = problem.cluster, problem.simulate(layout).prediction(minibatch_size)
    return Solution(
        profiles=profiles,
        cluster=cluster,
        minibatch_size=minibatch_size,
        microbatch_size=problem.microbatch_size,
        schedule=problem.schedule,
        table=table,
        stages=stage_plans(names, layout.cuts, table.devices, layout.recompute, cluster),
        prediction=prediction,
        lower_bound_ns=min(result.lower_bound_ns, prediction.step_ns),
        space=space,
    )
