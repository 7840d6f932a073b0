"""A lower bound by bisection over relaxations, and the plans of the stages that a relaxation chooses on the way."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.climb import Climbs
from bapipe.planner.device_line.cut_ranges import Relaxation
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.single_devices import SingleDevices
from bapipe.planner.device_line.timed_plans import SLOW, TimedPlans
from bapipe.planner.stages.intervals import INF

MAX_BOUND_WORK = 25 * 512**2
"""Budget of the bisection, without a time limit, in squared devices for each limit that is decided."""

BOUND_PRECISION = 200
"""Bisection ends at one part in so many."""

COARSE_PRECISION = 60
"""... or in so many where other bounds follow."""

MIN_TRANSFERS = 0.01
"""Transfers of a micro-batch that take this part of the best step are long: bounds by numbers of cuts follow."""

OTHER_GAP = 1.05
"""The bisection is coarse if it can leave no smaller gap than this, and other bounds follow."""

MAX_SLOW_PATHS = 3
"""So many plans of relaxations in a row are timed that take more than `SLOW` times as long as the best one."""

NUM_PATHS = 16
"""The number of ranges of the number of cuts whose stages by the relaxation are timed, within ..."""

PATH_PERCENTS = (101, 104, 110)
"""... so many percent of their bounds."""

SINGLE_PRECISION = 50
"""Stages on single devices are those within one part in so many of what the relaxation allows."""


class PrefixBisection:
    """Bisections whose plans and bounds go to `plans`."""

    def __init__(self, plans: TimedPlans, num_devices: int, deadline: Deadline) -> None:
        self._plans, self._num_devices, self._deadline = plans, num_devices, deadline
        self._num_slow_paths = 0

    def raise_bound(self, problems: list[Relaxation], enough_ns: int, deadline: Deadline) -> list[Relaxation]:
        """The bound is the smallest over the problems, so the problem with the smallest is always the next.

        Returns the problems, some of them in parts. Invariant: no plan of a problem is faster than its `bound_ns`.

        Args:
            problems: one for each order of the devices, schedule and micro-batch size.
            enough_ns: nothing is gained by a bound above it.
        """
        plans, high_ns = self._plans, dict.fromkeys(problems, INF)
        lines = {problem.line for problem in problems}
        num_left = len(lines) * MAX_BOUND_WORK // self._num_devices**2
        with suppress(OutOfTime):
            while plans.best is not None and (num_left > 0 or self._deadline.is_given):
                deadline.check()
                lowest = min(problems, key=lambda problem: problem.bound_ns)
                low_ns, reached_ns = lowest.bound_ns, max(problem.bound_ns for problem in problems)
                # The bound of all is no higher than a limit that any problem keeps.
                high = min(*high_ns.values(), plans.best.step_ns)
                # Where the relaxation leaves a large gap at best, other bounds go on.
                is_coarse = self.has_long_transfers(lowest) and high * OTHER_GAP < plans.best.step_ns
                precision = COARSE_PRECISION if is_coarse else BOUND_PRECISION
                if high - low_ns <= low_ns // precision or low_ns >= enough_ns:
                    break
                # What is proven of one problem often holds for the next; below the best plan most is infeasible.
                is_behind = low_ns + low_ns // BOUND_PRECISION < reached_ns < high
                # Of unlike devices a limit that is refuted takes the least time.
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

    def has_long_transfers(self, problem: Relaxation, min_share: float = MIN_TRANSFERS) -> bool:
        """Returns whether the transfers of one micro-batch are such a part of the best step, if there is any."""
        best = self._plans.best
        if best is None or not isinstance(problem, PrefixBound):
            return best is not None
        return problem.round_trip_ns(len(best.plan.counts) - 1) > min_share * best.step_ns

    def time_equal_groups(self, starts: Sequence[TimedPlan], deadline: Deadline) -> None:
        """Bisects over plans with equal numbers of replicas, as those that some plans have, and times what it finds."""
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

    def time_paths(self, ranges: Sequence[Relaxation], climbs: Climbs, deadline: Deadline) -> None:
        """Times the stages that the relaxation chooses near the lowest bounds of ranges."""
        lowest = sorted(ranges, key=lambda each: each.bound_ns)[:NUM_PATHS]
        with suppress(OutOfTime):
            for each, percent in product(lowest, PATH_PERCENTS):
                path = None if self._plans.is_over else each.path(each.bound_ns * percent // 100, deadline)
                if path is not None:
                    self._plans.time_unless_slow(each.line, path, climbs)

    def time_single_devices(
        self, kinds: Sequence[tuple[DeviceLine, str, int]], best: TimedPlan, climbs: Climbs, deadline: Deadline
    ) -> None:
        """Times stages on single devices, by a relaxation of its own for each line, schedule and micro-batch size."""
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

    def _path(self, problem: Relaxation, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """The stages of the relaxation within a step time, which are timed; without any the bound rises."""
        path = problem.path(limit_ns, deadline)
        if path is None:
            problem.bound_ns = max(problem.bound_ns, limit_ns + 1)
        elif not self._plans.is_over and self._num_slow_paths < MAX_SLOW_PATHS:
            timed, best = self._plans.time(problem.line, path), self._plans.best
            assert best is not None
            is_slow = timed is None or timed.step_ns > SLOW * best.step_ns
            self._num_slow_paths = self._num_slow_paths + 1 if is_slow else 0
        return path
