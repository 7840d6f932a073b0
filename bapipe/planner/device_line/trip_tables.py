"""Compiled: what the dynamic programmes of `trips_before.py` and `trips_behind.py` share.

Arrays are handed over one by one: numba counts the references to each array of a named tuple that a call takes apart.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_limits import Floats, Ints
from bapipe.planner.device_line.trip_limits import FLAT_REST, PURE_REST, REST

MANY = 2**30
"""Cuts, where no stages are within the step time."""


class Tables(NamedTuple):
    """What is known of the layers before and behind a boundary on so many first devices, and on the other ones.

    In ns at least, infinite where no stages are within the step time.

    Attributes:
        before: of a micro-batch at the boundary its trip so far, F and B; that, and what follows behind its way back,
            if so many others are behind it; and both without transfers. [2, 1 + late, devices + 1, boundaries]
        behind: its trip from there on, and that without transfers. [2, devices + 1, boundaries]
        cuts_before, cuts_behind: the cuts on the way, at least, those before with the one at the boundary.
            [devices + 1, boundaries]
    """

    before: NDArray[np.float64]
    behind: NDArray[np.float64]
    cuts_before: NDArray[np.int32]
    cuts_behind: NDArray[np.int32]


@compiled
def push(values: Floats, positions: Ints, heads: Ints, tails: Ints, q: int, position: int, value: float) -> None:
    tail, head = tails[q], heads[q]
    while tail > head and values[q, tail - 1] >= value:
        tail -= 1
    values[q, tail], positions[q, tail] = value, position
    tails[q] = tail + 1


@compiled
def drop(positions: Ints, heads: Ints, tails: Ints, q: int, edge: int, sign: int) -> bool:
    """Drops what the window has left behind; returns whether anything is left."""
    head, tail = heads[q], tails[q]
    while head < tail and (positions[q, head] - edge) * sign < 0:
        head += 1
    heads[q] = head
    return bool(head < tail)


@compiled
def reached(trips: Floats) -> tuple[int, int]:
    """The first and the last boundary but the end that any stages reach, the end itself if none does."""
    low, high = 0, trips.size - 2
    while low < trips.size - 1 and trips[low] == np.inf:
        low += 1
    while high > low and trips[high] == np.inf:
        high -= 1
    return low, high


@compiled
def least_from(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """The least of each value and those behind it."""
    least = values.copy()
    for i in range(values.size - 2, -1, -1):
        least[i] = min(least[i], least[i + 1])
    return least


@compiled
def rest_behind(
    transfers: Floats,
    at_host: Ints,
    kind: PlanKind,
    behind: NDArray[np.float64],
    cuts_behind: NDArray[np.int32],
    own: Any,
    p: int,
    most: int,
    low: int,
    rest: Floats,
    cuts: Ints,
) -> int:
    """Notes what is behind each end of a stage of up to `most` devices, with the cut there; returns the last end."""
    last, high = behind.shape[2] - 1, -1
    cuts[low] = MANY
    may_end = own.few <= kind.last_most and own.most >= kind.last_fewest
    for j in range(low + 1, last + 1):
        trip = pure = np.inf
        num_cuts = MANY
        if j < last or may_end:
            for to in range(p + own.few, p + most + 1):
                trip = min(trip, behind[0, to, j] + transfers[at_host[to], j])
                pure = min(pure, behind[1, to, j])
                num_cuts = min(num_cuts, cuts_behind[to, j])
        if trip < np.inf:
            high = j
        rest[FLAT_REST, j] = rest[REST, j] = trip
        rest[PURE_REST, j] = pure
        cuts[j] = num_cuts + (j < last) if num_cuts < MANY and trip < np.inf else MANY
    return high
