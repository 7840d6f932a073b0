"""Compiled: the limits of a stage by trips alone, each as a sum of one number for its begin and one for its end.

Each limit of `excess` that needs no more than the trip of a micro-batch is of the form

    what is before the begin i + the layers before j - the layers before i + what is after the end j <= the step time

So two numbers for each boundary and limit decide about a stage. They are computed for all boundaries in one loop, which
the compiler vectorizes, and most stages that are tried exceed one of these limits.
"""

from typing import Any, NamedTuple

import numpy as np

from bapipe.planner.compute.arrays import Floats, Ints
from bapipe.planner.compute.compiled import inlined
from bapipe.planner.device_line.stage_arrays import (
    BACKWARD,
    BEFORE_GRADIENTS,
    CRITICAL,
    FIRST_BUCKET,
    FORWARD,
    GRADIENTS,
    HELD,
    STASH,
    STATE,
    TRIP,
    UPDATE,
    WORK,
    BoundInputs,
)
from bapipe.planner.device_line.stage_limits import least_again
from bapipe.planner.device_line.trip_limits import (
    ARRIVAL,
    FLAT_RETURN,
    FOLLOW,
    FOLLOW_LATE,
    RETURN,
    OfClass,
    Stage,
    excess,
)
from bapipe.planner.device_line.trip_tables import FLAT_AROUND, STEEP_AROUND, Window

NUM_SUMS = 12
"""The maximum number of limits of a stage."""

NUM_COLUMNS, NUM_BEFORE, NUM_BEHIND = GRADIENTS + 1, FOLLOW_LATE + 1, STEEP_AROUND + 1

BEFORE, BEHIND, ALWAYS, AGAIN, NUM_WEIGHTS = np.cumsum([NUM_COLUMNS, NUM_BEFORE, NUM_BEHIND, 1, 1]).tolist()
"""Where the weights of a limit begin, after those of the sums over layers: for what is before the begin, for what is
after the end, for the constant 1, and for the F that run again before each backward; and how many weights there are."""


class Sums(NamedTuple):
    """The limits of the stages of a class after some devices.

    Attributes:
        weights: of each limit. [limits, NUM_WEIGHTS]
        begins, ends: what the begin and the end of a stage add to each limit, less the step time. A stage exceeds the
            step time if begin and end of any limit add up to more than 0. [limits, boundaries]
    """

    weights: Floats
    begins: Floats
    ends: Floats


@inlined
def _note_sums(
    columns: Floats, own: Any, stage: Stage, known: Floats, rest: Floats, window: Window, sums: Sums
) -> tuple[int, int]:
    """Fills `sums` for the stages that begin and end in a window.

    Args:
        columns: those of the layers on the kinds of the stage. [LAYER_SUMS, boundaries]
        known, rest: see `excess`.

    Returns:
        The number of limits without rings, which come first, and of all limits.
    """
    weights, begins, ends = sums
    num_plain, num = _note_weights(own, stage, weights)
    first, last = window.first_begin, window.last_begin
    layers, at_begins = slice(first, window.last_end + 1), slice(first, last + 1)
    at_ends = slice(window.first_end, window.last_end + 1)
    for k in range(num):
        ends[k, layers] = 0.0
        for column in range(NUM_COLUMNS):
            if weights[k, column] != 0:
                _add(columns[column, layers], weights[k, column], ends[k, layers])
        begins[k, at_begins] = weights[k, ALWAYS] - stage.room
        _add(ends[k, at_begins], -1.0, begins[k, at_begins])
        for row in range(NUM_BEFORE):
            if weights[k, BEFORE + row] != 0:
                _add(known[row, at_begins], weights[k, BEFORE + row], begins[k, at_begins])
        for row in range(NUM_BEHIND):
            if weights[k, BEHIND + row] != 0:
                _add(rest[row, at_ends], weights[k, BEHIND + row], ends[k, at_ends])
    return num_plain, num


