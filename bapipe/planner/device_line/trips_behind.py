"""Compiled: lower bounds on what follows each boundary; the counterpart of `trips_before.py`."""

from typing import Any

import numpy as np

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import compiled, inlined, least
from bapipe.planner.device_line.around_stages import (
    add,
    behind_ends,
    join_levels,
    known_before,
    limit_known,
    most_devices,
    note_least,
    note_levels,
    note_row_ns,
    reached,
)
from bapipe.planner.device_line.early_waits import Waits
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import CRITICAL, FORWARD, TRIP, BoundInputs
from bapipe.planner.device_line.tracked_arrays import Tracked
from bapipe.planner.device_line.trip_limits import (
    ARRIVAL,
    BEFORE_ANY,
    BEFORE_FIRST,
    Stage,
    of_class_behind,
    stage_of,
)
from bapipe.planner.device_line.trip_sums import Sums, last_ends
from bapipe.planner.device_line.trip_tables import (
    AFTER,
    ANY,
    ANY_BACK,
    AROUND,
    FIRST,
    FIRST_BACK,
    FLAT_AROUND,
    Scratch,
    Tables,
    Window,
)
from bapipe.planner.device_line.trip_windows import least_of_ends, move_back


@compiled
def fill_behind(
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
    """Adds stages on the devices from `p` on, before what is known; returns how many begins and ends were tried."""
    num, end = problem.stages.shape[0], problem.layers.shape[1] - 1
    lows, before, behind = tables.lows, tables.before_begins, tables.behind_begins
    width, num_tried = behind.shape[2], 0
    if problem.is_alike and 0 < p < num - 1 and first_class == 0:
        for x in range(width):
            other = x + lows[p] - lows[p + 1]
            if 0 <= other < width:
                for row in range(3):
                    behind[row, p, x] = min(behind[row, p, x], behind[row, p + 1, other])
    low, last_low = reached(before[p], lows[p], end)
    if low == end:
        return 0
    known, rest, late, starts, costs = scratch.known, scratch.rest, scratch.late, scratch.starts, scratch.costs
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
        of_class = of_class_behind(tracked, late, p, g)
        stage, columns = stage_of(problem, tracked, kind, waits, limit, is_full, p, g), problem.columns[own.own]
        join_levels(num_late, num_levels, late[first : high + 1])
        known_before(scratch.levels, low, last_low, tracked, stage, g, is_full, waits, known)
        limit_known(columns, own, stage, of_class, low, last_low, scratch.slopes, known)
        begin = min(high - 1, last_low)
        window = Window(low, begin, first, high)
        tried, has_any = last_ends(problem, columns, own, stage, of_class, known, rest, sums, window, starts, is_full)
        num_tried += tried
        if not has_any:
            continue
        begins, ends, here = slice(low, begin + 1), slice(first, high + 1), slice(low - lows[p], begin + 1 - lows[p])
        around, gradients = scratch.around, scratch.gradients
        add(rest[FLAT_AROUND, ends], columns[TRIP, ends], own.fastest, costs[ends])
        least_of_ends(scratch, window, around)
        add(around[begins], columns[TRIP, begins], -own.fastest, around[begins])
        note_least(around[begins], behind[AROUND, p, here])
        for row, of_row in ((FIRST, FIRST_BACK), (ANY, ANY_BACK)):
            gradients[begins] = 0.0
            if is_full:
                add(rest[of_row, ends], columns[CRITICAL, ends], own.fastest, costs[ends])
                _least_gradient(columns, own, stage, row, known, scratch, window, gradients)
            _note_later(gradients[begins], known[ARRIVAL, begins], around[begins], stage.rounding, behind[row, p, here])
        if num_late > 0:
            num_speeds = note_row_ns(tracked, own, p, g, num_speeds, scratch)
            _note_late(columns, tracked, stage, g, scratch, window, tables.gradient_begins[p, here])
    return num_tried


@inlined
def _note_later(times: Floats, arrived: Floats, around: Floats, rounding: float, noted: Floats) -> None:
    """Lowers `noted` to the maximum of `times` and `arrived + around`, by boundary, where that is less."""
    for x in range(noted.size):
        ns = arrived[x] + around[x]
        noted[x] = least((ns if ns > times[x] else times[x]) - rounding, noted[x])


@inlined
def _least_gradient(
    columns: Floats, own: Any, stage: Stage, row: int, known: Floats, scratch: Scratch, window: Window, found: Floats
) -> None:
    """Finds a lower bound on when a gradient leaves the stages that begin at each boundary: the minimum over ends.

    The sooner such a stage ends, the later the gradient arrives, and the shorter are the F that its B waits for; so
    the best end is found by bisection.
    """
    starts, values, positions = scratch.starts, scratch.values, scratch.positions
    head = tail = 0
    pushed = window.last_end + 1
    for i in range(window.last_begin, window.first_begin - 1, -1):
        found[i] = np.inf
        if starts[i] == i:
            continue
        head, tail, pushed = move_back(scratch, window, head, tail, pushed, i)
        few, many, critical = head, tail - 1, own.fastest * columns[CRITICAL, i]
        while few < many:
            middle = (few + many) // 2
            if values[middle] - critical >= _behind_forwards(columns, own, stage, known, row, i, positions[middle]):
                many = middle
            else:
                few = middle + 1
        ns = max(values[few] - critical, _behind_forwards(columns, own, stage, known, row, i, positions[few]))
        if few > head:
            forwards_ns = _behind_forwards(columns, own, stage, known, row, i, positions[few - 1])
            ns = min(ns, max(values[few - 1] - critical, forwards_ns))
        found[i] = ns


@inlined
def _behind_forwards(columns: Floats, own: Any, stage: Stage, known: Floats, row: int, i: int, j: int) -> float:
    """Returns a lower bound on when the first B of the stage of layers [i, j) ends, after the F before it."""
    f = (columns[FORWARD, j] - columns[FORWARD, i]) * own.fastest - stage.rounding
    there, num = (known[BEFORE_FIRST, i], stage.num_first) if row == FIRST else (known[BEFORE_ANY, i], stage.num_any)
    b = (columns[CRITICAL, j] - columns[CRITICAL, i]) * own.fastest
    return float(max(there + f, known[ARRIVAL, i] + num * f) + b)


@inlined
def _note_late(
    columns: Floats,
    tracked: Tracked,
    stage: Stage,
    g: int,
    scratch: Scratch,
    window: Window,
    noted: Floats,
) -> None:
    """Stores lower bounds on when the gradients of each row leave the stages of class `g`: the minimum over ends.

    Args:
        noted: by begin. [begins, num_gradients]
    """
    starts, late, then, found = scratch.starts, scratch.late, scratch.then_late, scratch.found_late
    in_front, more = AFTER + tracked.behind.size, tracked.more_before[g]
    row_ns, rows_ns = scratch.row_ns[in_front:], scratch.rows_ns[in_front:]
    first_there, last_there = scratch.forwards[0], scratch.forwards[1]
    then_late, then_before, last_before = tracked.then_late[g], tracked.then_before[g], tracked.last_before[g]
    last_end = window.first_end - 1
    for i in range(window.first_begin, window.last_begin + 1):
        last_end = max(last_end, starts[i])
    for j in range(window.first_end, last_end + 1):
        for row in range(found.size):
            then[j, row] = min(late[j, then_late[row, 0]], late[j, then_late[row, 1]])
    for i in range(window.first_begin, window.last_begin + 1):
        if starts[i] == i:
            continue
        here = scratch.levels[i]
        for row in range(found.size):
            first_there[row] = min(here[then_before[row, 0]], here[then_before[row, 1]])
            last_there[row] = min(here[last_before[row, 0]], here[last_before[row, 1]])
        found[:] = np.inf
        for j in range(max(i + 1, window.first_end), starts[i] + 1):
            f, r = columns[FORWARD, j] - columns[FORWARD, i], columns[CRITICAL, j] - columns[CRITICAL, i]
            own_late, first_late = late[j], then[j]
            for row in range(found.size):
                # After the F that the first B of its replica waits for, or after the gradient of that one.
                own_f = f * row_ns[row] - stage.rounding
                first_b = max(first_there[row] + stage.num_any * own_f, last_there[row] + own_f)
                others = r * rows_ns[row] - more[row] * stage.rounding
                ns = max(max(first_late[row], first_b) + others, own_late[row] + r * row_ns[row] - stage.rounding)
                found[row] = least(ns, found[row])
        into = noted[i - window.first_begin]
        for row in range(found.size):
            into[row] = least(found[row], into[row])
