"""Climbs from plans for many devices to better ones by estimates of their steps; the simulator times what is found.

Where estimates are not exact, because links carry several transfers at once, the climb goes on by the simulator.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.estimate import ESTIMATED, StepEstimate
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.neighbourhood import Neighbourhood, Score

MIN_ACTIONS, MAX_ACTIONS = 8_000_000, 320_000_000
"""A walk ends after estimates of as many actions as twice the micro-batches and the square of the devices say, within
these: up to three seconds."""

MAX_TRIES, MAX_WORSE = 6_000, 1_800
"""Other climbs end after so many neighbours, and after so many in a row without a better one."""

MAX_ERROR = 1e-3
"""Estimates that differ more from the simulator are not trusted alone."""


class Climbs:
    """The climbs of a search, none of them twice from the same plan."""

    def __init__(self, time: Callable[[DeviceLine, LinePlan], TimedPlan | None], num_doublings: int = 0) -> None:
        """`time` times a plan with the simulator; each doubling lets climbs go on for twice as long, by other moves."""
        self._time, self._num_doublings = time, num_doublings
        self._estimates: dict[tuple[DeviceLine, str, int], StepEstimate] = {}
        self._done: set[tuple[DeviceLine, LinePlan]] = set()
        self._seed = num_doublings

    def estimate_ns(self, line: DeviceLine, plan: LinePlan) -> float:
        """Estimates the step time of a plan, infinite if it does not fit; other schedules are taken for 1F1B."""
        estimate = self._estimate(line, plan)
        if estimate is not None:
            return estimate.step_ns(plan)
        as_1f1b = replace(plan, schedule="1f1b")
        estimate = self._estimate(line, as_1f1b)
        assert estimate is not None
        return estimate.step_ns(as_1f1b)

    def is_slower(self, line: DeviceLine, plan: LinePlan, limit_ns: float) -> bool:
        """Returns whether a plan takes longer than a limit by its estimate."""
        estimate = self._estimate(line, plan)
        return estimate is not None and estimate.score_ns(plan, limit_ns) > limit_ns

    def has(self, timed: TimedPlan) -> bool:
        """Returns whether a plan is the start or the end of a climb."""
        return (timed.line, timed.plan) in self._done

    def from_plans(self, plans: Sequence[TimedPlan], deadline: Deadline, is_over: Callable[[], bool]) -> None:
        """Climbs from each of some plans, in an equal share of the time that is left; `is_over` ends simulations."""
        for num_left, timed in zip(range(len(plans), 0, -1), plans, strict=True):
            self.from_plan(timed, deadline.share(num_left), is_over)

    def from_plan(self, timed: TimedPlan, deadline: Deadline, is_over: Callable[[], bool]) -> None:
        """Climbs from a plan, each time by other moves."""
        line, self._seed = timed.line, self._seed + 1
        self._done.add((line, timed.plan))
        estimate = self._estimate(line, timed.plan)
        if estimate is not None:
            found = self._estimated(timed, estimate, deadline)
            self._done.add((line, found))
            other = self._time(line, found)
            if other is not None and other.step_ns < timed.step_ns:
                timed = other
            if abs(estimate.step_ns(timed.plan) - timed.step_ns) <= MAX_ERROR * timed.step_ns:
                return
        self._climb(timed, self._simulated(line), lambda: not (deadline.is_over or is_over()))

    def _estimated(self, timed: TimedPlan, estimate: StepEstimate, deadline: Deadline) -> LinePlan:
        """Returns what a climb by estimates ends at."""
        line, start_s = timed.line, deadline.remaining_s
        if not line.allows_all:
            return self._climb(timed, estimate.score_ns, lambda: not deadline.is_over)

        def part_done() -> float:
            """Time that the user did not choose does not change a walk, but for its end."""
            if deadline.is_over:
                return 1.0
            return 1 - (deadline.remaining_s or 0.0) / start_s if start_s and deadline.is_given else 0.0

        num_microbatches = line.options.minibatch_size // timed.plan.microbatch_size
        max_actions = 2 * num_microbatches * len(line.cluster.devices) ** 2
        max_actions = min(MAX_ACTIONS, max(MIN_ACTIONS, max_actions))
        return estimate.walk(timed.plan, max_actions << self._num_doublings, part_done, self._seed)

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

    def _estimate(self, line: DeviceLine, plan: LinePlan) -> StepEstimate | None:
        """Estimates plans with the same schedule and micro-batch size, None if there are none of this schedule."""
        if plan.schedule not in ESTIMATED:
            return None
        key = line, plan.schedule, plan.microbatch_size
        if key not in self._estimates:
            self._estimates[key] = StepEstimate(*key)
        return self._estimates[key]
