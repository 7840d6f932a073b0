"""Compiled: what comes at least before each boundary, by a dynamic programme over devices and boundaries.

A stage may begin at some boundaries and end at some. The further its end, the later the first begin with which it is
within the limits; so of all stages that end at a boundary those that begin in a window are tried, and windows move one
way. The least of a sum over a window is at the head of a queue in which values rise; of two sums, of which the other
one falls with the begin, the least maximum is found by bisection.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_limits import Floats, Ints, Problem, rings_ns
from bapipe.planner.device_line.trip_limits import (
    ARRIVAL,
    BEFORE_ANY,
    BEFORE_FIRST,
    FIRST_THERE,
    FLAT_RETURN,
    FOLLOW,
    FOLLOW_LAST,
    FOLLOW_LATE,
    LAST_THERE,
    OF_KINDS,
    REPLICAS,
    RETURN,
    ROUNDS,
    ROWS_OF_REPLICA,
    Stage,
    Tracked,
    excess,
    stage_of,
)
from bapipe.planner.device_line.trip_tables import (
    AFTER,
    ANY_BACK,
    AROUND,
    ARRIVED,
    BACK,
    FIRST_BACK,
    FLAT_AROUND,
    STEEP_AROUND,
    Scratch,
    Tables,
    behind_ends,
    drop,
    most_devices,
    push,
    reached,
)


@compiled
def fill_before(
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
    """Adds stages behind the first `p` devices; returns how many ends and begins of stages were tried.

    Args:
        is_full: whether more is asked for than trips.
        may_be_last: whether the stages may end at the last layer.
        first_group, end_group: the classes of the stages.
    """
    num, end = problem.stages.shape[0], problem.layers.shape[1] - 1
    lows, before, ends, behind = tables.lows, tables.before_begins, tables.before_ends, tables.behind_ends
    width, num_tried, num_behind = before.shape[2], 0, tracked.behind.size * is_full
    num_before = tracked.before.size * is_full
    if problem.is_alike and p > 1 and first_group == 0:  # devices may stay idle, but not before the first stage
        for x in range(width):
            other = x + lows[p] - lows[p - 1]
            if 0 <= other < width and x + lows[p] < end:
                for row in range(before.shape[0]):
                    before[row, p, x] = min(before[row, p, x], before[row, p - 1, other])
    low, last_low = reached(before[ARRIVED, p], lows[p], end)
    if low == end or p == num:
        return 0
    layers, max_bucket = problem.layers, problem.max_bucket
    send, back, at_host = tracked.send, tracked.back, tracked.at_host
    known, rest, flat_arrivals = scratch.known, scratch.rest, scratch.arrivals
    values, positions, heads, tails = scratch.values, scratch.positions, scratch.heads, scratch.tails
    bests, found = scratch.bests, scratch.found
    for g in range(first_group, end_group):
        own = problem.stages[p, g]
        most = most_devices(own, kind, num - p, p == 0, problem.is_alike)
        if most == 0:
            continue
        first, high = behind_ends(send, back, at_host, kind, lows, behind, may_be_last, own, p, most, low, rest)
        if high <= low:
            continue
        replicas, replica_ns, rounds = tracked.replicas[g], tracked.replica_ns[p, g], tracked.rounds[g]
        of_kinds = tracked.of_kinds[p, g]
        stage = stage_of(problem, tracked, kind, limit, is_full, p, g)
        for j in range(high - 1, first - 1, -1):
            trip = layers[own.own, j + 1].trip - layers[own.own, j].trip
            critical = (layers[own.own, j + 1].critical - layers[own.own, j].critical) * own.fastest
            rest[FLAT_AROUND, j] = min(rest[FLAT_AROUND, j], rest[FLAT_AROUND, j + 1] + own.fastest * trip)
            rest[STEEP_AROUND, j] = min(rest[STEEP_AROUND, j], rest[STEEP_AROUND, j + 1] + stage.slope * trip)
            rest[FIRST_BACK, j] = min(rest[FIRST_BACK, j], rest[FIRST_BACK, j + 1] + critical)
            rest[ANY_BACK, j] = min(rest[ANY_BACK, j], rest[ANY_BACK, j + 1] + critical)
        known_before(before, lows[p], low, last_low, tracked, stage, g, is_full, p, known)
        for k in range(num_before):
            row = AFTER + num_behind + tracked.then_before[g, k]
            flat_arrivals[k, low] = before[row, p, low - lows[p]]
            for i in range(low + 1, last_low + 1):
                forward = (layers[own.own, i].forward - layers[own.own, i - 1].forward) * own.fastest
                flat_arrivals[k, i] = min(before[row, p, i - lows[p]], flat_arrivals[k, i - 1] + forward)
        heads[:], tails[:], bests[:] = 0, 0, 0
        at = pushed = low
        for j in range(first, high + 1):
            while pushed < min(j, last_low + 1):
                if known[ARRIVAL, pushed] < np.inf:
                    _push_begin(
                        layers,
                        own,
                        before[:, p, pushed - lows[p]],
                        values,
                        positions,
                        heads,
                        tails,
                        tracked.more_behind,
                        tracked.then_behind,
                        num_behind,
                        g,
                        pushed,
                    )
                pushed += 1
            if rest[FLAT_AROUND, j] == np.inf:
                continue
            while at < pushed and (
                known[ARRIVAL, at] == np.inf
                or excess(layers, max_bucket, own, stage, replicas, replica_ns, rounds, of_kinds, known, rest, at, j)
                > 0
            ):
                at += 1
                num_tried += 1
            num_tried += 1
            if at == pushed or not drop(positions, heads, tails, 0, at, 1):
                continue
            _find(
                layers,
                max_bucket,
                own,
                flat_arrivals,
                values,
                positions,
                heads,
                tails,
                tracked.more_behind,
                tracked.more_before,
                num_behind,
                problem.rounding_ns,
                g,
                at,
                j,
                bests,
                found,
            )
            for to in range(p + own.few, p + most + 1):
                x = j - lows[to]
                if not 0 <= x < width or behind[AROUND, to, x] == np.inf:
                    continue
                send_ns, back_ns = (send[at_host[to], j], back[at_host[to], j]) if j < end else (0.0, 0.0)
                for row in range(2 + num_behind):
                    ns = found[row] + (send_ns if row == ARRIVED else back_ns)
                    ends[row, to, x] = min(ends[row, to, x], ns)
                for row in range(2 + num_behind, before.shape[0]):
                    ends[row, to, x] = min(ends[row, to, x], found[row] + send_ns)
    return num_tried


@compiled
def known_before(
    before: NDArray[np.float64],
    lowest: int,
    low: int,
    high: int,
    tracked: Tracked,
    stage: Stage,
    g: int,
    is_full: bool,
    p: int,
    known: Floats,
) -> None:
    """Notes what is before the begins from `low` to `high` of the stages of class `g`, see `excess`."""
    num_behind = tracked.behind.size
    first_before = AFTER + num_behind
    for i in range(low, high + 1):
        x = i - lowest
        known[ARRIVAL, i], known[RETURN, i] = before[ARRIVED, p, x], before[BACK, p, x]
        if is_full:
            known[FOLLOW, i] = known[FLAT_RETURN, i] = before[AFTER, p, x]
            known[FOLLOW_LATE, i] = before[AFTER + tracked.of_class[g], p, x]
            known[BEFORE_FIRST, i] = before[first_before + tracked.waits[g].before_first, p, x]
            known[BEFORE_ANY, i] = before[first_before + tracked.waits[g].before_any, p, x]
            for k in range(stage.num_replicas):
                row, replica = REPLICAS + ROWS_OF_REPLICA * k, tracked.replicas[g, k]
                known[row + FIRST_THERE, i] = before[first_before + replica.first, p, x]
                known[row + LAST_THERE, i] = before[first_before + replica.last, p, x]
                known[row + FOLLOW_LAST, i] = before[AFTER + replica.behind, p, x]
            for k in range(stage.num_rounds):
                known[ROUNDS + k, i] = before[AFTER + tracked.rounds[g, k].behind, p, x]
            if stage.num_kinds > 0:
                known[OF_KINDS + FIRST_THERE, i] = known[OF_KINDS + LAST_THERE, i] = before[first_before, p, x]
                known[OF_KINDS + FOLLOW_LAST, i] = before[AFTER, p, x]
        else:
            known[FOLLOW, i] = known[FLAT_RETURN, i] = known[FOLLOW_LATE, i] = known[RETURN, i]
            known[BEFORE_FIRST, i] = known[BEFORE_ANY, i] = 0.0


@compiled
def _push_begin(
    layers: NDArray[Any],
    own: Any,
    before: NDArray[np.float64],
    values: Floats,
    positions: Ints,
    heads: Ints,
    tails: Ints,
    more: Ints,
    then: Ints,
    num_behind: int,
    g: int,
    i: int,
) -> None:
    """Adds a begin of a stage to the window: what each table says there, less the layers before it as on the stage.

    Args:
        before: the rows at the begin.
    """
    sums = layers[own.own, i]
    forward, critical, backward = sums.forward * own.fastest, sums.critical * own.fastest, sums.backward * own.fastest
    push(values, positions, heads, tails, ARRIVED, i, before[ARRIVED] - forward)
    push(values, positions, heads, tails, BACK, i, before[BACK] - critical)
    if num_behind == 0:
        return
    for k in range(num_behind):
        push(values, positions, heads, tails, AFTER + k, i, before[AFTER + k] - critical)
    first_before = AFTER + num_behind
    for q in range(first_before, before.size):
        push(values, positions, heads, tails, q, i, before[q] - forward)
    for k in range(num_behind):
        if more[g, k] > 0:
            ns = before[AFTER + then[g, k]] - critical - more[g, k] * backward
            push(values, positions, heads, tails, before.size + k, i, ns)


@compiled
def _find(
    layers: NDArray[Any],
    max_bucket: float,
    own: Any,
    arrivals: NDArray[np.float64],
    values: Floats,
    positions: Ints,
    heads: Ints,
    tails: Ints,
    more: Ints,
    more_before: Ints,
    num_behind: int,
    rounding_ns: float,
    g: int,
    at: int,
    j: int,
    bests: Ints,
    found: Floats,
) -> None:
    """Finds what each table says behind the stages that end at j and begin at `at` or later, without the cut."""
    sums = layers[own.own, j]
    forward, critical, backward = sums.forward * own.fastest, sums.critical * own.fastest, sums.backward * own.fastest
    found[ARRIVED] = values[ARRIVED, heads[ARRIVED]] + forward
    drop(positions, heads, tails, BACK, at, 1)
    found[BACK] = values[BACK, heads[BACK]] + critical
    if num_behind == 0:
        return
    num_before = more_before.shape[1]
    num_rows = AFTER + num_behind + num_before
    for k in range(num_behind):
        q, num = AFTER + k, more[g, k]
        drop(positions, heads, tails, q, at, 1)
        # The later the stage begins, the longer the way back, and the shorter the rings behind `num` more B.
        best = min(max(bests[q], heads[q]), tails[q] - 1)
        rings = _rings_behind(layers, max_bucket, own, num, positions[q, best], j)
        if values[q, best] + critical < rings:
            ns = rings
            while best + 1 < tails[q]:
                rings = _rings_behind(layers, max_bucket, own, num, positions[q, best + 1], j)
                ns = min(ns, max(values[q, best + 1] + critical, rings))
                if values[q, best + 1] + critical >= rings:
                    break
                best += 1
        else:
            ns = values[q, best] + critical
            while best > heads[q]:
                rings = _rings_behind(layers, max_bucket, own, num, positions[q, best - 1], j)
                ns = min(ns, max(values[q, best - 1] + critical, rings))
                best -= 1
                if values[q, best] + critical < rings:
                    break
        bests[q] = best
        if num > 0:
            of_others = num_rows + k
            drop(positions, heads, tails, of_others, at, 1)
            ns = max(ns, values[of_others, heads[of_others]] + critical + num * backward)
        found[q] = ns
    for k in range(num_before):
        q, num = AFTER + num_behind + k, more_before[g, k] + 1
        drop(positions, heads, tails, q, at, 1)
        # The same of the F of one micro-batch, and of so many on a replica.
        best = min(max(bests[q], heads[q]), tails[q] - 1)
        i = positions[q, best]
        of_first = _last_forward(layers, own, arrivals[k, i], num, rounding_ns, i, j)
        if values[q, best] + forward < of_first:
            ns = of_first
            while best + 1 < tails[q]:
                i = positions[q, best + 1]
                of_first = _last_forward(layers, own, arrivals[k, i], num, rounding_ns, i, j)
                ns = min(ns, max(values[q, best + 1] + forward, of_first))
                if values[q, best + 1] + forward >= of_first:
                    break
                best += 1
        else:
            ns = values[q, best] + forward
            while best > heads[q]:
                i = positions[q, best - 1]
                of_first = _last_forward(layers, own, arrivals[k, i], num, rounding_ns, i, j)
                ns = min(ns, max(values[q, best - 1] + forward, of_first))
                best -= 1
                if values[q, best] + forward < of_first:
                    break
        bests[q] = best
        found[q] = ns - rounding_ns


@compiled
def _rings_behind(layers: NDArray[Any], max_bucket: float, own: Any, num: int, i: int, j: int) -> float:
    """From the arrival of a gradient until the rings of the stage of layers [i, j) are done, behind `num` more B."""
    begin, end = layers[own.own, i], layers[own.own, j]
    first_full = min(max(end.backward - begin.before_gradients, 0.0), end.first_bucket) * own.fastest
    ring = rings_ns(own, max_bucket, end.gradients - begin.gradients)
    b = (end.backward - begin.backward) * own.fastest
    return float(num * b + first_full + ring + end.update - begin.update)


@compiled
def _last_forward(
    layers: NDArray[Any], own: Any, arrival: float, num: int, rounding_ns: float, i: int, j: int
) -> float:
    """When a replica of the stage of layers [i, j) has run `num` F, at least; no later, the later it begins."""
    f = (layers[own.own, j].forward - layers[own.own, i].forward) * own.fastest
    return float(arrival + num * (f - rounding_ns))
