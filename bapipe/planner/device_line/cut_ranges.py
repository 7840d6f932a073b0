"""Raises the lower bound of the prefixes by dividing plans into ranges of their numbers of cuts.

A round trip of a micro-batch includes the transfers over all cuts, but if the number of stages is unknown,
`prefix_bound.py` counts only those before a stage. Plans with many cuts have long round trips, and those with few have
long stages, whose gradients take long to sum; a relaxation over all numbers may combine the advantages of both. So
every range of numbers has a bound of its own. A range in which the relaxation has a plan within the goal is divided:
into numbers near the best plan's, smaller and larger ones, and finally by the replicas of the last stage. The largest
goal that all ranges exceed is found by bisection; a range that exceeds a goal is not asked about lower ones.
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
"""A range is not divided by its numbers of cuts if its width is at most 1/`NARROW` of its smallest number."""

PRECISION = 100
"""The bisection ends at a relative precision of 1/`PRECISION`."""

MIN_GOAL = 80
"""The lowest goal, in percent of the step time that is not refuted."""


class PlanRelaxation(Protocol):
    """The plans of one order of the devices, schedule and micro-batch size, relaxed: `PrefixBound` or `SingleDevices`.

    Attributes:
        num_cuts: the minimum and the maximum number of cuts between the stages of its plans.
        bound_ns: a lower bound on the step time of every plan.
        has_rings: whether `ring_bound.py` gives stronger bounds for them.
    """

    line: DeviceLine
    num_cuts: tuple[int, int]
    bound_ns: int

    @property
    def has_rings(self) -> bool: ...

    def path(self, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """Returns the stages that the relaxation chooses within a step time; None if no plan can be within it."""

    def with_num_cuts(self, fewest: int, most: int) -> "PlanRelaxation":
        """Returns the problem of the plans with `fewest` to `most` cuts between their stages."""

    def parts_by_last_stage(self) -> "Sequence[PlanRelaxation]":
        """Returns problems that divide the plans, with higher bounds; none if they cannot be divided."""


class CutRanges:
    """The plans of several problems, by ranges of their numbers of cuts. No plan is faster than `bound_ns`.

    Attributes:
        ranges: the problems restricted to ranges of cuts, each with its own bound.
    """

    def __init__(self, problems: Sequence[PlanRelaxation], num_cuts: int) -> None:
        """`num_cuts` is the best plan's number of cuts; ranges are narrow near it."""
        self._likely = num_cuts
        self.ranges = [problem.with_num_cuts(*problem.num_cuts) for problem in problems]

    @property
    def bound_ns(self) -> int:
        """A lower bound on the step time of every plan."""
        return min(each.bound_ns for each in self.ranges)

    def raise_bound(self, high_ns: int, deadline: Deadline, may_go_on: Callable[[], bool]) -> None:
        """Raises the bound towards `high_ns`, as far as the relaxation allows, while time and budget last.

        Args:
            may_go_on: asked before each question to the relaxation.
        """
        low_ns = self.bound_ns
        while high_ns - low_ns > 1 + low_ns // PRECISION and may_go_on():
            # A low goal is refuted with fewer ranges, so raising it in small steps costs little.
            goal_ns = max((2 * low_ns + high_ns) // 3, high_ns * MIN_GOAL // 100)
            if self._is_refuted(goal_ns, deadline, may_go_on):
                low_ns = goal_ns + 1
            else:
                high_ns = goal_ns

    def _is_refuted(self, goal_ns: int, deadline: Deadline, may_go_on: Callable[[], bool]) -> bool:
        """Returns whether all ranges exceed the goal; asks one after another, those near the best plan first."""
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

    def _distance(self, problem: PlanRelaxation) -> tuple[int, int]:
        """Returns the distance from the best plan's number of cuts to a problem's range, and the width of the range."""
        fewest, most = problem.num_cuts
        return max(fewest - self._likely, self._likely - most, 0), most - fewest

    def _parts(self, problem: PlanRelaxation) -> Sequence[PlanRelaxation]:
        """Returns the problem divided by its numbers of cuts; if these are nearly equal, by the last stage."""
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
