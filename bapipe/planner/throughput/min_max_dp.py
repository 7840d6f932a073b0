"""Exact dynamic programme for the least largest load over all boundaries and states of a problem."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from bapipe.planner.throughput.problem import END, LeastLoad, LoadProblem, StagePath

if TYPE_CHECKING:
    from bapipe.planner.throughput.problem import Indices, Numbers

BLOCK = 1 << 21
"""Most stages priced at once; bounds the memory."""

GROWTH = (1.0, 1.02, 1.1, 1.3, 2.0, 4.0, 16.0, 256.0)
"""How far above the bound a plan is looked for, in turn; a low limit leaves few boundaries to look at."""

Tell = Callable[[float, float], None]
"""(best load found, or the limit that none was found below; bound)"""


def least_load(
    problem: LoadProblem, *, bound: float, ceiling: float, dtype: type = float, tell: Tell | None = None
) -> LeastLoad:
    """Returns the plan of least largest load, proven.

    Args:
        bound: a load that no plan is below.
        ceiling: a load that every plan is below.
    """
    limits = sorted({min(ceiling, bound * growth + 1e-9 * bound + (dtype is int)) for growth in GROWTH} | {ceiling})
    for limit in limits:
        if tell:
            tell(limit, bound)
        found = least_below(problem, limit, dtype)
        if found is not None:
            return LeastLoad(best=found, bound=found.load)
        bound = limit
    return LeastLoad(best=None, bound=ceiling)


def least_below(problem: LoadProblem, limit: float, dtype: type = float) -> StagePath | None:
    """Returns the plan of least largest load, or None where none is below the limit.

    Bellman's equation over (boundary, state): the least load with which a plan reaches it. Only what can be part of a
    plan below the limit is looked at. O(states * boundaries**2) stages at worst.
    """
    if problem.num_boundaries < 2:
        return None
    number = np.int64 if dtype is int else np.float64
    limit = ceil(limit) if dtype is int else limit
    table = _Table(problem.num_boundaries, limit, number)
    for state in problem.starts:
        table.reach(state)[0] = 0
    for state in range(problem.num_states):
        if state not in table.least:
            continue
        reached = table.least[state]
        begin = np.nonzero((reached < limit) & problem.beginnings(state, limit))[0]
        end = np.nonzero(problem.endings(state, limit))[0]
        if begin.size and end.size:
            table.fill(problem, state, begin, end)
    return table.path(problem)


@dataclass(slots=True)
class _Reached:
    """How a plan reached each boundary by the end of a stage in some state: its load, and where the stage began."""

    load: "Numbers"
    begin: "Indices"


class _Table:
    """The programme's table: it fills as the states are gone through, first to last."""

    def __init__(self, num_boundaries: int, limit: float, number: type) -> None:
        self.limit = limit
        self.least: dict[int, Numbers] = {}
        self._number = number
        self._num_boundaries = num_boundaries
        self._before: dict[int, Indices] = {}
        self._ended: dict[int, _Reached] = {}

    def reach(self, state: int) -> "Numbers":
        """Returns the least load with which a stage in this state can begin at each boundary."""
        if state not in self.least:
            self.least[state] = np.full(self._num_boundaries, self.limit, dtype=self._number)
            self._before[state] = np.full(self._num_boundaries, -1, dtype=np.intp)
        return self.least[state]

    def fill(self, problem: LoadProblem, state: int, begin: "Indices", end: "Indices") -> None:
        """Goes on from every beginning to every end of a stage, and from there to what can follow it."""
        ended = self._end(problem, state, begin, end)
        at = np.nonzero(ended.load < self.limit)[0]
        if not at.size:
            return
        self._ended[state] = ended
        for follower in problem.followers(state):
            places = at[at == self._num_boundaries - 1] if follower == END else at[at < self._num_boundaries - 1]
            if not places.size:
                continue
            load = ended.load[places]
            least = self.reach(follower)
            better = load < least[places]
            if better.any():
                least[places[better]] = load[better]
                self._before[follower][places[better]] = state

    def _end(self, problem: LoadProblem, state: int, begin: "Indices", end: "Indices") -> _Reached:
        reached = self.least[state]
        load: Numbers = np.full(self._num_boundaries, self.limit, dtype=self._number)
        origin: Indices = np.full(self._num_boundaries, -1, dtype=np.intp)
        rows = max(1, BLOCK // end.size)
        for first in range(0, begin.size, rows):
            some = begin[first : first + rows]
            later = end[end > some[0]]
            if not later.size:
                break
            block = np.maximum(problem.load(state, some, later, self.limit), reached[some][:, None])
            choice = block.argmin(axis=0)
            least = block[choice, np.arange(later.size)]
            better = least < load[later]
            load[later[better]] = least[better]
            origin[later[better]] = some[choice[better]]
        return _Reached(load, origin)

    def path(self, problem: LoadProblem) -> StagePath | None:
        """Returns the best plan, read from its end to its beginning."""
        last = self._num_boundaries - 1
        if END not in self.least or self.least[END][last] >= self.limit:
            return None
        load = self.least[END][last].item()
        boundaries, states, state = [last], [], END
        while boundaries[-1] > 0:
            state = int(self._before[state][boundaries[-1]])
            states.append(state)
            boundaries.append(int(self._ended[state].begin[boundaries[-1]]))
        return StagePath(load=load, boundaries=tuple(reversed(boundaries)), states=tuple(reversed(states)))
