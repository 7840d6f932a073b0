"""Plans for throughput: the minimal load of any device once the pipeline is full, whatever its first step takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil

from msgspec.structs import replace as replace_struct

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import THROUGHPUT, Alternative, Prediction, StagePlan
from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import downsets, prefixes
from bapipe.graph.layer_graph import Graph, contract, depth_first_order, of_layers, topological_order
from bapipe.planner.options import PlanOptions
from bapipe.planner.searched_space import ThroughputSpace
from bapipe.planner.solution import Solution
from bapipe.planner.throughput.heterogeneous import (
    MAX_DEVICES_WITH_ALL_COUNTS,
    MAX_DEVICES_WITH_GAPS,
    HeterogeneousDevices,
)
from bapipe.planner.throughput.homogeneous import HomogeneousDevices
from bapipe.planner.throughput.loads import Boundaries, StageCostSums
from bapipe.planner.throughput.min_devices_dp import min_max_load_homogeneous
from bapipe.planner.throughput.min_max_dp import min_max_load
from bapipe.planner.throughput.neighbourhood import neighbouring_downsets
from bapipe.planner.throughput.problem import MinMaxLoad
from bapipe.planner.validation import check_inputs, microbatch_sizes
from bapipe.progress import LoadProgress
from bapipe.schedules.one_f_one_b import one_rank
from bapipe.schedules.table import Action, Schedule
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages

MAX_DOWNSETS = 3000
"""Up to how many downsets of a graph all of them are boundaries."""

MAX_NEIGHBOURS = 800
"""Boundaries of one neighbourhood search, if a graph has more downsets than that."""

MIN_IMPROVEMENT = 0.9998
"""The neighbourhood search continues while it lowers the load below this share of the previous one."""

Stage = tuple[tuple[int, ...], tuple[int, ...]]
"""Layers, and ranks of the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSolution:
    """The stages of minimal load at one micro-batch size, none if nothing fits; no plan's load is below the bound."""

    microbatch_size: int
    load_ns: int
    bound_ns: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSearch:
    """What is searched. `has_all_downsets` says whether the boundaries are all downsets, so that bounds are proofs."""

    profiles: Mapping[str, ModelProfile]
    cluster: Cluster
    boundaries: Boundaries
    has_all_downsets: bool
    minibatch_size: int

    def solve(self, microbatch_size: int, limits: Sequence[int], progress: LoadProgress | None) -> LoadSolution:
        """Returns the best stages with micro-batches of one size, if each device may hold `limits` bytes."""
        if is_homogeneous(self.cluster, limits):
            homogeneous = self.homogeneous(microbatch_size, limits[0])
            bound_ns, ceiling_ns = homogeneous.bound_ns, homogeneous.ceiling_ns
            result = min_max_load_homogeneous(homogeneous, bound=bound_ns, ceiling=ceiling_ns, progress=progress)
            groups = _consecutive_groups(result)
        else:
            heterogeneous = self.heterogeneous(microbatch_size, limits)
            bound_ns, ceiling_ns = heterogeneous.bound_ns, heterogeneous.ceiling_ns
            result = min_max_load(heterogeneous, bound=bound_ns, ceiling=ceiling_ns, dtype=int, progress=progress)
            groups = [heterogeneous.states[state][1] for state in result.best.states] if result.best else []
        if result.best is None:
            return LoadSolution(microbatch_size=microbatch_size, load_ns=0, bound_ns=ceil(bound_ns), stages=())
        intervals = pairwise(result.best.boundaries)
        return LoadSolution(
            microbatch_size=microbatch_size,
            load_ns=int(result.best.load),
            # With some of the boundaries only, the search's own bound says nothing about the others.
            bound_ns=ceil(result.bound) if self.has_all_downsets else ceil(bound_ns),
            stages=tuple(
                (tuple(self.boundaries.layers(begin, end)), tuple(range(start, start + count)))
                for (begin, end), (start, count) in zip(intervals, groups, strict=True)
            ),
        )

    def homogeneous(self, microbatch_size: int, limit_bytes: int) -> HomogeneousDevices:
        """Returns the problem if all devices are the same."""
        device = self.cluster.devices[0]
        return HomogeneousDevices(
            self.boundaries,
            StageCostSums(self.boundaries, self.profiles[device.kind], microbatch_size, device.speed),
            num_devices=len(self.cluster.devices),
            num_microbatches=self.minibatch_size // microbatch_size,
            link=self.cluster.link(0, len(self.cluster.devices) - 1),
            overlaps=device.overlaps_transfers,
            memory_bytes=limit_bytes,
        )

    def heterogeneous(self, microbatch_size: int, limits: Sequence[int]) -> HeterogeneousDevices:
        """Returns the problem for any devices."""
        keys = sorted({(device.kind, device.speed) for device in self.cluster.devices})
        return HeterogeneousDevices(
            self.boundaries,
            {
                (kind, speed): StageCostSums(self.boundaries, self.profiles[kind], microbatch_size, speed)
                for kind, speed in keys
            },
            self.cluster,
            num_microbatches=self.minibatch_size // microbatch_size,
            memory_bytes=limits,
        )


