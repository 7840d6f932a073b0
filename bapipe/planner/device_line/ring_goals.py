"""Raises the bound of `ring_ranges.py`: which goals its ranges are asked about, and how much time each may take.

A goal is a step time; once no plan is within it, the bound is above it. The first ones are 90, 93 and 95.25 percent of
the best step, a gap of 5 percent; then halves of what is open. Where `trip_bound.py` is asked, a goal that is a little
higher takes several times as long, and one that is cut off has told little. So there are low goals before these, which
leave a bound early, and looks, whose work is known before them, that say for which goal there is time:

    1. prefixes alone      50, 55 ... percent, in a second or less
    2. a look              by trips, at what is within 95.25 percent; else at 93 percent
    3. another look        by all tables that take less time than others; and then 95.25 percent itself, if that look
                           says that there is time
    4. 60 and 80 percent, and then as elsewhere, with what the looks have found
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.plan_range import PlanRange
from bapipe.planner.device_line.ring_ranges import RingRanges
from bapipe.planner.device_line.trip_bound import BY_COARSE, BY_TRIPS

PRECISION, PART_OF_GAP = 250, 12
"""The goal that all ranges exceed is searched for to one part in so many, or to this part of what is left to the best
plan if that is more; to half of both where `trip_bound.py` is asked, and of many devices to an eighth: what it finds is
close to the best plan."""

FEW_DEVICES = 64
"""More are many there."""

MUCH = 1 / 5
"""Where `trip_bound.py` is asked, cuts are counted from the first on if they make a larger difference to a step."""

MIN_GOAL = 80
"""No goal is below so many percent of what is not exceeded."""

FIRST_PERCENT, PERCENT_STEP = 50, 5
"""The goals by prefixes alone that come before those of `trip_bound.py`."""

SOON = 0.6, 0.8
"""Where `trip_bound.py` is asked, these parts of the best step come next, so that little time leaves a bound too."""

GOALS = 0.9, 0.93, 0.9525
"""Then these: gaps of 11, 7.5 and 5 percent."""

LOOKS = (GOALS[2], 2.0), (GOALS[1], 4 / 3)
"""Before them there is a look at the plans within one, by trips alone: lower goals begin with what is known then.
The first one is taken for which so many times its work is left, as there is more to be asked then, or none."""

COARSE = 10.0
"""Behind a look at those within the last goal there is one by all tables that take less time than others, if so many
times the work of the first look at the ranges that are open is left: twice as much as it takes."""

REST, REST_OF_TURNS, REST_OF_STAGE = 2.0, 10.0, 0.1
"""Then the last goal is asked about, before the others, if so many times the work of that look at the ranges that are
open is left: the second one where turns are told apart, in many ranges (it takes up to twice as much, but lower goals
gain from what is found); where cuts are counted, the last one for each stage of the best plan."""

HALF, ALMOST_ALL, MOST = 2.0, 10 / 9, 4 / 3
"""The second look and that question have one part in so many of what is left, and so have the first two goals, or each
of them where `trip_bound.py` is asked about what rings leave: where they are out of reach, lower ones are of use."""

SLOWER, MAX_HALVED = 4, 0.01
"""From one of these goals to the next a question takes up to so many times as long. If too little is left for that, the
goal is half the way there, as long as that is more than this part of the best step."""


@contextmanager
def _in_part(deadline: Deadline, num_parts: float) -> Iterator[Deadline]:
    """One part in so many of the time that is left; what it is over for ends, and only that."""
    try:
        yield deadline.share(num_parts)
    except OutOfTime:
        deadline.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGoals:
    """The goals of some ranges, up to a time.

    Attributes:
        high_ns: the best step, or what need not be exceeded.
        left: what is left of a budget of work, see `RingRanges.num_tried`, by the time that is left if that is limited:
            nothing from 0 on.
    """

    ranges: RingRanges
    high_ns: int
    deadline: Deadline
    left: Callable[[], float]

    def raise_bound(self) -> None:
        """Raises the bound of the ranges as far as the relaxation allows; raises OutOfTime when the deadline passes."""
        ranges, best_ns = self.ranges, self.high_ns
        for each in ranges.ranges:
            each.counts_cuts |= each.trips is not None and each.of_cuts(ranges.best) > MUCH
        goals_ns = [int(part * best_ns) for part in GOALS]
        took = self._raise_first() if ranges.asks_trips else 0
        low_ns, high_ns = ranges.bound_ns, best_ns
        while high_ns - low_ns > 1 + self._precision_ns(low_ns) and self.left() > 0:
            left_before, tried_before = self.left(), ranges.num_tried
            goal_ns = max((low_ns + high_ns) // 2, high_ns * MIN_GOAL // 100)
            first_ns = next((ns for ns in goals_ns if low_ns < ns < high_ns), None)
            if first_ns is not None:
                is_slow = SLOWER * took > left_before and first_ns - low_ns > MAX_HALVED * best_ns
                goal_ns = (low_ns + first_ns) // 2 if is_slow else first_ns
            in_part = first_ns in goals_ns[:2] if ranges.asks_trips else ranges.may_ask_trips and first_ns is not None
            if self._is_refuted(goal_ns, MOST if in_part else 1):
                low_ns = max(ranges.bound_ns, goal_ns + 1)
            else:
                high_ns = goal_ns
            took = ranges.num_tried - tried_before

    def _raise_first(self) -> int:
        """Raises the bound to the last of the goals if there is hope, else to low ones.

        Returns:
            The work of what was asked last; of the first look a part of that, as the next goal takes about as long.
        """
        ranges = self.ranges
        self._raise_soon()
        is_new, took = not any(each.known for each in ranges.ranges), 0
        for part, times in LOOKS if is_new else ():
            goal_ns = int(part * self.high_ns)
            looks = [(each, each.trips) for each in ranges.open_of(goal_ns) if each.trips is not None]
            work = sum(trips.look_work(each.kind, goal_ns, self.deadline) for each, trips in looks)
            if times * work < self.left():
                took = work // SLOWER
                open_ranges = self._look(goal_ns, self.deadline, BY_TRIPS)
                if part == GOALS[-1] and COARSE * sum(tried for _, tried in open_ranges) < self.left():
                    self._raise_to_last(goal_ns)
                break
        for part in SOON:
            tried_before = ranges.num_tried
            if not self._is_refuted(int(part * self.high_ns)):
                return ranges.num_tried - tried_before
            took = max(took, ranges.num_tried - tried_before)
        return took

    def _raise_soon(self) -> None:
        """Raises the bound as far as one look at all prefixes does, so that a search that ends soon has one."""
        for percent in range(FIRST_PERCENT, 100, PERCENT_STEP):
            goal_ns = self.high_ns * percent // 100
            left = [each for each in self.ranges.ranges if each.bound_ns <= goal_ns]
            if not all(self.ranges.is_refuted_soon(each, goal_ns, self.deadline) for each in left):
                return
            for each in left:
                each.bound_ns = goal_ns + 1

    def _raise_to_last(self, goal_ns: int) -> None:
        """Raises the bound to the last goal, unless that seems to take too long."""
        with _in_part(self.deadline, HALF) as own:
            rest, of_counted = 0.0, REST_OF_STAGE * len(self.ranges.best.plan.counts)
            for each, tried in self._look(goal_ns, own, BY_COARSE):
                of_ranges = REST_OF_TURNS if each.problem.prefix.tells_turns else REST
                rest += tried * (of_counted if each.counts_cuts else of_ranges)
            if rest < self.left():
                self._is_refuted(goal_ns, ALMOST_ALL)

    def _look(self, goal_ns: int, deadline: Deadline, num_rounds: int) -> list[tuple[PlanRange, int]]:
        """Looks at the plans within a goal; returns the ranges that are left, and the work that they were."""
        asked = self.ranges.open_of(goal_ns)
        tried_before = [0 if each.trips is None else each.trips.num_tried for each in asked]
        if asked:
            self.ranges.ask(asked, goal_ns, deadline, num_rounds)
        return [
            (each, each.trips.num_tried - before)
            for each, before in zip(asked, tried_before, strict=True)
            if each.bound_ns <= goal_ns and each.trips is not None
        ]

    def _is_refuted(self, goal_ns: int, num_parts: float = 1) -> bool:
        """Returns whether no plan is within a goal, asked with one part in `num_parts` of what is left.

        Of the time alone where rings are asked, too, whose work takes another time.
        """
        rest = self.left() * (1 - 1 / num_parts) if num_parts > 1 and self.ranges.asks_trips else 0.0
        with _in_part(self.deadline, num_parts) as own:
            return self.ranges.is_refuted(goal_ns, own, lambda: self.left() - rest)
        return False

    def _precision_ns(self, low_ns: int) -> int:
        precision_ns = max(low_ns // PRECISION, (self.ranges.best.step_ns - low_ns) // PART_OF_GAP)
        if not self.ranges.asks_trips:
            return precision_ns
        return precision_ns // (8 if self.ranges.num_devices > FEW_DEVICES else 2)
