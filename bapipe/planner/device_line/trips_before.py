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
    FLAT_RETURN,
    FOLLOW,
    FOLLOW_LATE,
    PACED_ANY,
    PACED_FIRST,
    RETURN,
    Late,
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
    late: Late,
    waits: NDArray[Any],
    kind: PlanKind,
    limit: float,
    tables: Tables,
    scratch: Scratch,
    is_full: bool,
    may_be_last: bool,
    p: int,
) -> int:
    """Adds stages behind the first `p` devices; returns how many ends and begins of stages were tried.

    Args:
        waits: `WAIT`. [positions, groups]
        is_full: whether more is asked for than trips.
        may_be_last: whether the stages may end at the last layer.
    """
    (num, num_groups), end = problem.stages.shape, problem.layers.shape[1] - 1
    lows, before, ends, behind = tables.lows, tables.before_begins, tables.before_ends, tables.behind_ends
    width, num_tried, num_late = before.shape[2], 0, late.numbers.size * is_full
    if problem.is_alike and p > 1:  # devices may stay idle, but not before the first stage
        for x in range(width):
            other = x + lows[p] - lows[p - 1]
            if 0 <= other < width:
                for row in range(before.shape[0]):
                    before[row, p, x] = min(before[row, p, x], before[row, p - 1, other])
    low, last_low = reached(before[ARRIVED, p], lows[p], end)
    if low == end or p == num:
        return 0
    layers, max_bucket = problem.layers, problem.max_bucket
    send, back, at_host = late.send, late.back, late.at_host
    known, rest, flat_arrivals = scratch.known, scratch.rest, scratch.arrivals
    values, positions, heads, tails = scratch.values, scratch.positions, scratch.heads, scratch.tails
    found = scratch.found
    for g in range(num_groups):
        own = problem.stages[p, g]
        most = most_devices(own, kind, num - p, p == 0, problem.is_alike)
        if most == 0:
            continue
        first, high = behind_ends(send, back, at_host, kind, lows, behind, may_be_last, own, p, most, low, rest)
        if high <= low:
            continue
        wait = waits[p, g]
        stage = stage_of(problem, late, wait, kind, limit, is_full, p, g)
        for j in range(high - 1, first - 1, -1):
            trip = layers[own.own, j + 1].trip - layers[own.own, j].trip
            critical = (layers[own.own, j + 1].critical - layers[own.own, j].critical) * own.fastest
            rest[FLAT_AROUND, j] = min(rest[FLAT_AROUND, j], rest[FLAT_AROUND, j + 1] + own.fastest * trip)
            rest[STEEP_AROUND, j] = min(rest[STEEP_AROUND, j], rest[STEEP_AROUND, j + 1] + stage.slope * trip)
            rest[FIRST_BACK, j] = min(rest[FIRST_BACK, j], rest[FIRST_BACK, j + 1] + critical)
            rest[ANY_BACK, j] = min(rest[ANY_BACK, j], rest[ANY_BACK, j + 1] + critical)
        known_before(before, lows[p], low, last_low, late, wait, g, is_full, p, known)
        flat_arrivals[low] = known[ARRIVAL, low]
        for i in range(low + 1, last_low + 1):
            forward = (layers[own.own, i].forward - layers[own.own, i - 1].forward) * own.fastest
            flat_arrivals[i] = min(known[ARRIVAL, i], flat_arrivals[i - 1] + forward)
        heads[:], tails[:] = 0, 0
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
                        late.more,
                        late.then,
                        num_late,
                        g,
                        pushed,
                    )
                pushed += 1
            if rest[FLAT_AROUND, j] == np.inf:
                continue
            while at < pushed and (
                known[ARRIVAL, at] == np.inf or excess(layers, max_bucket, own, stage, known, rest, at, j) > 0
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
                late.more,
                late.paced,
                num_late,
                problem.rounding_ns,
                g,
                at,
                j,
                found,
            )
            for to in range(p + own.few, p + most + 1):
                x = j - lows[to]
                if not 0 <= x < width or behind[AROUND, to, x] == np.inf:
                    continue
                send_ns, back_ns = (send[at_host[to], j], back[at_host[to], j]) if j < end else (0.0, 0.0)
                for row in range(2 + num_late):
                    ns = found[row] + (send_ns if row == ARRIVED else back_ns)
                    ends[row, to, x] = min(ends[row, to, x], ns)
                for row in range(2 + num_late, before.shape[0]):
                    ends[row, to, x] = min(ends[row, to, x], found[row] + send_ns)
    return num_tried


