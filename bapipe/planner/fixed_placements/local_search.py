"""Local search over the cuts of a pipeline, with lower bounds on neighbours from known paths.

A neighbour has one cut, or several consecutive cuts, moved by a few boundaries; so a layer can move from any stage to
any other one. The longest of the known paths is a lower bound on a neighbour's step time. One product of matrices gives
it for all neighbours. Only those whose bound is below the best step are simulated, and then their longest paths are
known, too. So soon almost every neighbour that is no better is recognized without a simulation.
"""

import numpy as np

from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.path_bound import PathBound
from bapipe.planner.stages.intervals import IntArray

CUT_MOVES, BLOCK_MOVES = (1, 2, 4, 8), (1, 2)
"""The numbers of boundaries by which one cut is moved, and by which several consecutive ones are."""

PRODUCTS_PER_ACTION = 1_500
"""How many multiplications in a product of matrices take as long as one simulated action."""


def descend(game: PathBound, cuts: Cuts, step_ns: int, budget: Budget) -> tuple[int, Cuts]:
    """Returns the step time and the cuts of a local minimum reached from some cuts.

    Longest paths that are found on the way are added to `game`. Ends early if the budget is over.

    Args:
        step_ns: the step time of `cuts`.
    """
    while not budget.is_over():
        better = _first_improvement(game, cuts, step_ns, budget)
        if better is None:
            break
        step_ns, cuts = better
    return step_ns, cuts


def _first_improvement(game: PathBound, cuts: Cuts, step_ns: int, budget: Budget) -> tuple[int, Cuts] | None:
    """Returns (step time, cuts) of the first faster neighbour, in the order of their bounds; None if there is none."""
    pipeline = game.pipeline
    neighbours = _neighbours(np.array(cuts))
    times, fits = pipeline.time_vectors(neighbours)
    neighbours, times = neighbours[fits], times[fits].astype(float)
    paths = game.path_weights.astype(float)
    budget.spend(times.shape[0] * times.shape[1] * len(paths) // PRODUCTS_PER_ACTION)
    bounds_ns = (times @ paths.T).max(axis=1, initial=0)
    while len(bounds_ns) and not budget.is_over():
        i = int(np.argmin(bounds_ns))
        if bounds_ns[i] >= step_ns:
            break
        candidate = tuple(neighbours[i].tolist())
        length_ns, weights = pipeline.longest_path(times[i].astype(np.int64))
        budget.spend(2 * pipeline.path_cost)
        if length_ns < step_ns:
            budget.spend(pipeline.simulation_cost)
            simulated_ns = pipeline.step_ns(candidate)
            if simulated_ns is not None and simulated_ns < step_ns:
                return simulated_ns, candidate
        game.add_path(weights)
        bounds_ns = np.maximum(bounds_ns, times @ weights.astype(float))
        bounds_ns[i] = np.inf
    return None


def _neighbours(cuts: IntArray) -> IntArray:
    """Returns the cuts with one of them, or several consecutive ones, moved. [n, stages + 1]"""
    inner = np.arange(1, len(cuts) - 1)
    first, last = (inner[i] for i in np.triu_indices(len(inner)))
    moved = np.zeros((len(first), len(cuts)), dtype=np.int64)
    moved[:, 1:-1] = (first[:, None] <= inner) & (inner <= last[:, None])
    alone = moved[first == last]
    shifted = np.concatenate(
        [cuts + sign * size * moved for size in BLOCK_MOVES for sign in (-1, 1)]
        + [cuts + sign * size * alone for size in CUT_MOVES for sign in (-1, 1) if size not in BLOCK_MOVES]
    )
    return shifted[(np.diff(shifted, axis=1) > 0).all(axis=1)]
