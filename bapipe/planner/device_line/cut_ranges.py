"""Raises the bound of the prefixes by taking plans apart by their numbers of cuts.

A round trip of a micro-batch takes the transfers over all cuts, and `prefix_bound.py` counts, of stages whose number is
not known, those before a stage only. Plans with many cuts have long round trips, and those with few have long stages,
whose gradients take long to sum; what neither can do, the relaxation of all numbers may. So every range of numbers has
a bound of its own, and one in which the relaxation has a plan within the goal is divided: into numbers near that of the
best plan, fewer and more, and at last by the replicas of the last stage. The goal that all exceed is found by
bisection; a range that exceeds one is not asked about lower ones.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isqrt
from typing import Protocol

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.line import DeviceLine, LinePlan

NEAR = ((0.6, 1.5), (0.85, 1.2))
"""Ranges are first divided at these parts of the best plan's number of cuts, below it and above it."""

NARROW = 20
"""Ranges of fewer numbers than one in so many are not divided."""

PRECISION = 100
"""The goal that all ranges exceed is searched for to one part in so many."""

MIN_GOAL = 80
"""No goal is below so many percent of what is not exceeded."""


class Relaxation(Protocol):
    """The plans of one order of the devices, schedule and micro-batch size, relaxed: `PrefixBound` or `SingleDevices`.

    Attributes:
        num_cuts: the fewest and the most cuts between the stages of its plans.
        bound_ns: what is proven of every plan.
        has_rings: whether `ring_bound.py` knows more of them.
    """

    line: DeviceLine
    num_cuts: tuple[int, int]
    bound_ns: int

    @property
    def has_rings(self) -> bool: ...

    def path(self, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """Returns the stages that the relaxation chooses within a step time; None if no plan can be within it."""

    def with_num_cuts(self, fewest: int, most: int) -> "Relaxation":
        """Returns the problem of plans with so many cuts between their stages."""

    def parts_by_last_stage(self) -> "Sequence[Relaxation]":
        """Returns problems with parts of the plans, with higher bounds; none if it has no parts."""


class CutRanges:
    """The plans of several problems, by ranges of their numbers of cuts. No plan is faster than `bound_ns`.

    Attributes:
        ranges: each with its own bound.
    """

    def __init__(self, problems: Sequence[Relaxation], num_cuts: int) -> None:
        """`num_cuts` are those of the best plan; the ranges are narrow near them."""
        self._likely = num_cuts
        self.ranges = [problem.with_num_cuts(*problem.num_cuts) for problem in problems]

    @property
    def bound_ns(self) -> int:
        """What is proven of every plan."""
        return min(each.bound_ns for each in self.ranges)

    def raise_bound(self, high_ns: int, deadline: Deadline, may_go_on: Callable[[], bool]) -> None:
        """Raises the bound up to a time, as far as the relaxation allows, while there are time and budget.

        Args:
            may_go_on: asked before each question to the relaxation.
        """
        low_ns = self.bound_ns
        while high_ns - low_ns > 1 + low_ns // PRECISION and may_go_on():
            # A low goal needs fewer ranges; one that is too low is soon followed by the next.
            goal_ns = max((2 * low_ns + high_ns) // 3, high_ns * MIN_GOAL // 100)
            if self._is_refuted(goal_ns, deadline, may_go_on):
                low_ns = goal_ns + 1
            else:
                high_ns = goal_ns

    def _is_refuted(self, goal_ns: int, deadline: Deadline, may_go_on: Callable[[], bool]) -> bool:
        """Asks of range after range, beginning near the best plan, whether it exceeds the goal, until one does not."""
        self.ranges.sort(key=self._distance)
        at = 0
        while at < len(self.ranges):
            each = self.ranges[at]
            if each.bound_ns > goal_ns:
                at += 1
                continue
            if not may_go_on():
                return False
            if each.path(goal_ns, deadline) is None:
                each.bound_ns = goal_ns + 1
                continue
            parts = self._parts(each)
            if not parts:
                return False
            self.ranges[at : at + 1] = sorted(parts, key=self._distance)
        return True

    def _distance(self, problem: Relaxation) -> tuple[int, int]:
        """How far the best plan's number of cuts is from those of a problem."""
        fewest, most = problem.num_cuts
        return max(fewest - self._likely, self._likely - most, 0), most - fewest

    def _parts(self, problem: Relaxation) -> Sequence[Relaxation]:
        """The problem's plans, divided by their number of cuts; if these are nearly equal, by their last stage."""
        fewest, most = problem.num_cuts
        if (most - fewest) * NARROW <= fewest:
            return problem.parts_by_last_stage()
        for below, above in NEAR:
            inner = {int(below * self._likely) - 1, int(above * self._likely)}
            ends = sorted(end for end in inner if fewest <= end < most)
            if ends:
                break
        else:
            ends = [isqrt(fewest * most)]
        return [problem.with_num_cuts(before + 1, end) for before, end in pairwise([fewest - 1, *ends, most])]
