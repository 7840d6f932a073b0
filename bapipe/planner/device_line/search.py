"""Plans for many devices: a lower bound by bisection over prefixes of the devices, and the best of the plans near it.

    1. first plans       naive ones, equal groups of devices, cut evenly; where memory is tight, with cuts moved so that
                         they fit; and stages that grow from the first to the last, so that their sums end at one time
    2. climb             the best plans change their cuts and their numbers of devices for as long as that helps

1F1B and GPipe with replicas:

    3. raise_by_rings    bisection by ranges of the number of cuts and of replicas, with the rings of early stages
                         behind later backwards

Other schedules, and stages on single devices:

    3. raise_bound       bisection; the stages that the relaxation chooses are timed, too
    4. equal_groups      the relaxation with equal numbers of replicas: cuts that suit the order of the stages;
                         without replicas, step 6, and the stages that its relaxation chooses are timed
    5. climb             from the best of the plans found since
    6. raise_by_cuts     bisection by ranges of the number of cuts, with the transfers over all of them; with replicas
                         and long transfers also before step 5, and then step 4 is left out

All:

    7. climb_on          the rest of a time limit: stages on single devices, and longer climbs while they help; then
                         step 3 again, if it was not done

If only a bound above that of a rival is of use, the bounds come first. Budgets are counted in simulated actions and in
estimates, so that results do not depend on the speed of the machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, product
from math import inf, isinf

from bapipe.formats.cluster import Cluster
from bapipe.planner.branch_and_bound.intervals import INF
from bapipe.planner.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.climb import Climbs
from bapipe.planner.device_line.cut_ranges import CutRanges, Relaxation
from bapipe.planner.device_line.estimate import ESTIMATED
from bapipe.planner.device_line.fitting_cuts import fitting_plans
from bapipe.planner.device_line.growing_stages import growing_stages
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_ranges import RingRanges
from bapipe.planner.device_line.single_devices import SingleDevices
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

BOUND_PRECISION = 200
"""Bisection ends at one part in so many."""

COARSE_PRECISION = 60
"""... or in so many where other bounds follow."""

MAX_CUTS_WORK = 80 * 512**2
"""Budget of the bounds by numbers of cuts, without a time limit, in the same unit, ..."""

MIN_TRANSFERS, LONG_TRANSFERS = 0.01, 0.05
"""... which are raised where the transfers of a micro-batch take this part of the best step; and nearly alone from that
part on."""

OTHER_GAP = 1.05
"""The bisection is coarse if it can leave no smaller gap than this, and other bounds follow."""

NEAR_BOUND = 1.01
"""Bounds by rings are raised where the best step is more than so many times the bound."""

MAX_TRIED, TRIED_PER_S = 3_500_000_000, 46_000_000
"""Budget of the bounds by rings, without a time limit, in stages that are tried behind prefixes; and so many are tried
in a second by two processors, about."""

RAISED_PARTS = 4 / 3
"""Bounds by rings have one part in so many of what is left of a given time limit behind the first climbs."""

MAX_ESTIMATED = 400
"""So many naive plans are estimated to begin with the best ones."""

MIN_TRIED = 3
"""So many naive plans are timed also if that takes more than its share of the time."""

NUM_FITTING = 6
"""The number of plans of each order of the devices that are tried where memory is tight."""

MAX_SLOW_PATHS = 3
"""So many of the relaxation's stages are timed without any as fast as the best plan and this much:"""

SLOW = 1.2

NUM_PATHS = 16
"""The number of ranges of the number of cuts whose stages by the relaxation are timed, within ..."""

PATH_PERCENTS = (101, 104, 110)
"""... so many percent of their bounds."""

SINGLE_PRECISION = 50
"""Stages on single devices are those within one part in so many of what the relaxation allows."""

MAX_USELESS, USEFUL = 2, 0.999
"""Climbs end for good after so many rounds in a row that do not bring the step to this part of it."""

MAX_RUNNERS, NUM_CLIMBED = 12, 2
"""Climbs begin from so many plans whose steps are estimated, and from so many others."""


def has_many_devices(cluster: Cluster, schedules: Sequence[str], *, num_layers: int, minibatch_size: int) -> bool:
    """Returns whether the devices are too many for tables of placements, and every stage has devices of its own."""
    num_devices = len(cluster.devices)
    is_large = num_layers * min(num_devices, minibatch_size) > MAX_LAYER_REPLICAS
    return num_devices >= MIN_DEVICES and is_large and all(name in SCHEDULES for name in schedules)


Shape = tuple[DeviceLine, str, int, int]
"""The order of the devices, schedule, micro-batch size and number of stages of plans."""


