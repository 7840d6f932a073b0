"""Closes the gap of a long chain: best-first search among the intervals that plans within a *limit* can have.

These intervals come from the relaxation. The lower the limit, the fewer there are: of hundreds of millions often a few
thousand, so that tables and nodes take little time. Part of the budget first goes to a search for any faster plan. Then
the search asks whether any plan is within a limit between the bound and the best step. If there is none, the limit is a
bound, and the next limit is higher. If an attempt exceeds its budget, the next limit is lower.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.search import best_below
from bapipe.planner.branch_and_bound.step_limits import FIRST_SHARE, is_small_gap
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.long_chain.relaxation import Relaxation
from bapipe.progress import SearchProgress

PARTS_OF_BUDGET = 2
"""The search for any faster plan gets 1 / `PARTS_OF_BUDGET` of the time and of the nodes."""

FIRST_NODES, NODES_PER_PLACEMENT = 1_000, 4
"""The budget of the first attempt at a limit, which doubles after each that exceeds it, and what each placement adds to
it, because making its tables takes about as long as these nodes."""


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
    """Returns the best layout, or a faster one, with the same lower bound or a larger one.

    Args:
        relaxation_of: makes the relaxation of a problem.
        best: the best layout so far, and the bound so far.
        max_nodes: the node budget.
        max_intervals: a limit is not tried if it leaves more intervals, summed over all placements of all problems.
        deadline: ends the search with the best layout and bound so far.
        num_simulated: the number of plans simulated before, to report progress.
    """
    search = _Closing(problems, relaxation_of, best, max_intervals, deadline, progress, num_simulated)
    with suppress(OutOfTime):
        search.attempt(1.0, max_nodes // PARTS_OF_BUDGET, deadline.share(PARTS_OF_BUDGET))
        search.raise_limits(max_nodes - max_nodes // PARTS_OF_BUDGET)
    return replace(search.best, lower_bound_ns=min(search.bound_ns, search.best.step_ns))


class _Closing:
    """The state of the search.

    Attributes:
        best, bound_ns: the best layout, and the lower bound on the step of all layouts, so far.
    """

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
        self._num_before = self._num_simulated = num_simulated  # before the current attempt, and with it

    def raise_limits(self, max_nodes: int) -> None:
        """Makes attempts at one limit after another until the gap is closed or the budget is spent."""
        share, nodes = FIRST_SHARE, FIRST_NODES
        while self.bound_ns < self.best.step_ns and max_nodes > 0:
            self._deadline.check()
            is_small = is_small_gap(self.bound_ns, self.best.step_ns)
            is_done = self.attempt(1.0 if is_small else share, min(nodes, max_nodes), self._deadline)
            max_nodes -= nodes
            share, nodes = (min(1.0, 2 * share), nodes) if is_done else (share / 2, 2 * nodes)

    def attempt(self, share: float, max_nodes: int, deadline: Deadline) -> bool:
        """Searches for plans within a limit; returns whether there are none, or the best of them is known.

        Args:
            share: the share of the gap between the bound and the best step that lies below the limit.
        """
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
        """Returns the problems with only those intervals that plans within a limit can have, by them the originals.

        Problems without such plans are left out. None if there are too many intervals. The second number is how many
        placements such plans can have.
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
        """Reports the progress of the whole search from that of an attempt."""
        self._num_simulated = self._num_before + num_simulated
        if self._progress:
            best_ns = min(best_ns, self.best.step_ns)
            self._progress(self._num_simulated, best_ns, min(best_ns, max(bound_ns, self.bound_ns)))
