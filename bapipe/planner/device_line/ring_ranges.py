"""Raises the bound of plans with replicas by taking them apart: by their last stage, by cuts, and by delays.

The relaxation of `ring_bound.py` decides ranges of numbers of cuts, and of replicas of the last stage, one at a time. A
goal is asked of wide ranges first; of one in which the relaxation has a plan within it, narrow ones are asked, then
with the delays of rings, which take the longest. A range with a plan within an earlier goal comes first, so that a goal
that fails fails soon. What is proven of a range holds for lower goals.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt

from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.line import TimedPlan
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_bound import RingBound

WIDTH = 1.25
"""Wide ranges of numbers of cuts end at so many times their begin."""

NARROW = 200
"""The transfers of plans of a narrow range differ by one part in so many of the best step at most."""

PRECISION, PART_OF_GAP = 250, 10
"""The goal that all ranges exceed is searched for to one part in so many, or to this part of what is left to the best
plan if that is more."""

MANY_REPLICAS = 20
"""GPipe: without delays ranges of the replicas of the last stage are divided down to one part in so many of the
micro-batches."""

SMALL, FEW_REPLICAS = 1.1, 50
"""With delays ranges of the replicas of the last stage are divided down to this, or to one part in so many of the
micro-batches."""

MIN_GOAL = 65
"""No goal is below so many percent of what is not exceeded."""

LAST_PARTS = 32
"""GPipe: the replicas of the last stage are told apart by halves of the micro-batches, down to one part in so many."""


@dataclass(kw_only=True, eq=False)
class Range:
    """Plans of a problem.

    Attributes:
        cuts: the fewest and the most.
        last_replicas: of the last stage, the fewest and the most.
        depth: how often they were taken apart.
        has_delays: whether the delays of rings count; if so, ...
        counts_cuts: ... whether prefixes with different numbers of cuts are told apart.
        is_likely: whether the relaxation may have a plan within a goal soon.
        bound_ns: what is proven of them.
    """

    problem: RingBound
    cuts: tuple[int, int]
    last_replicas: tuple[int, int]
    bound_ns: int
    depth: int = 0
    has_delays: bool = False
    counts_cuts: bool = True
    is_likely: bool = False


class RingRanges:
    """The plans of several problems, by ranges. No plan is faster than `bound_ns`.

    Attributes:
        ranges: each with its own bound.
    """

    def __init__(self, problems: Sequence[PrefixBound], bound_ns: int, best: TimedPlan) -> None:
        """No plan is faster than `bound_ns`; `best` is the fastest one known, like which the relaxation's may be."""
        self._best, best_ns = best, best.step_ns
        self._problems: list[RingBound] = []
        self.ranges: list[Range] = []
        for problem in problems:
            trip_ns = float(problem.least.trip[-1]) / problem.max_speed
            # Some stage is busy for as long as all are on average.
            busy_ns = trip_ns * max(1.0, problem.num_microbatches / problem.num_devices)
            bound = RingBound(problem, max(best_ns - busy_ns, 1.0))
            self._problems.append(bound)
            self.ranges += [
                Range(
                    problem=bound,
                    cuts=(fewest, most),
                    last_replicas=problem.last_replicas,
                    bound_ns=max(bound_ns, problem.bound_ns),
                )
                for fewest, most in _widths(*problem.num_cuts)
            ]

    @property
    def num_tried(self) -> int:
        """The work so far, see `FurthestPrefixes`."""
        return sum(problem.num_tried for problem in self._problems)

    @property
    def bound_ns(self) -> int:
        """What is proven of every plan."""
        return min(each.bound_ns for each in self.ranges)

    def raise_bound(self, high_ns: int, deadline: Deadline, may_go_on: Callable[[], bool]) -> None:
        """Raises the bound up to a time, as far as the relaxation allows, while there are time and budget."""
        low_ns = self.bound_ns
        while high_ns - low_ns > 1 + self._precision_ns(low_ns) and may_go_on():
            # A low goal needs fewer questions; one that is too low is soon followed by the next.
            goal_ns = max((2 * low_ns + high_ns) // 3, high_ns * MIN_GOAL // 100)
            if self.is_refuted(goal_ns, deadline, may_go_on, high_ns):
                low_ns = goal_ns + 1
            else:
                high_ns = goal_ns

    def _precision_ns(self, low_ns: int) -> int:
        return max(low_ns // PRECISION, (self._best.step_ns - low_ns) // PART_OF_GAP)

    def is_refuted(
        self, goal_ns: int, deadline: Deadline, may_go_on: Callable[[], bool], high_ns: int | None = None
    ) -> bool:
        """Returns whether no plan is within a goal by the relaxation, asked range by range as long as there is hope.

        Args:
            high_ns: a later goal is not above it. Most ranges with delays have no plan within that, so that it is
                the only question to them.
        """
        while True:
            left = [each for each in self.ranges if each.bound_ns <= goal_ns]
            if not left:
                return True
            if not may_go_on():
                return False
            # Those likely within the goal first, the parts of one before others; then those that take the least time.
            likely = [each for each in left if self._is_likely(each)]
            asked = (
                likely[-1] if likely else min(left, key=lambda each: (each.has_delays, each.counts_cuts, each.depth))
            )
            asked_ns = high_ns if high_ns is not None and asked.has_delays and not likely else goal_ns
            kind = PlanKind(*asked.cuts, *asked.last_replicas)
            if not asked.problem.is_feasible(
                kind, asked_ns, deadline, has_delays=asked.has_delays, counts_cuts=asked.counts_cuts
            ):
                asked.bound_ns = asked_ns + 1
                continue
            if asked_ns > goal_ns:
                asked.is_likely = True
                continue
            parts = list(self._refined(asked) if asked.has_delays else self._parts(asked))
            if not parts:
                asked.is_likely = True
                return False
            self.ranges.remove(asked)
            self.ranges += parts

    def _is_likely(self, each: Range) -> bool:
        return each.is_likely or self._has_best(each)

    def _has_best(self, each: Range) -> bool:
        """Whether the fastest known plan is one of a range."""
        best, problem = self._best.plan, each.problem.prefix
        kind = self._best.line, best.schedule, best.microbatch_size
        is_of_problem = (problem.line, problem.schedule, problem.size) == kind
        has_replicas = each.last_replicas[0] <= best.counts[-1] <= each.last_replicas[1]
        return is_of_problem and has_replicas and each.cuts[0] < len(best.counts) <= each.cuts[1] + 1

    def _parts(self, whole: Range) -> Iterator[Range]:
        """The plans of a range, taken apart: by their last stage, then by their cuts, then with delays."""
        problem = whole.problem.prefix
        fewest, most = whole.cuts
        low, high = whole.last_replicas
        of_cuts = problem.round_trip_ns(most) - problem.round_trip_ns(fewest)
        num_parts = min(most - fewest + 1, int(of_cuts * NARROW // self._best.step_ns) + 1)
        if problem.are_forwards_first and low < high and (low, high) == problem.last_replicas:
            end = max(1, problem.num_microbatches // LAST_PARTS)
            while low <= high:
                yield replace(whole, last_replicas=(low, min(high, end)), depth=whole.depth + 1, is_likely=False)
                low, end = end + 1, 2 * end
        elif num_parts > 1:
            ends = [fewest - 1 + (most - fewest + 1) * i // num_parts for i in range(num_parts + 1)]
            for before, after in pairwise(ends):
                yield replace(whole, cuts=(before + 1, after), depth=whole.depth + 1, is_likely=False)
        elif problem.are_forwards_first and (high - low) * MANY_REPLICAS > problem.num_microbatches:
            for replicas in _halves(low, high):
                yield replace(whole, last_replicas=replicas, depth=whole.depth + 1, is_likely=False)
        else:
            yield replace(whole, has_delays=True, counts_cuts=False, depth=0, is_likely=False)

    def _refined(self, whole: Range) -> Iterator[Range]:
        """The plans of a range with delays in two halves, by their cuts, then by their last stage; none if it is small.

        Between the two cuts are counted.
        """
        (fewest, most), (low, high), problem = whole.cuts, whole.last_replicas, whole.problem.prefix
        is_wide = high > SMALL * low and (high - low) * FEW_REPLICAS > problem.num_microbatches
        if fewest < most:
            middle = (fewest + most) // 2
            for cuts in ((fewest, middle), (middle + 1, most)):
                yield replace(whole, cuts=cuts, is_likely=True)
        elif not whole.counts_cuts:
            yield replace(whole, counts_cuts=True, is_likely=True)
        elif problem.are_forwards_first and is_wide:
            for replicas in _halves(low, high):
                yield replace(whole, last_replicas=replicas, is_likely=True)


def _halves(low: int, high: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Ranges whose ends are in equal proportion to their begins."""
    middle = isqrt(low * high)
    return (low, middle), (middle + 1, high)


def _widths(fewest: int, most: int) -> Iterator[tuple[int, int]]:
    while fewest <= most:
        end = min(most, max(fewest, int(fewest * WIDTH)))
        yield fewest, end
        fewest = end + 1