def solve_throughput(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    progress: LoadProgress | None = None,
) -> Solution:
    """Returns the solution of `explore_throughput` over all micro-batch sizes that divide the mini-batch, or for one.

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
        progress=progress,
    )


def explore_throughput(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    *,
    minibatch_size: int,
    microbatch_sizes: Sequence[int],
    limits: Sequence[int],
    progress: LoadProgress | None = None,
    max_downsets: int = MAX_DOWNSETS,
    max_neighbours: int = MAX_NEIGHBOURS,
) -> Solution:
    """Returns the solution with the smallest maximum load of a device in a step.

    The space: cuts of the graph of layers at any of its downsets, any number of devices for a stage, every micro-batch
    size given. Layers that share parameters stay together. Its order is 1F1B deep enough to keep every device busy.

    Args:
        profiles: one for each kind of device in the cluster, all of one model.
        limits: what each device may hold.
        max_downsets: a graph with more downsets is cut along some linear orders, then near the best cuts.
        max_neighbours: boundaries of each neighbourhood search; 0 leaves it out.

    Raises:
        Infeasible: nothing fits; the message says how much memory would do.
    """
    first = profiles[cluster.devices[0].kind]
    graph = of_layers(first)
    index = {layer.name: i for i, layer in enumerate(first.layers)}
    tied = [(i, *(index[other] for other in layer.shares)) for i, layer in enumerate(first.layers) if layer.shares]
    contracted, layers_of_node = contract(graph, tied)
    node_sets, has_all_downsets = _node_sets(contracted, max_downsets)
    search = ThroughputSearch(
        profiles=profiles,
        cluster=cluster,
        boundaries=Boundaries(node_sets, layers_of_node, graph.num_nodes),
        has_all_downsets=has_all_downsets,
        minibatch_size=minibatch_size,
    )
    solutions = [search.solve(size, limits, progress) for size in microbatch_sizes]
    feasible = [solution for solution in solutions if solution.stages]
    if not feasible:
        raise Infeasible(_shortfall(search, microbatch_sizes, limits))
    # Of equal loads the larger micro-batch wins: it has fewer transfers and a shorter order.
    best = min(feasible, key=lambda solution: (solution.load_ns, -solution.microbatch_size))
    if not has_all_downsets and max_neighbours:
        best = _improve(search, contracted, layers_of_node, best, limits, max_neighbours, progress)
    bound_ns = min(best.load_ns, *(solution.bound_ns for solution in solutions))
    space = _searched_space(search, limits, microbatch_sizes, max_downsets)
    return _solution(search, best, bound_ns, space, limits)


def is_homogeneous(cluster: Cluster, limits: Sequence[int]) -> bool:
    """Returns whether devices differ in nothing but their names, so that only their number matters."""
    kinds = {
        (device.kind, device.speed, device.overlaps_transfers, limit)
        for device, limit in zip(cluster.devices, limits, strict=True)
    }
    hosts = {device.host for device in cluster.devices}
    one_link = cluster.intra_host == cluster.inter_host or len(hosts) in (1, len(cluster.devices))
    return len(kinds) == 1 and one_link and not cluster.links


def one_f_one_b_with_replicas(devices: Sequence[Sequence[int]], num_microbatches: int, num_ranks: int) -> Schedule:
    """Returns 1F1B over stages of several devices, with as many micro-batches in flight as devices run them.

    Stage s begins with one F for each device of stage s and later, dealt to its own devices round robin.
    """
    order: list[tuple[Action, ...]] = [()] * num_ranks
    for s, ranks in enumerate(devices):
        stage_order = one_rank(s, sum(map(len, devices[s:])), num_microbatches)
        for position, rank in enumerate(ranks):
            order[rank] = tuple(action for action in stage_order if action.microbatch % len(ranks) == position)
    return Schedule(devices=tuple(map(tuple, devices)), num_microbatches=num_microbatches, order=tuple(order))


def _node_sets(graph: Graph, max_downsets: int) -> tuple[list[int], bool]:
    """Returns all downsets and True, or the prefixes of three linear orders and False if there are too many."""
    every = downsets(graph, max_downsets)
    if every is not None:
        return every, True
    orders = [topological_order(graph), depth_first_order(graph), depth_first_order(graph, reverse=True)]
    some = {nodes for order in orders for nodes in prefixes(order)}
    return sorted(some, key=lambda nodes: (nodes.bit_count(), nodes)), False


def _improve(
    search: ThroughputSearch,
    graph: Graph,
    layers_of_node: Sequence[Sequence[int]],
    solution: LoadSolution,
    limits: Sequence[int],
    max_neighbours: int,
    progress: LoadProgress | None,
) -> LoadSolution:
    """Returns a local optimum: the exact search repeated among the downsets next to the best cuts so far."""
    node_of = {layer: node for node, layers in enumerate(layers_of_node) for layer in layers}
    while True:
        node_sets = (sum({1 << node_of[layer] for layer in layers}) for layers, _ in solution.stages)
        cuts = list(accumulate(node_sets, initial=0))  # the downset before the first stage, and after each stage
        near = Boundaries(
            neighbouring_downsets(graph, cuts, max_neighbours), layers_of_node, search.boundaries.num_layers
        )
        better = replace(search, boundaries=near).solve(solution.microbatch_size, limits, progress)
        if better.load_ns >= MIN_IMPROVEMENT * solution.load_ns or not better.stages:
            return solution
        solution = better


def _consecutive_groups(result: MinMaxLoad) -> list[tuple[int, int]]:
    """Returns (first device, count) of each stage of a homogeneous plan: states are counts."""
    counts = result.best.states if result.best else ()
    return list(zip(accumulate(counts[:-1], initial=0), counts, strict=True)) if counts else []


def _searched_space(
    search: ThroughputSearch, limits: Sequence[int], microbatch_sizes: Sequence[int], max_downsets: int
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


def _solution(
    search: ThroughputSearch, best: LoadSolution, bound_ns: int, space: ThroughputSpace, limits: Sequence[int]
) -> Solution:
    """Returns a solution with its simulated prediction and the alternatives."""
    table, prediction = _simulate(search, best)
    return Solution(
        profiles=search.profiles,
        cluster=search.cluster,
        objective=THROUGHPUT,
        minibatch_size=search.minibatch_size,
        microbatch_size=best.microbatch_size,
        schedule="1f1b",
        table=table,
        stages=_stage_plans(search, best),
        prediction=replace_struct(prediction, load_ns=best.load_ns),
        lower_bound_ns=bound_ns,
        space=space,
        alternatives=tuple(_alternatives(search, best, limits)),
    )


def _stage_plans(search: ThroughputSearch, solution: LoadSolution) -> tuple[StagePlan, ...]:
    devices = search.cluster.devices
    layers = search.profiles[devices[0].kind].layers
    return tuple(
        StagePlan(layers=tuple(layers[i].name for i in numbers), devices=tuple(devices[rank].name for rank in ranks))
        for numbers, ranks in solution.stages
    )


def _simulate(search: ThroughputSearch, solution: LoadSolution) -> tuple[Schedule, Prediction]:
    """Returns a solution's order, and what the simulator predicts for it."""
    table = one_f_one_b_with_replicas(
        [ranks for _, ranks in solution.stages],
        search.minibatch_size // solution.microbatch_size,
        len(search.cluster.devices),
    )
    stages = _stage_plans(search, solution)
    costs = build_stages(stages, search.profiles, search.cluster, solution.microbatch_size)
    return table, simulate_schedule(table, costs, search.cluster).prediction(search.minibatch_size)


