"""Linearizations: orders of the layers along which a branching model is cut.

The step-time search cuts a chain of layers. Along the profile's order it may not be able to separate two branches whose
layers alternate. So a min-max DP over the downsets of the layer graph finds the cuts that minimize the largest load of
a stage, or its memory, for some numbers of stages. A linearization through such cuts is searched too if they are well
below the minimum along the profile's order (`MAX_RATIO`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import msgspec

from bapipe.errors import BapipeError, ConstraintsUnmet, Infeasible
from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.measurement import Measurement
from bapipe.formats.profile import LOSS, ModelProfile, ProfilesByKind
from bapipe.graph.downsets import downsets
from bapipe.graph.layer_graph import of_layers
from bapipe.planner.baselines import compared_with
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.decision import stage_plan
from bapipe.planner.results.no_plan import bounds_without_plan, error_of_all
from bapipe.planner.results.searched_space import ActionOrderSpace, LinearizationsSpace, partitions_in
from bapipe.planner.results.solution import Solution
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.planner.stages.devices import ns_per_sample
from bapipe.planner.throughput.contracted_graph import ContractedGraph, contracted_graph
from bapipe.planner.throughput.homogeneous import HomogeneousDevices
from bapipe.planner.throughput.lightest_cuts import MORE_THAN_ANY, lightest_cuts
from bapipe.planner.throughput.loads import Boundaries, StageCostSums, slowest_of
from bapipe.planner.throughput.min_devices_dp import min_max_load_homogeneous
from bapipe.planner.throughput.problem import StagePath
from bapipe.planner.whole_progress import WholeProgress
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage_cost import build_stages

MAX_DOWNSETS = 1000
"""Graphs with more downsets are searched along the profile's order only."""

MAX_RATIO = 0.995
"""A linearization is searched if its largest load or memory, relative to that of the profile's order, is below this."""

Solve = Callable[[ProfilesByKind, Deadline], Solution]
"""Searches along the order of the layers in some profiles until a deadline."""


def solve_over_linearizations(
    profiles: ProfilesByKind,
    cluster: Cluster,
    chosen_for: Sequence[PlanOptions],
    solve: Solve,
    deadline: Deadline = UNLIMITED,
    progress: WholeProgress | None = None,
) -> Solution:
    """Returns the fastest solution over the promising linearizations, with its layers in the profile's order.

    Args:
        chosen_for: what the linearizations are chosen for; `solve` may ask under another limit on memory.
        deadline: if a user gave it, each linearization has an equal share of its time: the bound of all is the lowest.
        progress: what `solve` tells of each linearization.

    Raises:
        Infeasible: no plan fits in memory along any of them.
        OutOfTime: the deadline passed before any plan was found that fits.
    """
    fastest = _fastest_device(profiles, cluster)
    profile = profiles[fastest.kind]
    graph = _branching_graph(profile)
    orders = [tuple(range(len(profile.layers)))]
    if graph is not None:
        with suppress(OutOfTime):
            for order in _promising(graph, profile, fastest.speed, cluster, chosen_for, deadline):
                orders.append(order)
    orders = list(dict.fromkeys(orders))
    solutions: list[Solution] = []
    bounds_ns: list[int] = []
    failures: list[BapipeError] = []
    for number, order in enumerate(orders):
        share = deadline.share_of_limit(len(orders) - number)
        if progress is not None and len(orders) > 1:  # of orders that were searched no more than of others is shown
            progress.others_ns = step_bound_ns(profiles, cluster, chosen_for[0])
        in_order = {kind: with_layer_order(profile, order) for kind, profile in profiles.items()}
        try:
            solutions.append(_in_profile_order(solve(in_order, share), profiles))
        except BapipeError as error:  # nothing fits, or constraints allow no cut along this order
            failures.append(error)
            bounds_ns += bounds_without_plan(error)
    if not solutions:
        failure = error_of_all(failures)
        raise failure if graph is None else _along(failure, len(orders))
    best = min(solutions, key=lambda solution: solution.preference)
    if len(orders) == 1:
        return best
    # The space is now the plans along all linearizations, so the bound is the lowest of their bounds.
    of_any_plan_ns = step_bound_ns(profiles, cluster, chosen_for[0])
    bounds_ns += [_bound_ns(solution, best, of_any_plan_ns) for solution in solutions]
    bound_ns = min(best.prediction.step_ns, *bounds_ns)
    space = LinearizationsSpace(num_orders=len(orders), along_each=best.space)
    return replace(best, lower_bound_ns=bound_ns, space=space)


