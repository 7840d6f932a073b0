"""Long chains: a lower bound by bisection over a relaxation, and the best of many plans constructed near it.

If a chain can be cut at very many places, there are too many partial plans to expand. `relaxation.py` decides for a
step time T whether any plan may be within T. Bisection finds the smallest such T, which is a lower bound. The steps:

    1. construct_balanced  plans with equal numbers of replicas per stage, cut as evenly as possible, then with slightly
                           longer stages if that makes transfers shorter
    2. raise_bound         bisection for one micro-batch size after another; paths of the relaxation are also simulated
    3. hill_climb          moves the cuts of the best plans as long as that makes their simulated steps shorter
    4. close_gap           if a gap remains, a best-first search among the intervals that the relaxation leaves

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
"""A chain with at least this many boundaries is long: this search is used."""

DEFAULT_MAX_ACTIONS = 12_000_000
"""The budget in simulated actions."""

BUDGET_ACTIONS_PER_NODE = 400
"""How many actions in the budget of this search, or of that for fixed placements, are a node of a best-first search: a
third of what the simulator alone runs meanwhile (`branch_and_bound.search.ACTIONS_PER_NODE`), because these searches
also do what they do not count, such as the bisection here."""

PRECISION_DIVISOR = 400
"""Bisection ends when its two ends differ by at most 1 / `PRECISION_DIVISOR` of their value."""

BALANCE_SLACKS = (1.0, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2)
"""Factors by which stages may be longer than with the most even cuts, for shorter transfers."""

MAX_GAP = 0.01
"""A best-first search follows if the best plan exceeds the bound by more than this fraction of the bound ..."""

MAX_EXACT_INTERVALS = 20_000_000
"""... and it has at most this many intervals, summed over the placements."""

NUM_CLIMBED = 4
"""How many of the best plans are cut in several ways, and are improved by hill climbing."""

CUT_MOVES = (32, 16, 8, 4, 3, 2, 1)
"""The numbers of boundaries by which a cut is moved."""


def is_long_chain(problems: Sequence[Problem]) -> bool:
    """Returns whether some problem has so many boundaries that it needs this search."""
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
    """Returns the best layout found, with a lower bound for all layouts; None if it is proven that nothing fits.

    Args:
        max_actions: the budget, in simulated actions, of the steps before the best-first search, which gets as much.
        max_exact_intervals: the maximum number of intervals of the best-first search, summed over the placements.
        max_gap: a best-first search follows if the best plan exceeds the bound by more than this fraction of the bound.
        deadline: ends the search with the best layout so far.

    Raises:
        OutOfTime: the deadline passed before a layout that fits was found.
        NothingFoundError: no layout that fits was found, but there may be one.
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
    # No plan was found. If the relaxation has none either, nothing fits.
    if best is None:
        if not search.may_fit:
            return None
        max_nodes = max_actions // BUDGET_ACTIONS_PER_NODE
        return best_first(problems, max_nodes=max_nodes, deadline=deadline, progress=progress)
    if best.step_ns > (1 + max_gap) * best.lower_bound_ns:
        return close_gap(
            search.problems,
            search.relaxation,
            best,
            max_nodes=max_actions // BUDGET_ACTIONS_PER_NODE,
            max_intervals=max_exact_intervals,
            deadline=deadline,
            progress=progress,
            num_simulated=len(search.simulated),
        )
    return best