def _alternatives(search: ThroughputSearch, best: LoadSolution, limits: Sequence[int]) -> list[Alternative]:
    """Returns one device, and data parallelism over all of them, at the plan's micro-batch size."""
    num_devices = len(search.cluster.devices)
    heterogeneous = search.heterogeneous(best.microbatch_size, limits)
    alternatives = []
    for name, ranks in {"one-device": (0,), "data-parallel": tuple(range(num_devices))}.items():
        num_microbatches = search.minibatch_size // best.microbatch_size
        if len(ranks) > num_microbatches or (name == "data-parallel" and num_devices == 1):
            continue
        load_ns = heterogeneous.single_stage_load(ranks)
        solution = LoadSolution(
            microbatch_size=best.microbatch_size,
            load_ns=load_ns,
            bound_ns=0,
            stages=((tuple(range(search.boundaries.num_layers)), ranks),),
        )
        _, prediction = _simulate(search, solution)
        lack_bytes = max(prediction.ranks[rank].peak_bytes - limits[rank] for rank in ranks)
        alternatives.append(
            Alternative(
                name=name,
                step_ns=prediction.step_ns,
                peak_bytes=max(rank.peak_bytes for rank in prediction.ranks),
                feasible=lack_bytes <= 0,
                why_not=_why_not(lack_bytes, load_ns / best.load_ns - 1 if best.load_ns else 0.0),
            )
        )
    return sorted(alternatives, key=lambda a: (not a.feasible, a.step_ns))


def _why_not(lack_bytes: int, extra_load: float) -> str:
    if lack_bytes > 0:
        return f"a device lacks {lack_bytes:,} bytes"
    return f"its largest load is {extra_load:.1%} larger" if extra_load else "as small a load as this plan's"


def _shortfall(search: ThroughputSearch, microbatch_sizes: Sequence[int], limits: Sequence[int]) -> str:
    """Returns a sentence that says with how much more memory per device something would fit, found by bisection."""
    size = microbatch_sizes[0]
    enough, short = max(limits), 0
    while not search.solve(size, [limit + enough for limit in limits], None).stages:
        short, enough = enough, 2 * enough
    while enough - short > max(1, enough // 1000):
        middle = (enough + short) // 2
        if search.solve(size, [limit + middle for limit in limits], None).stages:
            enough = middle
        else:
            short = middle
    return (
        f"no plan for throughput fits in memory; the closest, with micro-batches of {size}, lacks {enough:,} bytes on "
        f"each device, which may hold {', '.join(f'{limit:,}' for limit in sorted(set(limits)))}. Try more devices, "
        "smaller micro-batches, or a smaller mini-batch"
    )
