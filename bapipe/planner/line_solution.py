"""Plans whose stages take consecutive devices: the whole answer for many devices, else a first one.

Such plans are a few numbers, without tables of intervals and placements, so a good one and a bound are known within a
second or two (`device_line/`). With few devices the exact searches know more plans, and often prove more, but take
longer to begin. What both have found is joined, as far as it holds for the same plans.
"""

from dataclasses import dataclass, replace

from bapipe.planner.branch_and_bound.partition_space import line_space
from bapipe.planner.branch_and_bound.space import tries_all_orders, tries_any_order
from bapipe.planner.compute.deadline import OutOfTime
from bapipe.planner.device_line.best_naive import best_naive
from bapipe.planner.device_line.fewer_recomputed import with_fewer_recomputed
from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.device_line.search import LineSearch
from bapipe.planner.results.searched_space import GIVEN_ORDER, PartitionSpace, SearchedSpace
from bapipe.planner.results.solution import Solution
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.stages.device_orders import device_orders
from bapipe.planner.stages.fast_links import WORDS, paths_along_fast_links
from bapipe.planner.whole_progress import bounded_progress
from bapipe.schedules import SCHEDULES

MIN_FIRST_DEVICES = 3
"""With fewer devices than this, exact searches begin without a first solution."""

MIN_FIRST = 2_000
"""Boundaries times devices from which on there is a first solution even if the exact search tries any order of the
devices; if it tries some orders only, there always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSolution:
    """The best plan whose stages take consecutive devices, in one of some orders.

    Attributes:
        has_every_order: whether all devices are alike, so that there is no other order.
        has_every_schedule: whether every schedule asked for has one stage per device, as those of this search have.
    """

    solution: Solution
    has_every_order: bool
    has_every_schedule: bool

    def joined(self, exact: Solution) -> Solution:
        """Returns the faster of this plan and that of an exact search, with what is proven of a space with both.

        The exact search tries any order of the devices or, of too many, those of this search.
        """
        own = self.solution
        assert isinstance(exact.space, PartitionSpace)
        assert isinstance(own.space, PartitionSpace)
        has_same_orders = exact.space.device_order == own.space.device_order
        fastest = min(exact, own, key=lambda each: each.preference)
        space: SearchedSpace = exact.space
        bound_ns = exact.lower_bound_ns
        # What holds for all plans of this search holds for those of the other in the same orders, ...
        if self.has_every_schedule and (has_same_orders or self.has_every_order):
            bound_ns = max(bound_ns, own.lower_bound_ns)
            # ... and for those that need the other's `MOST_AT_CUTS`.
            if has_same_orders and own.lower_bound_ns == bound_ns:
                space = own.space
        return replace(fastest, lower_bound_ns=min(bound_ns, fastest.prediction.step_ns), space=space)


def solve_first(request: SearchRequest) -> LineSolution | None:
    """Returns a first solution where an exact search may take long, None if it does not, or if no plan was found."""
    asked = request.schedules
    simple = [name for name in asked if name in SCHEDULES]
    if not simple:
        return None
    profiles, cluster, options = request.inputs
    num_devices = len(cluster.devices)
    if num_devices < MIN_FIRST_DEVICES:
        return None
    is_small = num_devices * len(DeviceLine(profiles, cluster, options).cuts) < MIN_FIRST
    if is_small and tries_any_order(profiles, cluster, options):
        return None
    first = replace(request, options=replace(options, schedules=simple), deadline=request.deadline.share(2), rival=None)
    if request.progress is not None:  # its plans are only some of those asked for
        first = replace(first, progress=bounded_progress(request.progress, request.step_bound_ns))
    found = solve_on_line(first, is_last=False)
    return found and replace(found, has_every_schedule=len(simple) == len(asked))


def solve_on_line(request: SearchRequest, *, is_last: bool = True) -> LineSolution | None:
    """Returns the best plan found whose stages take consecutive devices, None without one that fits.

    Args:
        is_last: whether no other search follows.
    """
    profiles, cluster, options = request.inputs
    line = DeviceLine(profiles, cluster, options)
    orders = device_orders(profiles, cluster, options)
    search = LineSearch(
        [line.in_order(order.ranks) for order in orders],
        request.schedules,
        request.microbatch_sizes,
        bound_ns=request.step_bound_ns,
        deadline=request.deadline,
        progress=request.progress,
        rival=request.rival,
        is_last=is_last,
    )
    search.run()
    if search.best is None:
        return None
    best = with_fewer_recomputed(search.best, request.deadline)
    space = line_space(profiles, cluster, options, [order.words for order in orders])
    return LineSolution(
        solution=best.line.solution(best, search.bound_ns, space),
        has_every_order=len(set(line.class_of.values())) == 1,
        has_every_schedule=True,
    )


def naive_solution(request: SearchRequest, error: OutOfTime) -> Solution:
    """Returns the best of the naive plans, for when a search has ended before it found any plan, or was not begun.

    Args:
        error: with which it ended.

    Raises:
        OutOfTime: none of those tried fits.
    """
    bound_ns = max(error.lower_bound_ns, request.step_bound_ns)
    orders = _naive_orders(request, holds_for_all=error.lower_bound_ns <= request.step_bound_ns)
    best = best_naive([line for _, line in orders], request.schedules, request.microbatch_sizes, request.deadline)
    if best is None:
        raise OutOfTime(
            f"none of the naive plans tried fits, which does not prove that there is none; {error}", bound_ns
        ) from None
    space = line_space(*request.inputs, list(dict.fromkeys(words for words, _ in orders)))
    return best.line.solution(best, bound_ns, space)


def no_slower_than_naive(solution: Solution, request: SearchRequest) -> Solution:
    """Returns the best of the naive plans if it is faster than a solution that is not proven optimal."""
    step_ns = solution.prediction.step_ns
    if solution.lower_bound_ns == step_ns:
        return solution
    is_of_all = solution.asked_bound_ns is None
    orders = _naive_orders(request, of=solution.space if is_of_all else None, holds_for_all=not is_of_all)
    lines = [line for _, line in orders]
    best = best_naive(lines, request.schedules, request.microbatch_sizes, request.deadline, below_ns=step_ns)
    if best is None:
        return solution
    space = (
        solution.space if is_of_all else line_space(*request.inputs, list(dict.fromkeys(words for words, _ in orders)))
    )
    return best.line.solution(best, solution.bound_of_all_ns, space)


def _naive_orders(
    request: SearchRequest, *, of: SearchedSpace | None = None, holds_for_all: bool = False
) -> list[tuple[str, DeviceLine]]:
    """Returns the orders of the devices to try naive plans in, each with its words for the certificate.

    All of them are in the searched space. If that has every order, paths along the fastest links are among them: a plan
    that sends over one link that is much slower than the others can be many times slower.

    Args:
        of: the space of a search, which may have been one of a line.
        holds_for_all: whether what is proven holds for plans in any order, also where a search knows some of them.
    """
    inputs = request.inputs
    line = DeviceLine(*inputs)
    given = {GIVEN_ORDER: line}
    ordered = {order.words: line.in_order(order.ranks) for order in device_orders(*inputs)}
    if isinstance(of, PartitionSpace) and of.device_order == line_space(*inputs, list(ordered)).device_order:
        return list(ordered.items())
    if holds_for_all or tries_all_orders(*inputs):
        paths = paths_along_fast_links(line.cluster, _bytes_at_cuts(line, request.microbatch_sizes[-1]))
        return [*(given | ordered).items(), *((WORDS, line.in_order(path)) for path in paths)]
    return list((given if tries_any_order(*inputs) else ordered).items())


def _bytes_at_cuts(line: DeviceLine, microbatch_size: int) -> int:
    """Returns the mean of the activations of a micro-batch at the cuts between layers."""
    sent = [line.chain(0, microbatch_size).send_bytes[cut] for cut in line.cuts[1:-1]]
    return int(sum(sent)) // max(len(sent), 1)
