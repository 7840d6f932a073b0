"""Raises the bound of `ring_ranges.py`: chooses the goals that its ranges are asked about, and the time for each.

A goal is a step time; once it is refuted, that is, no plan is within it, the bound is above it. The first goals are 90,
93 and 95.25 percent of the best step (the last one is a gap of 5 percent); then bisection. If `trip_bound.py` is asked,
a slightly higher goal takes several times as long, and a question that is cut off yields little. So there are low goals
before these, which give a bound early, and *looks*, whose work is known in advance and which tell for which goal there
is time:

    1. prefixes alone      50, 55 ... percent, in a second or less
    2. a look              by trips, at the plans within 95.25 percent; else at those within 93 percent
    3. another look        by all tables but the slowest; then 95.25 percent itself, if that look says that there is
                           time
    4. 60 and 80 percent, then as above, with what the looks have found
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.cut_ranges import MIN_GOAL
from bapipe.planner.device_line.plan_range import PlanRange
from bapipe.planner.device_line.ring_ranges import RingRanges
from bapipe.planner.device_line.trip_bound import BY_COARSE, BY_TRIPS

PRECISION, PART_OF_GAP = 250, 12
"""The search for the highest refuted goal ends at a precision of 1/`PRECISION` of the bound, or 1/`PART_OF_GAP` of the
gap to the best plan if that is more; of half that if `trip_bound.py` is asked, and of an eighth for many devices, as
its bounds come close to the best plan."""

FEW_DEVICES = 64
"""More devices than this are many for `PRECISION`."""

MUCH = 1 / 5
"""Where `trip_bound.py` is asked, cuts are counted from the start if they change a step by more than this part."""

FIRST_PERCENT, PERCENT_STEP = 50, 5
"""The first goal by prefixes alone, and the steps to the next ones, in percent of the best step."""

SOON = 0.6, 0.8
"""If `trip_bound.py` is asked, these parts of the best step come next, so that even a short search has a bound."""

GOALS = 0.9, 0.93, 0.9525
"""The next goals, as parts of the best step: gaps of 11, 7.5 and 5 percent."""

LOOKS = (GOALS[2], 2.0), (GOALS[1], 4 / 3)
"""(Goal, factor): before `GOALS` there is a look by trips at the plans within one goal, from which lower goals profit.
It is the first one for which `factor` times its work is left, as more is asked after it; or none."""

COARSE = 10.0
"""After a look at the last goal there is one by all tables but the slowest, if this many times the work of the first
look at the ranges that are still open is left, which is twice what it takes."""

REST, REST_OF_TURNS, REST_OF_STAGE = 2.0, 10.0, 0.1
"""Then the last goal is asked about before the others if this many times the work of that look at the ranges that are
still open is left: `REST_OF_TURNS` if turns are distinguished, in many ranges (it takes up to twice as much, but lower
goals profit from what is found); `REST_OF_STAGE` times the best plan's stages if cuts are counted."""

HALF, ALMOST_ALL, MOST = 2.0, 10 / 9, 4 / 3
"""The second look gets 1/`HALF` of the remaining time, that question 1/`ALMOST_ALL`. Each of the first two goals gets
1/`MOST`, or each of the three if `trip_bound.py` is asked about what rings leave: if these are out of reach, lower
goals still raise the bound."""

SLOWER, MAX_HALVED = 4, 0.01
"""A question about the next one of these goals takes up to `SLOWER` times as long. If too little is left for that, the
goal is halfway to it, as long as it is further away than `MAX_HALVED` of the best step."""


@contextmanager
def _in_part(deadline: Deadline, num_parts: float) -> Iterator[Deadline]:
    """Yields a deadline after 1/`num_parts` of the remaining time; it ends only the block, not the search."""
    try:
        yield deadline.share(num_parts)
    except OutOfTime:
        deadline.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGoals:
    """Raises the bound of some ranges, goal by goal.

    Attributes:
        high_ns: the best step, or a bound that need not be exceeded.
        left: returns the remaining budget of work, see `RingRanges.num_tried`, or what the remaining time allows if
            that is limited; the search ends at 0.
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
        """Raises the bound by steps 1 to 4: to the last of `GOALS` if there seems to be time, else to low goals.

        Returns:
            The work of the last question, by which that of the next goal is estimated; of the first look a part.
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
        """Raises the bound as far as prefixes alone do, so that a search that ends early has one."""
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
        """Looks at the plans within a goal; returns the ranges that are not refuted, and the work for each."""
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
        """Returns whether no plan is within a goal, asked with 1/`num_parts` of the remaining time and work.

        If rings are asked too, it is a share of the time only, as the time that their work takes differs.
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
