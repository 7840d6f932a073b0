"""Plans for clusters or sizes that differ little, each near its lower bound at a small part of the price of a search.

A full search spends most of its time on the last percent. Here a plan of one point is tried at the others, its cuts are
moved, and a short branch and bound per point finds what is faster and proves how much faster any plan can be.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.branch_and_bound.problem import SearchResult
from bapipe.planner.branch_and_bound.search import best_below
from bapipe.planner.branch_and_bound.space import search_space
from bapipe.planner.compute.deadline import UNLIMITED, deadline_of
from bapipe.planner.device_line.best_naive import best_naive
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.search import has_many_devices
from bapipe.planner.exact_search import solution_of, space_of_problems
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes, named_schedules
from bapipe.planner.long_chain.bisection import is_long_chain
from bapipe.planner.results.solution import Solution, make_plan
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.planner.stages.intervals import INF
from bapipe.schedules import SCHEDULES

MAX_GAP = 0.005
"""The search of a point ends when its plan exceeds the lower bound by no more than this share of it."""

MAX_NODES = 300
"""Node budget of the search of a point."""

MAX_LAYERS = 1_000
"""Of more layers, tables of all stages that a point may have take more time and memory than its plan."""

MAX_MOVES = 100
"""Maximum number of plans with moved cuts that are timed per point."""

Progress = Callable[[int, Callable[[], Plan | None]], None]
"""Called when another point has been searched, with its number and what returns its plan so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A cluster, and the options of a plan for it."""

    cluster: Cluster
    options: PlanOptions


def can_plan_nearby(profiles: ProfilesByKind, points: Sequence[Point]) -> bool:
    """Returns whether the branch and bound is the search for all these points."""
    num_layers = len(next(iter(profiles.values())).layers)
    return num_layers <= MAX_LAYERS and all(
        all(name in SCHEDULES for name in point.options.schedules)
        and not has_many_devices(
            point.cluster,
            named_schedules(point.options),
            num_layers=num_layers,
            minibatch_size=point.options.minibatch_size,
        )
        for point in points
    )


def plans_nearby(
    profiles: ProfilesByKind, points: Sequence[Point], progress: Progress
) -> list[Plan | BapipeError | None]:
    """Returns for each point a plan with its lower bound; why there is none; or None if only a full search can tell.

    The bounds hold for plans whose layers are cut in the profile's order.

    Args:
        points: in an order in which neighbours differ little: the plan of each is tried at the next.
    """
    found = [_begin(profiles, point) for point in points]
    begun = [each for each in found if isinstance(each, _PointSearch)]
    _try_plans_of_neighbours(begun)
    for number, search in enumerate(found):
        if isinstance(search, _PointSearch):
            search.move_cuts()
            search.search()
            progress(number, search.plan)
    _try_plans_of_neighbours(begun)
    return [each if isinstance(each, BapipeError) else each.plan() for each in found]


def _begin(profiles: ProfilesByKind, point: Point) -> "_PointSearch | BapipeError":
    try:
        return _PointSearch(profiles, point)
    except BapipeError as error:
        return error


def _try_plans_of_neighbours(searches: "Sequence[_PointSearch]") -> None:
    """Tries the best plan of each search at the next one, forwards and then backwards."""
    for before, after in [*pairwise(searches), *pairwise(searches[::-1])]:
        after.try_plan(before.best)


class _PointSearch:
    """The best plan of a point so far, and what is proven about all its plans."""

    def __init__(self, profiles: ProfilesByKind, point: Point) -> None:
        self._profiles, self._options = profiles, point.options
        self._cluster = point.cluster.sequential
        check_inputs(profiles, self._cluster, self._options)
        self._line = DeviceLine(profiles, self._cluster, self._options)
        sizes, schedules = microbatch_sizes(profiles, self._cluster, self._options), named_schedules(self._options)
        self._sizes = sizes
        self.best: TimedPlan | None = best_naive([self._line], schedules, sizes, UNLIMITED)
        self._space = search_space(profiles, self._cluster, self._options)
        self._bound_ns = step_bound_ns(profiles, self._cluster, self._options)
        # A plan of the search, whose devices may be in another order than the cluster's.
        self._found: Solution | None = None

    @property
    def step_ns(self) -> int:
        """The step time of the fastest plan known."""
        known = [self.best.step_ns] if self.best else []
        return min([*known, *([self._found.prediction.step_ns] if self._found else [])], default=INF)

    def try_plan(self, other: TimedPlan | None) -> None:
        """Takes the plan of another point if it fits here and is faster."""
        if other is not None and sum(other.plan.counts) <= len(self._cluster.devices):
            self._time_all([other.plan])

    def move_cuts(self) -> None:
        """Moves single cuts of the best plan as long as that makes it faster."""
        num_left = MAX_MOVES
        while self.best is not None and num_left > 0:
            moved = list(_with_moved_cuts(self.best.plan, self._line.cuts))[:num_left]
            num_left -= len(moved)
            if not self._time_all(moved):
                return

    def search(self) -> None:
        """Searches for a faster plan, and proves a lower bound."""
        problems = self._space.problems
        if is_long_chain(problems):
            return
        result, bound_ns = best_below(
            problems, self.step_ns, max_gap=MAX_GAP, max_nodes=MAX_NODES, deadline=deadline_of(None)
        )
        self._bound_ns = max(self._bound_ns, bound_ns)
        if result is not None:
            space = space_of_problems(self._space, self._profiles, self._cluster, self._options)
            self._found = solution_of(self._profiles, result, self._options.minibatch_size, space)
            self._time_all([_line_plan(result)])

    def plan(self) -> Plan | None:
        """Returns the fastest plan known, None if there is none."""
        solution = self._found
        if self.best is not None and (solution is None or self.best.step_ns < solution.prediction.step_ns):
            space = space_of_problems(self._space, self._profiles, self._cluster, self._options)
            solution = self._line.solution(self.best, self._bound_ns, space)
        if solution is None:
            return None
        return make_plan(replace(solution, lower_bound_ns=min(self._bound_ns, solution.prediction.step_ns)))

    def _time_all(self, plans: Iterable[LinePlan]) -> bool:
        """Returns whether one of some plans fits and is faster than the best one, which it then is."""
        before = self.best
        for plan in plans:
            if plan.microbatch_size not in self._sizes:
                continue
            timed = self._line.time(plan)
            if timed is not None and (self.best is None or timed.step_ns < self.best.step_ns):
                self.best = timed
        return self.best is not before


def _with_moved_cuts(plan: LinePlan, cuts: Sequence[int]) -> Iterator[LinePlan]:
    """Yields a plan with each of its cuts moved to the allowed ones before and after, and some further away."""
    at = [cuts.index(cut) for cut in plan.cuts]
    for stage in range(1, len(at) - 1):
        for far in (-4, -1, 1, 4):
            place = at[stage] + far
            if at[stage - 1] < place < at[stage + 1]:
                yield replace(plan, cuts=(*plan.cuts[:stage], cuts[place], *plan.cuts[stage + 1 :]))


def _line_plan(result: SearchResult) -> LinePlan:
    return LinePlan(
        cuts=tuple(result.layout.cuts),
        counts=tuple(placement.num_replicas for placement in result.layout.placements),
        schedule=result.problem.schedule,
        microbatch_size=result.problem.microbatch_size,
    )
