"""Plans for throughput: the smallest maximum load of a device once the pipeline is full."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import floor, inf

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.graph.downsets import downsets
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes
from bapipe.planner.results.no_plan import what_to_try
from bapipe.planner.results.searched_space import ANY_ORDER, ThroughputSpace
from bapipe.planner.results.solution import Solution
from bapipe.planner.results.work_bound import work_bound_ns
from bapipe.planner.stages.device_orders import DeviceOrder
from bapipe.planner.throughput.contracted_graph import ContractedGraph, contracted_graph
from bapipe.planner.throughput.heterogeneous import (
    MAX_DEVICES_WITH_ALL_COUNTS,
    MAX_DEVICES_WITH_GAPS,
)
from bapipe.planner.throughput.large_graph import MAX_LISTED, LargeGraph
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.load_solution import throughput_solution
from bapipe.planner.throughput.naive_plans import best_naive_plans, naive_alternatives
from bapipe.planner.throughput.order_search import FoundInOrder, OrderSearch, best_of
from bapipe.planner.throughput.orders import given_order, orders_to_search
from bapipe.progress import LoadProgress

MAX_DOWNSETS = 3000
"""Maximum number of downsets of a graph up to which all of them are boundaries."""

MAX_NEIGHBOURS = 800
"""Boundaries of one neighbourhood search, if a graph has more downsets than that."""

MAX_COARSE = 33
"""Boundaries of the search for a first plan when the time is over: so few take a few hundredths of a second."""

OTHERS_PART = 8
"""The part of a time limit that the first of several orders of the devices leaves to the others: a first plan in each
of them takes little, and the search in the first order should still be what it would be alone."""

Bounds = tuple[int, ...]
"""On the plans in one order of the devices, in nanoseconds: the smallest holds for all of them."""


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
        orders=orders_to_search(profiles, cluster, options),
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
    orders: Sequence[DeviceOrder] = (),
    deadline: Deadline = UNLIMITED,
    progress: LoadProgress | None = None,
    max_downsets: int = MAX_DOWNSETS,
    max_neighbours: int = MAX_NEIGHBOURS,
) -> Solution:
    """Returns the solution with the smallest maximum load of a device in a step.

    The space: cuts of the graph of layers at any of its downsets, any number of devices for a stage (of many that
    differ: a power of two, or any number for all layers) that follow each other in an order, every micro-batch size
    given. Layers that share parameters stay together, with all between them. The schedule is 1F1B with enough
    micro-batches in flight to keep devices busy.

    Args:
        profiles: one for each kind of device in the cluster, all of one model.
        limits: the memory that each device may use, in bytes.
        orders: in which stages take the devices; in the cluster's if there are none. Alike devices have one order.
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
    orders = orders or (given_order(cluster),)
    naive, one_stage_ns = best_naive_plans(whole, orders, microbatch_sizes, deadline, work_ns)
    first = best_of([plan.solution(search.boundaries.num_layers) for plan in naive if plan.fits])
    report = _Report(progress, first, one_stage_ns, work_ns, len(orders) * len(microbatch_sizes))
    large = LargeGraph(
        graph=graph.graph,
        layers_of_node=graph.layers_of_node,
        profile=profile,
        cluster=cluster,
        listed=listed,
        deadline=deadline,
    )
    searches = [
        OrderSearch(
            ranks=order.ranks,
            search=search.in_order(order.ranks),
            coarse=coarse.in_order(order.ranks),
            near=None if search.has_all_downsets else partial(graph.near, max_boundaries=max_neighbours),
            large=large,
            improves=max_neighbours > 0,
        )
        for order in orders
    ]
    best, bounds_ns = _best_in_orders(searches, microbatch_sizes, first, report, deadline)
    if best is None:
        deadline.check()
        fitting = _fitting(searches, microbatch_sizes, bounds_ns, report, deadline, has_tied=graph.has_merged_layers)
        best, bounds_ns = fitting
    bound_ns = min(best.load_ns, max(work_ns, floor(min(one_stage_ns, *chain.from_iterable(bounds_ns)))))
    space = _searched_space(searches, orders, graph, microbatch_sizes, max_downsets)
    return throughput_solution(coarse, best, bound_ns, space, naive_alternatives(whole, naive, best.load_ns))


def _best_in_orders(
    searches: Sequence[OrderSearch],
    microbatch_sizes: Sequence[int],
    first: LoadSolution | None,
    report: "_Report",
    deadline: Deadline,
) -> tuple[LoadSolution | None, list[Bounds]]:
    """Returns the best plan in any of some orders of the devices, and their bounds.

    The first order leaves the others a part of a time limit that the user chose; without one it ends as if it were the
    only one.

    Args:
        first: a plan that is known, if there is one.
    """
    best, bounds_ns = first, list[Bounds]()
    for number, each in enumerate(searches):
        if number and best is not None and (deadline.is_over or best.load_ns <= report.work_ns):
            return best, [*bounds_ns, (report.work_ns,)]
        # The plans of the first order are improved whatever a naive one has: its cuts say nothing of where others are.
        below_ns = best.load_ns if number and best is not None else inf
        num_parts: float = len(searches) - number
        if number == 0 < len(searches) - 1:
            num_parts = OTHERS_PART / (OTHERS_PART - 1)
        until = deadline.share_of_limit(num_parts)
        found = each.solve(microbatch_sizes, below_ns, partial(report.of, number), until)
        bounds_ns.append(found.bounds_ns)
        best = best_of([plan for plan in (found.best, best) if plan is not None])
    return best, bounds_ns


