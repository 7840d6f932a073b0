"""Compiled: what the dynamic programmes of `trips_before.py` and `trips_behind.py` share."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import Floats, Ints

ARRIVED, BACK, AFTER = range(3)
"""The last index of `Tables.before_begins`, its rows: from `AFTER` on for each number of micro-batches behind, then of
each number before."""

AROUND, FIRST, ANY = range(3)
"""The rows of `Tables.behind_begins`."""

FLAT_AROUND, STEEP_AROUND, FIRST_BACK, ANY_BACK = range(4)
"""The rows of what is behind the ends of the stages of a class, see `behind_ends`."""


class Tables(NamedTuple):
    """What is known of the layers before and behind the begins and the ends of stages.

    In ns at least, by so many first devices and the boundary, which counts from the first one that matters there;
    infinite where no stages are within the step time. If cuts are counted, all begins of stages are behind one number
    of cuts; if not, begins and ends share their arrays.

    Attributes:
        lows: the first boundary that matters. [devices + 1]
        before_begins, before_ends: when the first micro-batch is at the boundary; what its B takes from there to the
            first stage; that, and what follows behind its way, if so many others are behind it; and when micro-batches
            from some numbers on are at the boundary. [devices + 1, width, 2 + behind + before]
        behind_begins, behind_ends: what a micro-batch takes from there on and back again; and when the gradient of the
            very first one is there, and that of any. [3, devices + 1, width]
    """

    lows: Ints
    before_begins: NDArray[np.float64]
    before_ends: NDArray[np.float64]
    behind_begins: NDArray[np.float64]
    behind_ends: NDArray[np.float64]


class Scratch(NamedTuple):
    """Arrays for the stages on the devices from one on, by boundary, whose values are of no use afterwards.

    Attributes:
        known, rest: see `excess`. [7, boundaries], [4, boundaries]
        starts: of the stages that end there, the first begin within the limits, the end itself if there is none; or of
            those that begin there the last end.
        begins: those of stages that are tried.
        then: what is there by each row, see `Tracked`. [boundaries, rows]
        found: by each row. [rows]
        costs, around, gradients, critical: of stages, by their begins or ends.
        values, positions: a queue.
    """

    known: Floats
    rest: Floats
    starts: Ints
    begins: Ints
    then: Floats
    found: Floats
    costs: Floats
    around: Floats
    gradients: Floats
    critical: Floats
    values: Floats
    positions: Ints


class Window(NamedTuple):
    """The boundaries at which stages begin and end."""

    first_begin: int
    last_begin: int
    first_end: int
    last_end: int


@compiled
def reached(before: Floats, low: int, end: int) -> tuple[int, int]:
    """The first and the last boundary before the end that any stages reach, the end itself if none does.

    Args:
        before: the table behind some devices, from the boundary `low` on. [width, rows]
    """
    first, last = 0, min(before.shape[0], end - low) - 1
    while first <= last and before[first, ARRIVED] == np.inf:
        first += 1
    while last > first and before[last, ARRIVED] == np.inf:
        last -= 1
    return (low + first, low + last) if first <= last else (end, end)


@compiled
def most_devices(own: Any, kind: PlanKind, num_left: int, is_first: bool, is_alike: bool) -> int:
    """The most devices of the stages of a class on so many that are left, 0 if there are none."""
    if own.few > num_left or (is_first and (own.few > kind.first_most or own.most < kind.first_fewest)):
        return 0
    return int(own.few if is_alike else min(own.most, num_left))


@compiled
def behind_ends(
    send: Floats,
    back: Floats,
    at_host: Ints,
    kind: PlanKind,
    lows: Ints,
    behind: NDArray[np.float64],
    may_be_last: bool,
    own: Any,
    p: int,
    most: int,
    low: int,
    rest: Floats,
) -> tuple[int, int]:
    """Notes what is behind each end of a stage of up to `most` devices, with the cut there.

    Returns:
        The first end and the last one.
    """
    end, first, last = rest.shape[1] - 1, rest.shape[1], -1
    rest[:] = np.inf
    may_end = may_be_last and own.few <= kind.last_most and own.most >= kind.last_fewest
    for to in range(p + own.few, p + most + 1):
        link, lowest = at_host[to], lows[to]
        for j in range(max(low + 1, lowest), min(lowest + behind.shape[2], end + may_end)):
            around = behind[AROUND, to, j - lowest]
            if around == np.inf:
                continue
            first, last = min(first, j), max(last, j)
            rest[FLAT_AROUND, j] = min(rest[FLAT_AROUND, j], around + send[link, j] + back[link, j])
            rest[FIRST_BACK, j] = min(rest[FIRST_BACK, j], behind[FIRST, to, j - lowest] + back[link, j])
            rest[ANY_BACK, j] = min(rest[ANY_BACK, j], behind[ANY, to, j - lowest] + back[link, j])
    for j in range(rest.shape[1]):
        rest[STEEP_AROUND, j] = rest[FLAT_AROUND, j]
    return first, last
