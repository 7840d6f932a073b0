"""Compiled: what the dynamic programmes of `trips_before.py` and `trips_behind.py` share."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        gradient_begins, gradient_ends: when gradients of the micro-batches from some numbers on are there.
            [devices + 1, width, num_gradients]
    """

    lows: Ints
    before_begins: NDArray[np.float64]
    before_ends: NDArray[np.float64]
    behind_begins: NDArray[np.float64]
    behind_ends: NDArray[np.float64]
    gradient_begins: NDArray[np.float64]
    gradient_ends: NDArray[np.float64]


class Scratch(NamedTuple):
    """Arrays for the stages on the devices from one on, by boundary, whose values are of no use afterwards.

    Attributes:
        known, rest: see `excess`. [NUM_KNOWN, boundaries], [4, boundaries]
        slopes: by how much `known` may rise with 1 ns of F and of r; and how high it may be. [3, NUM_KNOWN]
        starts: of the stages that end there, the first begin within the limits, the end itself if there is none; or of
            those that begin there the last end.
        then: what is there by each row, see `Tracked`. [boundaries, rows]
        levels: what is before begins, see `note_levels`. [boundaries, levels of rows]
        late, then_late: when gradients are at ends, in levels; and those of the first micro-batches of the same
            replicas, by their rows. [boundaries, levels of num_gradients], [boundaries, num_gradients]
        apart, least_behind: by begins, and the least of some, see `trips_apart.py`. [boundaries, 2 rows], [2 rows]
        found, found_late: by each row, and of gradients. [rows], [num_gradients]
        speeds: of the devices of a stage, the fastest first. [devices]
        row_ns, rows_ns: ns of the work of 1 ns on the replicas of each row, at least; and of all actions that follow
            one another there. [rows]
        forwards: when the F are there that the first B of the replicas of each row waits for: the first one, and the
            last. [2, num_gradients]
        costs, around, gradients: of stages, by their begins or ends.
        values, positions: a queue.
        weights, begin_sums, end_sums: see `Sums`.
    """

    known: Floats
    slopes: Floats
    rest: Floats
    starts: Ints
    then: Floats
    levels: Floats
    late: Floats
    then_late: Floats
    apart: Floats
    least_behind: Floats
    found: Floats
    found_late: Floats
    speeds: Floats
    row_ns: Floats
    rows_ns: Floats
    forwards: Floats
    costs: Floats
    around: Floats
    gradients: Floats
    values: Floats
    positions: Ints
    weights: Floats
    begin_sums: Floats
    end_sums: Floats


class Window(NamedTuple):
    """The boundaries at which stages begin and end."""

    first_begin: int
    last_begin: int
    first_end: int
    last_end: int
