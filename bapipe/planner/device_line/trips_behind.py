"""Compiled: what comes at least behind each boundary, as `trips_before.py` has it before them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_limits import Floats, Ints, Problem
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
    behind_ends,
    drop,
    most_devices,
    push,
    reached,
)
from bapipe.planner.device_line.trips_before import known_before


@compiled
def fill_behind(
    problem: Problem,
    tracked: Tracked,
    kind: PlanKind,
    limit: float,
    tables: Tables,
    scratch: Scratch,
    is_full: bool,
    may_be_last: bool,
    first_group: int,
    end_group: int,
    p: int,
) -> int:
    """Adds stages on the devices from `p` on, in front of what is known; returns how many were tried, as above."""
    num, end = problem.stages.shape[0], problem.layers.shape[1] - 1
    lows, before, behind, ends = tables.lows, tables.before_begins, tables.behind_begins, tables.behind_ends
    width, num_tried = behind.shape[2], 0
    if problem.is_alike and 0 < p < num - 1 and first_group == 0:
        for x in range(width):
            other = x + lows[p] - lows[p + 1]
            if 0 <= other < width:
                for row in range(3):
                    behind[row, p, x] = min(behind[row, p, x], behind[row, p + 1, other])
    low, last_low = reached(before[ARRIVED, p], lows[p], end)
    if low == end:
        return 0
    layers, max_bucket = problem.layers, problem.max_bucket
    known, rest, values, positions = scratch.known, scratch.rest, scratch.values, scratch.positions
    heads, tails = scratch.heads, scratch.tails
    for g in range(first_group, end_group):
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
        stage = stage_of(problem, tracked, kind, limit, is_full, p, g)
        known_before(before, lows[p], low, last_low, tracked, stage, g, is_full, p, known)
        for i in range(low + 1, last_low + 1):
            forward = (layers[own.own, i].forward - layers[own.own, i - 1].forward) * own.fastest
            critical = layers[own.own, i].critical - layers[own.own, i - 1].critical
            for row in range(REPLICAS):
                step = critical * own.fastest
                if row in (FOLLOW, FOLLOW_LATE):
                    step = critical * stage.back_slope
                elif row in (ARRIVAL, BEFORE_ANY, BEFORE_FIRST):
                    step = forward
                known[row, i] = min(known[row, i], known[row, i - 1] + step)
            for k in range(stage.num_replicas):
                num_backward = 2 if replicas[k].count >= 2 else 1
                for row in range(REPLICAS + ROWS_OF_REPLICA * k, REPLICAS + ROWS_OF_REPLICA * (k + 1)):
                    is_behind = (row - REPLICAS) % ROWS_OF_REPLICA == FOLLOW_LAST
                    step = num_backward * critical * own.fastest if is_behind else forward
                    known[row, i] = min(known[row, i], known[row, i - 1] + step)
            for k in range(stage.num_rounds):
                step = rounds[k].count * critical * own.fastest
                known[ROUNDS + k, i] = min(known[ROUNDS + k, i], known[ROUNDS + k, i - 1] + step)
            if stage.num_kinds > 0:
                for row in range(OF_KINDS, OF_KINDS + ROWS_OF_REPLICA):
                    step = critical * own.fastest if row == OF_KINDS + FOLLOW_LAST else forward
                    known[row, i] = min(known[row, i], known[row, i - 1] + step)
        heads[:], tails[:] = 0, 0
        at = pushed = high
        for i in range(min(high - 1, last_low), low - 1, -1):
            while pushed > max(i, first - 1):
                if rest[FLAT_AROUND, pushed] < np.inf:
                    sums = layers[own.own, pushed]
                    critical = sums.critical * own.fastest
                    around = rest[FLAT_AROUND, pushed] + sums.trip * own.fastest
                    push(values, positions, heads, tails, AROUND, pushed, around)
                    push(values, positions, heads, tails, FIRST, pushed, rest[FIRST_BACK, pushed] + critical)
                    push(values, positions, heads, tails, ANY, pushed, rest[ANY_BACK, pushed] + critical)
                pushed -= 1
            x = i - lows[p]
            if before[ARRIVED, p, x] == np.inf:
                continue
            while at > pushed and (
                rest[FLAT_AROUND, at] == np.inf
                or excess(layers, max_bucket, own, stage, replicas, replica_ns, rounds, of_kinds, known, rest, i, at)
                > 0
            ):
                at -= 1
                num_tried += 1
            num_tried += 1
            if at == pushed or not drop(positions, heads, tails, AROUND, at, -1):
                continue
            around = values[AROUND, heads[AROUND]] - layers[own.own, i].trip * own.fastest
            behind[AROUND, p, x] = min(behind[AROUND, p, x], around)
            for row in (FIRST, ANY):
                drop(positions, heads, tails, row, at, -1)
                ns = known[ARRIVAL, i] + around
                if is_full:
                    ns = max(ns, _gradient(layers, own, stage, known, values, positions, heads, tails, row, i))
                behind[row, p, x] = min(behind[row, p, x], ns - stage.rounding)
    return num_tried


@compiled
def _gradient(
    layers: NDArray[Any],
    own: Any,
    stage: Stage,
    known: Floats,
    values: Floats,
    positions: Ints,
    heads: Ints,
    tails: Ints,
    row: int,
    i: int,
) -> float:
    """When a gradient leaves stages that begin at i, at least; of all ends in a queue.

    The sooner the stage ends, the later the gradient is there, and the shorter are the F that its B waits for.
    """
    critical = layers[own.own, i].critical * own.fastest
    low, high = heads[row], tails[row] - 1
    while low < high:
        middle = (low + high) // 2
        if values[row, middle] - critical >= _behind_forwards(
            layers, own, stage, known, row, i, positions[row, middle]
        ):
            high = middle
        else:
            low = middle + 1
    ns = max(values[row, low] - critical, _behind_forwards(layers, own, stage, known, row, i, positions[row, low]))
    if low > heads[row]:
        behind = _behind_forwards(layers, own, stage, known, row, i, positions[row, low - 1])
        ns = min(ns, max(values[row, low - 1] - critical, behind))
    return float(ns)


@compiled
def _behind_forwards(layers: NDArray[Any], own: Any, stage: Stage, known: Floats, row: int, i: int, j: int) -> float:
    """When the first B of the stage of layers [i, j) is done behind the F before it, at least."""
    begin, end = layers[own.own, i], layers[own.own, j]
    f = (end.forward - begin.forward) * own.fastest - stage.rounding
    there, num = (known[BEFORE_FIRST, i], stage.num_first) if row == FIRST else (known[BEFORE_ANY, i], stage.num_any)
    return float(max(there + f, known[ARRIVAL, i] + num * f) + (end.critical - begin.critical) * own.fastest)