def _shape(line: DeviceLine, plan: LinePlan) -> Shape:
    return line, plan.schedule, plan.microbatch_size, len(plan.counts)


class LineSearch:
    """The plans timed, and the bound so far.

    Attributes:
        best: the fastest plan that fits, None before there is one.
        bound_ns: a time that no step beats.
    """

    def __init__(
        self,
        lines: Sequence[DeviceLine],
        schedules: Sequence[str],
        sizes: Sequence[int],
        *,
        bound_ns: int,
        deadline: Deadline,
        progress: SearchProgress | None = None,
        rival: Rival | None = None,
        is_last: bool = True,
    ) -> None:
        """`bound_ns` is a time that no step beats; of a bound above that of a `rival` nothing is gained.

        Args:
            lines: the same devices in several orders.
            is_last: whether no other search follows, so that what is left of a time limit is for this one.
        """
        self.lines, self.schedules, self.sizes, self.rival = lines, schedules, sizes, rival
        self._may_climb_on = is_last and rival is None and deadline.is_given
        self._num_devices, self._minibatch_size = len(lines[0].cluster.devices), lines[0].options.minibatch_size
        self.deadline, self.progress = deadline, progress
        self.best: TimedPlan | None = None
        self.bound_ns = bound_ns
        self._climbs = Climbs(self._time)
        self._cut_ranges: CutRanges | None = None
        self._ring_ranges: RingRanges | None = None
        self._timed: dict[tuple[DeviceLine, LinePlan], TimedPlan | None] = {}
        self._estimated: list[tuple[float, DeviceLine, LinePlan]] = []
        self._num_actions = self._num_slow_paths = 0
        self._has_replicas = lines[0].options.replicas
        self._is_memory_tight = False  # whether a plan did not fit
        self._max_actions = 10**15 if deadline.is_given else MAX_ACTIONS

    def run(self) -> None:
        """Searches until the budget or the time is over, or the best plan attains the bound."""
        with suppress(OutOfTime):
            first = self.deadline.share(4)
            for number, (line, plan) in enumerate(self._first_plans(self.deadline.share(4))):
                is_over = first.is_over if first.is_given else self._num_actions > self._max_actions // 4
                if number >= MIN_TRIED and (is_over or self.rival is not None):
                    break
                self._time_unless_slow(line, plan)
                if self._has_exact_best:
                    break
            if self.best is None or self._is_memory_tight:
                self._time_fitting(self.deadline.share(6))
            problems = list(self._problems())
            if all(problem.has_rings for problem in problems):
                self._climb_and_raise_by_rings(problems)
            else:
                self._climb_and_raise(problems)

    @property
    def _has_exact_best(self) -> bool:
        """Whether the best plan is as fast as its estimate, as then all plans of these schedules are, about."""
        if self.best is None or not all(schedule in ESTIMATED for schedule in self.schedules):
            return False
        return self._climbs.is_exact(self.best)

    def _climb_and_raise_by_rings(self, problems: Sequence[Relaxation]) -> None:
        """Climbs, and raises the bound to what the relaxation with rings allows."""
        if self.rival is not None:
            self._raise_by_rings(problems, self.deadline.share(2))
            if self.bound_ns >= self.rival.lower_bound_ns:
                return
        self._climb(self.deadline.share(2))
        if self.rival is None:
            self._raise_by_rings(problems, self.deadline.share(RAISED_PARTS if self._may_climb_on else 1))
            self._climb_on()
            if self._may_climb_on:
                self._raise_by_rings(problems, self.deadline)

    def _climb_and_raise(self, problems: list[Relaxation]) -> None:
        """The same of other schedules and of stages on single devices."""
        if self.rival is None:
            self._climb(self.deadline.share(3), may_simulate=False)
        # Several orders have too many ranges for that.
        is_plain = self.rival is None and self._has_replicas and len(self.lines) == 1
        starts_with_cuts = is_plain and self._has_long_transfers(problems[0], LONG_TRANSFERS)
        parts = self._raise_bound(problems, self.deadline.share(2))
        if starts_with_cuts:
            self._raise_by_cuts(problems, self.deadline.share(2))
        if self.rival is not None and self.bound_ns >= self.rival.lower_bound_ns:
            return
        self._num_slow_paths = 0
        with suppress(OutOfTime):
            if not self._has_replicas:
                self._raise_by_cuts(parts, self.deadline.share(4))
            elif not starts_with_cuts:
                self._equal_groups(self.deadline.share(8))
        self._climb(self.deadline.share(4))
        if self.rival is None:
            self._raise_by_cuts(parts, self.deadline.share(2 if self._may_climb_on else 1))
            self._climb_on()

    def _climb(self, deadline: Deadline, *, may_simulate: bool = True) -> None:
        """Changes the cuts and the devices of the best plans.

        Those whose steps are estimated race. From others half of the time, then on from the best one.
        """
        runners = self._runners()
        self._climbs.race(runners, deadline.share(2), lambda: self._is_over)
        if not may_simulate:
            return
        others = (timed for timed in self._fastest() if not self._climbs.is_exact(timed))
        starts = [timed for timed in islice(others, 2 * NUM_CLIMBED) if not self._climbs.has(timed)]
        self._climbs.from_plans(starts[:NUM_CLIMBED], deadline.share(2), lambda: self._is_over)
        if self.best is not None and not (runners and self._climbs.is_exact(self.best)):
            self._climbs.from_plan(self.best, deadline, lambda: self._is_over)

    def _runners(self) -> list[tuple[DeviceLine, LinePlan]]:
        """The fastest plans by simulation or estimate that climbs walk from, of different shapes."""
        timed = [(each.step_ns, each.line, each.plan) for each in self._timed.values() if each is not None]
        of_shapes: dict[Shape, tuple[DeviceLine, LinePlan]] = {}
        for _, line, plan in sorted([*timed, *self._estimated], key=lambda each: each[0]):
            if self._climbs.can_walk(line, plan):
                of_shapes.setdefault(_shape(line, plan), (line, plan))
        return list(of_shapes.values())[:MAX_RUNNERS]

    def _climb_on(self) -> None:
        """Step 7: for as long as the time limit allows and that helps, climbs again, each time for twice as long."""
        if self.best is None or self._is_over or not self._may_climb_on:
            return
        if self._has_replicas:
            with suppress(OutOfTime):
                self._time_single_devices(self.best, self.deadline.share(4))
        num_doublings = num_useless = 0
        while not self._is_over and num_useless < MAX_USELESS:
            self.deadline.check()
            num_doublings, before_ns = num_doublings + 1, self.best.step_ns
            self._climbs = Climbs(self._time, num_doublings)
            self._climb(self.deadline)
            num_useless = num_useless + 1 if self.best.step_ns > before_ns * USEFUL else 0

    def _time_single_devices(self, best: TimedPlan, deadline: Deadline) -> None:
        """Step 7, also with replicas: the stages of the relaxation without them, those like the best first."""
        kinds = sorted(
            product(self.lines, self.schedules, self.sizes),
            key=lambda each: (
                (each[0] is not best.line) + (each[1] != best.plan.schedule) + (each[2] != best.plan.microbatch_size)
            ),
        )
        for line, schedule, size in kinds:
            problem = SingleDevices(line, schedule, size)
            low_ns, high_ns = self.bound_ns, best.step_ns
            while high_ns - low_ns > low_ns // SINGLE_PRECISION:
                middle_ns = (low_ns + high_ns) // 2
                if problem.is_refuted(middle_ns, deadline):
                    low_ns = middle_ns
                else:
                    high_ns = middle_ns
            path = problem.path(high_ns, deadline)
            if path is not None:
                self._time_unless_slow(line, path)

    def _first_plans(self, deadline: Deadline) -> list[tuple[DeviceLine, LinePlan]]:
        """Step 1: the naive and the growing plans of all lines, the smallest estimates first, and then the bounds.

        Those with bounds above an estimate have none. If the time for estimates is over before that, those without come
        in the order of the time that simulating them takes, as the smallest bounds are those of many stages.
        """
        bounded = [
            (bound_ns, line, plan)
            for line in self.lines
            for bound_ns, plan in naive_plans(line, self.schedules, self.sizes)
        ]
        estimated: list[tuple[float, DeviceLine, LinePlan]] = []
        least_ns, bounded = inf, sorted(bounded, key=lambda each: each[0])
        naive_deadline = deadline.share(2)
        for bound_ns, line, plan in bounded[:MAX_ESTIMATED]:
            if bound_ns > least_ns or naive_deadline.is_over:
                break
            estimated.append((self._climbs.estimate_ns(line, plan), line, plan))
            least_ns = min(least_ns, estimated[-1][0])
        self._is_memory_tight = any(isinf(estimate_ns) for estimate_ns, _, _ in estimated)
        num_naive = len(estimated)
        for line, schedule, size in product(self.lines, self.schedules, self.sizes) if self._has_replicas else ():
            step_ns = partial(self._climbs.estimate_ns, line)
            for estimate_ns, plan in growing_stages(line, schedule, size, step_ns, deadline):
                estimated.append((estimate_ns, line, plan))
        estimated.sort(key=lambda each: each[0])
        self._estimated = [each for each in estimated if not isinf(each[0])]
        others = bounded[num_naive:]
        if naive_deadline.is_over:
            others.sort(key=lambda each: each[1].num_actions(each[2]))
        ranked = [*estimated, *others]
        return [(line, plan) for _, line, plan in ranked]

    def _time_fitting(self, deadline: Deadline) -> None:
        """Step 1, where memory is tight: naive plans with cuts moved so that they fit, a few of each line."""
        plans = [fitting_plans(line, self.schedules, self.sizes) for line in self.lines]
        for _, (line, of_line) in product(range(NUM_FITTING), zip(self.lines, plans, strict=True)):
            if deadline.is_over and self.best is not None:
                break
            plan = next(of_line, None)
            if plan is not None:
                self._time_unless_slow(line, plan)

    def _time_unless_slow(self, line: DeviceLine, plan: LinePlan) -> None:
        """Times a plan unless its estimate is that of a slow one, or says that it does not fit."""
        if not self._climbs.is_slower(line, plan, INF if self.best is None else SLOW * self.best.step_ns):
            self._time(line, plan)
        elif self.best is None:
            self._is_memory_tight = True

    def _fastest(self) -> Iterator[TimedPlan]:
        """The plans so far, the fastest first, of different schedules and numbers of stages."""
        of_shapes: dict[Shape, TimedPlan] = {}
        for timed in sorted((each for each in self._timed.values() if each), key=lambda each: each.step_ns):
            of_shapes.setdefault(_shape(timed.line, timed.plan), timed)
        return iter(list(of_shapes.values()))

    def _time(self, line: DeviceLine, plan: LinePlan) -> TimedPlan | None:
        """Times a plan, once."""
        key = line, plan
        if key not in self._timed:
            self.deadline.check()
            self._num_actions += line.num_actions(plan)
            timed = self._timed[key] = line.time(plan)
            self._is_memory_tight |= timed is None
            if timed is not None and (self.best is None or timed.step_ns < self.best.step_ns):
                self.best = timed
            if self.progress and self.best is not None:
                best_ns = self.best.step_ns
                self.progress(len(self._timed), best_ns, min(self.bound_ns, best_ns))
        return self._timed[key]

    @property
    def _is_over(self) -> bool:
        return self.best is not None and (self.best.step_ns <= self.bound_ns or self._num_actions > self._max_actions)

    def _raise_bound(self, problems: list[Relaxation], deadline: Deadline) -> list[Relaxation]:
        """Step 3: the bound is the smallest over the problems, so the problem with the smallest is always the next.

        Returns the problems, some of them in parts. Invariant: no plan of a problem is faster than its `bound_ns`.
        """
        high_ns = dict.fromkeys(problems, INF)
        enough_ns = INF if self.rival is None else self.rival.lower_bound_ns
        num_left = len(self.lines) * MAX_BOUND_WORK // self._num_devices**2
        with suppress(OutOfTime):
            while self.best is not None and (num_left > 0 or self.deadline.is_given):
                deadline.check()
                lowest = min(problems, key=lambda problem: problem.bound_ns)
                low_ns, reached_ns = lowest.bound_ns, max(problem.bound_ns for problem in problems)
                # The bound of all is no higher than a limit that any problem keeps.
                high = min(*high_ns.values(), self.best.step_ns)
                # Where the relaxation leaves a large gap at best, other bounds go on.
                is_coarse = self._has_long_transfers(lowest) and high * OTHER_GAP < self.best.step_ns
                precision = COARSE_PRECISION if is_coarse else BOUND_PRECISION
                if high - low_ns <= low_ns // precision or low_ns >= enough_ns:
                    break
                # What is proven of one problem often holds for the next; below the best plan most is infeasible.
                is_behind = low_ns + low_ns // BOUND_PRECISION < reached_ns < high
                # Of unlike devices a limit that is refuted takes the least time.
                between_ns = (low_ns + 3 * high) // 4 if len(self.lines) == 1 else (low_ns + high) // 2
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
                self.bound_ns = max(self.bound_ns, min(problem.bound_ns for problem in problems))
                num_left -= 1
        return problems

    def _raise_by_cuts(self, problems: Sequence[Relaxation], deadline: Deadline) -> None:
        """Step 6: of plans with each number of cuts by themselves the relaxation knows more transfers."""
        if self.best is None or (self._has_replicas and not self._has_long_transfers(problems[0])):
            return
        asked = iter(range(MAX_CUTS_WORK // self._num_devices**2))
        if self._cut_ranges is None:
            self._cut_ranges = CutRanges(problems, len(self.best.plan.counts) - 1)
        with suppress(OutOfTime):
            self._cut_ranges.raise_bound(
                self.best.step_ns, deadline, lambda: self.deadline.is_given or next(asked, None) is not None
            )
        self.bound_ns = max(self.bound_ns, self._cut_ranges.bound_ns)
        if not self._has_replicas:
            self._time_paths(self._cut_ranges.ranges, self.deadline.share(4))

    def _time_paths(self, ranges: Sequence[Relaxation], deadline: Deadline) -> None:
        """Step 4, without replicas: the stages that the relaxation chooses near the lowest bounds of ranges."""
        lowest = sorted(ranges, key=lambda each: each.bound_ns)[:NUM_PATHS]
        with suppress(OutOfTime):
            for each, percent in product(lowest, PATH_PERCENTS):
                path = None if self._is_over else each.path(each.bound_ns * percent // 100, deadline)
                if path is not None:
                    self._time_unless_slow(each.line, path)

    def _has_long_transfers(self, problem: Relaxation, min_share: float = MIN_TRANSFERS) -> bool:
        """Whether the transfers of one micro-batch are such a part of the best step, if there is any."""
        if self.best is None or not isinstance(problem, PrefixBound):
            return self.best is not None
        return problem.round_trip_ns(len(self.best.plan.counts) - 1) > min_share * self.best.step_ns

    def _raise_by_rings(self, problems: Sequence[Relaxation], deadline: Deadline) -> None:
        """Step 3: bounds by ranges, also with the rings of early stages behind the backwards of later ones."""
        if self.best is None or self.best.step_ns <= self.bound_ns * NEAR_BOUND:
            return
        if self._ring_ranges is None:
            prefixes = [problem for problem in problems if isinstance(problem, PrefixBound)]
            self._ring_ranges = RingRanges(prefixes, self.bound_ns, self.best)
        ranges = self._ring_ranges

        def left() -> float:
            left_s = deadline.remaining_s
            in_time = inf if left_s is None else left_s * TRIED_PER_S
            return in_time if self.deadline.is_given else min(in_time, MAX_TRIED - ranges.num_tried)

        high_ns = self.best.step_ns if self.rival is None else min(self.best.step_ns, self.rival.lower_bound_ns)
        with suppress(OutOfTime):
            if self.rival is None or not ranges.is_refuted(high_ns - 1, deadline, left):
                ranges.raise_bound(high_ns, deadline, left)
        self.bound_ns = max(self.bound_ns, ranges.bound_ns)

    def _problems(self) -> Iterator[Relaxation]:
        """The relaxations, one for each order of the devices, schedule and micro-batch size."""
        for line, size, schedule in product(self.lines, self.sizes, self.schedules):
            problem: Relaxation
            if self._has_replicas:
                last_replicas = 1, min(self._num_devices, self._minibatch_size // size)
                problem = PrefixBound(line, schedule, size, self._num_devices, last_replicas=last_replicas)
            else:
                problem = SingleDevices(line, schedule, size)
            problem.bound_ns = self.bound_ns
            yield problem

    def _path(self, problem: Relaxation, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """The stages of the relaxation within a step time, which are timed; without any the bound rises."""
        path = problem.path(limit_ns, deadline)
        if path is None:
            problem.bound_ns = max(problem.bound_ns, limit_ns + 1)
        elif not self._is_over and self._num_slow_paths < MAX_SLOW_PATHS:
            timed = self._time(problem.line, path)
            assert self.best is not None
            is_slow = timed is None or timed.step_ns > SLOW * self.best.step_ns
            self._num_slow_paths = self._num_slow_paths + 1 if is_slow else 0
        return path

    def _equal_groups(self, deadline: Deadline) -> None:
        """Step 4: bisection over plans with equal groups, beginning with those of the best naive plans."""
        for timed in islice(self._fastest(), 2 * NUM_CLIMBED):
            plan, replicas = timed.plan, timed.plan.counts[0]
            if set(plan.counts) != {replicas} or sum(plan.counts) != self._num_devices:
                continue
            problem = PrefixBound(
                timed.line, plan.schedule, plan.microbatch_size, self._num_devices, only_replicas=replicas
            )
            low_ns, high_ns = self.bound_ns, timed.step_ns
            while high_ns - low_ns > low_ns // BOUND_PRECISION and not self._is_over:
                middle_ns = (low_ns + high_ns) // 2
                if self._path(problem, middle_ns, deadline) is None:
                    low_ns = middle_ns
                else:
                    high_ns = middle_ns