def _bound_ns(solution: Solution, best: Solution, of_any_plan_ns: int) -> int:
    """Returns the lower bound along one order, valid for the space of the best solution.

    Args:
        of_any_plan_ns: a lower bound on any plan, used if the search along this order was cut off and covered less.
    """
    space, of_best = partitions_in(solution.space), partitions_in(best.space)
    # Along each order the cuts allow other numbers of stages.
    if replace(space, stage_counts=of_best.stage_counts, device_counts=of_best.device_counts) != of_best:
        return of_any_plan_ns
    if isinstance(solution.space, ActionOrderSpace) and not isinstance(best.space, ActionOrderSpace):
        return solution.space.named_bound_ns
    return solution.lower_bound_ns


def _in_profile_order(solution: Solution, profiles: ProfilesByKind) -> Solution:
    """Returns a solution with the layers of each stage in the profile's order, in which they run, and its step then.

    The order decides which gradients are there first, so the all-reduces of replicas begin at other times.
    """
    names = [layer.name for layer in next(iter(profiles.values())).layers]
    if names == [layer.name for layer in next(iter(solution.profiles.values())).layers]:
        return solution
    index = {name: i for i, name in enumerate(names)}
    stages = tuple(
        stage_plan(
            tuple(sorted(stage.layers, key=index.__getitem__)),
            stage.devices,
            recompute=stage.recompute,
            recompute_layers=frozenset(stage.recomputed),
        )
        for stage in solution.stages
    )
    costs = build_stages(stages, profiles, solution.cluster, solution.microbatch_size)
    prediction = simulate_columns(solution.table, costs, solution.cluster).prediction(solution.minibatch_size)
    return replace(
        solution,
        profiles=profiles,
        stages=stages,
        prediction=prediction,
        alternatives=compared_with(solution.alternatives, prediction),
    )


def _along(failure: BapipeError, num_orders: int) -> BapipeError:
    """Returns the error, and along which orders of the layers no plan was found."""
    if not isinstance(failure, Infeasible | ConstraintsUnmet):
        return failure
    along = "the profile's order" if num_orders == 1 else f"each of {num_orders} orders"
    message = f"along {along} of the layers (there are more) {failure}"
    if isinstance(failure, Infeasible):
        return Infeasible(message, is_proven=failure.is_proven)
    return ConstraintsUnmet(message, is_proven=False)


def _fastest_device(profiles: ProfilesByKind, cluster: Cluster) -> Device:
    """Returns the device that takes the least time for a sample; of equally fast ones any."""
    per_sample_ns = ns_per_sample(profiles, cluster)
    return cluster.devices[per_sample_ns.index(min(per_sample_ns))]


def _branching_graph(profile: ModelProfile) -> ContractedGraph | None:
    """Returns the graph of the layers, None if all its cuts are along the profile's order."""
    if of_layers(profile).has_single_order:
        return None
    graph = contracted_graph(profile)
    return graph if downsets(graph.graph, len(graph.prefixes_of_layers())) is None else None


