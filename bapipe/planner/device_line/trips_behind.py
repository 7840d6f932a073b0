"""Compiled: what comes at least behind each boundary, as `trips_before.py` has it before them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.early_waits import Waits
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import Floats, Ints, Problem
from bapipe.planner.device_line.trip_limits import (
    ARRIVAL,
    BEFORE_ANY,
    BEFORE_FIRST,
    FOLLOW,
    FOLLOW_LAST,
    FOLLOW_LATE,
    OF_KINDS,
    REPLICAS,
    ROUNDS,
    ROWS_OF_REPLICA,
    Stage,
    Tracked,
    excess,
    stage_of,
)
from bapipe.planner.device_line.trip_tables import (
    ANY,
    ANY_BACK,
    AROUND,
    ARRIVED,
    FIRST,
    FIRST_BACK,
    FLAT_AROUND,
    Scratch,
    Tables,
    Window,
    behind_ends,
    most_devices,
    reached,
)
from bapipe.planner.device_line.trips_before import known_before


@compiled
def fill_behind(
    problem: Problem,
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
    """Adds stages on the devices from `p` on, in front of what is known; returns how many were tried, as above."""
    num, end = problem.stages.shape[0], problem.layers.shape[1] - 1
    lows, before, behind, ends = tables.lows, tables.before_begins, tables.behind_begins, tables.behind_ends
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
    layers, savings, max_bucket = problem.layers, problem.savings, problem.max_bucket
    known, rest, starts, costs, critical = scratch.known, scratch.rest, scratch.starts, scratch.costs, scratch.critical
    for g in range(first_class, end_class):
        own = problem.stages[p, g]
        most = most_devices(own, kind, num - p, p == 0, problem.is_alike)
        if most == 0:
            continue
        first, high = behind_ends(
            tracked.send, tracked.back, tracked.at_host, kind, lows, ends, may_be_last, own, p, most, low, rest
        )
        if high <= low:
            continue
        replicas, replica_ns, rounds = tracked.replicas[g], tracked.replica_ns[p, g], tracked.rounds[g]
        of_kinds = tracked.of_kinds[p, g]
        stage = stage_of(problem, tracked, kind, waits, limit, is_full, p, g)
        known_before(before[p], lows[p], low, last_low, tracked, stage, g, is_full, known)
        limit_known(layers, own, stage, replicas, rounds, low, last_low, known)
        at, begin, has_any = high, min(high - 1, last_low), False
        for i in range(begin, low - 1, -1):
            starts[i] = i
            if before[p, i - lows[p], ARRIVED] == np.inf:
                continue
            while at >= max(i + 1, first) and (
                rest[FLAT_AROUND, at] == np.inf
                or excess(
                    layers, savings, max_bucket, own, stage, replicas, replica_ns, rounds, of_kinds, known, rest, i, at
                )
                > 0
            ):
                at -= 1
                num_tried += 1
            num_tried += 1
            if at >= max(i + 1, first):
                starts[i], has_any = at, True
        if not has_any:
            continue
        window = Window(low, begin, first, high)
        around, trips = scratch.around, scratch.gradients
        for j in range(low, high + 1):
            trips[j] = layers[own.own, j].trip * own.fastest
            critical[j] = layers[own.own, j].critical * own.fastest
            costs[j] = rest[FLAT_AROUND, j] + trips[j]
        _least_around(scratch, window, around)
        for i in range(low, begin + 1):
            around[i] -= trips[i]
            x = i - lows[p]
            behind[AROUND, p, x] = min(behind[AROUND, p, x], around[i])
        for row, of_row in ((FIRST, FIRST_BACK), (ANY, ANY_BACK)):
            gradients = scratch.gradients
            if is_full:
                for j in range(first, high + 1):
                    costs[j] = rest[of_row, j] + critical[j]
                _least_gradient(layers, own, stage, row, scratch, window, gradients)
            for i in range(low, begin + 1):
                x = i - lows[p]
                ns = known[ARRIVAL, i] + around[i]
                if is_full:
                    ns = max(ns, gradients[i])
                behind[row, p, x] = min(behind[row, p, x], ns - stage.rounding)
    return num_tried


@compiled
def limit_known(
    layers: NDArray[Any],
    own: Any,
    stage: Stage,
    replicas: NDArray[Any],
    rounds: NDArray[Any],
    low: int,
    high: int,
    known: Floats,
) -> None:
    """Lowers what is before the begins of stages where it rises faster than they shrink, as `limit_rest` does behind.

    Args:
        replicas, rounds: see `Tracked`, of the class.
        low, high: the first begin and the last one.
    """
    for i in range(low + 1, high + 1):
        forward = (layers[own.own, i].forward - layers[own.own, i - 1].forward) * own.fastest
        back = layers[own.own, i].critical - layers[own.own, i - 1].critical
        for row in range(REPLICAS):
            step = back * own.fastest
            if row in (FOLLOW, FOLLOW_LATE):
                step = back * stage.back_slope
            elif row in (ARRIVAL, BEFORE_ANY, BEFORE_FIRST):
                step = forward
            known[row, i] = min(known[row, i], known[row, i - 1] + step)
        for k in range(stage.num_replicas):
            num_backward = 2 if replicas[k].count >= 2 else 1
            for row in range(REPLICAS + ROWS_OF_REPLICA * k, REPLICAS + ROWS_OF_REPLICA * (k + 1)):
                is_behind = (row - REPLICAS) % ROWS_OF_REPLICA == FOLLOW_LAST
                step = num_backward * back * own.fastest if is_behind else forward
                known[row, i] = min(known[row, i], known[row, i - 1] + step)
        for k in range(stage.num_rounds):
            step = rounds[k].count * back * own.fastest
            known[ROUNDS + k, i] = min(known[ROUNDS + k, i], known[ROUNDS + k, i - 1] + step)
        if stage.num_kinds > 0:
            for row in range(OF_KINDS, OF_KINDS + ROWS_OF_REPLICA):
                step = back * own.fastest if row == OF_KINDS + FOLLOW_LAST else forward
                known[row, i] = min(known[row, i], known[row, i - 1] + step)


@compiled
def _push(values: Floats, positions: Ints, head: int, tail: int, position: int, value: float) -> int:
    """Adds a value to a queue in which values rise, and returns its end; those that are no less are left out."""
    while tail > head and values[tail - 1] >= value:
        tail -= 1
    values[tail], positions[tail] = value, position
    return tail + 1


@compiled
def _drop(positions: Ints, head: int, tail: int, edge: int, sign: int) -> int:
    """Drops what the window has left behind, and returns the begin of the queue."""
    while head < tail and (positions[head] - edge) * sign < 0:
        head += 1
    return head


@compiled
def _move_back(scratch: Scratch, window: Window, head: int, tail: int, pushed: int, i: int) -> tuple[int, int, int]:
    """Moves the queue of `costs` back to the ends of the stages that begin at i, as `move_on` does for ends."""
    start, positions = scratch.starts[i], scratch.positions
    pushed = min(pushed, start + 1)
    while pushed > max(i + 1, window.first_end):
        pushed -= 1
        tail = _push(scratch.values, positions, head, tail, pushed, scratch.costs[pushed])
    return _drop(positions, head, tail, start, -1), tail, pushed


@compiled
def _least_around(scratch: Scratch, window: Window, found: Floats) -> None:
    """Finds for each begin of stages the least of `costs` at the ends of those, as `least` does for ends."""
    starts, values = scratch.starts, scratch.values
    head = tail = 0
    pushed = window.last_end + 1
    for i in range(window.last_begin, window.first_begin - 1, -1):
        found[i] = np.inf
        if starts[i] == i:
            continue
        head, tail, pushed = _move_back(scratch, window, head, tail, pushed, i)
        found[i] = values[head]


@compiled
def _least_gradient(
    layers: NDArray[Any], own: Any, stage: Stage, row: int, scratch: Scratch, window: Window, found: Floats
) -> None:
    """Finds when a gradient leaves the stages that begin at each boundary, at least; of all ends.

    The sooner such a stage ends, the later the gradient is there, and the shorter are the F that its B waits for.
    """
    known, critical, starts = scratch.known, scratch.critical, scratch.starts
    values, positions = scratch.values, scratch.positions
    head = tail = 0
    pushed = window.last_end + 1
    for i in range(window.last_begin, window.first_begin - 1, -1):
        found[i] = np.inf
        if starts[i] == i:
            continue
        head, tail, pushed = _move_back(scratch, window, head, tail, pushed, i)
        few, many = head, tail - 1
        while few < many:
            middle = (few + many) // 2
            if values[middle] - critical[i] >= _behind_forwards(layers, own, stage, known, row, i, positions[middle]):
                many = middle
            else:
                few = middle + 1
        ns = max(values[few] - critical[i], _behind_forwards(layers, own, stage, known, row, i, positions[few]))
        if few > head:
            forwards_ns = _behind_forwards(layers, own, stage, known, row, i, positions[few - 1])
            ns = min(ns, max(values[few - 1] - critical[i], forwards_ns))
        found[i] = ns


@compiled
def _behind_forwards(layers: NDArray[Any], own: Any, stage: Stage, known: Floats, row: int, i: int, j: int) -> float:
    """When the first B of the stage of layers [i, j) is done behind the F before it, at least."""
    begin, end = layers[own.own, i], layers[own.own, j]
    f = (end.forward - begin.forward) * own.fastest - stage.rounding
    there, num = (known[BEFORE_FIRST, i], stage.num_first) if row == FIRST else (known[BEFORE_ANY, i], stage.num_any)
    return float(max(there + f, known[ARRIVAL, i] + num * f) + (end.critical - begin.critical) * own.fastest)
