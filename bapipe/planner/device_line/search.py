"""Plans for many devices: a lower bound by bisection over prefixes of the devices, and the best of the plans near it.

First, `_time_first_plans`: naive plans, equal groups of devices, cut evenly; if memory is tight, with cuts moved so
that they fit; and stages that grow from the first to the last, so that all end at the same time. Then, in this order:

1F1B and GPipe with replicas (`_climb_and_raise_by_rings`)

    _climb                 local search from the best plans over cuts and numbers of devices, for as long as it helps
    _raise_by_rings        bisection by ranges of the number of cuts and of replicas, with the rings of early stages
                           after later backwards
    _climb_on              the rest of a time limit: stages on single devices, and longer climbs while they help; then
                           `_raise_by_rings` once more

Other schedules, and stages on single devices (`_climb_and_raise`)

    _climb                 as above, by estimates only
    raise_bound            of `PrefixBisection`; the stages that the relaxation chooses are also timed
    time_equal_groups      of `PrefixBisection`, with replicas: the relaxation with equal numbers of them, for cuts that
                           suit the order of the stages. Without replicas, or if transfers are long, `_raise_by_cuts`
    _climb                 from the best of the plans found since
    _raise_by_cuts         bisection by ranges of the number of cuts, with the transfers over all of them; without
                           replicas, the stages that its relaxation chooses are also timed
    _climb_on              as above

If only a bound above a rival's matters, the bounds come first. Budgets are counted in simulated actions and in
estimates, so that results do not depend on the speed of the machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, product
from math import inf

from bapipe.formats.cluster import Cluster
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.device_line.climb import USEFUL, Climbs, Estimated
from bapipe.planner.device_line.cut_ranges import CutRanges, PlanRelaxation
from bapipe.planner.device_line.estimate import ESTIMATED
from bapipe.planner.device_line.first_plans import first_fitting, first_plans
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.prefix_bisection import PrefixBisection
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_goals import RingGoals
from bapipe.planner.device_line.ring_ranges import RingRanges
from bapipe.planner.device_line.single_devices import SingleDevices
from bapipe.planner.device_line.timed_plans import Shape, TimedPlans, shape_of
from bapipe.planner.results.solution import Rival
from bapipe.planner.stages.intervals import INF
from bapipe.progress import SearchProgress
from bapipe.schedules import SCHEDULES

MIN_DEVICES = 33
"""The minimum number of devices for which this search is used, ..."""

MAX_LAYER_REPLICAS = 64
"""... unless the number of layers times the maximum number of replicas of a stage is at most this: then tables of
placements are small, however many devices there are."""

MAX_ACTIONS = 1_500_000
"""Budget of simulated actions, without a time limit: some twenty seconds with the tables of their orders."""

MAX_CUTS_WORK = 80 * 512**2
"""Budget of the bounds by numbers of cuts, without a time limit, in squared devices for each limit that is decided."""

LONG_TRANSFERS = 0.05
"""If the transfers of a micro-batch take at least this part of the best step, bounds are raised mainly by numbers of
cuts."""

NEAR_BOUND = 1.01
"""Bounds by rings are raised if the best step is more than this multiple of the bound."""

MAX_TRIED = 6_000_000_000
"""Budget of the bounds by rings, without a time limit, in stages that are tried after prefixes."""

TRIED_PER_S, MEASURED = 46_000_000, 20_000_000
"""The assumed rate of those, on two processors, until `MEASURED` of them have been tried; then it is measured."""

RAISED_PARTS = 4 / 3
"""Bounds by rings get 1/`RAISED_PARTS` of what remains of a given time limit after the first climbs."""

MIN_TRIED = 3
"""How many first plans are timed even if that takes more than its share of the time."""

MAX_USELESS = 2
"""Climbs end for good after this many rounds in a row without a useful gain."""

MAX_RUNNERS, NUM_CLIMBED = 12, 2
"""The maximum number of plans from which climbs begin: of those whose steps are estimated, and of others."""


def has_many_devices(cluster: Cluster, schedules: Sequence[str], *, num_layers: int, minibatch_size: int) -> bool:
    """Returns whether devices are too many for tables of placements, and every stage has devices of its own."""
    num_devices = len(cluster.devices)
    is_large = num_layers * min(num_devices, minibatch_size) > MAX_LAYER_REPLICAS
    return num_devices >= MIN_DEVICES and is_large and all(name in SCHEDULES for name in schedules)


class LineSearch:
    """The search of this module."""

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
        """`bound_ns` is a lower bound on every step; a bound above that of a `rival` need not be raised further.

        The search ends before the deadline by the time that building its result takes.

        Args:
            lines: the same devices in several orders.
            is_last: whether no other search follows, so that this one may use all that remains of a time limit.
        """
        deadline = deadline.share(1)
        self.lines, self.schedules, self.sizes, self.rival, self.deadline = lines, schedules, sizes, rival, deadline
        self._may_climb_on = is_last and rival is None and deadline.is_given
        self._num_devices, self._minibatch_size = len(lines[0].cluster.devices), lines[0].options.minibatch_size
        self._has_replicas = lines[0].options.replicas
        self._plans = TimedPlans(bound_ns, 10**15 if deadline.is_given else MAX_ACTIONS, deadline, progress)
        self._bisection = PrefixBisection(self._plans, self._num_devices, deadline)
        self._climbs = Climbs(self._plans.time)
        self._cut_ranges: CutRanges | None = None
        self._ring_ranges: RingRanges | None = None
        self._estimated: list[Estimated] = []

    @property
    def best(self) -> TimedPlan | None:
        """The fastest plan that fits, None before there is one."""
        return self._plans.best

    @property
    def bound_ns(self) -> int:
        """A lower bound on every step."""
        return self._plans.bound_ns

    def run(self) -> None:
        """Searches until budget or time are used up, or the best plan attains the bound."""
        with suppress(OutOfTime):
            self._time_first_plans()
            problems = list(self._problems())
            if all(problem.has_rings for problem in problems):
                self._climb_and_raise_by_rings(problems)
            else:
                self._climb_and_raise(problems)

    def _time_first_plans(self) -> None:
        """Times first plans, those with the shortest estimates first."""
        plans, of_time = self._plans, self.deadline.share(4)
        first = first_plans(self.lines, self.schedules, self.sizes, self._climbs, self.deadline.share(4))
        self._estimated, plans.is_memory_tight = first.estimated, first.is_memory_tight
        for number, (line, plan) in enumerate(first.ranked):
            is_enough = of_time.is_over if of_time.is_given else plans.num_actions > plans.max_actions // 4
            if number >= MIN_TRIED and (is_enough or self.rival is not None):
                break
            plans.time_unless_slow(line, plan, self._climbs)
            if self._has_exact_best:
                break
        if self.best is None or plans.is_memory_tight:
            of_time = self.deadline.share(6)

            def is_over() -> bool:
                return of_time.is_over and (self.best is not None or self.deadline.is_over)

            for line, plan in first_fitting(self.lines, self.schedules, self.sizes, is_over):
                plans.time_unless_slow(line, plan, self._climbs)

    @property
    def _has_exact_best(self) -> bool:
        """Whether the best plan's step is close to its estimate; then the estimates of these schedules are trusted."""
        if self.best is None or not all(schedule in ESTIMATED for schedule in self.schedules):
            return False
        return self._climbs.is_exact(self.best)

    def _climb_and_raise_by_rings(self, problems: Sequence[PlanRelaxation]) -> None:
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

    def _climb_and_raise(self, problems: list[PlanRelaxation]) -> None:
        """Climbs, and raises the bound without rings: of other schedules, and of stages on single devices."""
        if self.rival is None:
            self._climb(self.deadline.share(3), may_simulate=False)
        # With several orders there are too many ranges for that.
        is_plain = self.rival is None and self._has_replicas and len(self.lines) == 1
        starts_with_cuts = is_plain and self._bisection.has_long_transfers(problems[0], LONG_TRANSFERS)
        enough_ns = INF if self.rival is None else self.rival.lower_bound_ns
        parts = self._bisection.raise_bound(problems, enough_ns, self.deadline.share(2))
        if starts_with_cuts:
            self._raise_by_cuts(problems, self.deadline.share(2))
        if self.rival is not None and self.bound_ns >= self.rival.lower_bound_ns:
            return
        with suppress(OutOfTime):
            if not self._has_replicas:
                self._raise_by_cuts(parts, self.deadline.share(4))
            elif not starts_with_cuts:
                starts = self._plans.fastest()[: 2 * NUM_CLIMBED]
                self._bisection.time_equal_groups(starts, self.deadline.share(8))
        self._climb(self.deadline.share(4))
        if self.rival is None:
            self._raise_by_cuts(parts, self.deadline.share(2 if self._may_climb_on else 1))
            self._climb_on()

    def _climb(self, deadline: Deadline, *, may_simulate: bool = True) -> None:
        """Climbs from the best plans.

        First those whose steps are estimated race. Then, if simulation is allowed, plans without exact estimates get
        half of the remaining time, and the best plan the rest.
        """
        runners, plans = self._runners(), self._plans
        self._climbs.race(runners, deadline.share(2), lambda: plans.is_over)
        if runners and plans.best is not None and self._climbs.is_exact(plans.best):
            self._climbs.walk_on(plans.best, deadline, lambda: plans.is_over)
        if not may_simulate:
            return
        others = (timed for timed in self._plans.fastest() if not self._climbs.is_exact(timed))
        starts = [timed for timed in islice(others, 2 * NUM_CLIMBED) if not self._climbs.has(timed)]
        self._climbs.from_plans(starts[:NUM_CLIMBED], deadline.share(2), lambda: self._plans.is_over)
        if self.best is not None and not (runners and self._climbs.is_exact(self.best)):
            self._climbs.from_plan(self.best, deadline, lambda: self._plans.is_over)

    def _runners(self) -> list[tuple[DeviceLine, LinePlan]]:
        """Returns the plans from which walks begin: the fastest of each shape, by simulation or estimate."""
        timed = [(each.step_ns, each.line, each.plan) for each in self._plans.that_fit()]
        of_shapes: dict[Shape, tuple[DeviceLine, LinePlan]] = {}
        for _, line, plan in sorted([*timed, *self._estimated], key=lambda each: each[0]):
            if self._climbs.can_walk(line, plan):
                of_shapes.setdefault(shape_of(line, plan), (line, plan))
        return list(of_shapes.values())[:MAX_RUNNERS]

    def _climb_on(self) -> None:
        """Climbs again, each time for twice as long, while the time limit allows and it helps."""
        if self.best is None or self._plans.is_over or not self._may_climb_on:
            return
        if self._has_replicas:
            with suppress(OutOfTime):
                kinds = list(product(self.lines, self.schedules, self.sizes))
                self._bisection.time_single_devices(kinds, self.best, self._climbs, self.deadline.share(4))
        num_doublings = num_useless = 0
        while not self._plans.is_over and num_useless < MAX_USELESS:
            self.deadline.check()
            num_doublings, before_ns = num_doublings + 1, self.best.step_ns
            self._climbs = Climbs(self._plans.time, num_doublings)
            self._climb(self.deadline)
            num_useless = num_useless + 1 if self.best.step_ns > before_ns * USEFUL else 0

    def _raise_by_cuts(self, problems: Sequence[PlanRelaxation], deadline: Deadline) -> None:
        """Raises the bound by ranges of the number of cuts, for which the relaxation counts more transfers."""
        if self.best is None or (self._has_replicas and not self._bisection.has_long_transfers(problems[0])):
            return
        asked = iter(range(MAX_CUTS_WORK // self._num_devices**2))
        if self._cut_ranges is None:
            self._cut_ranges = CutRanges(problems, len(self.best.plan.counts) - 1)
        with suppress(OutOfTime):
            self._cut_ranges.raise_bound(
                self.best.step_ns, deadline, lambda: self.deadline.is_given or next(asked, None) is not None
            )
        self._plans.raise_bound(self._cut_ranges.bound_ns)
        if not self._has_replicas:
            self._bisection.time_paths(self._cut_ranges.ranges, self._climbs, self.deadline.share(4))

    def _raise_by_rings(self, problems: Sequence[PlanRelaxation], deadline: Deadline) -> None:
        """Raises the bound by ranges, counting the rings of early stages after the backwards of later ones."""
        if self.best is None or self.best.step_ns <= self.bound_ns * NEAR_BOUND:
            return
        if self._ring_ranges is None:
            prefixes = [problem for problem in problems if isinstance(problem, PrefixBound)]
            self._ring_ranges = RingRanges(prefixes, self.bound_ns, self.best)
        ranges = self._ring_ranges
        at_first_s, tried_before = deadline.remaining_s or 0.0, ranges.num_tried

        def left() -> float:
            left_s, in_time = deadline.remaining_s, inf
            if left_s is not None:
                num_tried, took_s = ranges.num_tried - tried_before, at_first_s - left_s
                in_time = left_s * (num_tried / took_s if num_tried > MEASURED and took_s > 0 else TRIED_PER_S)
            return in_time if self.deadline.is_given else min(in_time, MAX_TRIED - ranges.num_tried)

        high_ns = self.best.step_ns if self.rival is None else min(self.best.step_ns, self.rival.lower_bound_ns)
        with suppress(OutOfTime):
            if self.rival is None or not ranges.is_refuted(high_ns - 1, deadline, left):
                RingGoals(ranges=ranges, high_ns=high_ns, deadline=deadline, left=left).raise_bound()
        self._plans.raise_bound(ranges.bound_ns)

    def _problems(self) -> Iterator[PlanRelaxation]:
        """The relaxations, one for each order of the devices, schedule and micro-batch size."""
        for line, size, schedule in product(self.lines, self.sizes, self.schedules):
            problem: PlanRelaxation
            if self._has_replicas:
                last_replicas = 1, min(self._num_devices, self._minibatch_size // size)
                problem = PrefixBound(line, schedule, size, self._num_devices, last_replicas=last_replicas)
            else:
                problem = SingleDevices(line, schedule, size)
            problem.bound_ns = self.bound_ns
            yield problem
