"""A lower bound on the step of all cuts of a pipeline whose placements are fixed, by a game of cuts against paths.

For any path with weights w and any cuts, w @ times is at most the step time. The same holds for any average of the
weights of several paths. A dynamic programme finds the minimum of such an average over all cuts, which is a lower bound
for all of them.

The best average is the solution of a matrix game. One player chooses cuts, the other a path, and the first pays the
length of the path with these cuts. The bound is what a mixed strategy assures the second player. The double oracle
algorithm (McMahan, Gordon and Blum 2003) solves the game for some cuts and some paths, then adds the best reply of each
player: cuts from the dynamic programme, and the longest path. Every round gives a valid bound.
"""

from itertools import islice

import numpy as np

from bapipe.planner.fixed_placements.matrix_game import solve_game
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.placed_pipeline import MAX_SUM, PlacedPipeline
from bapipe.planner.stages.intervals import INF, IntArray

GAME_ITERATIONS = 300
"""Iterations of the game's solver in each round."""

GAME_COST = 20_000
"""Simulated actions that take as long as the solution of a game."""

MAX_PATHS = 400
"""Maximum number of known paths that are used, the last ones found."""

Paths = dict[bytes, IntArray]
"""Weight vectors of paths, by their bytes; the last ones found come last."""

PRECISION_DIVISOR = 1000
"""The game is solved when its value exceeds the bound by at most 1 / `PRECISION_DIVISOR` of the bound."""


class PathBound:
    """The game of one pipeline.

    Attributes:
        bound_ns: a lower bound on the step of all cuts that fit and that `PlacedPipeline.forbid_slow` does not exclude.
        is_solved: whether further rounds would raise the bound only a little.
    """

    def __init__(self, pipeline: PlacedPipeline, paths: Paths) -> None:
        """`paths` are already known; those that the game finds are added to this dict."""
        self.pipeline, self.paths = pipeline, paths
        self.bound_ns = 0
        self.is_solved = False
        self._times: dict[Cuts, IntArray] = {}

    @property
    def path_weights(self) -> IntArray:
        """The weights of the known paths, of at most `MAX_PATHS`. [paths, entries]"""
        return np.array(list(islice(reversed(self.paths.values()), MAX_PATHS)))

    def add_path(self, weights: IntArray) -> bool:
        """Adds a path; returns whether it is new."""
        is_new = weights.tobytes() not in self.paths
        self.paths[weights.tobytes()] = weights
        return is_new

    def add_cuts(self, cuts: Cuts) -> IntArray:
        """Adds cuts and their longest path; returns the weights of this path."""
        times, _ = self.pipeline.time_vectors([cuts])
        self._times[cuts] = times[0]
        _, weights = self.pipeline.longest_path(times[0])
        self.add_path(weights)
        return weights

    def play_round(self) -> int:
        """Plays one round, which may raise the bound; returns its cost in simulated actions."""
        paths, times = self.path_weights, np.array(list(self._times.values()))
        lengths = paths.astype(float) @ times.T.astype(float)
        path_strategy, cut_strategy = solve_game(lengths, GAME_ITERATIONS)
        # The best reply to the mixture of cuts is the longest path with the mean of their times.
        value_ns, weights = self.pipeline.longest_path(cut_strategy @ times // int(cut_strategy.sum()))
        cuts = self._bound_by(path_strategy, paths)
        is_new = self.add_path(weights)
        if cuts is not None and cuts not in self._times:
            self.add_cuts(cuts)
            is_new = True
        self.is_solved = not is_new or value_ns - self.bound_ns <= self.bound_ns // PRECISION_DIVISOR
        return 4 * self.pipeline.path_cost + self.pipeline.min_cuts_cost + GAME_COST

    def _bound_by(self, strategy: IntArray, paths: IntArray) -> Cuts | None:
        """Raises the bound to that of a mixture of paths; returns cuts that attain the minimum, None without any."""
        # If times are very long, the strategy keeps fewer bits, so that sums fit in 64 bits.
        while self.pipeline.max_sum(strategy @ paths) >= MAX_SUM:
            strategy = strategy // 2
        found = self.pipeline.min_cuts(strategy @ paths)
        if found is None:
            self.bound_ns = INF
            return None
        value, cuts = found
        self.bound_ns = max(self.bound_ns, -(-value // max(int(strategy.sum()), 1)))
        return cuts
