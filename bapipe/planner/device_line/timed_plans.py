"""The plans that a search has simulated, the fastest of them, and a lower bound on every step."""

import time

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.compute.pace import TIMES_SIMULATED, Pace
from bapipe.planner.device_line.climb import Climbs
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.stages.intervals import INF
from bapipe.progress import SearchProgress

SLOW = 1.2
"""Plans whose estimate is above this multiple of the fastest step are not simulated."""

Shape = tuple[DeviceLine, str, int, int]
"""The order of the devices, schedule, micro-batch size and number of stages of plans."""


def shape_of(line: DeviceLine, plan: LinePlan) -> Shape:
    """Returns the shape of a plan."""
    return line, plan.schedule, plan.microbatch_size, len(plan.counts)


class TimedPlans:
    """The plans that have been simulated, each once.

    Attributes:
        best: the fastest plan that fits, None before there is one.
        bound_ns: a lower bound on every step.
        num_actions: how many actions have been simulated.
        max_actions: the budget of these.
        is_memory_tight: whether a plan did not fit.
    """

    def __init__(self, bound_ns: int, max_actions: int, deadline: Deadline, progress: SearchProgress | None) -> None:
        self.best: TimedPlan | None = None
        self.bound_ns, self.max_actions, self.num_actions = bound_ns, max_actions, 0
        self.is_memory_tight = False
        self._deadline, self._progress = deadline, progress
        self._pace = Pace()
        self._timed: dict[tuple[DeviceLine, LinePlan], TimedPlan | None] = {}

    def time(self, line: DeviceLine, plan: LinePlan) -> TimedPlan | None:
        """Simulates a plan; returns None if it does not fit, or if too little of a given time limit is left for it.

        Raises:
            OutOfTime: the deadline has passed.
        """
        key, num_actions = (line, plan), line.num_actions(plan)
        if key not in self._timed:
            self._deadline.check()
            if self._deadline.is_given and not self._pace.has_time_for_result(num_actions, self._deadline):
                return None
            self.num_actions += num_actions
            began_s = time.perf_counter()
            timed = self._timed[key] = line.time(plan)
            took_s = time.perf_counter() - began_s
            self._pace.note(num_actions, took_s)
            self.is_memory_tight |= timed is None
            if timed is not None and (self.best is None or timed.step_ns < self.best.step_ns):
                self.best = timed
                if self._deadline.is_given:
                    self._deadline.leave((TIMES_SIMULATED - 1) * took_s)
            if self._progress and self.best is not None:
                best_ns = self.best.step_ns
                self._progress(len(self._timed), best_ns, min(self.bound_ns, best_ns))
        return self._timed[key]

    def time_unless_slow(self, line: DeviceLine, plan: LinePlan, climbs: Climbs) -> None:
        """Simulates a plan unless its estimate is above `SLOW` times the best step, or says that it does not fit."""
        if not climbs.is_slower(line, plan, INF if self.best is None else SLOW * self.best.step_ns):
            self.time(line, plan)
        elif self.best is None:
            self.is_memory_tight = True

    def that_fit(self) -> list[TimedPlan]:
        """Returns those that fit, the fastest first."""
        return sorted((each for each in self._timed.values() if each is not None), key=lambda each: each.step_ns)

    def fastest(self) -> list[TimedPlan]:
        """Returns the fastest one of each schedule, micro-batch size and number of stages, the fastest first."""
        of_shapes: dict[Shape, TimedPlan] = {}
        for timed in self.that_fit():
            of_shapes.setdefault(shape_of(timed.line, timed.plan), timed)
        return list(of_shapes.values())

    def raise_bound(self, bound_ns: int) -> None:
        """Records a lower bound on every step."""
        self.bound_ns = max(self.bound_ns, bound_ns)

    @property
    def is_over(self) -> bool:
        """Whether the best plan attains the bound, or enough actions have been simulated."""
        return self.best is not None and (self.best.step_ns <= self.bound_ns or self.num_actions > self.max_actions)