@inlined
def _note_weights(own: Any, stage: Stage, weights: Floats) -> tuple[int, int]:
    """Fills in the weights of the limits, see `excess`; returns their numbers as `_note_sums` does."""
    n, forward, backward = own.count, own.forward, own.backward
    apart, late_apart = 1 + stage.apart, 1 + stage.late_apart
    weights[:] = 0.0
    weights[:, BEFORE + ARRIVAL] = 1.0
    weights[0, WORK], weights[0, UPDATE], weights[0, ALWAYS] = own.busiest, 1.0, own.last_ring
    weights[1, TRIP] = own.busiest
    weights[2, FORWARD], weights[2, CRITICAL] = apart * forward, n * backward
    weights[3, FORWARD], weights[3, CRITICAL] = late_apart * own.fastest, stage.late_count * own.fastest
    weights[:2, AGAIN] = own.busiest
    weights[2, AGAIN], weights[3, AGAIN] = weights[2, CRITICAL], weights[3, CRITICAL]
    weights[2:4, BEHIND + STEEP_AROUND] = 1.0
    weights[1:3, BEFORE + FOLLOW] = weights[3, BEFORE + FOLLOW_LATE] = 1.0
    num = 4
    for way in range(2):
        if own.trips[way] > 0:
            _pass(own, way, weights[num])
            weights[num, BEFORE + FOLLOW] = 1.0
            num += 1
    if stage.num_cycles > 0:
        weights[num, TRIP] = weights[num, BEFORE + ARRIVAL] = 2 + stage.num_cycles
        weights[num, TRIP] *= own.fastest
        weights[num, BEFORE + RETURN], weights[num, ALWAYS] = 1 + stage.num_cycles, -stage.cycle_slack
        weights[num, BEFORE + FLAT_RETURN], weights[num, BEHIND + FLAT_AROUND] = 1.0, 2.0
        num += 1
    if stage.num_turns > 0:
        weights[num, TRIP], weights[num, BEFORE + ARRIVAL] = 2 * own.fastest, 2.0
        weights[num, FORWARD] = weights[num, CRITICAL] = weights[num, AGAIN] = stage.num_turns * own.fastest
        weights[num, BEFORE + RETURN], weights[num, ALWAYS] = 1.0, stage.first_ns - stage.turns_slack
        weights[num, BEFORE + FLAT_RETURN], weights[num, BEHIND + FLAT_AROUND] = 1.0, 2.0
        num += 1
    # In the limits from here on, the rings of the stage and its update follow.
    num_plain = num
    weights[num, FORWARD], weights[num, BACKWARD] = n * backward, (n - 1) * backward
    num += 1
    if n >= 2:
        weights[num, FORWARD], weights[num, CRITICAL] = apart * forward, backward
        weights[num, BACKWARD] = (n - 2) * backward
        weights[num, BEHIND + (STEEP_AROUND if n >= 3 else FLAT_AROUND)] = 1.0
        num += 1
    for way in range(2):
        if own.trips[way] > 0 and own.steps[way] > 0:
            _pass(own, way, weights[num])
            weights[num, BACKWARD] = -backward
            num += 1
    weights[num_plain:num, UPDATE], weights[num_plain:num, GRADIENTS] = 1.0, own.ring_rate
    for k in range(num_plain, num):  # also before the B that precedes the rings
        weights[k, AGAIN] = weights[k, CRITICAL] + weights[k, BACKWARD] + backward
    return num_plain, num


@inlined
def _pass(own: Any, way: int, weights: Floats) -> None:
    """Sets the weights of consecutive round trips, and of the F and r between them."""
    weights[FORWARD] = own.trips[way] * own.forward + own.steps[way] * own.backward
    weights[CRITICAL] = weights[AGAIN] = (own.trips[way] + own.steps[way]) * own.backward
    weights[BEHIND + FLAT_AROUND] = own.trips[way]


@inlined
def _add(numbers: Floats, weight: float, total: Floats) -> None:
    """Adds `weight * numbers` to `total`."""
    for x in range(total.size):
        total[x] += weight * numbers[x]


@inlined
def first_begins(
    problem: BoundInputs,
    columns: Floats,
    own: Any,
    stage: Stage,
    of_class: OfClass,
    known: Floats,
    rest: Floats,
    sums: Sums,
    window: Window,
    starts: Ints,
    is_full: bool,
) -> tuple[int, bool]:
    """Finds for each end the first begin with which a stage keeps all limits, or those by trips alone.

    Args:
        columns: see `_note_sums`.
        of_class, known, rest: see `excess`.
        starts: see `Scratch`.
        is_full: whether all limits count, or only those by trips, which `_note_sums` adds up.

    Returns:
        How many pairs of a begin and an end were tried, and whether there is any such stage.
    """
    num_plain = num = 0
    if not is_full:
        num_plain, num = _note_sums(columns, own, stage, known, rest, window, sums)
    at, num_tried, has_any = window.first_begin, 0, False
    for j in range(window.first_end, window.last_end + 1):
        starts[j], last = j, min(j - 1, window.last_begin)
        if rest[FLAT_AROUND, j] == np.inf:
            continue
        while at <= last and _is_beyond(
            problem, columns, own, stage, of_class, known, rest, sums, num_plain, num, at, j, is_full
        ):
            at += 1
            num_tried += 1
        num_tried += 1
        if at <= last:
            starts[j], has_any = at, True
    return num_tried, has_any