@compiled
def known_before(
    before: NDArray[np.float64],
    lowest: int,
    low: int,
    high: int,
    late: Late,
    wait: Any,
    g: int,
    is_full: bool,
    p: int,
    known: Floats,
) -> None:
    """Notes what is before the begins from `low` to `high` of the stages of class `g`, see `excess`."""
    num_late = late.numbers.size
    paced = AFTER + num_late
    for i in range(low, high + 1):
        x = i - lowest
        known[ARRIVAL, i], known[RETURN, i] = before[ARRIVED, p, x], before[BACK, p, x]
        if is_full:
            known[FOLLOW, i] = known[FLAT_RETURN, i] = before[AFTER, p, x]
            known[FOLLOW_LATE, i] = before[AFTER + late.of_class[g], p, x]
            known[PACED_FIRST, i] = before[paced + wait.paced_first, p, x]
            known[PACED_ANY, i] = before[paced + wait.paced_any, p, x]
        else:
            known[FOLLOW, i] = known[FLAT_RETURN, i] = known[FOLLOW_LATE, i] = known[RETURN, i]
            known[PACED_FIRST, i] = known[PACED_ANY, i] = 0.0


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
    num_late: int,
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
    if num_late == 0:
        return
    for k in range(num_late):
        push(values, positions, heads, tails, AFTER + k, i, before[AFTER + k] - critical)
    paced = AFTER + num_late
    for q in range(paced, before.size):
        push(values, positions, heads, tails, q, i, before[q] - forward)
    for k in range(num_late):
        if more[g, k] > 0:
            ns = before[AFTER + then[g, k]] - critical - more[g, k] * backward
            push(values, positions, heads, tails, before.size + k, i, ns)


@compiled
def _find(
    layers: NDArray[Any],
    max_bucket: float,
    own: Any,
    arrivals: Floats,
    values: Floats,
    positions: Ints,
    heads: Ints,
    tails: Ints,
    more: Ints,
    paced: Ints,
    num_late: int,
    rounding_ns: float,
    g: int,
    at: int,
    j: int,
    found: Floats,
) -> None:
    """Finds what each table says behind the stages that end at j and begin at `at` or later, without the cut."""
    sums = layers[own.own, j]
    forward, critical, backward = sums.forward * own.fastest, sums.critical * own.fastest, sums.backward * own.fastest
    found[ARRIVED] = values[ARRIVED, heads[ARRIVED]] + forward
    drop(positions, heads, tails, BACK, at, 1)
    found[BACK] = values[BACK, heads[BACK]] + critical
    if num_late == 0:
        return
    num_rows = AFTER + num_late + paced.size
    for k in range(num_late):
        q, num = AFTER + k, more[g, k]
        drop(positions, heads, tails, q, at, 1)
        # The later the stage begins, the longer the way back, and the shorter the rings behind `num` more B.
        low, high = heads[q], tails[q] - 1
        while low < high:
            middle = (low + high) // 2
            if values[q, middle] + critical >= _rings_behind(layers, max_bucket, own, num, positions[q, middle], j):
                high = middle
            else:
                low = middle + 1
        ns = max(values[q, low] + critical, _rings_behind(layers, max_bucket, own, num, positions[q, low], j))
        if low > heads[q]:
            rings = _rings_behind(layers, max_bucket, own, num, positions[q, low - 1], j)
            ns = min(ns, max(values[q, low - 1] + critical, rings))
        if num > 0:
            of_others = num_rows + k
            drop(positions, heads, tails, of_others, at, 1)
            ns = max(ns, values[of_others, heads[of_others]] + critical + num * backward)
        found[q] = ns
    for k in range(paced.size):
        q, num = AFTER + num_late + k, paced[k] // int(own.most) + 1
        drop(positions, heads, tails, q, at, 1)
        # The same of the F of one micro-batch, and of so many on a replica.
        low, high = heads[q], tails[q] - 1
        while low < high:
            middle = (low + high) // 2
            i = positions[q, middle]
            if values[q, middle] + forward >= _last_forward(layers, own, arrivals, num, rounding_ns, i, j):
                high = middle
            else:
                low = middle + 1
        of_first = _last_forward(layers, own, arrivals, num, rounding_ns, positions[q, low], j)
        ns = max(values[q, low] + forward, of_first)
        if low > heads[q]:
            of_first = _last_forward(layers, own, arrivals, num, rounding_ns, positions[q, low - 1], j)
            ns = min(ns, max(values[q, low - 1] + forward, of_first))
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
    layers: NDArray[Any], own: Any, arrivals: Floats, num: int, rounding_ns: float, i: int, j: int
) -> float:
    """When a replica of the stage of layers [i, j) has run `num` F, at least; no later, the later it begins."""
    f = (layers[own.own, j].forward - layers[own.own, i].forward) * own.fastest
    return float(arrivals[i] + num * (f - rounding_ns))
