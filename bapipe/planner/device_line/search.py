"""Plans for many devices: a lower bound by bisection over prefixes of the devices, and the best of the plans near it.

    1. naive plans       equal groups of devices, cut evenly
    2. raise_bound       bisection; the stages that the relaxation chooses are timed, too
    3. raise_by_pivots   alike devices: a bound that also counts what the largest stage brings about in earlier ones
    4. equal_groups      the relaxation with equal numbers of replicas: cuts that suit the order of the stages
    5. hill_climb        the best plan moves its cuts for as long as the simulator says that this helps

The budget is counted in simulated actions, so that results do not depend on the speed of the machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from bapipe.formats.cluster import Cluster
from bapipe.planner.branch_and_bound.intervals import INF
from bapipe.planner.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.naive import MIN_TRIED, naive_plans
from bapipe.planner.device_line.pivot_bound import LEVELS_OF_STEP, PivotBound
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.solution import Rival
from bapipe.progress import SearchProgress
from bapipe.schedules import SCHEDULES

MIN_DEVICES = 33
"""From so many devices on this search is used, ..."""

MAX_LAYER_REPLICAS = 64
"""... unless the layers, times the replicas that a stage may have, are at most so many: tables of placements are
small then, however many devices there are."""

MAX_ACTIONS = 1_500_000
"""Budget of simulated actions, without a time limit: some twenty seconds with the tables of their orders."""

MAX_BOUND_WORK = 25 * 512**2
"""Budget of the bisection, without a time limit, in squared devices for each limit that is decided."""

LAST_STAGE_GROWTH = 4
"""GPipe: the replicas of the last stage are told apart by powers of this."""

BOUND_PRECISION = 200
"""Bisection ends at one part in so many."""

COARSE_PRECISION = 60
"""... or in so many where the bound of pivots follows."""

PIVOT_GAPS = (5, 6.5, 8, 10)
"""The gaps, in percent, that the bound of pivots is asked for, one after another."""

MAX_SLOW_PATHS = 3
"""So many of the relaxation's stages are timed without any as fast as the best plan and this much:"""

SLOW = 1.1

NUM_CLIMBED = 3
"""The number of plans whose cuts are moved."""

CUT_MOVES = (8, 4, 2, 1)
"""By how many boundaries a cut is moved at once."""


def has_many_devices(cluster: Cluster, schedules: Sequence[str], *, num_layers: int, minibatch_size: int) -> bool:
    """Returns whether the devices are too many for tables of placements, and every stage has devices of its own."""
    num_devices = len(cluster.devices)
    is_large = num_layers * min(num_devices, minibatch_size) > MAX_LAYER_REPLICAS
    return num_devices >= MIN_DEVICES and is_large and all(name in SCHEDULES for name in schedules)


