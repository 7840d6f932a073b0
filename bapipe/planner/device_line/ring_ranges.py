"""Raises the bound of plans with replicas by taking them apart: by their last stage, and by cuts.

The relaxation of `ring_bound.py` decides ranges of numbers of cuts, and of replicas of the last stage, one at a time. A
goal is asked of wide ranges first; of one in which the relaxation has a plan within it, with cuts counted, then of its
parts. A range with a plan within an earlier goal comes first, so that a goal that fails fails soon. What is proven of a
range holds for lower goals.

Of unlike devices, and of few alike ones, `trip_bound.py` is asked instead, which knows more and takes longer: about all
plans of a problem at once, and then about ranges with what is known of the whole.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from bapipe.planner.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.line import TimedPlan
from bapipe.planner.device_line.plan_range import Known, PlanRange, parts_of, wide_ranges
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.replica_classes import MAX_ALIKE
from bapipe.planner.device_line.ring_bound import RingBound
from bapipe.planner.device_line.trip_bound import Behind, TripBound
from bapipe.planner.threads import in_threads, num_threads

PRECISION, PART_OF_GAP = 250, 12
"""The goal that all ranges exceed is searched for to one part in so many, or to this part of what is left to the best
plan if that is more; to half of both where `trip_bound.py` is asked, and of many devices to an eighth: what it finds is
close to the best plan."""

FEW_DEVICES = 64
"""More are many there."""

MUCH = 1 / 5
"""Where `trip_bound.py` is asked, cuts are counted from the first on if they make a larger difference to a step."""

ROUNDS = 8
"""The tables of `trip_bound.py` are filled so often at most."""

MAX_KEPT_BYTES = 2**29
"""Of tables for later goals."""

MIN_GOAL = 80
"""No goal is below so many percent of what is not exceeded."""

FIRST_PERCENT, PERCENT_STEP = 50, 5
"""The goals by prefixes alone that come before those of `trip_bound.py`."""

GOALS = 0.9, 0.93, 0.9525
"""Where `trip_bound.py` is asked, the first goals are these parts of the best step: gaps of 11, 7.5 and 5 percent."""

LOOKS = (GOALS[2], 2.0), (GOALS[1], 4 / 3)
"""Before them there is a look at the plans within one, by trips alone: lower goals begin with what is known then.
The first one is taken for which so many times its work is left, as there is more to be asked then, or none."""

SOON = 0.6, 0.8
"""These come next, so that little time leaves a bound too."""

COARSE = 10.0
"""Behind a look at those within the last goal there is one by all tables that take less time than others, if so many
times the work of the first look at the ranges that are open is left: twice as much as it takes."""

REST, REST_OF_STAGE = 2.0, 0.1
"""Then the last goal is asked about, before the others, if so many times the work of that look at the ranges that are
open is left: where cuts are counted, for each stage of the best plan."""

HALF, ALMOST_ALL, MOST = 2.0, 10 / 9, 4 / 3
"""The second look and that question have one part in so many of what is left, and so has the first goal: where they are
out of reach, lower ones are of use."""

AT_ONCE = 4
"""So many ranges are asked at once, whatever the number of processors, so that the bound is the same."""

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


class RingRanges:
    """The plans of several problems, by ranges. No plan is faster than `bound_ns`.

    Attributes:
        ranges: each with its own bound.
    """

    def __init__(self, problems: Sequence[PrefixBound], bound_ns: int, best: TimedPlan) -> None:
        """No plan is faster than `bound_ns`; `best` is the fastest one known, like which the relaxation's may be."""
        self._best, best_ns = best, best.step_ns
        self._problems: list[RingBound] = []
        self._trips: list[TripBound] = []
        self._kept: deque[Known] = deque()
        self.ranges: list[PlanRange] = []
        for problem in problems:
            trip_ns = float(problem.least.trip[-1]) / problem.max_speed
            # Some stage is busy for as long as all are on average.
            busy_ns = trip_ns * max(1.0, problem.num_microbatches / problem.num_devices)
            bound = RingBound(problem, max(best_ns - busy_ns, 1.0))
            self._problems.append(bound)
            has_trips = not problem.has_one_speed or problem.num_devices <= MAX_ALIKE
            trips = TripBound(problem) if has_trips else None
            every = PlanRange(
                problem=bound,
                trips=trips,
                cuts=problem.num_cuts,
                last_replicas=problem.last_replicas,
                first_replicas=(1, int(problem.classes.most[-1])),
                bound_ns=max(bound_ns, problem.bound_ns),
            )
            if trips is not None:
                self.ranges.append(every)
                self._trips.append(trips)
            else:
                self.ranges += wide_ranges(every)

    @property
    def num_tried(self) -> int:
        """The work so far, see `FurthestPrefixes`."""
        return sum(problem.num_tried for problem in self._problems) + self._num_of_trips

    @property
    def _num_of_trips(self) -> int:
        return sum(each.num_tried for each in self._trips)

    @property
    def bound_ns(self) -> int:
        """What is proven of every plan."""
        return min(each.bound_ns for each in self.ranges)

    def raise_bound(self, high_ns: int, deadline: Deadline, left: Callable[[], float]) -> None:
        """Raises the bound up to a time, as far as the relaxation allows.

        Args:
            left: what is left of a budget of work, see `num_tried`, by the time that is left if that is limited:
                nothing from 0 on.
        """
        for each in self.ranges:
            each.counts_cuts |= each.trips is not None and each.of_cuts(self._best) > MUCH
        goals_ns = [int(part * high_ns) for part in GOALS]
        took = self._raise_first(high_ns, deadline, left) if self._trips else 0
        low_ns, best_ns = self.bound_ns, high_ns
        while high_ns - low_ns > 1 + self._precision_ns(low_ns) and left() > 0:
            left_before, tried_before = left(), self.num_tried
            goal_ns = max((low_ns + high_ns) // 2, high_ns * MIN_GOAL // 100)
            first_ns = next((ns for ns in goals_ns if low_ns < ns < high_ns), None)
            if first_ns is not None:
                is_slow = SLOWER * took > left_before and first_ns - low_ns > MAX_HALVED * best_ns
                goal_ns = (low_ns + first_ns) // 2 if is_slow else first_ns
            is_first = bool(self._trips) and first_ns == goals_ns[0]
            if self._is_refuted_in_part(goal_ns, deadline, left, MOST if is_first else 1):
                low_ns = max(self.bound_ns, goal_ns + 1)
            else:
                high_ns = goal_ns
            took = self.num_tried - tried_before

    def _raise_first(self, high_ns: int, deadline: Deadline, left: Callable[[], float]) -> int:
        """Raises the bound to the last of the goals if there is hope, else to low ones.

        Returns:
            The work of what was asked last; of the first look a part of that, as the next goal takes about as long.
        """
        self._raise_soon(high_ns, deadline)
        is_new, took = not any(each.known for each in self.ranges), 0
        for part, times in LOOKS if is_new else ():
            goal_ns = int(part * high_ns)
            looks = [(each, each.trips) for each in self._open_of(goal_ns) if each.trips is not None]
            work = sum(trips.look_work(each.kind, goal_ns, deadline) for each, trips in looks)
            if times * work < left():
                took = work // SLOWER
                open_ranges = self._look(goal_ns, deadline, only_trips=True)
                if part == GOALS[-1] and COARSE * sum(tried for _, tried in open_ranges) < left():
                    self._raise_to_last(goal_ns, deadline, left)
                break
        for part in SOON:
            tried_before = self.num_tried
            if not self.is_refuted(int(part * high_ns), deadline, left):
                return self.num_tried - tried_before
            took = max(took, self.num_tried - tried_before)
        return took

    def _raise_to_last(self, goal_ns: int, deadline: Deadline, left: Callable[[], float]) -> None:
        """Raises the bound to the last goal, unless that seems to take too long."""
        with _in_part(deadline, HALF) as own:
            rest, of_counted = 0.0, REST_OF_STAGE * len(self._best.plan.counts)
            for each, tried in self._look(goal_ns, own, only_trips=False):
                rest += tried * (of_counted if each.counts_cuts else REST)
            if rest < left():
                self._is_refuted_in_part(goal_ns, deadline, left, ALMOST_ALL)

    def _look(self, goal_ns: int, deadline: Deadline, *, only_trips: bool) -> list[tuple[PlanRange, int]]:
        """Looks at the plans within a goal; returns the ranges that are left, and the work that they were."""
        asked = self._open_of(goal_ns)
        tried_before = [0 if each.trips is None else each.trips.num_tried for each in asked]
        if asked:
            self._ask(asked, goal_ns, deadline, num_rounds=0, only_trips=only_trips)
        return [
            (each, each.trips.num_tried - before)
            for each, before in zip(asked, tried_before, strict=True)
            if each.bound_ns <= goal_ns and each.trips is not None
        ]

    def _open_of(self, goal_ns: int) -> list[PlanRange]:
        """The ranges to ask about a goal next."""
        open_ranges = [each for each in self.ranges if each.bound_ns <= goal_ns]
        return self._next(open_ranges) if open_ranges else []

    def _is_refuted_in_part(
        self, goal_ns: int, deadline: Deadline, left: Callable[[], float], num_parts: float
    ) -> bool:
        """The same as `is_refuted`, within one part in `num_parts` of the time and the budget that are left."""
        rest = left() * (1 - 1 / num_parts)
        with _in_part(deadline, num_parts) as own:
            return self.is_refuted(goal_ns, own, lambda: left() - rest)
        return False

    def _raise_soon(self, high_ns: int, deadline: Deadline) -> None:
        """Raises the bound as far as one look at all prefixes does, so that a search that ends soon has one."""
        for percent in range(FIRST_PERCENT, 100, PERCENT_STEP):
            goal_ns = high_ns * percent // 100
            left = [each for each in self.ranges if each.bound_ns <= goal_ns]
            if not all(self._is_refuted_soon(each, goal_ns, deadline) for each in left):
                return
            for each in left:
                each.bound_ns = goal_ns + 1

    @property
    def _has_many_devices(self) -> bool:
        return self._trips[0].prefix.num_devices > FEW_DEVICES

    def _precision_ns(self, low_ns: int) -> int:
        precision_ns = max(low_ns // PRECISION, (self._best.step_ns - low_ns) // PART_OF_GAP)
        if not self._trips:
            return precision_ns
        return precision_ns // (8 if self._has_many_devices else 2)

    def is_refuted(self, goal_ns: int, deadline: Deadline, left: Callable[[], float]) -> bool:
        """Returns whether no plan is within a goal by the relaxation, asked range by range as long as there is hope.

        A range in which there may be one is asked about in parts, while anything is left of time or budget.
        """
        while True:
            asked = self._open_of(goal_ns)
            if not asked:
                return True
            if left() <= 0:
                return False
            if any(each.open_ns != goal_ns for each in asked):
                self._ask([each for each in asked if each.open_ns != goal_ns], goal_ns, deadline)
            for whole in (each for each in asked if each.bound_ns <= goal_ns):
                parts = parts_of(whole, self._best)
                if not parts:
                    return False
                self.ranges.remove(whole)
                self.ranges += parts

    def _ask(
        self,
        asked: Sequence[PlanRange],
        goal_ns: int,
        deadline: Deadline,
        num_rounds: int = ROUNDS,
        *,
        only_trips: bool = False,
    ) -> None:
        """Asks whether ranges have plans within a goal, at once; those that may are likely.

        Args:
            num_rounds, only_trips: of `trip_bound.py`; behind a look, 0, ranges that are left have not been asked yet.
        """
        running, answers, known = list(asked), dict[int, bool](), dict[int, Behind]()

        def answer(number: int, deadline: Deadline) -> None:
            try:
                answers[number] = self._answer(
                    asked[number],
                    goal_ns,
                    num_rounds,
                    only_trips,
                    lambda: num_threads() // len(running),
                    partial(known.__setitem__, number),
                    deadline,
                )
            finally:
                running.pop()

        try:
            in_threads([partial(answer, number) for number in range(len(asked))], deadline)
        finally:  # what is known when the time is over is kept
            for number, is_refuted in answers.items():
                each = asked[number]
                each.bound_ns = goal_ns + 1 if is_refuted else each.bound_ns
                each.is_likely = not is_refuted
                if not is_refuted and num_rounds > 0:
                    each.open_ns = goal_ns
            for number, behind in known.items():
                if not answers.get(number, False):
                    self._note(asked[number], goal_ns, behind)

    def _answer(
        self,
        asked: PlanRange,
        goal_ns: int,
        num_rounds: int,
        only_trips: bool,
        max_threads: Callable[[], int],
        keep: Callable[[Behind], None],
        deadline: Deadline,
    ) -> bool:
        """Returns whether no plan of a range is within a goal.

        Args:
            keep: called with what is known of those that are, by trips.
        """
        if asked.trips is None:
            return not asked.problem.is_feasible(
                asked.kind, goal_ns, deadline, counts_cuts=asked.counts_cuts, is_fine=asked.is_fine
            )
        earlier = asked.known_within(goal_ns)
        if earlier is None and self._is_refuted_soon(asked, goal_ns, deadline):
            return True
        behind = asked.trips.within(
            asked.kind,
            goal_ns,
            deadline,
            num_rounds,
            earlier,
            counts_cuts=asked.counts_cuts,
            only_trips=only_trips,
            max_threads=max_threads,
            keep=keep,
        )
        return behind is None

    def _is_refuted_soon(self, asked: PlanRange, goal_ns: int, deadline: Deadline) -> bool:
        return not asked.problem.is_feasible(asked.kind, goal_ns, deadline, counts_cuts=False, is_fine=False)

    def _note(self, asked: PlanRange, goal_ns: int, behind: Behind) -> None:
        """Notes what is known of the plans of a range within a goal; other numbers of cuts are ruled out."""
        (fewest, most), later = asked.cuts, tuple(each for each in asked.known if each.goal_ns > goal_ns)
        asked.known = self._keep(goal_ns, behind), *later
        asked.cuts = behind.cuts
        for cuts in ((fewest, asked.cuts[0] - 1), (asked.cuts[1] + 1, most)):
            if cuts[0] <= cuts[1]:
                self.ranges.append(replace(asked, cuts=cuts, known=later, bound_ns=goal_ns + 1))

    def _keep(self, goal_ns: int, behind: Behind) -> Known:
        """Returns what is known of plans within a goal; the oldest of too many is forgotten."""
        known = Known(goal_ns, behind)
        self._kept.append(known)
        while sum(each.behind.nbytes for each in self._kept if each.behind is not None) > MAX_KEPT_BYTES:
            self._kept.popleft().behind = None
        return known

    def _next(self, left: Sequence[PlanRange]) -> list[PlanRange]:
        """The ranges to ask at once.

        Those likely within a goal first, of plans like the best one before others, and the parts of one together. Then
        those that take the least time. Where `trip_bound.py` is asked one of each problem, as they share its tables.
        """
        likely = [each for each in left if each.is_likely or self._has_best(each)]
        others = [each for each in left if not (each.is_likely or self._has_best(each))]
        likely.reverse()
        likely.sort(key=lambda each: (self._has_best(each), self._is_like_best(each.problem.prefix)), reverse=True)
        ranked = [*likely, *sorted(others, key=lambda each: each.counts_cuts)]
        first = ranked[0]
        if first.trips is not None:
            of_problems = {id(each.problem): each for each in reversed(left)}
            ranked = [first, *(each for each in of_problems.values() if each.problem is not first.problem)]
        return ranked[:AT_ONCE]

    def _is_like_best(self, problem: PrefixBound) -> bool:
        """Whether the fastest known plan is one of a problem."""
        kind = self._best.line, self._best.plan.schedule, self._best.plan.microbatch_size
        return (problem.line, problem.schedule, problem.size) == kind

    def _has_best(self, each: PlanRange) -> bool:
        """Whether the fastest known plan is one of a range."""
        best, is_of_problem = self._best.plan, self._is_like_best(each.problem.prefix)
        has_last = each.last_replicas[0] <= best.counts[-1] <= each.last_replicas[1]
        has_first = each.first_replicas[0] <= best.counts[0] <= each.first_replicas[1]
        return is_of_problem and has_last and has_first and each.cuts[0] < len(best.counts) <= each.cuts[1] + 1