def _fitting(
    searches: Sequence[OrderSearch],
    microbatch_sizes: Sequence[int],
    bounds_ns: Sequence[Bounds],
    report: "_Report",
    deadline: Deadline,
    *,
    has_tied: bool,
) -> tuple[LoadSolution, list[Bounds]]:
    """Returns a plan that fits where the first searches have found none, and bounds.

    Args:
        bounds_ns: those of the first searches.
        has_tied: whether layers that share parameters stay together.

    Raises:
        Infeasible: no plan was found; the message says how much memory the closest one lacks.
    """
    size, closest = microbatch_sizes[0], None
    for number, each in enumerate(searches):
        closest = each.closest(size, closest, deadline)
        if closest is not None and not closest.num_bytes:
            without_plan = [
                LoadSolution(microbatch_size=of_size, load_ns=0, bound_ns=bound_ns, stages=())
                for of_size, bound_ns in zip(microbatch_sizes, bounds_ns[number], strict=True)
            ]
            fits = FoundInOrder(best=closest.solution, bounds_ns=bounds_ns[number])
            found = each.improved(fits, without_plan, partial(report.of, number), deadline)
            assert found.best is not None
            return found.best, [*bounds_ns[:number], found.bounds_ns, *bounds_ns[number + 1 :]]
    search = searches[0].search
    has_all = search.has_all_downsets
    hold = f"each device, which may hold {', '.join(f'{limit:,}' for limit in sorted(set(search.limits)))}"
    remedy = what_to_try(next(iter(search.profiles.values())).layers, search.limits, size)
    none_fits = "no plan for throughput fits" if has_all else "no plan for throughput was found that fits"
    lacks = f"; the closest, with micro-batches of {size}, lacks {closest.num_bytes:,} bytes on" if closest else " of"
    tied = (
        ". Layers that share parameters stay in one stage here, with all between them: the step as `objective` may "
        "separate them"
    )
    raise Infeasible(
        f"{none_fits} in {'' if closest else 'the '}memory{lacks} {hold}. {remedy}{tied if has_tied else ''}",
        is_proven=has_all and search.is_homogeneous and not has_tied,
    )


class _Report:
    """Reports progress: only loads of plans that are known to fit, and bounds of all micro-batch sizes together."""

    def __init__(
        self,
        progress: LoadProgress | None,
        first: LoadSolution | None,
        one_stage_ns: float,
        work_ns: int,
        num_searches: int,
    ) -> None:
        """`one_stage_ns` is a bound on plans of one stage, `work_ns` on all, for searches that have not begun."""
        self._progress, self.work_ns, self._num_searches = progress, work_ns, num_searches
        self._one_stage_ns = one_stage_ns
        self._best_ns = inf if first is None else first.load_ns
        self._bounds_ns: dict[tuple[int, int], float] = {}
        self._say()

    def of(self, order: int, microbatch_size: int) -> LoadProgress:
        """Returns the progress of a search in one order of the devices and at one micro-batch size.

        It reports infinite loads as long as it has no plan.
        """
        search = order, microbatch_size

        def report(load_ns: float, bound_ns: float) -> None:
            self._best_ns = min(self._best_ns, load_ns)
            # Bounds of one search rise; that of all is the smallest of them.
            self._bounds_ns[search] = max(bound_ns, self._bounds_ns.get(search, 0.0))
            self._say()

        return report

    def _say(self) -> None:
        if self._progress and self._best_ns < inf:
            unknown = [self.work_ns] if len(self._bounds_ns) < self._num_searches else []
            known_ns = max(self.work_ns, min(self._one_stage_ns, *self._bounds_ns.values(), *unknown))
            self._progress(self._best_ns, min(self._best_ns, known_ns))


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


def _searched_space(
    searches: Sequence[OrderSearch],
    orders: Sequence[DeviceOrder],
    graph: ContractedGraph,
    microbatch_sizes: Sequence[int],
    max_downsets: int,
) -> ThroughputSpace:
    search, words = searches[0].search, tuple(dict.fromkeys(order.words for order in orders))
    # A plan in any order may have the devices that it leaves out before its first stage.
    counts_later = not search.is_homogeneous and ANY_ORDER not in words
    num_devices, homogeneous = len(search.cluster.devices), search.is_homogeneous
    given = tuple(range(num_devices))
    return ThroughputSpace(
        num_layers=search.boundaries.num_layers,
        num_devices=num_devices,
        num_downsets=search.boundaries.num_boundaries if search.has_all_downsets else None,
        max_downsets=max_downsets,
        has_all_device_counts=homogeneous or num_devices <= MAX_DEVICES_WITH_ALL_COUNTS,
        has_gaps=homogeneous or num_devices <= MAX_DEVICES_WITH_GAPS,
        counts_later=counts_later,
        is_fastest_first=not homogeneous and any(each.search.fastest_first != given for each in searches),
        keeps_tied=graph.has_merged_layers,
        microbatch_sizes=tuple(microbatch_sizes),
        orders=words,
    )
