"""Raises a lower bound by bisection over step times, and simulates the stages that relaxations choose on the way."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.climb import Climbs
from bapipe.planner.device_line.cut_ranges import PlanRelaxation
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.single_devices import SingleDevices
from bapipe.planner.device_line.timed_plans import SLOW, TimedPlans
from bapipe.planner.stages.intervals import INF

MAX_BOUND_WORK = 25 * 512**2
"""Budget of the bisection, without a time limit, in squared devices for each limit that is decided."""

BOUND_PRECISION = 200
"""Bisection ends at a relative precision of 1/`BOUND_PRECISION`, ..."""

COARSE_PRECISION = 60
"""... or of 1/`COARSE_PRECISION` if other bounds follow."""

MIN_TRANSFERS = 0.01
"""Transfers of a micro-batch above this part of the best step are long: bounds by numbers of cuts follow."""

OTHER_GAP = 1.05
"""The bisection is coarse if the best step stays above this multiple of its bound, and other bounds follow."""

MAX_SLOW_PATHS = 3
"""After this many plans of relaxations in a row that take more than `SLOW` times the best step, no more are timed."""

NUM_PATHS = 16
"""How many ranges of the number of cuts have the stages of their relaxation timed, within ..."""

PATH_PERCENTS = (101, 104, 110)
"""... these percentages of their bounds."""

SINGLE_PRECISION = 50
"""The bisection over stages on single devices ends at a relative precision of one divided by this."""


class PrefixBisection:
    """Bisections that record their plans and bounds in `plans`."""

    def __init__(self, plans: TimedPlans, num_devices: int, deadline: Deadline) -> None:
        self._plans, self._num_devices, self._deadline = plans, num_devices, deadline
        self._num_slow_paths = 0

    def raise_bound(self, problems: list[PlanRelaxation], enough_ns: int, deadline: Deadline) -> list[PlanRelaxation]:
        """Raises the bound, which is the minimum over the problems: the problem with the lowest is always the next.

        Returns the problems, some of them divided. Invariant: no plan of a problem is faster than its `bound_ns`.

        Args:
            problems: one for each order of the devices, schedule and micro-batch size.
            enough_ns: the bound need not be raised above it.
        """
        plans, high_ns = self._plans, dict.fromkeys(problems, INF)
        lines = {problem.line for problem in problems}
        num_left = len(lines) * MAX_BOUND_WORK // self._num_devices**2
        with suppress(OutOfTime):
            while plans.best is not None and (num_left > 0 or self._deadline.is_given):
                deadline.check()
                lowest = min(problems, key=lambda problem: problem.bound_ns)
                low_ns, reached_ns = lowest.bound_ns, max(problem.bound_ns for problem in problems)
                # The joint bound cannot exceed a limit within which any relaxation has a plan.
                high = min(*high_ns.values(), plans.best.step_ns)
                # If the relaxation leaves a large gap even at best, other bounds take over.
                is_coarse = self.has_long_transfers(lowest) and high * OTHER_GAP < plans.best.step_ns
                precision = COARSE_PRECISION if is_coarse else BOUND_PRECISION
                if high - low_ns <= low_ns // precision or low_ns >= enough_ns:
                    break
                # A bound of one problem often holds for the next; most limits below the best plan are infeasible.
                is_behind = low_ns + low_ns // BOUND_PRECISION < reached_ns < high
                # With several orders of the devices, refuting a limit takes the least time, so limits are lower.
                between_ns = (low_ns + 3 * high) // 4 if len(lines) == 1 else (low_ns + high) // 2
                limit_ns = reached_ns - 1 if is_behind else between_ns
                if low_ns < enough_ns <= min(high, limit_ns):
                    limit_ns = enough_ns - 1
                if self._path(lowest, limit_ns, deadline) is not None:
                    high_ns[lowest] = limit_ns
                    parts = lowest.parts_by_last_stage()
                    if parts:
                        problems = [*(problem for problem in problems if problem is not lowest), *parts]
                        del high_ns[lowest]
                        high_ns |= dict.fromkeys(parts, INF)
                plans.raise_bound(min(problem.bound_ns for problem in problems))
                num_left -= 1
        return problems

    def has_long_transfers(self, problem: PlanRelaxation, min_share: float = MIN_TRANSFERS) -> bool:
        """Returns whether a micro-batch's transfers exceed `min_share` of the best step; True for `SingleDevices`."""
        best = self._plans.best
        if best is None or not isinstance(problem, PrefixBound):
            return best is not None
        return problem.round_trip_ns(len(best.plan.counts) - 1) > min_share * best.step_ns

    def time_equal_groups(self, starts: Sequence[TimedPlan], deadline: Deadline) -> None:
        """Bisects over plans with as many replicas of every stage as each of `starts` has, and times what it finds."""
        self._num_slow_paths = 0
        for timed in starts:
            plan, replicas = timed.plan, timed.plan.counts[0]
            if set(plan.counts) != {replicas} or sum(plan.counts) != self._num_devices:
                continue
            problem = PrefixBound(
                timed.line, plan.schedule, plan.microbatch_size, self._num_devices, only_replicas=replicas
            )
            low_ns, high_ns = self._plans.bound_ns, timed.step_ns
            while high_ns - low_ns > low_ns // BOUND_PRECISION and not self._plans.is_over:
                middle_ns = (low_ns + high_ns) // 2
                if self._path(problem, middle_ns, deadline) is None:
                    low_ns = middle_ns
                else:
                    high_ns = middle_ns

    def time_paths(self, ranges: Sequence[PlanRelaxation], climbs: Climbs, deadline: Deadline) -> None:
        """Times the stages that relaxations choose just above the bounds of the ranges with the lowest bounds."""
        lowest = sorted(ranges, key=lambda each: each.bound_ns)[:NUM_PATHS]
        with suppress(OutOfTime):
            for each, percent in product(lowest, PATH_PERCENTS):
                path = None if self._plans.is_over else each.path(each.bound_ns * percent // 100, deadline)
                if path is not None:
                    self._plans.time_unless_slow(each.line, path, climbs)

    def time_single_devices(
        self, kinds: Sequence[tuple[DeviceLine, str, int]], best: TimedPlan, climbs: Climbs, deadline: Deadline
    ) -> None:
        """Times stages on single devices that a relaxation chooses for each line, schedule and micro-batch size."""
        ordered = sorted(
            kinds,
            key=lambda each: (
                (each[0] is not best.line) + (each[1] != best.plan.schedule) + (each[2] != best.plan.microbatch_size)
            ),
        )
        for line, schedule, size in ordered:
            problem = SingleDevices(line, schedule, size)
            low_ns, high_ns = self._plans.bound_ns, best.step_ns
            while high_ns - low_ns > low_ns // SINGLE_PRECISION:
                middle_ns = (low_ns + high_ns) // 2
                if problem.is_refuted(middle_ns, deadline):
                    low_ns = middle_ns
                else:
                    high_ns = middle_ns
            path = problem.path(high_ns, deadline)
            if path is not None:
                self._plans.time_unless_slow(line, path, climbs)

    def _path(self, problem: PlanRelaxation, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """Returns the relaxation's stages within a step time and times them; raises the bound if there are none."""
        path = problem.path(limit_ns, deadline)
        if path is None:
            problem.bound_ns = max(problem.bound_ns, limit_ns + 1)
        elif not self._plans.is_over and self._num_slow_paths < MAX_SLOW_PATHS:
            timed, best = self._plans.time(problem.line, path), self._plans.best
            assert best is not None
            is_slow = timed is None or timed.step_ns > SLOW * best.step_ns
            self._num_slow_paths = self._num_slow_paths + 1 if is_slow else 0
        return path
