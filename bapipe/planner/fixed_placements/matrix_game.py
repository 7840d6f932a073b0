"""Approximate solution of a matrix game in numbers that are the same on every machine.

Regret matching+ with alternating updates and linear averaging (Tammelin 2014, arXiv:1407.5042). Both strategies are
whole numbers, and all sums stay below 2^53, so that floating point is exact in them.
"""

import numpy as np

from bapipe.planner.stages.intervals import IntArray

TOTAL = 1 << 20
"""The numbers of a strategy add up to about this."""

PAYOFF_BITS = 20
"""Number of bits to which payoffs are rounded."""


def solve_game(payoffs: IntArray, num_iterations: int) -> tuple[IntArray, IntArray]:
    """Returns strategies of the player of the rows, who maximizes, and of the columns, who minimizes.

    A strategy is a weight per row (or column), an integer; a bound from it is valid however good it is.

    Args:
        payoffs: [rows, columns]
        num_iterations: at most 1,000; the error falls about as one over this.
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
    """The weights scaled to a sum of about `TOTAL`; equal ones if all are zero."""
    total = weights.sum()
    if total == 0:
        weights, total = np.ones_like(weights), float(len(weights))
    scaled: IntArray = np.floor(weights * TOTAL / total)
    return scaled
