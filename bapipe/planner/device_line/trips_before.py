"""Compiled: lower bounds on what precedes each boundary, by a dynamic programme over devices and boundaries.

The further the end of a stage, the later the first begin with which it keeps the limits. So of all stages that end at
a boundary only those that begin in a window are tried, and the window slides one way. All rows of a table are computed
at once for each stage: they are contiguous in memory, so the compiler vectorizes sums over them.
"""

from typing import Any

import numpy as np

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import compiled, inlined, least
from bapipe.planner.device_line.around_stages import (
    add,
    behind_ends,
    join_levels,
    known_before,
    limit_rest,
    most_devices,
    note_levels,
    note_row_ns,
    reached,
)
from bapipe.planner.device_line.early_waits import Waits
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import CRITICAL, FORWARD, BoundInputs
from bapipe.planner.device_line.tracked_arrays import Tracked
from bapipe.planner.device_line.trip_limits import of_class_behind, stage_of
from bapipe.planner.device_line.trip_sums import Sums, first_begins
from bapipe.planner.device_line.trip_tables import AFTER, AROUND, ARRIVED, BACK, Scratch, Tables, Window
from bapipe.planner.device_line.trip_windows import least_of_begins
from bapipe.planner.device_line.trips_apart import note_apart, note_found, note_later, rings_of


@compiled
def fill_before(
    problem: BoundInputs,
    tracked: Tracked,
    kind: PlanKind,
    waits: Waits,
    limit: float,
    tables: Tables,
    scratch: Scratch,
    is_full: bool,
    may_be_last: bool,
    first_class: int,
    end_class: int,
    p: int,
) -> int:
    """Adds the stages that follow the first `p` devices; returns how many begins and ends were tried.

    Args:
        is_full: whether to compute more than trips.
        may_be_last: whether the stages may end at the last layer.
        first_class, end_class: the classes of the stages.
    """
    num, end = problem.stages.shape[0], problem.layers.shape[1] - 1
    lows, before = tables.lows, tables.before_begins
    width, num_tried, num_behind = before.shape[1], 0, tracked.behind.size * is_full
    if problem.is_alike and p > 1 and first_class == 0:  # devices may stay idle, but not before the first stage
        for x in range(width):
            other = x + lows[p] - lows[p - 1]
            if 0 <= other < width and x + lows[p] < end:
                note_later(before[p - 1, other], 0.0, before[p, x])
    low, last_low = reached(before[p], lows[p], end)
    if low == end or p == num:
        return 0
    known, rest, late, starts = scratch.known, scratch.rest, scratch.late, scratch.starts
    num_levels, num_late = tracked.num_levels if is_full else 1, tracked.num_gradients * is_full
    note_levels(before[p, low - lows[p] : last_low + 1 - lows[p]], num_levels, scratch.levels[low : last_low + 1])
    sums, num_speeds = Sums(scratch.weights, scratch.begin_sums, scratch.end_sums), 0
    for g in range(first_class, end_class):
        own = problem.stages[p, g]
        most = most_devices(own, kind, num - p, p == 0, problem.is_alike)
        if most == 0:
            continue
        first, high = behind_ends(tracked, kind, tables, may_be_last, own, p, most, low, is_full, rest, late)
        if high <= low:
            continue
        stage, columns = stage_of(problem, tracked, kind, waits, limit, is_full, p, g), problem.columns[own.own]
        limit_rest(columns, tracked, own, stage, first, high, rest, late)
        join_levels(num_late, num_levels, late[first : high + 1])
        known_before(scratch.levels, low, last_low, tracked, stage, g, is_full, waits, known)
        of_class = of_class_behind(tracked, late, p, g)
        window = Window(low, min(high - 1, last_low), first, high)
        tried, has_any = first_begins(
            problem, columns, own, stage, of_class, known, rest, sums, window, starts, is_full
        )
        num_tried += tried
        if has_any and is_full and tracked.is_rough:
            note_apart(problem, tracked, tables, scratch, num_behind, p, g, most, window)
        elif has_any and is_full:
            num_speeds = note_row_ns(tracked, own, p, g, num_speeds, scratch)
            _note_stages(problem, tracked, tables, scratch, num_behind, p, g, most, window)
        elif has_any:
            _note_trips(columns, tracked, own, tables, scratch, p, most, window)
    return num_tried


