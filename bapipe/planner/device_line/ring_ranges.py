"""Lower bounds for plans with replicas by dividing them into ranges: by their last stage, and by cuts.

The relaxation of `ring_bound.py` decides ranges of numbers of cuts, and of replicas of the last stage, one at a time.
For a goal it is asked about wide ranges first; if it has a plan within the goal in one, about the same range with cuts
counted, then about parts of it. A range with a plan within an earlier goal comes first, so that a goal that cannot be
refuted is given up soon. What is proven of a range holds for lower goals.

For different devices, and for few equal ones, `trip_bound.py` is asked instead, which is stronger and takes longer:
about all plans of a problem at once, then about ranges, starting from what is known of the whole. For GPipe on many
equal devices it is asked by ranges of the last stage once rings get no further. Goals are chosen in `ring_goals.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bapipe.hardware import num_cores
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.compute.threads import in_threads
from bapipe.planner.device_line.behind import Behind
from bapipe.planner.device_line.line import TimedPlan
from bapipe.planner.device_line.plan_range import Known, PlanRange, by_last_stage, parts_of, wide_ranges
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_bound import RingBound
from bapipe.planner.device_line.trip_bound import BY_COARSE, TripBound

ROUNDS = 8
"""How many times the tables of `trip_bound.py` are filled at most."""

ASK_TRIPS_UP_TO = 0.96
"""`trip_bound.py` is asked about GPipe on many equal devices if rings cannot refute a goal up to this part of the best
step."""

ROUNDS_OF_ALIKE = 1
"""The same as `ROUNDS` for many equal devices, where it is better to divide ranges soon."""

MAX_COUNTED = 120
"""Before `trip_bound.py` is asked about many equal devices, rings rule out numbers of cuts; up to this many they count
cuts for that."""

MAX_KEPT_BYTES = 2**29
"""The maximum bytes of tables that are kept for later goals."""

AT_ONCE = 4
"""How many ranges are asked at once, whatever the number of processors, so that the bound does not depend on it."""


class RingRanges:
    """The plans of several problems, by ranges. No plan is faster than `bound_ns`.

    Attributes:
        best: the fastest known plan; the relaxation's plans may be similar.
        ranges: the ranges, each with its own bound.
    """

    def __init__(self, problems: Sequence[PrefixBound], bound_ns: int, best: TimedPlan) -> None:
        """No plan is faster than `bound_ns`."""
        self.best, best_ns = best, best.step_ns
        self._problems: list[RingBound] = []
        self._trips: list[TripBound] = []
        self._kept: deque[Known] = deque()
        self.ranges: list[PlanRange] = []
        for problem in problems:
            trip_ns = float(problem.least.trip[-1]) / problem.max_speed
            # Some stage is busy for at least the mean of all stages.
            busy_ns = trip_ns * max(1.0, problem.num_microbatches / problem.num_devices)
            bound = RingBound(problem, max(best_ns - busy_ns, 1.0))
            self._problems.append(bound)
            trips = None if problem.has_many_alike else TripBound(problem)
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
    def asks_trips(self) -> bool:
        """Whether `trip_bound.py` is asked about all plans from the start."""
        return not any(problem.prefix.has_many_alike for problem in self._problems)

    @property
    def may_ask_trips(self) -> bool:
        """Whether `trip_bound.py` may be asked at all: from the start, or about plans that rings cannot rule out."""
        return self.asks_trips or any(problem.prefix.are_forwards_first for problem in self._problems)

    @property
    def num_devices(self) -> int:
        return self._problems[0].prefix.num_devices

    @property
    def bound_ns(self) -> int:
        """A lower bound on the step time of every plan."""
        return min(each.bound_ns for each in self.ranges)

    def open_of(self, goal_ns: int) -> list[PlanRange]:
        """Returns the ranges to ask about a goal next; empty if all exceed it."""
        open_ranges = [each for each in self.ranges if each.bound_ns <= goal_ns]
        return self._next(open_ranges) if open_ranges else []

    def is_refuted(self, goal_ns: int, deadline: Deadline, left: Callable[[], float]) -> bool:
        """Returns whether the relaxation refutes a goal: has no plan within it in any range.

        A range in which it has one is divided, as long as `left` returns more than 0.
        """
        while True:
            asked = self.open_of(goal_ns)
            if not asked:
                return True
            if left() <= 0:
                return False
            if any(each.open_ns != goal_ns for each in asked):
                self.ask([each for each in asked if each.open_ns != goal_ns], goal_ns, deadline)
            for whole in (each for each in asked if each.bound_ns <= goal_ns):
                parts = parts_of(whole, self.best)
                if parts:
                    self.ranges.remove(whole)
                    self.ranges += parts
                elif self._is_for_trips(whole, goal_ns):
                    self._begin_trips(whole.problem)
                    break
                else:
                    return False

    def _is_for_trips(self, stuck: PlanRange, goal_ns: int) -> bool:
        """Whether `trip_bound.py` may refute a range that rings cannot, and the goal is far from the best step."""
        is_far = goal_ns <= ASK_TRIPS_UP_TO * self.best.step_ns
        return stuck.trips is None and stuck.problem.prefix.are_forwards_first and is_far

    def _begin_trips(self, problem: RingBound) -> None:
        """Replaces the ranges of a problem by ranges of its last stage for `trip_bound.py`."""
        of_problem = [each for each in self.ranges if each.problem is problem]
        trips = TripBound(problem.prefix)
        every = replace(
            of_problem[0],
            trips=trips,
            cuts=problem.prefix.num_cuts,
            last_replicas=problem.prefix.last_replicas,
            bound_ns=min(each.bound_ns for each in of_problem),
            is_fine=False,
            is_likely=False,
            open_ns=0,
        )
        self._trips.append(trips)
        self.ranges = [each for each in self.ranges if each.problem is not problem] + by_last_stage(every)

    def ask(
        self,
        asked: Sequence[PlanRange],
        goal_ns: int,
        deadline: Deadline,
        num_rounds: int = ROUNDS,
    ) -> None:
        """Asks in parallel whether ranges have plans within a goal, and stores the answers in them.

        Args:
            num_rounds: see `TripBound.within`. A range that a look does not refute does not count as asked; but where
                turns are distinguished it is divided next, as all tables rule out little more of it than the look.
        """
        running, answers, known = list(asked), dict[int, bool](), dict[int, Behind]()

        def answer(number: int, deadline: Deadline) -> None:
            try:
                answers[number] = self._answer(
                    asked[number],
                    goal_ns,
                    num_rounds,
                    lambda: num_cores() // len(running),
                    partial(known.__setitem__, number),
                    deadline,
                )
            finally:
                running.pop()

        try:
            in_threads([partial(answer, number) for number in range(len(asked))], deadline)
        finally:  # what is known at the deadline is kept
            for number, is_refuted in answers.items():
                each = asked[number]
                each.bound_ns = goal_ns + 1 if is_refuted else each.bound_ns
                each.is_likely = not is_refuted
                if not is_refuted and num_rounds >= (BY_COARSE if each.problem.prefix.tells_turns else 1):
                    each.open_ns = goal_ns
            for number, behind in known.items():
                if not answers.get(number, False):
                    self._note(asked[number], goal_ns, behind)

    def _answer(
        self,
        asked: PlanRange,
        goal_ns: int,
        num_rounds: int,
        max_threads: Callable[[], int],
        keep: Callable[[Behind], None],
        deadline: Deadline,
    ) -> bool:
        """Returns whether no plan of a range is within a goal.

        Args:
            keep: called with what `trip_bound.py` has found for the plans that may be within the goal.
        """
        if asked.trips is None:
            return not asked.problem.is_feasible(
                asked.kind, goal_ns, deadline, counts_cuts=asked.counts_cuts, is_fine=asked.is_fine
            )
        earlier, kind = asked.known_within(goal_ns), asked.kind
        if earlier is None and self.is_refuted_soon(asked, goal_ns, deadline):
            return True
        if asked.problem.prefix.has_many_alike:
            num_rounds = min(num_rounds, ROUNDS_OF_ALIKE)
            cuts = asked.cuts if earlier is not None else self._cuts_left(asked, goal_ns, deadline)
            if cuts is None:
                return True
            kind = kind._replace(fewest_cuts=cuts[0], most_cuts=cuts[1])
        behind = asked.trips.within(
            kind,
            goal_ns,
            deadline,
            num_rounds,
            earlier,
            counts_cuts=asked.counts_cuts,
            is_fine=asked.is_fine,
            max_threads=max_threads,
            keep=keep,
        )
        return behind is None

    def is_refuted_soon(self, asked: PlanRange, goal_ns: int, deadline: Deadline) -> bool:
        """Returns whether prefixes alone refute a goal for a range."""
        return not asked.problem.is_feasible(asked.kind, goal_ns, deadline, counts_cuts=False, is_fine=False)

    def _cuts_left(self, asked: PlanRange, goal_ns: int, deadline: Deadline) -> tuple[int, int] | None:
        """Returns the minimum and maximum number of cuts of plans within a goal, by rings alone; None if refuted."""

        def may_be(part: PlanRange) -> bool:
            is_open = partial(asked.problem.is_feasible, part.kind, goal_ns, deadline, is_fine=False)
            return is_open(counts_cuts=False) and (part.cuts[1] > MAX_COUNTED or is_open(counts_cuts=True))

        left = deque(wide_ranges(asked))
        while left and not may_be(left[0]):
            left.popleft()
        while left and not may_be(left[-1]):
            left.pop()
        return (left[0].cuts[0], left[-1].cuts[1]) if left else None

    def _note(self, asked: PlanRange, goal_ns: int, behind: Behind) -> None:
        """Stores what is known of the plans of a range within a goal; numbers of cuts not in `behind` are refuted."""
        (fewest, most), later = asked.cuts, tuple(each for each in asked.known if each.goal_ns > goal_ns)
        asked.known = self._keep(goal_ns, behind), *later
        asked.cuts = behind.cuts
        for cuts in ((fewest, asked.cuts[0] - 1), (asked.cuts[1] + 1, most)):
            if cuts[0] <= cuts[1]:
                self.ranges.append(replace(asked, cuts=cuts, known=later, bound_ns=goal_ns + 1))

    def _keep(self, goal_ns: int, behind: Behind) -> Known:
        """Keeps what is known of plans within a goal; drops the oldest while tables exceed `MAX_KEPT_BYTES`."""
        known = Known(goal_ns, behind)
        self._kept.append(known)
        while sum(each.behind.nbytes for each in self._kept if each.behind is not None) > MAX_KEPT_BYTES:
            self._kept.popleft().behind = None
        return known

    def _next(self, left: Sequence[PlanRange]) -> list[PlanRange]:
        """Returns the ranges to ask at once.

        First those likely to have a plan within the goal, beginning with those that hold the best plan, and the parts
        of one range together; then those that take the least time. If `trip_bound.py` is asked from the start, one of
        each problem comes first. Others follow only if turns are distinguished: many small ranges take less time in a
        thread each than one after another in several.
        """
        likely = [each for each in left if each.is_likely or self._has_best(each)]
        others = [each for each in left if not (each.is_likely or self._has_best(each))]
        likely.reverse()
        likely.sort(key=lambda each: (self._has_best(each), self._is_like_best(each.problem.prefix)), reverse=True)
        ranked = [*likely, *sorted(others, key=lambda each: each.counts_cuts)]
        first = ranked[0]
        if first.trips is not None and self.asks_trips:
            of_problems = {id(each.problem): each for each in reversed(left)}
            one_each = [first, *(each for each in of_problems.values() if each.problem is not first.problem)]
            more = (each for each in ranked if each.problem.prefix.tells_turns and each not in one_each)
            ranked = [*one_each, *more]
        return ranked[:AT_ONCE]

    def _is_like_best(self, problem: PrefixBound) -> bool:
        """Whether a problem contains the fastest known plan."""
        kind = self.best.line, self.best.plan.schedule, self.best.plan.microbatch_size
        return (problem.line, problem.schedule, problem.size) == kind

    def _has_best(self, each: PlanRange) -> bool:
        """Whether a range contains the fastest known plan, by cuts and replicas."""
        best, is_of_problem = self.best.plan, self._is_like_best(each.problem.prefix)
        has_last = each.last_replicas[0] <= best.counts[-1] <= each.last_replicas[1]
        has_first = each.first_replicas[0] <= best.counts[0] <= each.first_replicas[1]
        return is_of_problem and has_last and has_first and each.cuts[0] < len(best.counts) <= each.cuts[1] + 1