def _promising(
    graph: ContractedGraph,
    profile: ModelProfile,
    speed: float,
    cluster: Cluster,
    chosen_for: Sequence[PlanOptions],
    deadline: Deadline,
) -> Iterator[tuple[int, ...]]:
    """Yields linearizations, as layer numbers, with much less load or memory than along the profile's order.

    Loads are compared within the memory of the fullest device and without a limit, for the largest micro-batches; where
    the two differ also bytes, with and without recomputation, for the smallest. Each stage has one device, all of one
    profile and speed, with the slowest link.

    Raises:
        OutOfTime: the deadline passed before all are found.
    """
    node_sets = downsets(graph.graph, MAX_DOWNSETS)
    if node_sets is None:
        return
    chain = graph.boundaries(graph.prefixes_of_layers())
    every = graph.boundaries(node_sets)
    num_devices = len(cluster.devices)
    limits = dict.fromkeys(max(options.limits(cluster)) for options in chosen_for)
    may_recompute = any(options.recompute for options in chosen_for)

    def paths(num_stages: int, memory_bytes: int) -> tuple[StagePath | None, StagePath | None]:
        deadline.check()
        on_chain, best = (
            _min_max_path(_homogeneous_problem(boundaries, profile, speed, cluster, memory_bytes, num_stages))
            for boundaries in (chain, every)
        )
        return on_chain, best

    for num_stages in sorted({2, (num_devices + 1) // 2, num_devices} - {0, 1}):
        unlimited = paths(num_stages, MORE_THAN_ANY)
        limited = [paths(num_stages, limit) for limit in limits]
        for on_chain, best in (unlimited, *limited):
            if best is not None and (on_chain is None or best.load < MAX_RATIO * on_chain.load):
                yield _order(every, best.boundaries, profile)
        if all(within == unlimited for within in limited):
            continue
        for recompute in (False, True)[: 1 + may_recompute]:
            along_chain, lightest = (
                lightest_cuts(boundaries, profile, num_stages, recompute=recompute, deadline=deadline)
                for boundaries in (chain, every)
            )
            if lightest.num_bytes < MAX_RATIO * along_chain.num_bytes:
                yield _order(every, lightest.boundaries, profile)


def _order(every: Boundaries, path: Sequence[int], profile: ModelProfile) -> tuple[int, ...]:
    """Returns the layers of the stages between some boundaries, one stage after the other."""
    order = [layer for begin, end in pairwise(path) for layer in every.layers(begin, end)]
    if profile.layers[-1].name == LOSS:  # the loss stays last
        order.remove(len(order) - 1)
        order.append(len(order))
    return tuple(order)


def with_layer_order(profile: ModelProfile, order: Sequence[int]) -> ModelProfile:
    """Returns the profile with its layers in another topological order."""
    return msgspec.structs.replace(
        profile,
        layers=tuple(profile.layers[i] for i in order),
        measurements=tuple(
            Measurement(microbatch_size=m.microbatch_size, layers=tuple(m.layers[i] for i in order))
            for m in profile.measurements
        ),
    )


def _homogeneous_problem(
    boundaries: Boundaries, profile: ModelProfile, speed: float, cluster: Cluster, memory_bytes: int, num_stages: int
) -> HomogeneousDevices:
    """Returns the partition into `num_stages` stages, one device each, all of one speed and with the slowest link."""
    size = profile.microbatch_sizes[-1]
    links = cluster.links_among(range(len(cluster.devices)))
    return HomogeneousDevices(
        boundaries,
        StageCostSums(boundaries, profile, size, speed),
        num_devices=num_stages,
        num_microbatches=num_stages,
        max_replicas=1,
        link=slowest_of(links),
        overlaps=all(device.overlaps_transfers for device in cluster.devices),
        memory_bytes=memory_bytes,
    )


def _min_max_path(problem: HomogeneousDevices) -> StagePath | None:
    """Returns the stages with the smallest largest load; none if no stages fit in memory."""
    return min_max_load_homogeneous(problem, bound=problem.bound_ns, ceiling=problem.ceiling_ns).best