class _LongChainSearch:
    """The state of a search: the simulated plans, and the bound so far.

    Problems of one micro-batch size share their costs, and so their feasible intervals and their bound. Their costs
    serve as the key of the micro-batch size.

    Attributes:
        problems: the problems with at least one root. Problem i is `problems[i]`.
        feasible: the feasible intervals for each micro-batch size.
        bounds_ns: for each micro-batch size, a lower bound on the step of all plans.
        simulated: the step time by problem and path; None if the path does not fit.
        ranked: (step time, sequence number, problem, path) of all simulated paths that fit.
        best_ns: the best step time so far; None without one.
        num_actions: the number of actions simulated so far.
        may_fit: whether the relaxation has a pipeline that fits in memory.
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
        # First bounds: one micro-batch through the whole chain and back; all work at the speed of all devices.
        self.bounds_ns = {
            costs: max(int(feasible.trip_before_ns[-1]), self._min_root_ns(costs))
            for costs, feasible in self.feasible.items()
        }
        self._bisected: set[StageCostTable] = set()
        self.simulated: dict[tuple[int, Path], int | None] = {}
        self.ranked: list[tuple[int, int, int, Path]] = []
        self.best_ns: int | None = None
        self.num_actions = 0
        self.may_fit = True

    def _min_root_ns(self, costs: StageCostTable) -> int:
        """Returns the smallest bound of a root with one micro-batch size."""
        problems = [problem for problem in self.problems if problem.lower_bound.costs is costs]
        return min(root.bound_ns for problem in problems for root in problem.roots)

    @property
    def bound_ns(self) -> int:
        """A lower bound on the step of all plans of all problems."""
        return min(self.bounds_ns.values(), default=0)

    @property
    def is_over(self) -> bool:
        """Whether the best plan is optimal or the budget is spent; raises OutOfTime after the deadline."""
        self.deadline.check()
        if self.best_ns is None:
            return False
        return self.best_ns <= self.bound_ns or self.num_actions > self.max_actions

    def result(self) -> SearchResult | None:
        """Returns the best layout with the bound so far; None if no layout that fits is known."""
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
        """Returns the entries of `ranked` with the shortest steps."""
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
        """Simulates a path; returns its step time, None if it does not fit."""
        boundaries, placements = path
        for placement, (begin, end) in zip(placements, pairwise(boundaries), strict=True):
            self.deadline.check()
            if not problem.lower_bound.costs.candidates_from(placement, begin).fits[end - begin - 1]:
                return None
        layout = problem.layout(boundaries, placements)
        if not problem.fits(layout):
            return None
        # F and B of each micro-batch in each stage; the cost is in actions of the longest-path engine.
        factor = 1 if problem.is_cheap_to_simulate(layout) else EVENT_DRIVEN_FACTOR
        self.num_actions += 2 * len(placements) * problem.num_microbatches * factor
        return problem.step_ns(layout)

    def construct_balanced(self) -> None:
        """Step 1: simulates uniform pipelines with balanced cuts, then the best of them with longer stages."""
        balanced: list[tuple[int, int, int, BalancedCuts]] = []
        # One pipeline of each problem in turn, so that a small budget covers all problems.
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
        """Returns the feasible intervals at the problem's micro-batch size."""
        return self.feasible[problem.lower_bound.costs]

    def raise_bound(self) -> None:
        """Step 2: raises the bound by bisection for each micro-batch size, that of the best plan first."""
        best = self._best_plans(1)[0][2] if self.ranked else 0
        first = self.problems[best].lower_bound.costs if self.problems else None
        for costs in sorted(self.bounds_ns, key=lambda costs: costs is not first):
            if not self.is_over:
                numbers = [i for i, problem in enumerate(self.problems) if problem.lower_bound.costs is costs]
                # The bound on all plans is the minimum over the sizes: no size needs a larger bound than another has.
                known = [bound_ns for other, bound_ns in self.bounds_ns.items() if other in self._bisected]
                self._bisect_bound(costs, numbers, min(known, default=None))
                self._bisected.add(costs)
                self.feasible[costs].clear()
        self.may_fit = self.best_ns is not None or self.bound_ns < INF >> 2

    def _bisect_bound(self, costs: StageCostTable, numbers: Sequence[int], sufficient_ns: int | None) -> None:
        """Raises the bound for one micro-batch size by bisection, and simulates paths of the relaxation.

        Invariant: no plan is faster than bounds_ns[costs]; `high_ns` is feasible for the relaxation, None if unknown.

        Args:
            numbers: the problems of this size.
            sufficient_ns: a bound that need not be exceeded, because another size has it; None if there is none.
        """
        relaxations = [(i, self.relaxation(self.problems[i])) for i in numbers]

        def is_feasible(limit_ns: int) -> bool:
            """Returns whether some relaxation is feasible, and simulates its path; if none is, raises the bound."""
            at = next((at for at, (_, relaxation) in enumerate(relaxations) if relaxation.is_feasible(limit_ns)), None)
            # No problem of this size has a plan within the limit: the limit + 1 ns is a bound.
            if at is None:
                self.bounds_ns[costs] = max(self.bounds_ns[costs], limit_ns + 1)
                return False
            relaxations.insert(0, relaxations.pop(at))  # the most likely to be feasible at the next limit
            i, relaxation = relaxations[0]
            path = relaxation.best_path()
            if path is not None:
                self.step_ns(i, path)
            return True

        # With no limit on time, only memory restricts the stages; this also gives a first path to simulate.
        if self.best_ns is None and not is_feasible(INF >> 2):
            return
        # A bound above `sufficient_ns` would not raise the minimum over the sizes.
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
        """Step 3: moves the cuts of the best plans as long as that makes them faster."""
        for _, _, i, path in self._best_plans(NUM_CLIMBED):
            improved = True
            while improved and not self.is_over:
                moved = self._move_cuts(i, path)
                path, improved = moved, moved != path

    def _move_cuts(self, i: int, path: Path) -> Path:
        """Returns the path after each cut in turn has been moved if that makes the step shorter."""
        boundaries, placements = path
        best_ns = self.step_ns(i, path)
        # At most the mean length of a stage.
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
    """Returns the possible placements of the first stage, over all roots of some problems."""
    return [placement for problem in problems for root in problem.roots for placement in root.first_placements]
