"""Rounds wanted cuts to boundaries between layers."""

import numpy as np
from numpy.typing import ArrayLike

from bapipe.planner.compute.arrays import Ints


def nearest_cuts(positions: ArrayLike, targets: ArrayLike) -> tuple[int, ...]:
    """Returns the boundary nearest to each target, moved as far as needed so that every stage has a layer.

    Args:
        positions: the position of each boundary, ascending. [boundaries]
        targets: the wanted positions of the cuts, ascending, in the same unit; no more than there are boundaries
            between the first and the last one. [stages - 1]
    """
    at = np.asarray(positions, dtype=float)
    nearest = np.searchsorted((at[1:] + at[:-1]) / 2, targets)
    # All cuts are made distinct: moved to the right where they coincide, then to the left at the end. [stages - 1]
    steps: Ints = np.arange(len(nearest))
    apart = np.maximum.accumulate(np.maximum(nearest - steps, 1)) + steps
    return tuple(np.minimum(apart, len(at) - 1 - len(nearest) + steps).tolist())
