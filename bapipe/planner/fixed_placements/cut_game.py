"""The game of a set of possible cuts against paths, by double oracle: one node of the branch and bound over cuts."""

from collections.abc import Hashable
from typing import TypeVar

import numpy as np

from bapipe.planner.fixed_placements.local_search import PRODUCTS_PER_ACTION
from bapipe.planner.fixed_placements.matrix_game import solve_game
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.path_bound import Paths
from bapipe.planner.fixed_placements.pipeline import Pipeline
from bapipe.planner.fixed_placements.possible_cuts import MAX_EXACT, PossibleCuts, minimize
from bapipe.planner.stages.intervals import INF, IntArray

GAME_ITERATIONS, GAME_COST = 60, 4_000
"""Iterations of the solver of a game, and the simulated actions that take as long."""

MAX_SUMS = 6_000_000
"""Maximum number of sums of paths with intervals that are in memory at a time, besides those of one mixture."""

MAX_KEPT, MIN_SHARE_DIVISOR, NUM_LAST_KEPT = 10, 50, 3
"""What a node hands down to its children: at most `MAX_KEPT` paths, and as many cuts, each with more than
1 / `MIN_SHARE_DIVISOR` of the strategy; and the last ones found."""

Key = TypeVar("Key", bound=Hashable)

Simulated = dict[Cuts, IntArray]
"""The time vectors of cuts."""


class CutGame:
    """The game of the possible cuts of a node against paths, by double oracle.

    Attributes:
        bound_ns: of all cuts of the node.
        possible: the cuts of the node that may be faster than the best layout.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        possible: PossibleCuts,
        bound_ns: int,
        paths: Paths,
        simulated: Simulated,
    ) -> None:
        """`paths` and `simulated` are those to begin with; what the game finds is added to them."""
        self._pipeline, self.possible, self.bound_ns = pipeline, possible, bound_ns
        self.paths = {w.tobytes(): w for w in paths.values() if is_exact(pipeline, w)}
        self.simulated = simulated
        self._path_strategy = self._cut_strategy = np.zeros(0, dtype=np.int64)

    @property
    def cost(self) -> int:
        """The simulated actions that take as long as a round."""
        return sweep_cost(len(self.paths) + 1, self.possible) + 2 * self._pipeline.num_actions + GAME_COST

    def improve(self, limit_ns: int) -> Cuts | None:
        """Raises the bound by the solution of the game on known cuts and paths; returns the best reply.

        None if no cuts are left that may be below the limit.
        """
        if not self.paths:
            return None
        weights, times = np.array(list(self.paths.values())), np.array(list(self.simulated.values()))
        payoffs = weights.astype(float) @ times.T.astype(float)
        self._path_strategy, self._cut_strategy = solve_game(payoffs, GAME_ITERATIONS)
        found = minimize(self._pipeline, *self._rows(weights), self.possible, limit_ns)
        self.bound_ns, self.possible = max(self.bound_ns, least_whole(found.bounds.max())), found.possible
        # The best path against the mixture of cuts; the shift keeps the sums of times below 2^60.
        shares = self._cut_strategy >> 10
        if shares.any():
            self.add_path(self._pipeline.longest_path(shares @ times // int(shares.sum()))[1])
        return None if self.possible.is_empty else found.cuts

    def add_path(self, weights: IntArray) -> None:
        if is_exact(self._pipeline, weights):
            self.paths[weights.tobytes()] = weights

    def _rows(self, weights: IntArray) -> tuple[IntArray, IntArray]:
        """The most used paths by themselves, then the mixture of all, rounded so that sums are exact; their totals."""
        shares = self._path_strategy
        while not is_exact(self._pipeline, shares @ weights):
            shares = shares >> 1
        if not shares.any():
            shares = np.eye(1, len(weights), dtype=np.int64)[0]
        alone = weights[np.argsort(-self._path_strategy, kind="stable")[: MAX_SUMS // self.possible.size]]
        rows = np.concatenate([alone, (shares @ weights)[None]]).astype(float)
        return rows, np.append(np.ones(len(alone)), float(shares.sum()))

    def handed_down(self) -> tuple[Paths, Simulated]:
        """Returns the paths and cuts that the strategies use most, and the last ones found."""
        return _most_used(self.paths, self._path_strategy), _most_used(self.simulated, self._cut_strategy)

    def division(self) -> tuple[int, int]:
        """Returns the cut whose position the strategy leaves most open, and how many of its positions come first."""
        shares = np.zeros(len(self.simulated))
        shares[: len(self._cut_strategy)] = self._cut_strategy
        shares[len(self._cut_strategy) :] = shares.sum() / 20 + 1  # found after the last game
        shares /= shares.sum()
        cuts = np.array(list(self.simulated))
        best, chosen = -1.0, (1, 1)
        for cut, positions in enumerate(self.possible.positions):
            if len(positions) > 1:
                ranks = np.searchsorted(positions, cuts[:, cut])
                mean = float(shares @ ranks)
                spread = float(shares @ np.abs(ranks - mean)) + 1e-3 * len(positions)
                if spread > best:
                    best, chosen = spread, (cut, min(max(int(np.ceil(mean)), 1), len(positions) - 1))
        return chosen


def _most_used(known: dict[Key, IntArray], strategy: IntArray) -> dict[Key, IntArray]:
    keys = list(known)
    shares = np.concatenate([strategy, np.zeros(len(keys) - len(strategy), dtype=np.int64)])
    used = [
        int(i) for i in np.argsort(-shares, kind="stable")[:MAX_KEPT] if shares[i] > shares.sum() // MIN_SHARE_DIVISOR
    ]
    last = range(max(0, len(keys) - NUM_LAST_KEPT), len(keys))
    return {keys[i]: known[keys[i]] for i in dict.fromkeys([*used, *last])}


def sweep_cost(num_rows: int, possible: PossibleCuts) -> int:
    """Returns the simulated actions that take as long as `minimize`."""
    return 10 * num_rows * possible.size // PRODUCTS_PER_ACTION


def is_exact(pipeline: Pipeline, weights: IntArray) -> bool:
    return pipeline.max_sum(weights) < MAX_EXACT


def least_whole(value_ns: float) -> int:
    """The least whole number that is no less, at most `INF`."""
    return int(min(np.ceil(value_ns), INF))
