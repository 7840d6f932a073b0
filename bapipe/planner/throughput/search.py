"""Plans for throughput: the smallest maximum load of a device once the pipeline is full."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import downsets, prefixes
from bapipe.graph.layer_graph import Graph, contract, depth_first_order, of_layers, topological_order
from bapipe.planner.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.options import PlanOptions
from bapipe.planner.searched_space import ThroughputSpace
from bapipe.planner.solution import Solution
from bapipe.planner.throughput.heterogeneous import (
    MAX_DEVICES_WITH_ALL_COUNTS,
    MAX_DEVICES_WITH_GAPS,
)
from bapipe.planner.throughput.large_graph import MAX_LISTED, LargeGraph
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution, is_homogeneous
from bapipe.planner.throughput.load_solution import solution_of
from bapipe.planner.throughput.loads import Boundaries
from bapipe.planner.throughput.memory_shortfall import least_shortfall, reduced
from bapipe.planner.throughput.neighbourhood import neighbouring_downsets
from bapipe.planner.validation import check_inputs, microbatch_sizes
from bapipe.progress import LoadProgress

MAX_DOWNSETS = 3000
"""Maximum number of downsets of a graph up to which all of them are boundaries."""

MAX_NEIGHBOURS = 800
"""Boundaries of one neighbourhood search, if a graph has more downsets than that."""

MAX_COARSE = 33
"""Boundaries of the search for a first plan when the time is over: so few take a few hundredths of a second."""

MIN_IMPROVEMENT = 0.9998
"""The neighbourhood search continues while it lowers the load below this share of the previous one."""


def solve_throughput(
    profiles: Mapping[str, ModelProfile],
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
    return explore_throughput(
        profiles,
        cluster,
        minibatch_size=options.minibatch_size,
        microbatch_sizes=microbatch_sizes(profiles, cluster, options),
        limits=options.limits(cluster),
        deadline=deadline,
        progress=progress,
    )


def explore_throughput(
    profiles: Mapping[str, ModelProfile],
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

    The space: cuts of the graph of layers at any of its downsets, any number of devices for a stage, every micro-batch
    size given. Layers that share parameters stay together. The order is 1F1B with enough micro-batches in flight to
    keep every device busy.

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
    first = profiles[cluster.devices[0].kind]
    graph = of_layers(first)
    index = {layer.name: i for i, layer in enumerate(first.layers)}
    tied = [(i, *(index[other] for other in layer.shares)) for i, layer in enumerate(first.layers) if layer.shares]
    contracted, layers_of_node = contract(graph, tied)
    # Few boundaries and equal groups: for a first plan where no time is left for more.
    coarse = LoadSearch(
        profiles=profiles,
        cluster=cluster,
        boundaries=_coarse(contracted, layers_of_node, graph.num_nodes),
        has_all_downsets=False,
        minibatch_size=minibatch_size,
        has_equal_groups=True,
    )
    every: list[int] | None = None
    try:
        every = downsets(contracted, max(max_downsets, MAX_LISTED), deadline.check)
        has_all_downsets = every is not None and len(every) <= max_downsets
        node_sets = every if every is not None and has_all_downsets else _prefixes_of_orders(contracted)
        boundaries = Boundaries(node_sets, layers_of_node, graph.num_nodes, deadline)
        search = replace(coarse, boundaries=boundaries, has_all_downsets=has_all_downsets, has_equal_groups=False)
    except OutOfTime:
        search, has_all_downsets = coarse, False
    solutions = [search.solve(size, limits, progress, deadline) for size in microbatch_sizes]
    feasible = [solution for solution in solutions if solution.stages]
    if not feasible and deadline.is_over:
        sizes = dict.fromkeys((microbatch_sizes[0], microbatch_sizes[-1]))
        feasible = [found for found in (coarse.solve(size, limits, None) for size in sizes) if found.stages]
    if not feasible:
        deadline.check()
        near = None if has_all_downsets else partial(_boundaries_near, contracted, layers_of_node, max_neighbours)
        feasible = [_fitting(search, microbatch_sizes[0], limits, near, deadline)]
    # Of equal loads the larger micro-batch wins: it has fewer transfers and a shorter order.
    best = min(feasible, key=lambda solution: (solution.load_ns, -solution.microbatch_size))
    bounds_ns = [solution.bound_ns for solution in solutions]
    if not has_all_downsets and max_neighbours and not deadline.is_over:
        large = LargeGraph(
            graph=contracted, layers_of_node=layers_of_node, profile=first, listed=every, deadline=deadline
        )
        best = large.improved(search, limits, best)
        if best.bound_ns < best.load_ns:
            best = _improve(search, contracted, layers_of_node, best, limits, max_neighbours, progress, deadline)
        bounds_ns, size = [best.bound_ns], best.microbatch_size
        for solution in solutions:
            if solution.microbatch_size != size:
                other = large.below(search, limits, solution, best.load_ns)
                best = other if other.stages else best
                bounds_ns.append(other.bound_ns)
    bound_ns = min(best.load_ns, *bounds_ns)
    space = _searched_space(search, limits, microbatch_sizes, max_downsets)
    return solution_of(coarse, best, bound_ns, space, limits)  # the tables of few boundaries do for the alternatives


def _coarse(graph: Graph, layers_of_node: Sequence[Sequence[int]], num_layers: int) -> Boundaries:
    """Returns few boundaries, evenly spaced along the topological order."""
    along = prefixes(topological_order(graph))
    num_steps = min(MAX_COARSE, len(along)) - 1
    chosen = [along[i * (len(along) - 1) // num_steps] for i in range(num_steps + 1)]
    return Boundaries(chosen, layers_of_node, num_layers)


def _prefixes_of_orders(graph: Graph) -> list[int]:
    """Returns the prefixes of three linear orders."""
    orders = [topological_order(graph), depth_first_order(graph), depth_first_order(graph, reverse=True)]
    some = {nodes for order in orders for nodes in prefixes(order)}
    return sorted(some, key=lambda nodes: (nodes.bit_count(), nodes))


def _improve(
    search: LoadSearch,
    graph: Graph,
    layers_of_node: Sequence[Sequence[int]],
    solution: LoadSolution,
    limits: Sequence[int],
    max_neighbours: int,
    progress: LoadProgress | None,
    deadline: Deadline,
) -> LoadSolution:
    """Returns a local optimum: the exact search repeated among the downsets next to the best cuts so far."""
    while not deadline.is_over:
        near = _boundaries_near(graph, layers_of_node, max_neighbours, solution)
        better = replace(search, boundaries=near).solve(solution.microbatch_size, limits, progress, deadline)
        if better.load_ns >= MIN_IMPROVEMENT * solution.load_ns or not better.stages:
            return solution
        solution = replace(better, bound_ns=solution.bound_ns)
    return solution


def _searched_space(
    search: LoadSearch, limits: Sequence[int], microbatch_sizes: Sequence[int], max_downsets: int
) -> ThroughputSpace:
    num_devices, homogeneous = len(search.cluster.devices), is_homogeneous(search.cluster, limits)
    return ThroughputSpace(
        num_layers=search.boundaries.num_layers,
        num_devices=num_devices,
        num_downsets=search.boundaries.num_boundaries if search.has_all_downsets else None,
        max_downsets=max_downsets,
        has_all_device_counts=homogeneous or num_devices <= MAX_DEVICES_WITH_ALL_COUNTS,
        has_gaps=homogeneous or num_devices <= MAX_DEVICES_WITH_GAPS,
        microbatch_sizes=tuple(microbatch_sizes),
    )


def _fitting(
    search: LoadSearch,
    microbatch_size: int,
    limits: Sequence[int],
    boundaries_near: Callable[[LoadSolution], Boundaries] | None,
    deadline: Deadline,
) -> LoadSolution:
    """Returns a plan that fits where the first search has found none.

    Args:
        boundaries_near: gives the downsets next to a plan's cuts; None if all have been searched.

    Raises:
        Infeasible: no plan was found; the message says how much memory the closest one lacks.
    """
    closest = least_shortfall(search, microbatch_size, limits, deadline)
    if closest is not None and boundaries_near is not None:
        closest = reduced(search, limits, closest, boundaries_near, deadline)
    if closest is not None and not closest.num_bytes:
        return closest.solution
    hold = f"each device, which may hold {', '.join(f'{limit:,}' for limit in sorted(set(limits)))}"
    remedy = "Try more devices, smaller micro-batches, or a smaller mini-batch"
    none_fits = (
        "no plan for throughput fits" if boundaries_near is None else "no plan for throughput was found that fits"
    )
    if closest is None:
        raise Infeasible(f"{none_fits} in the memory of {hold}. {remedy}")
    raise Infeasible(
        f"{none_fits} in memory; the closest, with micro-batches of {microbatch_size}, lacks {closest.num_bytes:,} "
        f"bytes on {hold}. {remedy}"
    )


def _boundaries_near(
    graph: Graph, layers_of_node: Sequence[Sequence[int]], max_neighbours: int, solution: LoadSolution
) -> Boundaries:
    """Returns the downsets next to the cuts of a plan."""
    node_of = {layer: node for node, layers in enumerate(layers_of_node) for layer in layers}
    node_sets = (sum({1 << node_of[layer] for layer in layers}) for layers, _ in solution.stages)
    cuts = list(accumulate(node_sets, initial=0))  # the downset before the first stage, and after each stage
    return Boundaries(neighbouring_downsets(graph, cuts, max_neighbours), layers_of_node, len(node_of))
