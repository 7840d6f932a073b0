"""Long chains: a lower bound by bisection over a relaxation, and the best of many plans constructed near it.

If a chain can be cut at very many places, partial plans are too many to expand. `relaxation.py` decides for a step time
T whether any plan may be so fast; bisection finds the smallest such T, which no plan beats. The steps:

    1. construct_balanced  plans with equal numbers of replicas per stage, cut as evenly as possible, then with slightly
                           longer stages where that makes transfers shorter
    2. raise_bound         bisection, one micro-batch size after another; the relaxation's own paths are simulated, too
    3. hill_climb          the best plans move their cuts as long as the simulator says that it helps
    4. close_gap           if a gap remains, best-first search among the intervals that the relaxation leaves

The budget is counted in simulated actions, so that results do not depend on the speed of the machine.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.search import EVENT_DRIVEN_FACTOR, best_first
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.long_chain.balanced import BalancedCuts, uniform_pipelines
from bapipe.planner.long_chain.close_gap import close_gap
from bapipe.planner.long_chain.feasible_intervals import FeasibleIntervals
from bapipe.planner.long_chain.relaxation import Path, Relaxation
from bapipe.planner.stages.intervals import INF
from bapipe.planner.stages.placements import StagePlacement
from bapipe.planner.stages.stage_candidates import StageCostTable
from bapipe.progress import SearchProgress

MIN_BOUNDARIES = 300
"""Minimum number of boundaries of a long chain, for which this search is used."""

DEFAULT_MAX_ACTIONS = 12_000_000
"""Budget: actions that the simulator may run."""

ACTIONS_PER_NODE = 400
"""Simulated actions of this search, and of that for fixed placements, that take about as long as a node of a best-first
search, which takes longer than the simulation of its actions."""

PRECISION_DIVISOR = 400
"""Bisection ends when the limits differ by no more than 1 / `PRECISION_DIVISOR` of their value."""

BALANCE_SLACKS = (1.0, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2)
"""By how much stages may exceed the most even cut, for shorter transfers."""

MAX_GAP = 0.01
"""A best-first search follows if the best plan exceeds the bound by more than this share of it, ..."""

MAX_EXACT_INTERVALS = 20_000_000
"""... among no more intervals of all placements than this."""

NUM_CLIMBED = 4
"""The number of plans that are varied: cut in several ways, and improved by hill climbing."""

CUT_MOVES = (32, 16, 8, 4, 3, 2, 1)
"""By how many boundaries a cut is moved at once."""


def is_long_chain(problems: Sequence[Problem]) -> bool:
    """Returns whether there are too many boundaries for partial plans to be expanded one by one."""
    return any(problem.lower_bound.costs.intervals.num_boundaries >= MIN_BOUNDARIES for problem in problems)


def solve_long_chain(
    problems: Sequence[Problem],
    *,
    max_actions: int = DEFAULT_MAX_ACTIONS,
    max_exact_intervals: int = MAX_EXACT_INTERVALS,
    max_gap: float = MAX_GAP,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> SearchResult | None:
    """Returns the best layout found and a bound on all, None if nothing fits.

    Args:
        max_actions: after how many simulated actions the heuristics end.
        max_exact_intervals: among no more intervals of all placements a best-first search follows.
        max_gap: a best-first search follows if the best plan exceeds the bound by more than this share of it.
        deadline: ends the search with the best layout so far.

    Raises:
        OutOfTime: the deadline passed before any layout was found that fits.
    """
    search = _LongChainSearch(problems, max_actions, deadline, progress)
    try:
        search.construct_balanced()
        search.raise_bound()
        search.hill_climb()
    except OutOfTime as error:
        if search.result() is None:
            error.lower_bound_ns = search.bound_ns
            raise
    best = search.result()
    # No plan could be constructed. If the relaxation has none either, that proves that nothing fits.
    if best is None:
        if not search.may_fit:
            return None
        max_nodes = max_actions // ACTIONS_PER_NODE
        return best_first(problems, max_nodes=max_nodes, deadline=deadline, progress=progress)
    if best.step_ns > (1 + max_gap) * best.lower_bound_ns:
        return close_gap(
            search.problems,
            search.relaxation,
            best,
            max_nodes=max_actions // ACTIONS_PER_NODE,
            max_intervals=max_exact_intervals,
            deadline=deadline,
            progress=progress,
            num_simulated=len(search.simulated),
        )
    return best


class _LongChainSearch:
    """The plans simulated, and the bound so far.

    Problems of one micro-batch size share their costs, hence their feasible intervals and their bound.

    Attributes:
        bounds_ns: per micro-batch size (its costs), a time that no step of its problems beats.
        simulated: the step time of each path of each problem, by its number; None if it does not fit.
        ranked: (step time, sequence number, number of the problem, path) of those that fit.
        num_actions: simulated so far.
        may_fit: whether the relaxation has any pipeline that fits in memory.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        max_actions: int,
        deadline: Deadline,
        progress: SearchProgress | None,
    ) -> None:
        self.problems = [problem for problem in problems if problem.roots]
        self.max_actions, self.deadline, self.progress = max_actions, deadline, progress
        self.feasible: dict[StageCostTable, FeasibleIntervals] = {}
        for problem in self.problems:
            costs = problem.lower_bound.costs
            if costs not in self.feasible:
                same_size = [other for other in self.problems if other.lower_bound.costs is costs]
                self.feasible[costs] = FeasibleIntervals(costs, _first_placements(same_size))
        # First bounds: one micro-batch through the whole chain and back, and all work at the speed of all devices.
        self.bounds_ns = {
            costs: max(int(feasible.before_ns[-1]), self._min_root_ns(costs))
            for costs, feasible in self.feasible.items()
        }
        self._bisected: set[StageCostTable] = set()
        self.simulated: dict[tuple[int, Path], int | None] = {}
        self.ranked: list[tuple[int, int, int, Path]] = []
        self.best_ns: int | None = None
        self.num_actions = 0
        self.may_fit = True

    def _min_root_ns(self, costs: StageCostTable) -> int:
        problems = [problem for problem in self.problems if problem.lower_bound.costs is costs]
        return min(root.bound_ns for problem in problems for root in problem.roots)

    @property
    def bound_ns(self) -> int:
        """A time that no step of any problem beats."""
        return min(self.bounds_ns.values(), default=0)

    @property
    def is_over(self) -> bool:
        self.deadline.check()
        if self.best_ns is None:
            return False
        return self.best_ns <= self.bound_ns or self.num_actions > self.max_actions

    def result(self) -> SearchResult | None:
        if not self.ranked:
            return None
        step_ns, _, i, (boundaries, placements) = self._best_plans(1)[0]
        problem = self.problems[i]
        return SearchResult(
            problem=problem,
            layout=problem.layout(boundaries, placements),
            step_ns=step_ns,
            lower_bound_ns=min(step_ns, self.bound_ns),
        )

    def _best_plans(self, count: int) -> list[tuple[int, int, int, Path]]:
        return sorted(self.ranked, key=lambda plan: plan[:2])[:count]

    def step_ns(self, i: int, path: Path) -> int | None:
        """Returns the simulated step time of a path of problem i, None if its stages do not fit."""
        if (i, path) not in self.simulated:
            self.deadline.check()
            step_ns = self.simulated[i, path] = self._simulate(self.problems[i], path)
            if step_ns is not None:
                self.ranked.append((step_ns, len(self.ranked), i, path))
                self.best_ns = step_ns if self.best_ns is None else min(self.best_ns, step_ns)
            if self.progress and self.best_ns is not None:
                self.progress(len(self.simulated), self.best_ns, min(self.bound_ns, self.best_ns))
        return self.simulated[i, path]

    def _simulate(self, problem: Problem, path: Path) -> int | None:
        boundaries, placements = path
        for placement, (begin, end) in zip(placements, pairwise(boundaries), strict=True):
            self.deadline.check()
            if not problem.lower_bound.costs.candidates_from(placement, begin).fits[end - begin - 1]:
                return None
        layout = problem.layout(boundaries, placements)
        if not problem.fits(layout):
            return None
        # F and B of each micro-batch in each stage, in units of the longest-path engine.
        factor = 1 if problem.is_cheap_to_simulate(layout) else EVENT_DRIVEN_FACTOR
        self.num_actions += 2 * len(placements) * problem.num_microbatches * factor
        return problem.step_ns(layout)

    def construct_balanced(self) -> None:
        """Step 1: simulates uniform pipelines with balanced cuts; the best of them also with longer stages."""
        balanced: list[tuple[int, int, int, BalancedCuts]] = []
        # One pipeline of each problem in turn, so that a small budget sees all problems.
        for pipelines in zip_longest(*(uniform_pipelines(problem) for problem in self.problems)):
            for i, placements in enumerate(pipelines):
                if placements is None:
                    continue
                cuts = BalancedCuts(self.problems[i], self._feasible(self.problems[i]), placements)
                path = cuts.path(BALANCE_SLACKS[0])
                step_ns = None if path is None else self.step_ns(i, path)
                if step_ns is not None:
                    balanced.append((step_ns, len(balanced), i, cuts))
                if self.is_over:
                    return
        for _, _, i, cuts in sorted(balanced, key=lambda plan: plan[:2])[:NUM_CLIMBED]:
            for slack in BALANCE_SLACKS[1:]:
                path = cuts.path(slack)
                if path is not None and not self.is_over:
                    self.step_ns(i, path)

    def _feasible(self, problem: Problem) -> FeasibleIntervals:
        return self.feasible[problem.lower_bound.costs]

    def raise_bound(self) -> None:
        """Step 2: raises the bound by bisection, one micro-batch size after another, that of the best plan first."""
        best = self._best_plans(1)[0][2] if self.ranked else 0
        first = self.problems[best].lower_bound.costs if self.problems else None
        for costs in sorted(self.bounds_ns, key=lambda costs: costs is not first):
            if not self.is_over:
                numbers = [i for i, problem in enumerate(self.problems) if problem.lower_bound.costs is costs]
                # The bound on all problems is the minimum over the sizes: no size needs more than another has.
                known = [bound_ns for other, bound_ns in self.bounds_ns.items() if other in self._bisected]
                self._bisect_bound(costs, numbers, min(known, default=None))
                self._bisected.add(costs)
                self.feasible[costs].clear()
        self.may_fit = self.best_ns is not None or self.bound_ns < INF >> 2

    def _bisect_bound(self, costs: StageCostTable, numbers: Sequence[int], sufficient_ns: int | None) -> None:
        """Raises the bound of the problems of one size, to `sufficient_ns` at most, and simulates paths on the way.

        Invariant: no plan is faster than bounds_ns[costs]; `high_ns` is feasible for the relaxation, None if unknown.
        """
        relaxations = [(i, self.relaxation(self.problems[i])) for i in numbers]

        def is_feasible(limit_ns: int) -> bool:
            at = next((at for at, (_, relaxation) in enumerate(relaxations) if relaxation.is_feasible(limit_ns)), None)
            # No problem of this size has a plan within the limit: the next nanosecond is a bound.
            if at is None:
                self.bounds_ns[costs] = max(self.bounds_ns[costs], limit_ns + 1)
                return False
            relaxations.insert(0, relaxations.pop(at))  # the most likely to be feasible for the next limit
            i, relaxation = relaxations[0]
            path = relaxation.best_path()
            if path is not None:
                self.step_ns(i, path)
            return True

        # Without a time limit only memory restricts the stages; this also gives a first path to simulate.
        if self.best_ns is None and not is_feasible(INF >> 2):
            return
        # Another size has a bound of `sufficient_ns`; a larger bound here would not raise the minimum over the sizes.
        if sufficient_ns is not None and not is_feasible(sufficient_ns - 1):
            return
        high_ns = sufficient_ns if sufficient_ns is not None else self.best_ns
        while not self.is_over:
            low_ns = self.bounds_ns[costs]
            if high_ns is not None and high_ns - low_ns <= low_ns // PRECISION_DIVISOR:
                break
            # Bisection; without an upper end the limit grows by a quarter until the relaxation is feasible.
            limit_ns = 5 * low_ns // 4 if high_ns is None else (low_ns + high_ns) // 2
            if is_feasible(limit_ns):
                high_ns = limit_ns
        if self.best_ns is not None and not self.is_over:
            is_feasible(self.best_ns - 1)  # the incumbent may be optimal

    def relaxation(self, problem: Problem) -> Relaxation:
        """Returns the relaxation of one of the problems."""
        return Relaxation(
            problem, self._feasible(problem), _first_placements([problem]), lambda placement: placement.successors
        )

    def hill_climb(self) -> None:
        """Step 3: moves the cuts of the best plans for as long as that helps."""
        for _, _, i, path in self._best_plans(NUM_CLIMBED):
            improved = True
            while improved and not self.is_over:
                moved = self._move_cuts(i, path)
                path, improved = moved, moved != path

    def _move_cuts(self, i: int, path: Path) -> Path:
        """Returns the path after every cut in turn has been moved wherever that helps."""
        boundaries, placements = path
        best_ns = self.step_ns(i, path)
        # No farther than the mean length of a stage.
        max_move = max(1, boundaries[-1] // len(placements))
        for cut in range(1, len(placements)):
            for move in [sign * size for size in CUT_MOVES if size <= max_move for sign in (-1, 1)]:
                boundary = boundaries[cut] + move
                if boundaries[cut - 1] < boundary < boundaries[cut + 1] and not self.is_over:
                    moved = (*boundaries[:cut], boundary, *boundaries[cut + 1 :])
                    step_ns = self.step_ns(i, (moved, placements))
                    if step_ns is not None and best_ns is not None and step_ns < best_ns:
                        best_ns, boundaries = step_ns, moved
        return boundaries, placements


def _first_placements(problems: Sequence[Problem]) -> list[StagePlacement]:
    return [placement for problem in problems for root in problem.roots for placement in root.first_placements]
