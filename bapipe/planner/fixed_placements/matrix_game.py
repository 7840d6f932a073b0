"""Solves a matrix game approximately, with the same result on every machine.

Regret matching+ with alternating updates and linear averaging (Tammelin 2014, arXiv:1407.5042). Strategies consist of
integers, and all sums stay below 2^53, so floating-point arithmetic is exact.
"""

import numpy as np

from bapipe.planner.stages.intervals import IntArray

TOTAL = 1 << 20
"""The weights of a strategy add up to about this."""

PAYOFF_BITS = 20
"""Payoffs are scaled and rounded to integers of this many bits."""


def solve_game(payoffs: IntArray, num_iterations: int) -> tuple[IntArray, IntArray]:
    """Returns the mixed strategies of the row player, who maximizes, and of the column player, who minimizes.

    A strategy has an integer weight per row, or per column. Bounds are valid for any strategy, whatever its quality.
    [rows], [columns]

    Args:
        payoffs: what the column player pays for each choice of both. [rows, columns]
        num_iterations: at most 1,000; the error is about proportional to its inverse.
    """
    spread = max(int(payoffs.max() - payoffs.min()), 1)
    scaled = np.floor((payoffs - payoffs.min()) * (1 << PAYOFF_BITS) / spread)
    row_regret, column_regret = np.zeros(payoffs.shape[0]), np.zeros(payoffs.shape[1])
    row_sum, column_sum = np.zeros(payoffs.shape[0]), np.zeros(payoffs.shape[1])
    columns = _strategy(column_regret)
    for iteration in range(1, num_iterations + 1):
        gains = np.floor(scaled @ columns / TOTAL)
        rows = _strategy(row_regret)
        row_regret = np.maximum(row_regret + gains - np.floor(rows @ gains / TOTAL), 0)
        rows = _strategy(row_regret)
        losses = np.floor(rows @ scaled / TOTAL)
        column_regret = np.maximum(column_regret - losses + np.floor(losses @ columns / TOTAL), 0)
        columns = _strategy(column_regret)
        row_sum += iteration * rows
        column_sum += iteration * columns
    return _strategy(row_sum).astype(np.int64), _strategy(column_sum).astype(np.int64)


def _strategy(weights: IntArray) -> IntArray:
    """Returns the weights scaled to a sum of about `TOTAL`; equal weights if all are zero."""
    total = weights.sum()
    if total == 0:
        weights, total = np.ones_like(weights), float(len(weights))
    scaled: IntArray = np.floor(weights * TOTAL / total)
    return scaled