@inlined
def last_ends(
    problem: BoundInputs,
    columns: Floats,
    own: Any,
    stage: Stage,
    of_class: OfClass,
    known: Floats,
    rest: Floats,
    sums: Sums,
    window: Window,
    starts: Ints,
    is_full: bool,
) -> tuple[int, bool]:
    """Finds for each begin the last end with which a stage keeps the limits; see `first_begins`."""
    num_plain = num = 0
    if not is_full:
        num_plain, num = _note_sums(columns, own, stage, known, rest, window, sums)
    at, num_tried, has_any = window.last_end, 0, False
    for i in range(window.last_begin, window.first_begin - 1, -1):
        starts[i], first = i, max(i + 1, window.first_end)
        if known[ARRIVAL, i] == np.inf:
            continue
        while at >= first and _is_beyond(
            problem, columns, own, stage, of_class, known, rest, sums, num_plain, num, i, at, is_full
        ):
            at -= 1
            num_tried += 1
        num_tried += 1
        if at >= first:
            starts[i], has_any = at, True
    return num_tried, has_any


@inlined
def _is_beyond(
    problem: BoundInputs,
    columns: Floats,
    own: Any,
    stage: Stage,
    of_class: OfClass,
    known: Floats,
    rest: Floats,
    sums: Sums,
    num_plain: int,
    num: int,
    i: int,
    j: int,
    is_full: bool,
) -> bool:
    """Returns whether the stage of the layers [i, j) exceeds a limit: any one if `is_full`, else one by trips alone."""
    layers, savings, max_bucket = problem.layers, problem.savings, problem.max_bucket
    is_beyond: bool
    if is_full:
        is_beyond = known[ARRIVAL, i] == np.inf or rest[FLAT_AROUND, j] == np.inf
    else:
        is_beyond = _are_above(columns, own, max_bucket, sums, num_plain, num, i, j)
        if not is_beyond and not _fits(columns, own, i, j):
            is_beyond = _are_above_again(problem, columns, own, sums, num_plain, num, i, j)
    # The last stage may have fewer micro-batches in flight, which the sums do not take into account.
    if not is_beyond and (is_full or (stage.is_in_turn and j == columns.shape[1] - 1)):
        is_beyond = excess(layers, savings, max_bucket, own, stage, of_class, known, rest, i, j) > 0
    return is_beyond


@inlined
def _are_above(
    columns: Floats, own: Any, max_bucket: float, sums: Sums, num_plain: int, num: int, i: int, j: int
) -> bool:
    """Returns whether the stage of the layers [i, j), which recomputes nothing, exceeds a limit; see `_note_sums`."""
    above, begins, ends = -np.inf, sums.begins, sums.ends
    for k in range(num_plain):
        above = max(above, begins[k, i] + ends[k, j])
    if above <= 0:
        rings = _rings(columns, own, max_bucket, i, j)
        for k in range(num_plain, num):
            above = max(above, begins[k, i] + ends[k, j] + rings)
    return bool(above > 0)


@inlined
def _rings(columns: Floats, own: Any, max_bucket: float, i: int, j: int) -> float:
    """Returns the time until the first bucket of a stage is full, plus the ring latency of all its buckets."""
    first_full = min(max(columns[BACKWARD, j] - columns[BEFORE_GRADIENTS, i], 0.0), columns[FIRST_BUCKET, j])
    num_buckets = np.ceil((columns[GRADIENTS, j] - columns[GRADIENTS, i]) / max_bucket)
    return float(own.backward * first_full + own.ring_latency * num_buckets)


@inlined
def _are_above_again(
    problem: BoundInputs, columns: Floats, own: Any, sums: Sums, num_plain: int, num: int, i: int, j: int
) -> bool:
    """Returns whether a stage that recomputes some layers so that it fits exceeds a limit; true if it never fits."""
    again = least_again(problem.layers, problem.savings, own, i, j)
    if again == np.inf:
        return True
    above, rings = -np.inf, _rings(columns, own, problem.max_bucket, i, j)
    for k in range(num):
        ns = sums.begins[k, i] + sums.ends[k, j] + again * sums.weights[k, AGAIN]
        above = max(above, ns + rings if k >= num_plain else ns)
    return bool(above > 0)


@inlined
def _fits(columns: Floats, own: Any, i: int, j: int) -> bool:
    """Returns whether the stage of the layers [i, j) fits with all its stashes."""
    state, held = columns[STATE, j] - columns[STATE, i], columns[HELD, j] - columns[STASH, i]
    return bool(state + max(own.num_stashes, 1.0) * held <= own.limit_bytes)
