"""Compiled: what the dynamic programmes of `trips_before.py` and `trips_behind.py` share."""

from typing import NamedTuple

from bapipe.planner.compute.arrays import Floats, Ints

ARRIVED, BACK, AFTER = range(3)
"""The rows (last index) of `Tables.before_begins`: from `AFTER` on for each number of micro-batches that follow, then
for each number before."""

AROUND, FIRST, ANY = range(3)
"""The rows of `Tables.behind_begins`."""

FLAT_AROUND, STEEP_AROUND, FIRST_BACK, ANY_BACK = range(4)
"""The rows of what follows the ends of the stages of a class, see `behind_ends`."""


class Tables(NamedTuple):
    """Lower bounds, in ns, on what precedes and what follows the begins and the ends of stages.

    By the number of first devices and by boundary, counted from `lows`; infinite where no stages are within the step
    time. If cuts are counted, all begins of stages come after one number of cuts; if not, begins and ends share their
    arrays.

    Attributes:
        lows: the first boundary in the tables. [devices + 1]
        before_begins, before_ends: when the first micro-batch arrives at the boundary; what its B takes from there to
            the first stage; that plus what follows, by how many others come after it; and when the micro-batches from
            some numbers on arrive at the boundary. [devices + 1, width, 2 + behind + before]
        behind_begins, behind_ends: what a micro-batch takes from there on and back again; and when the gradient of the
            very first one arrives, and that of any. [3, devices + 1, width]
        gradient_begins, gradient_ends: when the gradients of the micro-batches from some numbers on arrive.
            [devices + 1, width, num_gradients]
    """

    lows: Ints
    before_begins: Floats
    before_ends: Floats
    behind_begins: Floats
    behind_ends: Floats
    gradient_begins: Floats
    gradient_ends: Floats


class Scratch(NamedTuple):
    """Scratch arrays for the stages that begin at one device, by boundary.

    Attributes:
        known, rest: see `excess`. [NUM_KNOWN, boundaries], [4, boundaries]
        slopes: by how much `known` may rise per ns of F and of r; and its current limit. [3, NUM_KNOWN]
        starts: for each end the first begin with which a stage keeps the limits, the end itself if there is none; or
            for each begin the last such end.
        then: for each row the minimum over the rows that `Tracked` gives for it. [boundaries, rows]
        levels: the sparse table of what precedes begins, see `note_levels`. [boundaries, levels of rows]
        late, then_late: when gradients arrive at ends, as a sparse table; and those of the first micro-batches of the
            same replicas, by row. [boundaries, levels of num_gradients], [boundaries, num_gradients]
        apart, least_behind: sums by begin, and the minima of some, see `trips_apart.py`. [boundaries, 2 rows], [2 rows]
        found, found_late: results by row, and for gradients. [rows], [num_gradients]
        speeds: of the devices of a stage, the fastest first. [devices]
        row_ns, rows_ns: lower bounds on the time of 1 ns of work on the replica of each row; and of that of all its
            consecutive actions. [rows]
        forwards: when the first and the last micro-batch arrive whose F the first B of each row's replica waits for.
            [2, num_gradients]
        costs, around, gradients: values of stages, by begin or end.
        values, positions: a monotonic queue.
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
