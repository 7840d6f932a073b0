"""Searches the partition with the shortest step: layouts x micro-batch sizes x schedules, along one order of layers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan, StagePlan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.action_order.improve_plan import SEARCH, improve_plan
from bapipe.planner.baselines import baseline_alternatives
from bapipe.planner.options import PlanOptions
from bapipe.planner.searched_space import ActionOrderSpace, PartitionSpace, SearchedSpace
from bapipe.planner.solution import Solution, make_plan, sort_alternatives
from bapipe.planner.validation import check_inputs, named_schedules
from bapipe.progress import SearchProgress

if TYPE_CHECKING:
    from bapipe.planner.branch_and_bound.problem import SearchResult
    from bapipe.planner.branch_and_bound.space import SearchSpace

MAX_NODES = 30_000
"""Node budget of a search without a time limit: some seconds."""

UNLIMITED_NODES = 10**12
"""Node budget of a search with a time limit, which ends it earlier."""


def plan_step_time(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    stop: Callable[[], bool] | None = None,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the fastest plan along the profile's order of the layers; see `solve_step_time`.

    Raises:
        Infeasible: nothing fits; the message names the closest plan and what each device lacks.
        BapipeError: an unknown schedule, a device kind without a profile, profiles of different models, or sizes that
            do not divide.
    """
    check_inputs(profiles, cluster, options)
    solution = solve_step_time(profiles, cluster, options, stop=stop, progress=progress)
    return make_plan(add_baselines(solution, options))


def solve_step_time(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    stop: Callable[[], bool] | None = None,
    progress: SearchProgress | None = None,
) -> Solution:
    """Returns the stages and the order with the shortest step, by an exact search.

    The space: the layers in the profile's order, cut into the stages of a schedule at any layers, each stage on some
    devices of the cluster; every measured or interpolated micro-batch size that divides the mini-batch.

    Args:
        profiles: one for each kind of device in the cluster; `check_inputs` accepts them.
        stop: ends the search with the best solution so far when it returns True; without it, the search ends after
            `MAX_NODES`.

    Raises:
        Infeasible: nothing fits; the message names the closest plan and what each device lacks.
        BapipeError: constraints that cannot be met, or sizes that do not divide.
    """
    searches_order = SEARCH in options.schedules
    if searches_order:
        options = replace(options, replicas=False)  # the order search has stages of one device each
    space, result = find_best_layout(profiles, cluster, options, stop=stop, progress=progress)
    solution = solution_of(profiles, result, options.minibatch_size, space)
    if not searches_order:
        return solution
    limits, may_move = options.limits(cluster), not options.constraints
    return improve_plan(solution, profiles, limits, options.search_effort, may_move=may_move)


def add_baselines(solution: Solution, options: PlanOptions) -> Solution:
    """Returns the solution with the baselines among its alternatives."""
    space = solution.space
    partitions = space.stages_from if isinstance(space, ActionOrderSpace) else space
    assert isinstance(partitions, PartitionSpace)
    baselines = baseline_alternatives(
        solution,
        solution.profiles,
        partitions.microbatch_sizes,
        partitions.schedules,
        options.limits(solution.cluster),
    )
    return replace(solution, alternatives=sort_alternatives((*solution.alternatives, *baselines)))


def find_best_layout(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    stop: Callable[[], bool] | None = None,
    progress: SearchProgress | None = None,
) -> "tuple[PartitionSpace, SearchResult]":
    """Returns the searched space, and the best layout of it; see `solve_step_time`."""
    from bapipe.planner.branch_and_bound.infeasible import infeasible_error
    from bapipe.planner.branch_and_bound.space import search_space  # these load numpy
    from bapipe.planner.layout_search import search_layouts

    space = search_space(profiles, cluster, options)
    max_nodes = MAX_NODES if stop is None else UNLIMITED_NODES
    result = search_layouts(space.problems, max_nodes=max_nodes, stop=stop or (lambda: False), progress=progress)
    if result is None:
        raise infeasible_error(profiles, cluster, options, space)
    return _partition_space(profiles, cluster, options, space), result


def solution_of(
    profiles: Mapping[str, ModelProfile], result: "SearchResult", minibatch_size: int, space: SearchedSpace
) -> Solution:
    """Returns the result of a branch and bound as a solution, without alternatives."""
    problem, layout = result.problem, result.layout
    names = _layer_names(profiles)
    table, _ = problem.compiled(layout.placements)
    return Solution(
        profiles=profiles,
        cluster=problem.cluster,
        minibatch_size=minibatch_size,
        microbatch_size=problem.microbatch_size,
        schedule=problem.schedule,
        table=table,
        stages=tuple(
            StagePlan(
                layers=tuple(names[begin:end]),
                devices=tuple(problem.cluster.devices[rank].name for rank in ranks),
                recompute=recompute,
            )
            for (begin, end), ranks, recompute in zip(
                pairwise(layout.cuts), table.devices, layout.recompute, strict=True
            )
        ),
        prediction=problem.simulate(layout).prediction(minibatch_size),
        lower_bound_ns=result.lower_bound_ns,
        space=space,
    )


def _partition_space(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions, space: "SearchSpace"
) -> PartitionSpace:
    stages = options.num_stages
    return PartitionSpace(
        num_layers=len(_layer_names(profiles)),
        num_devices=len(cluster.devices),
        stage_counts=(stages, stages) if stages else (space.stage_counts[0], space.stage_counts[-1]),
        device_counts=(space.device_counts[0], space.device_counts[-1]),
        device_order=space.order,
        microbatch_sizes=tuple(sorted({problem.microbatch_size for problem in space.problems})),
        schedules=tuple(named_schedules(options)),
        replicas=options.replicas,
        recompute=options.recompute,
        constraints=tuple(options.constraints),
    )


def _layer_names(profiles: Mapping[str, ModelProfile]) -> list[str]:
    """Returns the names of the layers, which are the same in every profile."""
    return [layer.name for layer in next(iter(profiles.values())).layers]
