"""Compiled: what the dynamic programmes of `trips_before.py` and `trips_behind.py` share."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import Floats, Ints

ARRIVED, BACK, AFTER = range(3)
"""The rows of `Tables.before_begins`: from `AFTER` on for each number of micro-batches behind, then of each
number before."""

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
            from some numbers on are at the boundary. [2 + behind + before, devices + 1, width]
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
        forward, critical, backward: of the layers before, on the fastest device of a stage, see `LAYER_SUMS`.
        rings: of the longest stage that ends there.
        costs, found, others: of begins and ends, for one row of the tables.
        values, positions: a queue.
    """

    known: Floats
    rest: Floats
    starts: Ints
    positions: Ints
    forward: Floats
    critical: Floats
    backward: Floats
    rings: Floats
    costs: Floats
    found: Floats
    others: Floats
    values: Floats


class Window(NamedTuple):
    """The boundaries at which stages begin and end."""

    first_begin: int
    last_begin: int
    first_end: int
    last_end: int


@compiled
def push(values: Floats, positions: Ints, head: int, tail: int, position: int, value: float) -> int:
    """Adds a value to a queue in which values rise, and returns its end; those that are no less are left out."""
    while tail > head and values[tail - 1] >= value:
        tail -= 1
    values[tail], positions[tail] = value, position
    return tail + 1


@compiled
def drop(positions: Ints, head: int, tail: int, edge: int, sign: int) -> int:
    """Drops what the window has left behind, and returns the begin of the queue."""
    while head < tail and (positions[head] - edge) * sign < 0:
        head += 1
    return head


@compiled
def move_on(scratch: Scratch, window: Window, head: int, tail: int, pushed: int, j: int) -> tuple[int, int, int]:
    """Moves the queue of `costs` on to the begins of the stages that end at j, of which there are some.

    Args:
        pushed: the first begin that has not been added.

    Returns:
        The begin and the end of the queue, and the first begin that has not been added then.
    """
    start, positions = scratch.starts[j], scratch.positions
    pushed = max(pushed, start)
    while pushed < min(j, window.last_begin + 1):
        tail = push(scratch.values, positions, head, tail, pushed, scratch.costs[pushed])
        pushed += 1
    return drop(positions, head, tail, start, 1), tail, pushed


@compiled
def least(scratch: Scratch, window: Window, found: Floats) -> None:
    """Finds for each end of stages the least of `costs` at the begins of those, infinite where none ends."""
    starts, values = scratch.starts, scratch.values
    head = tail = pushed = 0
    for j in range(window.first_end, window.last_end + 1):
        found[j] = np.inf
        if starts[j] == j:
            continue
        head, tail, pushed = move_on(scratch, window, head, tail, pushed, j)
        found[j] = values[head]


@compiled
def reached(times: Floats, low: int, end: int) -> tuple[int, int]:
    """The first and the last boundary before the end that any stages reach, the end itself if none does.

    Args:
        times: from the boundary `low` on.
    """
    first, last = 0, min(times.size, end - low) - 1
    while first <= last and times[first] == np.inf:
        first += 1
    while last > first and times[last] == np.inf:
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
