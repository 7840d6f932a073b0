"""Exact dynamic programme for a `LoadProblem`: the minimal largest load over all boundaries and states.

Bellman's equation, over (boundary b, state x), for the minimal largest load R of all stages that end at or before b:

    R(b, x') = min over states x with successor x' and boundaries a < b of  max(R(a, x), load(x, a, b))

It is solved for a limit: loads are computed only at boundaries that a plan below the limit can use. The limit starts
just above the lower bound and grows until a plan is found; that plan is optimal, because the programme is exact below a
limit.
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np

from bapipe.planner.compute.arrays import Indices
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.throughput.problem import (
    END,
    LIMIT_GROWTH,
    MAX_STAGES_PER_BLOCK,
    LoadProblem,
    MinMaxLoad,
    StagePath,
)
from bapipe.progress import LoadProgress

if TYPE_CHECKING:
    from bapipe.planner.throughput.problem import LoadArray


def min_max_load(
    problem: LoadProblem,
    *,
    bound: float,
    ceiling: float,
    dtype: type = float,
    progress: LoadProgress | None = None,
    deadline: Deadline = UNLIMITED,
) -> MinMaxLoad:
    """Returns the plan with the minimal largest load, proven optimal; none if the deadline passes before.

    Args:
        bound: a lower bound on the largest load of every plan.
        ceiling: plans whose largest load is at least this are left out.
        dtype: int if loads are integers, else float.
    """
    # The additions make each limit strictly larger than the load of a plan that attains the bound.
    slack = 1e-9 * bound + (dtype is int)
    if bound >= ceiling:
        return MinMaxLoad(best=None, bound=ceiling)
    for limit in sorted({min(ceiling, bound * growth + slack) for growth in LIMIT_GROWTH} | {ceiling}):
        if progress:
            progress(inf, bound)
        try:
            best = min_max_load_below(problem, limit, dtype, deadline)
        except OutOfTime:
            return MinMaxLoad(best=None, bound=bound)
        if best is not None:
            return MinMaxLoad(best=best, bound=best.load)
        bound = limit  # no plan is below the limit, so the limit is a lower bound
    return MinMaxLoad(best=None, bound=ceiling)


def min_max_load_below(
    problem: LoadProblem, limit: float, dtype: type = float, deadline: Deadline = UNLIMITED
) -> StagePath | None:
    """Returns the plan with the minimal largest load, or None if none is below the limit.

    O(states * boundaries**2) stage loads in the worst case.
    """
    if problem.num_boundaries < 2:
        return None
    number = np.int64 if dtype is int else np.float64
    # Integer loads below a fractional limit are those below the next integer.
    table = _Table(problem.num_boundaries, ceil(limit) if dtype is int else limit, number)
    for state in problem.starts:
        # No stage lies before boundary 0.
        table.loads_before(state)[0] = 0
    # States are numbered topologically, so the loads before a state are final when it is reached.
    for state in range(problem.num_states):
        if state not in table.before:
            continue
        deadline.check()
        # Pruning: boundaries that no plan below the limit can use in this state.
        begin = np.nonzero((table.before[state] < table.limit) & problem.begins(state, table.limit))[0]
        end = np.nonzero(problem.ends(state, table.limit))[0]
        if begin.size and end.size:
            table.add_stage(problem, state, begin, end)
    return table.best_path()


@dataclass(slots=True)
class _StageEnds:
    """The best plan that ends a stage of one state at each boundary: its load, and the stage's begin; [boundaries]."""

    load: "LoadArray"
    begin: Indices


class _Table:
    """The table of the dynamic programme, filled state by state."""

    def __init__(self, num_boundaries: int, limit: float, number: type) -> None:
        self.limit = limit
        self.before: dict[int, LoadArray] = {}
        """By state: R, the minimal largest load of the stages before one that begins at each boundary; [boundaries]."""
        self._number = number
        self._num_boundaries = num_boundaries
        self._previous_state: dict[int, Indices] = {}  # by state, of the best stage before each boundary
        self._ends: dict[int, _StageEnds] = {}

    def loads_before(self, state: int) -> "LoadArray":
        """Returns R of a state, initially the limit at every boundary; [boundaries]."""
        if state not in self.before:
            self.before[state] = np.full(self._num_boundaries, self.limit, dtype=self._number)
            self._previous_state[state] = np.full(self._num_boundaries, -1, dtype=np.intp)
        return self.before[state]

    def add_stage(self, problem: LoadProblem, state: int, begin: Indices, end: Indices) -> None:
        """Extends every plan by a stage of one state, and updates R of the successors."""
        ends = self._best_ends(problem, state, begin, end)
        feasible = np.nonzero(ends.load < self.limit)[0]
        if not feasible.size:
            return
        self._ends[state] = ends
        last = self._num_boundaries - 1
        for successor in problem.successors(state):
            # The last stage must end at the last boundary, every other one before it.
            boundaries = feasible[feasible == last] if successor == END else feasible[feasible < last]
            if not boundaries.size:
                continue
            load = ends.load[boundaries]
            before = self.loads_before(successor)
            # Strict: of equal loads the first state wins, so the result is deterministic.
            better = load < before[boundaries]
            if better.any():
                before[boundaries[better]] = load[better]
                self._previous_state[successor][boundaries[better]] = state

    def _best_ends(self, problem: LoadProblem, state: int, begin: Indices, end: Indices) -> _StageEnds:
        """Minimizes max(R(a, x), load(x, a, b)) over a, for every b, in blocks of beginnings a."""
        before = self.before[state]
        load: LoadArray = np.full(self._num_boundaries, self.limit, dtype=self._number)
        origin: Indices = np.full(self._num_boundaries, -1, dtype=np.intp)
        # Blocks of rows bound the memory: [rows, ends] loads at a time.
        rows = max(1, MAX_STAGES_PER_BLOCK // end.size)
        for first in range(0, begin.size, rows):
            some = begin[first : first + rows]
            later = end[end > some[0]]
            if not later.size:
                break
            block = np.maximum(problem.load(state, some, later, self.limit), before[some][:, None])  # [some, later]
            choice = block.argmin(axis=0)
            minimum = block[choice, np.arange(later.size)]
            better = minimum < load[later]
            load[later[better]] = minimum[better]
            origin[later[better]] = some[choice[better]]
        return _StageEnds(load, origin)

    def best_path(self) -> StagePath | None:
        """Returns the best plan, traced back from the last boundary to the first."""
        last = self._num_boundaries - 1
        if END not in self.before or self.before[END][last] >= self.limit:
            return None
        load = self.before[END][last].item()
        boundaries, states, state = [last], [], END
        while boundaries[-1] > 0:
            state = int(self._previous_state[state][boundaries[-1]])
            states.append(state)
            boundaries.append(int(self._ends[state].begin[boundaries[-1]]))
        return StagePath(load=load, boundaries=tuple(reversed(boundaries)), states=tuple(reversed(states)))