@inlined
def _note_trips(
    columns: Floats, tracked: Tracked, own: Any, tables: Tables, scratch: Scratch, p: int, most: int, window: Window
) -> None:
    """Stores the trips before the ends of stages on up to `most` devices after `p` others: the minimum over begins.

    Args:
        columns: see `limit_rest`.
    """
    before, lowest, ends = tables.before_begins[p], tables.lows[p], slice(window.first_end, window.last_end + 1)
    begins = slice(window.first_begin, window.last_begin + 1)
    here = before[window.first_begin - lowest : window.last_begin + 1 - lowest]
    for row, column in ((ARRIVED, FORWARD), (BACK, CRITICAL)):
        over_cut = tracked.send if row == ARRIVED else tracked.back
        add(here[:, row], columns[column, begins], -own.fastest, scratch.costs[begins])
        least_of_begins(scratch, window, scratch.around)
        add(scratch.around[ends], columns[column, ends], own.fastest, scratch.around[ends])
        for to in range(p + own.few, p + most + 1):
            low = tables.lows[to]
            first, after = max(window.first_end, low), min(window.last_end + 1, low + tables.before_ends.shape[1])
            if first < after:
                those, there = slice(first, after), slice(first - low, after - low)
                sent, is_left = over_cut[tracked.at_host[to], those], tables.behind_ends[AROUND, to, there]
                _note_left(scratch.around[those], sent, is_left, tables.before_ends[to, there, row])


@inlined
def _note_left(times: Floats, more: Floats, around: Floats, noted: Floats) -> None:
    """Lowers `noted` to `times + more` where that is less, if some plan can follow (`around` is finite)."""
    for x in range(noted.size):
        later_ns = times[x] + more[x]
        noted[x] = least(later_ns if around[x] < np.inf else np.inf, noted[x])


@inlined
def _note_then(tracked: Tracked, levels: Floats, g: int, first: int, last: int, then: Floats) -> None:
    """Stores for each row the minimum over the rows that `Tracked` gives for it, at some begins of class `g`.

    Args:
        levels: see `Scratch`.
        then: [boundaries, rows]
    """
    num_behind, in_front = tracked.behind.size, AFTER + tracked.behind.size
    of_behind, of_before = tracked.then_behind[g], tracked.then_before[g]
    for i in range(first, last + 1):
        here, there = levels[i], then[i]
        for row in range(num_behind):
            there[AFTER + row] = min(here[of_behind[row, 0]], here[of_behind[row, 1]])
        for row in range(there.size - in_front):
            there[in_front + row] = min(here[of_before[row, 0]], here[of_before[row, 1]])