class LineSearch:
    """The plans timed, and the bound so far.

    Attributes:
        best: the fastest plan that fits, None before there is one.
        bound_ns: a time that no step beats.
    """

    def __init__(
        self,
        line: DeviceLine,
        schedules: Sequence[str],
        sizes: Sequence[int],
        *,
        bound_ns: int,
        deadline: Deadline,
        progress: SearchProgress | None = None,
        rival: Rival | None = None,
    ) -> None:
        """`bound_ns` is a time that no step beats; of a bound above that of a `rival` nothing is gained."""
        self.line, self.schedules, self.sizes, self.rival = line, schedules, sizes, rival
        self.deadline, self.progress = deadline, progress
        self.best: TimedPlan | None = None
        self.bound_ns = bound_ns
        self._timed: dict[LinePlan, TimedPlan | None] = {}
        self._num_actions = self._num_slow_paths = 0
        self._max_actions = 10**15 if deadline.is_given else MAX_ACTIONS

    def run(self) -> None:
        """Searches until the budget or the time is over, or the best plan attains the bound."""
        with suppress(OutOfTime):
            first = self.deadline.share(4)
            for number, (_, plan) in enumerate(naive_plans(self.line, self.schedules, self.sizes)):
                is_over = first.is_over if first.is_given else self._num_actions > self._max_actions // 4
                if number >= MIN_TRIED and (is_over or self.rival is not None):
                    break
                self._time(plan)
            problems = self._raise_bound(self.deadline.share(2) if self.deadline.is_given else self.deadline)
            self._raise_by_pivots(problems, self.deadline.share(2) if self.deadline.is_given else self.deadline)
            if self.rival is not None and self.bound_ns >= self.rival.lower_bound_ns:
                return
            self._num_slow_paths = 0
            self._equal_groups()
            for timed in self._fastest(NUM_CLIMBED):
                self._hill_climb(timed)

    def _fastest(self, count: int) -> list[TimedPlan]:
        """The fastest plans so far, of different groups of devices."""
        of_groups: dict[tuple[str, int, tuple[int, ...]], TimedPlan] = {}
        for timed in sorted((each for each in self._timed.values() if each), key=lambda each: each.step_ns):
            plan = timed.plan
            of_groups.setdefault((plan.schedule, plan.microbatch_size, plan.counts), timed)
        return list(of_groups.values())[:count]

    def _time(self, plan: LinePlan) -> TimedPlan | None:
        """Times a plan, once."""
        if plan not in self._timed:
            self.deadline.check()
            self._num_actions += 2 * len(plan.counts) * (self.line.options.minibatch_size // plan.microbatch_size)
            timed = self._timed[plan] = self.line.time(plan)
            if timed is not None and (self.best is None or timed.step_ns < self.best.step_ns):
                self.best = timed
            if self.progress and self.best is not None:
                best_ns = self.best.step_ns
                self.progress(len(self._timed), best_ns, min(self.bound_ns, best_ns))
        return self._timed[plan]

    @property
    def _is_over(self) -> bool:
        return self.best is not None and (self.best.step_ns <= self.bound_ns or self._num_actions > self._max_actions)

    def _raise_bound(self, deadline: Deadline) -> list[PrefixBound]:
        """Step 2: the bound is the smallest over the problems, so the problem with the smallest is always the next.

        Returns the problems. Invariant: no plan of a problem is faster than its `bound_ns`.
        """
        problems = list(self._problems())
        high_ns = dict.fromkeys(problems, INF)
        enough_ns = INF if self.rival is None else self.rival.lower_bound_ns
        num_left = MAX_BOUND_WORK // len(self.line.cluster.devices) ** 2
        with suppress(OutOfTime):
            while self.best is not None and (num_left > 0 or self.deadline.is_given):
                deadline.check()
                lowest = min(problems, key=lambda problem: problem.bound_ns)
                low_ns, reached_ns = lowest.bound_ns, max(problem.bound_ns for problem in problems)
                high = min(high_ns[lowest], self.best.step_ns)
                # Where the relaxation leaves a large gap at best, that of pivots goes on.
                has_pivots = lowest.is_alike and high * (1 + PIVOT_GAPS[0] / 100) < self.best.step_ns
                precision = COARSE_PRECISION if has_pivots else BOUND_PRECISION
                if high - low_ns <= low_ns // precision or low_ns >= enough_ns:
                    break
                # What is proven of one problem often holds for the next; below the best plan most is infeasible.
                is_behind = low_ns + low_ns // BOUND_PRECISION < reached_ns < high
                limit_ns = reached_ns - 1 if is_behind else (low_ns + 3 * high) // 4
                if low_ns < enough_ns <= min(high, limit_ns):
                    limit_ns = enough_ns - 1
                if self._path(lowest, limit_ns, deadline) is not None:
                    high_ns[lowest] = limit_ns
                    parts = self._parts(lowest)
                    if parts:
                        problems = [problem for problem in problems if problem is not lowest] + parts
                        high_ns |= dict.fromkeys(parts, INF)
                self.bound_ns = max(self.bound_ns, min(problem.bound_ns for problem in problems))
                num_left -= 1
        return problems

    def _raise_by_pivots(self, problems: Sequence[PrefixBound], deadline: Deadline) -> None:
        """Step 3: of alike devices, whether any plan leaves only a small gap, with what the largest stage brings about.

        A problem for which the bound of another one is too high a goal has the next lower one, and so have all others.
        """
        if self.best is None or not all(problem.is_alike for problem in problems):
            return
        best_ns = self.best.step_ns if self.rival is None else min(self.best.step_ns, self.rival.objective_ns)
        goals_ns = [goal for goal in (int(best_ns / (1 + gap / 100)) for gap in PIVOT_GAPS) if goal > self.bound_ns]
        if self.rival is not None:
            goals_ns = sorted({min(goal, self.rival.lower_bound_ns - 1) for goal in goals_ns}, reverse=True)
        with suppress(OutOfTime):
            for problem in sorted(problems, key=lambda each: each.bound_ns):
                if not goals_ns or problem.bound_ns > goals_ns[0]:
                    continue
                bound = PivotBound(problem, best_ns / LEVELS_OF_STEP, deadline)
                while goals_ns and problem.bound_ns <= goals_ns[0] and bound.is_feasible(goals_ns[0], deadline):
                    goals_ns.pop(0)
                if goals_ns:
                    problem.bound_ns = max(problem.bound_ns, goals_ns[0] + 1)
        self.bound_ns = max(self.bound_ns, min(problem.bound_ns for problem in problems))

    def _problems(self) -> Iterator[PrefixBound]:
        """The relaxations, one for each schedule and micro-batch size."""
        for size in self.sizes:
            for schedule in self.schedules:
                yield self._problem(schedule, size, (1, self._most_replicas(size)), self.bound_ns)

    def _parts(self, problem: PrefixBound) -> list[PrefixBound]:
        """GPipe: relaxations for a few ranges of the replicas of the last stage, on which its bound depends."""
        most = self._most_replicas(problem.size)
        if problem.schedule != "gpipe" or problem.last_replicas != (1, most) or most < LAST_STAGE_GROWTH:
            return []
        powers = [LAST_STAGE_GROWTH**i for i in range(most.bit_length()) if LAST_STAGE_GROWTH**i <= most]
        ranges = [(fewest, min(LAST_STAGE_GROWTH * fewest - 1, most)) for fewest in powers]
        return [self._problem(problem.schedule, problem.size, each, problem.bound_ns) for each in ranges]

    def _problem(self, schedule: str, size: int, last_replicas: tuple[int, int], bound_ns: int) -> PrefixBound:
        num_devices = len(self.line.cluster.devices)
        problem = PrefixBound(self.line, schedule, size, num_devices, last_replicas=last_replicas)
        problem.bound_ns = bound_ns
        return problem

    def _most_replicas(self, size: int) -> int:
        most = min(len(self.line.cluster.devices), self.line.options.minibatch_size // size)
        return most if self.line.options.replicas else 1

    def _path(self, problem: PrefixBound, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """The stages of the relaxation within a step time, which are timed; without any the bound rises."""
        path = problem.path(limit_ns, deadline)
        if path is None:
            problem.bound_ns = max(problem.bound_ns, limit_ns + 1)
        elif not self._is_over and self._num_slow_paths < MAX_SLOW_PATHS:
            timed = self._time(path)
            assert self.best is not None
            is_slow = timed is None or timed.step_ns > SLOW * self.best.step_ns
            self._num_slow_paths = self._num_slow_paths + 1 if is_slow else 0
        return path

    def _equal_groups(self) -> None:
        """Step 4: bisection over plans with equal groups, beginning with those of the best naive plans."""
        num_devices = len(self.line.cluster.devices)
        for timed in self._fastest(2 * NUM_CLIMBED):
            plan, replicas = timed.plan, timed.plan.counts[0]
            if set(plan.counts) != {replicas} or sum(plan.counts) != num_devices:
                continue
            problem = PrefixBound(self.line, plan.schedule, plan.microbatch_size, num_devices, only_replicas=replicas)
            low_ns, high_ns = self.bound_ns, timed.step_ns
            while high_ns - low_ns > low_ns // BOUND_PRECISION and not self._is_over:
                middle_ns = (low_ns + high_ns) // 2
                if self._path(problem, middle_ns, self.deadline) is None:
                    low_ns = middle_ns
                else:
                    high_ns = middle_ns

    def _hill_climb(self, timed: TimedPlan) -> None:
        """Step 5: moves one cut at a time wherever that helps, until no move does."""
        index = {cut: boundary for boundary, cut in enumerate(self.line.cuts)}
        improved = True
        while improved and not self._is_over:
            improved = False
            for s in range(1, len(timed.plan.cuts) - 1):
                for move in [sign * size for size in CUT_MOVES for sign in (-1, 1)]:
                    moved = self._moved(timed.plan, s, index[timed.plan.cuts[s]] + move)
                    if moved is None or self._is_over:
                        continue
                    other = self._time(moved)
                    if other is not None and other.step_ns < timed.step_ns:
                        timed, improved = other, True

    def _moved(self, plan: LinePlan, s: int, boundary: int) -> LinePlan | None:
        """The plan with one cut at another boundary, None if a stage would be empty."""
        if not 0 < boundary < len(self.line.cuts) - 1:
            return None
        cut = self.line.cuts[boundary]
        if not plan.cuts[s - 1] < cut < plan.cuts[s + 1]:
            return None
        return LinePlan(
            cuts=(*plan.cuts[:s], cut, *plan.cuts[s + 1 :]),
            counts=plan.counts,
            schedule=plan.schedule,
            microbatch_size=plan.microbatch_size,
        )
