"""The rule that rounds wanted cuts to boundaries between layers."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def nearest_cuts(positions: ArrayLike, targets: ArrayLike) -> tuple[int, ...]:
    """Returns the boundaries nearest to some targets, moved as far as needed to leave every stage a layer.

    Args:
        positions: where each boundary is, ascending. [boundaries]
        targets: where the cuts should be, ascending, fewer than boundaries between the first and the last one.
            [stages - 1]
    """
    at = np.asarray(positions, dtype=float)
    nearest = np.searchsorted((at[1:] + at[:-1]) / 2, targets)
    # At least one boundary apart, from the left and then from the right. [stages - 1]
    steps: NDArray[np.int64] = np.arange(len(nearest))
    apart = np.maximum.accumulate(np.maximum(nearest - steps, 1)) + steps
    return tuple(np.minimum(apart, len(at) - 1 - len(nearest) + steps).tolist())
