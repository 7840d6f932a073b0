"""Best-first search of a long chain among the intervals that the relaxation leaves to plans within a limit.

The lower the limit, the fewer intervals are left: of hundreds of millions often a few thousand, so that tables and
nodes take little time. First a part of the budget goes to plans faster than the best one, mostly to find one. Then the
search asks whether any plan is within a limit between the bound and the best step. If there is none, the limit is a
bound, and the next one is farther up; if an attempt exceeds its budget, the next limit is nearer to the bound.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.search import best_below
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.long_chain.relaxation import Relaxation
from bapipe.progress import SearchProgress

PARTS_OF_BUDGET = 2
"""The search for any faster plan gets 1 / `PARTS_OF_BUDGET` of the time and of the nodes."""

FIRST_NODES, NODES_PER_PLACEMENT = 1_000, 4
"""The budget of the first attempt at a limit; it doubles with each that fails. Each placement that is possible adds to
it, as making its tables takes about as long as some nodes."""

FIRST_SHARE = 1 / 4
"""How much of the gap between the bound and the best step lies below the first limit."""

MIN_GAP_DIVISOR = 1_000
"""If bound and best step differ by less than 1 / `MIN_GAP_DIVISOR` of the step, no limit is set between them."""


def close_gap(
    problems: Sequence[Problem],
    relaxation_of: Callable[[Problem], Relaxation],
    best: SearchResult,
    *,
    max_nodes: int,
    max_intervals: int,
    deadline: Deadline,
    progress: SearchProgress | None,
    num_simulated: int,
) -> SearchResult:
    """Returns a layout as fast as the best one or faster, and a bound as large as its bound or larger.

    Args:
        max_nodes: the budget.
        max_intervals: limits that leave more intervals to the placements of all problems are not tried.
        deadline: ends it with the best layout and bound so far.
        num_simulated: the number of plans simulated before, for the progress.
    """
    search = _Closing(problems, relaxation_of, best, max_intervals, deadline, progress, num_simulated)
    with suppress(OutOfTime):
        search.attempt(1.0, max_nodes // PARTS_OF_BUDGET, deadline.share(PARTS_OF_BUDGET))
        search.raise_limits(max_nodes - max_nodes // PARTS_OF_BUDGET)
    return replace(search.best, lower_bound_ns=min(search.bound_ns, search.best.step_ns))


class _Closing:
    def __init__(
        self,
        problems: Sequence[Problem],
        relaxation_of: Callable[[Problem], Relaxation],
        best: SearchResult,
        max_intervals: int,
        deadline: Deadline,
        progress: SearchProgress | None,
        num_simulated: int,
    ) -> None:
        self.problems, self.best, self.bound_ns = problems, best, best.lower_bound_ns
        self._relaxation_of, self._max_intervals = relaxation_of, max_intervals
        self._relaxations: dict[Problem, Relaxation] = {}
        self._deadline, self._progress = deadline, progress
        self._num_before = self._num_simulated = num_simulated  # before this attempt, and with it

    def raise_limits(self, max_nodes: int) -> None:
        """Proves that no plan is within one limit after another."""
        share, nodes = FIRST_SHARE, FIRST_NODES
        while self.bound_ns < self.best.step_ns and max_nodes > 0:
            self._deadline.check()
            is_small = (self.best.step_ns - self.bound_ns) * MIN_GAP_DIVISOR < self.best.step_ns
            is_done = self.attempt(1.0 if is_small else share, min(nodes, max_nodes), self._deadline)
            max_nodes -= nodes
            share, nodes = (min(1.0, 2 * share), nodes) if is_done else (share / 2, 2 * nodes)

    def attempt(self, share: float, max_nodes: int, deadline: Deadline) -> bool:
        """Searches for plans within a share of the gap; returns whether it is done."""
        step_ns = self.best.step_ns
        limit_ns = min(step_ns - 1, self.bound_ns + int(share * (step_ns - self.bound_ns)))
        original, num_placements = self._narrowed(limit_ns)
        if original is None:
            return False
        found, bound_ns = best_below(
            tuple(original),
            limit_ns + 1,
            max_gap=0.0,
            max_nodes=max_nodes + NODES_PER_PLACEMENT * num_placements,
            deadline=deadline,
            progress=self._report,
        )
        self.bound_ns = max(self.bound_ns, bound_ns)
        if found is not None:
            self.best = replace(found, problem=original[found.problem])
        self._num_before = self._num_simulated
        self._report(0, self.best.step_ns, self.bound_ns)
        return bound_ns > limit_ns or (found is not None and bound_ns == found.step_ns)

    def _narrowed(self, limit_ns: int) -> tuple[dict[Problem, Problem] | None, int]:
        """The problems with no other intervals than plans within a limit can have, and the original of each.

        And how many placements such plans can have. None if there are too many intervals. Problems without such plans
        are left out.
        """
        original: dict[Problem, Problem] = {}
        num_intervals = num_placements = 0
        for problem in self.problems:
            if problem not in self._relaxations:
                self._relaxations[problem] = self._relaxation_of(problem)
            intervals = self._relaxations[problem].possible_intervals(limit_ns)
            num_intervals += sum(map(len, intervals.values()))
            if num_intervals > self._max_intervals:
                return None, 0
            num_placements += sum(len(rows) > 0 for rows in intervals.values())
            if intervals:
                original[problem.narrowed(intervals)] = problem
        return original, num_placements

    def _report(self, num_simulated: int, best_ns: int, bound_ns: int) -> None:
        self._num_simulated = self._num_before + num_simulated
        if self._progress:
            best_ns = min(best_ns, self.best.step_ns)
            self._progress(self._num_simulated, best_ns, min(best_ns, max(bound_ns, self.bound_ns)))
