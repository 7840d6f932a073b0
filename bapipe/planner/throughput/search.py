"""Plans for throughput: the smallest maximum load of a device once the pipeline is full."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import floor, inf

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.graph.downsets import downsets
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes
from bapipe.planner.results.no_plan import what_to_try
from bapipe.planner.results.searched_space import ThroughputSpace
from bapipe.planner.results.solution import Solution
from bapipe.planner.results.work_bound import work_bound_ns
from bapipe.planner.throughput.contracted_graph import ContractedGraph, contracted_graph
from bapipe.planner.throughput.heterogeneous import (
    MAX_DEVICES_WITH_ALL_COUNTS,
    MAX_DEVICES_WITH_GAPS,
)
from bapipe.planner.throughput.large_graph import MAX_LISTED, LargeGraph
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.load_solution import throughput_solution
from bapipe.planner.throughput.loads import Boundaries
from bapipe.planner.throughput.memory_shortfall import least_shortfall, reduced
from bapipe.planner.throughput.naive_plans import best_naive_plans, naive_alternatives
from bapipe.progress import LoadProgress

MAX_DOWNSETS = 3000
"""Maximum number of downsets of a graph up to which all of them are boundaries."""

MAX_NEIGHBOURS = 800
"""Boundaries of one neighbourhood search, if a graph has more downsets than that."""

MAX_COARSE = 33
"""Boundaries of the search for a first plan when the time is over: so few take a few hundredths of a second."""

MIN_IMPROVEMENT = 0.9998
"""The neighbourhood search continues while it lowers the load below this share of the previous one."""

Near = Callable[[LoadSolution], Boundaries]
"""Returns the boundaries at the downsets next to the cuts of a plan."""


def solve_throughput(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: LoadProgress | None = None,
) -> Solution:
    """Returns the solution of `explore_throughput`, over all micro-batch sizes that divide the mini-batch or one.

    Raises:
        BapipeError: a device kind without a profile, profiles of different models, or sizes that do not divide.
    """
    check_inputs(profiles, cluster, options)
    solution = explore_throughput(
        profiles,
        cluster,
        minibatch_size=options.minibatch_size,
        microbatch_sizes=microbatch_sizes(profiles, cluster, options),
        limits=options.limits(cluster),
        deadline=deadline,
        progress=progress,
    )
    assert isinstance(solution.space, ThroughputSpace)
    return replace(solution, space=replace(solution.space, memory=options.memory))


def explore_throughput(
    profiles: ProfilesByKind,
    cluster: Cluster,
    *,
    minibatch_size: int,
    microbatch_sizes: Sequence[int],
    limits: Sequence[int],
    deadline: Deadline = UNLIMITED,
    progress: LoadProgress | None = None,
    max_downsets: int = MAX_DOWNSETS,
    max_neighbours: int = MAX_NEIGHBOURS,
) -> Solution:
    """Returns the solution with the smallest maximum load of a device in a step.

    The space: cuts of the graph of layers at any of its downsets, any number of devices for a stage (of many that
    differ: a power of two, or any number for all layers), every micro-batch size given. Layers that share parameters
    stay together, with all between them. The order is 1F1B with enough micro-batches in flight to keep devices busy.

    Args:
        profiles: one for each kind of device in the cluster, all of one model.
        limits: the memory that each device may use, in bytes.
        deadline: ends the search with the best solution so far.
        max_downsets: a graph with more downsets is cut along some linear orders, then near the best cuts.
        max_neighbours: boundaries of each neighbourhood search; 0 leaves it out.

    Raises:
        Infeasible: nothing fits; the message names the memory that would be enough.
        OutOfTime: the deadline passed before any plan was found that fits.
    """
    profile = profiles[cluster.devices[0].kind]
    graph = contracted_graph(profile)
    # Few boundaries and stages of equally many devices: for a first plan where no time is left for more.
    coarse = LoadSearch(
        profiles=profiles,
        cluster=cluster,
        boundaries=graph.evenly_spaced(MAX_COARSE),
        has_all_downsets=False,
        limits=tuple(limits),
        minibatch_size=minibatch_size,
        has_equal_replicas=True,
    )
    listed, search = _search_of(graph, coarse, max_downsets, deadline)
    # As the first plans: they cost little, are known to fit, and no result is worse.
    whole = replace(coarse, boundaries=graph.evenly_spaced(2))
    work_ns = work_bound_ns(profiles, cluster, minibatch_size)
    naive, one_stage_ns = best_naive_plans(whole, microbatch_sizes, deadline, work_ns)
    first = _best_solution([plan.solution(search.boundaries.num_layers) for plan in naive if plan.fits])
    report = _Report(progress, first, one_stage_ns, work_ns, len(microbatch_sizes))
    solutions = [search.solve(size, report.of(size), deadline) for size in microbatch_sizes]
    near = None if search.has_all_downsets else partial(graph.near, max_boundaries=max_neighbours)
    # The best plan of the searches is improved apart from the naive ones, whose cuts say nothing of where others are.
    try:
        found = _best_solution(_feasible(search, coarse, solutions, near, deadline, is_needed=first is None))
    except Infeasible as error:
        if not graph.has_merged_layers:
            raise
        raise Infeasible(
            f"{error}. Layers that share parameters stay in one stage here, with all between them: the step as "
            "`objective` may separate them",
            is_proven=False,
        ) from None
    bounds_ns = [solution.bound_ns for solution in solutions]
    if found is not None and near is not None and max_neighbours and not deadline.is_over:
        large = LargeGraph(
            graph=graph.graph,
            layers_of_node=graph.layers_of_node,
            profile=profile,
            cluster=cluster,
            listed=listed,
            deadline=deadline,
        )
        found, bounds_ns = _improved(large, search, solutions, found, near, report)
    best = _best_solution([solution for solution in (found, first) if solution is not None])
    assert best is not None  # or `_feasible` would have raised
    bound_ns = min(best.load_ns, max(work_ns, floor(min(one_stage_ns, *bounds_ns))))
    space = _searched_space(search, graph, microbatch_sizes, max_downsets)
    return throughput_solution(coarse, best, bound_ns, space, naive_alternatives(whole, naive, best.load_ns))


class _Report:
    """Reports progress: only loads of plans that are known to fit, and bounds of all micro-batch sizes together."""

    def __init__(
        self,
        progress: LoadProgress | None,
        first: LoadSolution | None,
        one_stage_ns: float,
        work_ns: int,
        num_sizes: int,
    ) -> None:
        """`one_stage_ns` is a bound on plans of one stage, `work_ns` at every size, for those not searched yet."""
        self._progress, self._work_ns, self._num_sizes = progress, work_ns, num_sizes
        self._one_stage_ns = one_stage_ns
        self._best_ns = inf if first is None else first.load_ns
        self._bounds_ns: dict[int, float] = {}
        self._say()

    def of(self, microbatch_size: int) -> LoadProgress:
        """Returns the progress of a search at one size, which reports infinite loads as long as it has no plan."""

        def report(load_ns: float, bound_ns: float) -> None:
            self._best_ns = min(self._best_ns, load_ns)
            # Bounds of one size rise; that of all is the smallest of them.
            self._bounds_ns[microbatch_size] = max(bound_ns, self._bounds_ns.get(microbatch_size, 0.0))
            self._say()

        return report

    def _say(self) -> None:
        if self._progress and self._best_ns < inf:
            unknown = [self._work_ns] if len(self._bounds_ns) < self._num_sizes else []
            known_ns = max(self._work_ns, min(self._one_stage_ns, *self._bounds_ns.values(), *unknown))
            self._progress(self._best_ns, min(self._best_ns, known_ns))


def _best_solution(solutions: Sequence[LoadSolution]) -> LoadSolution | None:
    """Returns the solution with the smallest load, None of none.

    Of equal loads the larger micro-batch wins: it has fewer transfers and a shorter order.
    """
    return min(solutions, key=lambda solution: (solution.load_ns, -solution.microbatch_size), default=None)


def _search_of(
    graph: ContractedGraph, coarse: LoadSearch, max_downsets: int, deadline: Deadline
) -> tuple[list[int] | None, LoadSearch]:
    """Returns all downsets if they are not too many to list, and the search among them, or along three linear orders.

    If there is no time to list them, it is the coarse search.
    """
    listed: list[int] | None = None
    try:
        listed = downsets(graph.graph, max(max_downsets, MAX_LISTED), deadline.check)
        has_all_downsets = listed is not None and len(listed) <= max_downsets
        node_sets = listed if listed is not None and has_all_downsets else graph.prefixes_of_orders()
        boundaries = graph.boundaries(node_sets, deadline)
    except OutOfTime:
        return listed, coarse
    return listed, replace(coarse, boundaries=boundaries, has_all_downsets=has_all_downsets, has_equal_replicas=False)


def _feasible(
    search: LoadSearch,
    coarse: LoadSearch,
    solutions: Sequence[LoadSolution],
    near: Near | None,
    deadline: Deadline,
    *,
    is_needed: bool,
) -> list[LoadSolution]:
    """Returns the solutions that have stages; if none has, one of the coarse search, or with the least memory.

    Args:
        is_needed: whether no other plan is known.

    Raises:
        Infeasible: no plan was found that fits.
        OutOfTime: the deadline has passed, and the coarse search has found none either.
    """
    feasible = [solution for solution in solutions if solution.stages]
    sizes = [solution.microbatch_size for solution in solutions]
    if not feasible and deadline.is_over:
        feasible = [found for found in map(coarse.solve, dict.fromkeys((sizes[0], sizes[-1]))) if found.stages]
    if feasible or not is_needed:
        return feasible
    deadline.check()
    return [_fitting(search, sizes[0], near, deadline)]


def _improved(
    large: LargeGraph,
    search: LoadSearch,
    solutions: Sequence[LoadSolution],
    best: LoadSolution,
    near: Near,
    report: _Report,
) -> tuple[LoadSolution, list[int]]:
    """Returns the best plan after more searches at its micro-batch size, then at the others; and a bound of each."""
    best = large.improved(search, best)
    if best.bound_ns < best.load_ns:
        best = _local_optimum(search, best, near, report.of(best.microbatch_size), large.deadline)
    bounds_ns, size = [best.bound_ns], best.microbatch_size
    for solution in solutions:
        if solution.microbatch_size != size:
            other = large.below(search, solution, best.load_ns)
            best = other if other.stages else best
            bounds_ns.append(other.bound_ns)
    return best, bounds_ns


def _local_optimum(
    search: LoadSearch, solution: LoadSolution, near: Near, progress: LoadProgress | None, deadline: Deadline
) -> LoadSolution:
    """Returns a local optimum: the exact search repeated among the downsets next to the best cuts so far."""
    while not deadline.is_over:
        better = replace(search, boundaries=near(solution)).solve(solution.microbatch_size, progress, deadline)
        if better.load_ns >= MIN_IMPROVEMENT * solution.load_ns or not better.stages:
            return solution
        solution = replace(better, bound_ns=solution.bound_ns)
    return solution


def _searched_space(
    search: LoadSearch, graph: ContractedGraph, microbatch_sizes: Sequence[int], max_downsets: int
) -> ThroughputSpace:
    num_devices, homogeneous = len(search.cluster.devices), search.is_homogeneous
    return ThroughputSpace(
        num_layers=search.boundaries.num_layers,
        num_devices=num_devices,
        num_downsets=search.boundaries.num_boundaries if search.has_all_downsets else None,
        max_downsets=max_downsets,
        has_all_device_counts=homogeneous or num_devices <= MAX_DEVICES_WITH_ALL_COUNTS,
        has_gaps=homogeneous or num_devices <= MAX_DEVICES_WITH_GAPS,
        counts_later=not homogeneous,
        is_fastest_first=not homogeneous and search.fastest_first != tuple(range(num_devices)),
        keeps_tied=graph.has_merged_layers,
        microbatch_sizes=tuple(microbatch_sizes),
    )


def _fitting(search: LoadSearch, microbatch_size: int, near: Near | None, deadline: Deadline) -> LoadSolution:
    """Returns a plan that fits where the first search has found none.

    Args:
        near: None if all downsets have been searched.

    Raises:
        Infeasible: no plan was found; the message says how much memory the closest one lacks.
    """
    closest = least_shortfall(search, microbatch_size, deadline)
    if closest is not None and near is not None:
        closest = reduced(search, closest, near, deadline)
    if closest is not None and not closest.num_bytes:
        return closest.solution
    hold = f"each device, which may hold {', '.join(f'{limit:,}' for limit in sorted(set(search.limits)))}"
    remedy = what_to_try(next(iter(search.profiles.values())).layers, search.limits, microbatch_size)
    is_proven = near is None and search.is_homogeneous
    none_fits = "no plan for throughput fits" if near is None else "no plan for throughput was found that fits"
    if closest is None:
        raise Infeasible(f"{none_fits} in the memory of {hold}. {remedy}", is_proven=is_proven)
    raise Infeasible(
        f"{none_fits} in memory; the closest, with micro-batches of {microbatch_size}, lacks {closest.num_bytes:,} "
        f"bytes on {hold}. {remedy}",
        is_proven=is_proven,
    )
