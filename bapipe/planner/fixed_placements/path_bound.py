"""A lower bound on all cuts of a pipeline whose placements are fixed, by a game of cuts against paths.

For the weights w of any one path, w @ times is at most the step time, whatever the cuts are; so it is for any average
of such weights. The bound is the minimum of an average over all cuts, which a dynamic programme finds. Which average
gives the largest? One player chooses cuts and pays the length of the path that the other chooses: the bound is what the
other can be sure of by a mixed strategy. The double oracle algorithm (McMahan, Gordon and Blum 2003) solves the game on
some cuts and some paths, then adds the best reply of each player: cuts by the dynamic programme, a path by the
longest-path algorithm. Every round gives a valid bound.
"""

from itertools import islice

import numpy as np

from bapipe.planner.fixed_placements.matrix_game import solve_game
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.pipeline import MAX_SUM, Pipeline
from bapipe.planner.stages.intervals import INF, IntArray

GAME_ITERATIONS = 300
"""Iterations of the solver of each round's game."""

GAME_COST = 20_000
"""Simulated actions that take as long as the solution of a game."""

MAX_PATHS = 400
"""How many of the known paths are used."""

Paths = dict[bytes, IntArray]
"""The weights of paths, by their bytes; the last ones found come last."""

PRECISION_DIVISOR = 1000
"""The game is solved when its value exceeds the bound by no more than 1 / `PRECISION_DIVISOR` of it."""


class PathBound:
    """The game of one pipeline.

    Attributes:
        bound_ns: no cuts that fit and are not left out by `Pipeline.forbid_slow` have a shorter step.
        is_solved: whether further rounds would raise the bound by little.
    """

    def __init__(self, pipeline: Pipeline, paths: Paths) -> None:
        """`paths` are known already; those that the game finds are added to them."""
        self.pipeline, self.paths = pipeline, paths
        self.bound_ns = 0
        self.is_solved = False
        self._times: dict[Cuts, IntArray] = {}

    @property
    def path_weights(self) -> IntArray:
        """The weights of the paths known so far, at most the last ones. [paths, entries]"""
        return np.array(list(islice(reversed(self.paths.values()), MAX_PATHS)))

    def add_path(self, weights: IntArray) -> bool:
        """Makes a path known; returns whether it was not."""
        is_new = weights.tobytes() not in self.paths
        self.paths[weights.tobytes()] = weights
        return is_new

    def add_cuts(self, cuts: Cuts) -> IntArray:
        """Makes cuts and their longest path known; returns the weights of this path."""
        times, _ = self.pipeline.time_vectors([cuts])
        self._times[cuts] = times[0]
        _, weights = self.pipeline.longest_path(times[0])
        self.add_path(weights)
        return weights

    def improve(self) -> int:
        """Plays one round; returns its cost in simulated actions."""
        paths, times = self.path_weights, np.array(list(self._times.values()))
        lengths = paths.astype(float) @ times.T.astype(float)
        path_strategy, cut_strategy = solve_game(lengths, GAME_ITERATIONS)
        # The best path against the mixture of cuts: the longest one with the mean of their times.
        value_ns, weights = self.pipeline.longest_path(cut_strategy @ times // int(cut_strategy.sum()))
        cuts = self._bound_by(path_strategy, paths)
        is_new = self.add_path(weights)
        if cuts is not None and cuts not in self._times:
            self.add_cuts(cuts)
            is_new = True
        self.is_solved = not is_new or value_ns - self.bound_ns <= self.bound_ns // PRECISION_DIVISOR
        return 4 * self.pipeline.num_actions + self.pipeline.min_cuts_cost + GAME_COST

    def _bound_by(self, strategy: IntArray, paths: IntArray) -> Cuts | None:
        """Raises the bound to that of a mixture of paths; returns the cuts that attain the minimum."""
        # With very long times fewer bits of the strategy are kept, so that sums fit in 64 bits.
        while self.pipeline.max_sum(strategy @ paths) >= MAX_SUM:
            strategy = strategy // 2
        found = self.pipeline.min_cuts(strategy @ paths)
        if found is None:
            self.bound_ns = INF
            return None
        value, cuts = found
        self.bound_ns = max(self.bound_ns, -(-value // max(int(strategy.sum()), 1)))
        return cuts
