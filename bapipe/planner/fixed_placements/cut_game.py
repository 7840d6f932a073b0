"""The game of a set of possible cuts against paths, for one node of the branch and bound over cuts.

The double oracle algorithm, as in `path_bound.py`; here each round also removes intervals from the set.
"""

from collections.abc import Hashable
from typing import TypeVar

import numpy as np

from bapipe.planner.fixed_placements.local_search import PRODUCTS_PER_ACTION
from bapipe.planner.fixed_placements.matrix_game import solve_game
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.path_bound import Paths
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.fixed_placements.possible_cuts import MAX_EXACT, PossibleCuts, minimize
from bapipe.planner.stages.intervals import INF, IntArray

GAME_ITERATIONS, GAME_COST = 60, 4_000
"""Iterations of the game's solver in each round, and the simulated actions that take as long."""

MAX_SUMS = 6_000_000
"""Maximum number of sums (of one path and one interval) in memory at a time, besides those of one mixture of paths."""

MAX_KEPT, MIN_SHARE_DIVISOR, NUM_LAST_KEPT = 10, 50, 3
"""A node passes on to its children at most `MAX_KEPT` paths, and as many cuts, that have more than
1 / `MIN_SHARE_DIVISOR` of their strategy each, and the last `NUM_LAST_KEPT` that were found."""

Key = TypeVar("Key", bound=Hashable)

CutTimes = dict[Cuts, IntArray]
"""The time vectors of cuts; the last ones found come last."""


class CutGame:
    """The game of the possible cuts of a node against paths.

    Attributes:
        bound_ns: a lower bound on the step of all cuts of the node.
        possible: the cuts of the node that may be faster than the limit of the last round.
        paths: the known paths for which sums are exact.
        cut_times: the time vectors of the known cuts.
    """

    def __init__(
        self,
        pipeline: PlacedPipeline,
        possible: PossibleCuts,
        bound_ns: int,
        paths: Paths,
        cut_times: CutTimes,
    ) -> None:
        """`paths` and `cut_times` are those to begin with; `cut_times` may get more."""
        self._pipeline, self.possible, self.bound_ns = pipeline, possible, bound_ns
        self.paths = {w.tobytes(): w for w in paths.values() if is_exact(pipeline, w)}
        self.cut_times = cut_times
        self._path_strategy = self._cut_strategy = np.zeros(0, dtype=np.int64)

    @property
    def cost(self) -> int:
        """The cost of a round in simulated actions."""
        return sweep_cost(len(self.paths) + 1, self.possible) + 2 * self._pipeline.path_cost + GAME_COST

    def play_round(self, limit_ns: int) -> Cuts | None:
        """Plays one round: raises the bound, removes intervals, and adds a path; returns the cuts of the best reply.

        None if no cuts are left that may be below the limit.
        """
        if not self.paths:
            return None
        weights, times = np.array(list(self.paths.values())), np.array(list(self.cut_times.values()))
        payoffs = weights.astype(float) @ times.T.astype(float)
        self._path_strategy, self._cut_strategy = solve_game(payoffs, GAME_ITERATIONS)
        found = minimize(self._pipeline, *self._path_mixtures(weights), self.possible, limit_ns)
        self.bound_ns, self.possible = max(self.bound_ns, round_up(found.bounds.max())), found.possible
        # The best reply to the mixture of cuts; the shift keeps sums of times below 2^60.
        shares = self._cut_strategy >> 10
        if shares.any():
            self.add_path(self._pipeline.longest_path(shares @ times // int(shares.sum()))[1])
        return None if self.possible.is_empty else found.cuts

    def add_path(self, weights: IntArray) -> None:
        """Adds a path if sums with its weights are exact."""
        if is_exact(self._pipeline, weights):
            self.paths[weights.tobytes()] = weights

    def _path_mixtures(self, weights: IntArray) -> tuple[IntArray, IntArray]:
        """Returns rows of weights and the total of each: the most used paths, then the mixture of all paths.

        The mixture is rounded so that sums are exact. [rows, entries], [rows]
        """
        shares = self._path_strategy
        while not is_exact(self._pipeline, shares @ weights):
            shares = shares >> 1
        if not shares.any():
            shares = np.eye(1, len(weights), dtype=np.int64)[0]
        alone = weights[np.argsort(-self._path_strategy, kind="stable")[: MAX_SUMS // self.possible.size]]
        rows = np.concatenate([alone, (shares @ weights)[None]]).astype(float)
        return rows, np.append(np.ones(len(alone)), float(shares.sum()))

    def most_used(self) -> tuple[Paths, CutTimes]:
        """Returns the paths and cuts that the strategies use most, with the last ones found."""
        return _most_used(self.paths, self._path_strategy), _most_used(self.cut_times, self._cut_strategy)

    def split_point(self) -> tuple[int, int]:
        """Returns the cut whose position varies most in the strategy, and how many positions the first part has."""
        shares = np.zeros(len(self.cut_times))
        shares[: len(self._cut_strategy)] = self._cut_strategy
        shares[len(self._cut_strategy) :] = shares.sum() / 20 + 1  # small shares for those found after the last round
        shares /= shares.sum()
        cuts = np.array(list(self.cut_times))
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
    """Returns the entries with the largest shares of a strategy, and the last ones found."""
    keys = list(known)
    shares = np.concatenate([strategy, np.zeros(len(keys) - len(strategy), dtype=np.int64)])
    used = [
        int(i) for i in np.argsort(-shares, kind="stable")[:MAX_KEPT] if shares[i] > shares.sum() // MIN_SHARE_DIVISOR
    ]
    last = range(max(0, len(keys) - NUM_LAST_KEPT), len(keys))
    return {keys[i]: known[keys[i]] for i in dict.fromkeys([*used, *last])}


def sweep_cost(num_rows: int, possible: PossibleCuts) -> int:
    """Returns the cost of `minimize` in simulated actions."""
    return 10 * num_rows * possible.size // PRODUCTS_PER_ACTION


def is_exact(pipeline: PlacedPipeline, weights: IntArray) -> bool:
    """Returns whether weights @ times is exact in floating point for all cuts."""
    return pipeline.max_sum(weights) < MAX_EXACT


def round_up(value_ns: float) -> int:
    """Returns a time rounded up to whole nanoseconds, at most `INF`."""
    return int(min(np.ceil(value_ns), INF))