@inlined
def _note_stages(
    problem: BoundInputs,
    tracked: Tracked,
    tables: Tables,
    scratch: Scratch,
    num_behind: int,
    p: int,
    g: int,
    most: int,
    window: Window,
) -> None:
    """Stores each row after the stages of class `g`, on up to `most` devices: the minimum over their begins.

    Args:
        num_behind: how many rows are for numbers of micro-batches that follow.
    """
    own, before, max_bucket = problem.stages[p, g], tables.before_begins[p], problem.max_bucket
    layers, lowest, in_front = problem.layers[own.own], tables.lows[p], AFTER + num_behind
    more_before = tracked.more_before[g]
    starts, then, found, rounding = scratch.starts, scratch.then, scratch.found, problem.rounding_ns
    ns, more_ns = scratch.row_ns, scratch.rows_ns
    first, last = window.last_begin, window.first_begin
    for j in range(window.first_end, window.last_end + 1):
        if starts[j] < j:
            first, last = min(first, starts[j]), max(last, min(j - 1, window.last_begin))
    _note_then(tracked, scratch.levels, g, first, last, then)
    for j in range(window.first_end, window.last_end + 1):
        if starts[j] == j:
            continue
        end, last = layers[j], min(j - 1, window.last_begin)
        found[:] = np.inf
        arrived = returned = np.inf
        for i in range(starts[j], last + 1, 2):  # two begins at once take hardly longer than one
            i2 = min(i + 1, last)
            begin, begin2, here, here2 = layers[i], layers[i2], before[i - lowest], before[i2 - lowest]
            f, f2 = end.forward - begin.forward, end.forward - begin2.forward
            r, r2 = end.critical - begin.critical, end.critical - begin2.critical
            arrived = min(arrived, here[ARRIVED] + f * own.fastest, here2[ARRIVED] + f2 * own.fastest)
            returned = min(returned, here[BACK] + r * own.fastest, here2[BACK] + r2 * own.fastest)
            b, b2 = end.backward - begin.backward, end.backward - begin2.backward
            rings, rings2 = rings_of(own, max_bucket, begin, end), rings_of(own, max_bucket, begin2, end)
            rows, then1, then2 = slice(AFTER, in_front), then[i], then[i2]
            there, there2 = (then1[rows], r, b, rings), (then2[rows], r2, b2, rings2)
            _note_behind(here[rows], here2[rows], there, there2, (ns[rows], more_ns[rows]), found[rows])
            rows = slice(in_front, found.size)
            of_rows = ns[rows], more_ns[rows], more_before, rounding
            _note_before(here[rows], here2[rows], then1[rows], then2[rows], of_rows, f, f2, found[rows])
        found[ARRIVED], found[BACK] = arrived, returned
        note_found(tracked, tables, own, p, most, j, in_front, found)


@inlined
def _note_behind(
    here: Floats,
    here2: Floats,
    there: tuple[Floats, float, float, float],
    there2: tuple[Floats, float, float, float],
    of_rows: tuple[Floats, Floats],
    found: Floats,
) -> None:
    """Lowers `found` to what follows a micro-batch after one of two stages, by rows of how many others follow it.

    Args:
        here, here2: the rows at their begins.
        there, there2: for each row the minimum over the rows that `Tracked` gives for it; and for the stage the part of
            B that earlier stages wait for and B, in ns of work, and its rings.
        of_rows: see `row_ns` and `rows_ns`.
    """
    row_ns, rows_ns = of_rows
    then, r, b, rings = there
    then2, r2, b2, rings2 = there2
    for row in range(found.size):
        own_r, own_r2 = r * row_ns[row], r2 * row_ns[row]
        ns = max(here[row] + own_r, rows_ns[row] * b + max(then[row] + own_r, rings))
        ns2 = max(here2[row] + own_r2, rows_ns[row] * b2 + max(then2[row] + own_r2, rings2))
        found[row] = least(ns if ns < ns2 else ns2, found[row])


@inlined
def _note_before(
    here: Floats,
    here2: Floats,
    then: Floats,
    then2: Floats,
    of_rows: tuple[Floats, Floats, Floats, float],
    f: float,
    f2: float,
    found: Floats,
) -> None:
    """Lowers `found` to when micro-batches leave one of two stages, by row.

    Args:
        here, here2, then, then2: as above.
        of_rows: see `row_ns` and `rows_ns`; how many F the replica has run since the micro-batch whose arrival is in
            `then`; and by how much each F may be shorter than the sum over its layers.
        f, f2: the F of the two stages, in ns of work.
    """
    row_ns, rows_ns, more, rounding = of_rows
    for row in range(found.size):
        shorter, shorter_all = rounding, more[row] * rounding
        ns = max(here[row] + f * row_ns[row] - shorter, then[row] + f * rows_ns[row] - shorter_all)
        ns2 = max(here2[row] + f2 * row_ns[row] - shorter, then2[row] + f2 * rows_ns[row] - shorter_all)
        found[row] = least(ns if ns < ns2 else ns2, found[row])
