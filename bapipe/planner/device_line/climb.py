"""Climbs from plans for many devices to better ones by estimates of their steps; the simulator times what is found.

Where estimates are not exact, because pairs of devices share links, the climb goes on by the simulator.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from bapipe.hardware import num_cores
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.compute.threads import in_threads
from bapipe.planner.device_line.estimate import ESTIMATED, StepEstimate
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.neighbourhood import Neighbourhood, Score

MIN_ACTIONS, MAX_ACTIONS = 800_000, 128_000_000
"""The limits of the budget of a walk in the first round, in estimated actions: the number of micro-batches times two
fifths of the squared number of devices. Up to two thirds of a second."""

LONG_WALK = 3
"""How many times the length of a walk from a single plan is doubled."""

NUM_TOGETHER, USEFUL = 2, 0.999
"""How many walks by different moves start from one plan at the same time; they go on while they shorten the step to
less than this part of it."""

MAX_TRIES, MAX_WORSE = 6_000, 1_800
"""Other climbs end after this many neighbours in all, or this many in a row that are no better."""

MAX_ERROR = 1e-3
"""The largest relative difference to the simulated step at which an estimate is trusted alone."""


Estimated = tuple[float, DeviceLine, LinePlan]
"""A plan with its step time by estimate, in ns."""


class Climbs:
    """The climbs of a search, none of them twice from the same plan."""

    def __init__(self, time: Callable[[DeviceLine, LinePlan], TimedPlan | None], num_doublings: int = 0) -> None:
        """`time` simulates a plan; each of `num_doublings` makes climbs twice as long, by other moves."""
        self._time, self._num_doublings = time, num_doublings
        self._estimates: dict[tuple[DeviceLine, str, int, int], StepEstimate] = {}
        self._done: set[tuple[DeviceLine, LinePlan]] = set()
        self._seed = num_doublings

    def estimate_ns(self, line: DeviceLine, plan: LinePlan) -> float:
        """Estimates the step of a plan, infinite if it does not fit; as 1F1B for schedules without estimates."""
        estimate = self._estimate(line, plan)
        if estimate is not None:
            return estimate.step_ns(plan)
        as_1f1b = replace(plan, schedule="1f1b")
        estimate = self._estimate(line, as_1f1b)
        assert estimate is not None
        return estimate.step_ns(as_1f1b)

    def is_slower(self, line: DeviceLine, plan: LinePlan, limit_ns: float) -> bool:
        """Returns whether the estimate of a plan exceeds `limit_ns`; False for schedules without estimates."""
        estimate = self._estimate(line, plan)
        return estimate is not None and estimate.score_ns(plan, limit_ns) > limit_ns

    def has(self, timed: TimedPlan) -> bool:
        """Returns whether a plan is the start or the end of a climb."""
        return (timed.line, timed.plan) in self._done

    def race(
        self, starts: Sequence[tuple[DeviceLine, LinePlan]], deadline: Deadline, is_over: Callable[[], bool]
    ) -> None:
        """Walks from each plan, then for twice as long from the better half of the ends, and so on.

        Successive halving (Karnin, Koren and Somekh 2013; Jamieson and Talwalkar 2016). The best end of each round is
        timed.

        Args:
            starts: plans that `can_walk`.
        """
        if starts:  # before time is shared, as compilation would use up that of the first walks
            estimate = self._estimate(*starts[0])
            assert estimate is not None
            _walk(estimate, starts[0][1], 1, 0, deadline)
        num_rounds, runners = len(starts).bit_length(), list(starts)
        for number in range(num_rounds):
            round_deadline, ends = deadline.share(num_rounds - number), list[Estimated]()
            num_at_once = num_cores()
            batches = [runners[at : at + num_at_once] for at in range(0, len(runners), num_at_once)]
            for num_left, batch in zip(range(len(batches), 0, -1), batches, strict=True):
                if is_over() or deadline.is_over:
                    break
                ends += self._walk_at_once(batch, number, round_deadline.share(num_left))
            if not ends:
                return
            ends.sort(key=lambda end: end[0])
            self._time(*ends[0][1:])
            runners = [(line, plan) for _, line, plan in ends[: len(ends) // 2]]

    def walk_on(self, timed: TimedPlan, deadline: Deadline, is_over: Callable[[], bool]) -> None:
        """Walks on from the winner of a race, doubling the length of the walk each time, while the step shortens.

        So a race whose best plan was still getting faster is continued.
        """
        line, plan, step_ns, number = timed.line, timed.plan, float(timed.step_ns), LONG_WALK
        while not (is_over() or deadline.is_over):
            ends = self._walk_at_once([(line, plan)] * NUM_TOGETHER, number, deadline)
            found_ns, _, plan = min(ends, key=lambda end: end[0])
            if found_ns < step_ns:
                self._time(line, plan)
            if found_ns > step_ns * USEFUL:
                break
            step_ns, number = found_ns, number + 1

    def _walk_at_once(
        self, starts: Sequence[tuple[DeviceLine, LinePlan]], num_doublings: int, deadline: Deadline
    ) -> list[Estimated]:
        """Walks from several plans at the same time; returns the ends of the walks."""
        walks = [self._walk(*start, num_doublings, slot) for slot, start in enumerate(starts)]
        found = in_threads(walks, deadline)
        lines = [line for line, _ in starts]
        return [(self.estimate_ns(line, plan), line, plan) for line, plan in zip(lines, found, strict=True)]

    def from_plans(self, plans: Sequence[TimedPlan], deadline: Deadline, is_over: Callable[[], bool]) -> None:
        """Climbs from each plan, in equal shares of the remaining time; `is_over` ends climbs by simulation."""
        for num_left, timed in zip(range(len(plans), 0, -1), plans, strict=True):
            self.from_plan(timed, deadline.share(num_left), is_over)

    def from_plan(self, timed: TimedPlan, deadline: Deadline, is_over: Callable[[], bool]) -> None:
        """Climbs from a plan, with different random moves in each call."""
        line, estimate = timed.line, self._estimate(timed.line, timed.plan)
        self._done.add((line, timed.plan))
        if estimate is not None and line.allows_all:
            found = self._walk(line, timed.plan, LONG_WALK)(deadline)
        else:
            self._seed += 1
            found = timed.plan
            if estimate is not None:
                found = self._climb(timed, estimate.score_ns, lambda: not deadline.is_over)
        self._done.add((line, found))
        other = self._time(line, found)
        if other is not None and other.step_ns < timed.step_ns:
            timed = other
        if not self.is_exact(timed):
            self._climb(timed, self._simulated(line), lambda: not (deadline.is_over or is_over()))

    def can_walk(self, line: DeviceLine, plan: LinePlan) -> bool:
        """Returns whether the plan's schedule has estimates, and constraints forbid no plan."""
        return line.allows_all and plan.schedule in ESTIMATED

    def is_exact(self, timed: TimedPlan) -> bool:
        """Returns whether the estimate of a plan is close to its simulated step time."""
        estimate = self._estimate(timed.line, timed.plan)
        if estimate is None:
            return False
        return abs(estimate.step_ns(timed.plan) - timed.step_ns) <= MAX_ERROR * timed.step_ns

    def _walk(
        self, line: DeviceLine, plan: LinePlan, num_doublings: int, slot: int = 0
    ) -> Callable[[Deadline], LinePlan]:
        """Returns a function that walks by estimates to a better plan; walks at the same time need different slots."""
        self._seed += 1
        max_actions = line.options.minibatch_size // plan.microbatch_size * len(line.cluster.devices) ** 2 * 2 // 5
        max_actions = min(MAX_ACTIONS, max(MIN_ACTIONS, max_actions)) << (num_doublings + self._num_doublings)
        estimate = self._estimate(line, plan, slot)
        assert estimate is not None
        return partial(_walk, estimate, plan, max_actions, self._seed)

    def _climb(self, timed: TimedPlan, score: Score, may_go_on: Callable[[], bool]) -> LinePlan:
        near = Neighbourhood(timed.line, timed.plan.schedule, timed.plan.microbatch_size)
        tries = iter(range(MAX_TRIES << self._num_doublings))
        return near.climb(
            timed.plan,
            score,
            MAX_WORSE << self._num_doublings,
            lambda: may_go_on() and next(tries, None) is not None,
            seed=self._seed,
        )

    def _simulated(self, line: DeviceLine) -> Score:
        def score(plan: LinePlan, _: float) -> float:
            timed = self._time(line, plan)
            return inf if timed is None else timed.step_ns

        return score

    def _estimate(self, line: DeviceLine, plan: LinePlan, slot: int = 0) -> StepEstimate | None:
        """Returns the estimates for the plan's schedule and micro-batch size; None if its schedule has none."""
        if plan.schedule not in ESTIMATED:
            return None
        key = line, plan.schedule, plan.microbatch_size
        if (*key, slot) not in self._estimates:
            self._estimates[*key, slot] = StepEstimate(*key)
        return self._estimates[*key, slot]


def _walk(estimate: StepEstimate, plan: LinePlan, max_actions: int, seed: int, deadline: Deadline) -> LinePlan:
    """Returns the plan at which a walk by estimates ends."""
    start_s = deadline.remaining_s

    def part_done() -> float:
        """Returns the part of the time that is over; 0 before the deadline unless the user gave a time limit."""
        if deadline.is_over:
            return 1.0
        return 1 - (deadline.remaining_s or 0.0) / start_s if start_s and deadline.is_given else 0.0

    return estimate.walk(plan, max_actions, part_done, seed)
