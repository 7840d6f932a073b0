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
from bapipe.planner.device_line.early_waits import Waits
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import Floats, Ints, Problem
from bapipe.planner.device_line.stage_limits import rings_ns, until_first_bucket
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
    Window,
    behind_ends,
    least,
    most_devices,
    move_on,
    reached,
)


@compiled
def fill_before(
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
    """Adds stages behind the first `p` devices; returns how many ends and begins of stages were tried.

    Args:
        is_full: whether more is asked for than trips.
        may_be_last: whether the stages may end at the last layer.
        first_class, end_class: the classes of the stages.
    """
    num, end = problem.stages.shape[0], problem.layers.shape[1] - 1
    lows, before, ends, behind = tables.lows, tables.before_begins, tables.before_ends, tables.behind_ends
    width, num_tried, num_behind = before.shape[2], 0, tracked.behind.size * is_full
    if problem.is_alike and p > 1 and first_class == 0:  # devices may stay idle, but not before the first stage
        for x in range(width):
            other = x + lows[p] - lows[p - 1]
            if 0 <= other < width and x + lows[p] < end:
                for row in range(before.shape[0]):
                    before[row, p, x] = min(before[row, p, x], before[row, p - 1, other])
    low, last_low = reached(before[ARRIVED, p], lows[p], end)
    if low == end or p == num:
        return 0
    layers, savings, max_bucket = problem.layers, problem.savings, problem.max_bucket
    send, back, at_host = tracked.send, tracked.back, tracked.at_host
    known, rest, starts, rings, found = scratch.known, scratch.rest, scratch.starts, scratch.rings, scratch.found
    forward, critical, backward = scratch.forward, scratch.critical, scratch.backward
    for g in range(first_class, end_class):
        own = problem.stages[p, g]
        most = most_devices(own, kind, num - p, p == 0, problem.is_alike)
        if most == 0:
            continue
        first, high = behind_ends(send, back, at_host, kind, lows, behind, may_be_last, own, p, most, low, rest)
        if high <= low:
            continue
        stage = stage_of(problem, tracked, kind, waits, limit, is_full, p, g)
        limit_rest(layers, own, stage, first, high, rest)
        known_before(before, lows[p], low, last_low, tracked, stage, g, is_full, p, known)
        replicas, replica_ns, rounds = tracked.replicas[g], tracked.replica_ns[p, g], tracked.rounds[g]
        of_kinds = tracked.of_kinds[p, g]
        at, has_any = low, False
        for j in range(first, high + 1):
            starts[j] = j
            if rest[FLAT_AROUND, j] == np.inf:
                continue
            last = min(j - 1, last_low)
            while at <= last and (
                known[ARRIVAL, at] == np.inf
                or excess(
                    layers, savings, max_bucket, own, stage, replicas, replica_ns, rounds, of_kinds, known, rest, at, j
                )
                > 0
            ):
                at += 1
                num_tried += 1
            num_tried += 1
            if at <= last:
                starts[j], has_any = at, True
        if not has_any:
            continue
        for j in range(first, high + 1):
            rings[j] = _rings_behind(layers, max_bucket, own, 0, starts[j], j)
        for i in range(low, high + 1):
            sums = layers[own.own, i]
            forward[i], critical[i] = sums.forward * own.fastest, sums.critical * own.fastest
            backward[i] = sums.backward * own.fastest
        window = Window(low, last_low, first, high)
        for row in range(before.shape[0]):
            is_back = BACK <= row < AFTER + num_behind
            _find_row(problem, tracked, own, g, before, p, row, num_behind, lows[p], scratch, window)
            link = back if is_back else send
            _note_ends(found, link, at_host, lows, behind, window, p + own.few, p + most, ends[row])
    return num_tried


@compiled
def limit_rest(layers: NDArray[Any], own: Any, stage: Stage, first: int, high: int, rest: Floats) -> None:
    """Lowers what is behind the ends of stages where it falls faster than they grow, so that `excess` rises with ends.

    Args:
        first, high: the ends.
    """
    for j in range(high - 1, first - 1, -1):
        trip = layers[own.own, j + 1].trip - layers[own.own, j].trip
        step = (layers[own.own, j + 1].critical - layers[own.own, j].critical) * own.fastest
        rest[FLAT_AROUND, j] = min(rest[FLAT_AROUND, j], rest[FLAT_AROUND, j + 1] + own.fastest * trip)
        rest[STEEP_AROUND, j] = min(rest[STEEP_AROUND, j], rest[STEEP_AROUND, j + 1] + stage.slope * trip)
        rest[FIRST_BACK, j] = min(rest[FIRST_BACK, j], rest[FIRST_BACK, j + 1] + step)
        rest[ANY_BACK, j] = min(rest[ANY_BACK, j], rest[ANY_BACK, j + 1] + step)


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
def _find_row(
    problem: Problem,
    tracked: Tracked,
    own: Any,
    g: int,
    before: NDArray[np.float64],
    p: int,
    row: int,
    num_behind: int,
    lowest: int,
    scratch: Scratch,
    window: Window,
) -> None:
    """Finds what a row of the table says behind the stages of class `g` on devices from `p` on, without the cut.

    Args:
        num_behind: how many rows are of micro-batches behind others.
        lowest: the boundary of the first column.
    """
    begins = slice(window.first_begin, window.last_begin + 1)
    ends = slice(window.first_end, window.last_end + 1)
    forward, critical, backward = scratch.forward, scratch.critical, scratch.backward
    costs, found, others, column = scratch.costs, scratch.found, scratch.others, window.first_begin - lowest
    is_back = BACK <= row < AFTER + num_behind
    _subtract(
        before[row, p, column:], critical[begins] if is_back else forward[begins], 0, backward[begins], costs[begins]
    )
    if row < AFTER:
        least(scratch, window, found)
        _add(found[ends], critical[ends] if is_back else forward[ends], 0.0)
    elif is_back:
        num_others, then = tracked.more_behind[g, row - AFTER], AFTER + tracked.then_behind[g, row - AFTER]
        _least_behind(problem.layers, problem.max_bucket, own, num_others, scratch, window)
        if num_others > 0:
            _subtract(before[then, p, column:], critical[begins], num_others, backward[begins], costs[begins])
            least(scratch, window, others)
            _note_later(others[ends], critical[ends], num_others, backward[ends], found[ends])
    else:
        k = row - AFTER - num_behind
        num_forwards, then = tracked.more_before[g, k] + 1, AFTER + num_behind + tracked.then_before[g, k]
        if num_forwards == 1:
            least(scratch, window, found)
            _add(found[ends], forward[ends], problem.rounding_ns)
        else:
            _subtract(before[then, p, column:], forward[begins], 0, backward[begins], others[begins])
            for i in range(window.first_begin + 1, window.last_begin + 1):
                others[i] = min(others[i], others[i - 1])
            _least_arrival(num_forwards, problem.rounding_ns, scratch, window)


@compiled
def _subtract(times: Floats, sums: Floats, num: int, more: Floats, found: Floats) -> None:
    for x in range(found.size):
        found[x] = times[x] - sums[x] - num * more[x]


@compiled
def _add(found: Floats, sums: Floats, less: float) -> None:
    for x in range(found.size):
        found[x] += sums[x] - less


@compiled
def _note_later(times: Floats, sums: Floats, num: int, more: Floats, found: Floats) -> None:
    for x in range(found.size):
        found[x] = max(found[x], times[x] + sums[x] + num * more[x])


@compiled
def _note_ends(
    found: Floats,
    link: Floats,
    at_host: Ints,
    lows: Ints,
    behind: NDArray[np.float64],
    window: Window,
    fewest: int,
    most: int,
    ends: NDArray[np.float64],
) -> None:
    """Notes what is found before the ends of stages, behind them and the cut there.

    Args:
        link: what is sent over the cut. [2, boundaries]
        fewest, most: the devices behind which the stages end.
        ends: the row of the table. [devices + 1, width]
    """
    for to in range(fewest, most + 1):
        begin, end = max(window.first_end, lows[to]), min(window.last_end + 1, lows[to] + ends.shape[1])
        if begin >= end:
            continue
        before_it, sent = found[begin:end], link[at_host[to], begin:end]
        own_ends, own_behind = ends[to, begin - lows[to] :], behind[AROUND, to, begin - lows[to] :]
        for x in range(before_it.size):  # slices from 0 on, which the compiler turns into vectors
            ns = before_it[x] + sent[x] if own_behind[x] < np.inf else np.inf
            own_ends[x] = min(own_ends[x], ns)


@compiled
def _least_behind(
    layers: NDArray[Any], max_bucket: float, own: Any, num: int, scratch: Scratch, window: Window
) -> None:
    """Finds how long the first stage waits for B behind those of the stages that end at each boundary.

    The later such a stage begins, the longer the way back, and the shorter the rings behind `num` more B.
    """
    critical, backward, rings, starts = scratch.critical, scratch.backward, scratch.rings, scratch.starts
    values, positions, found = scratch.values, scratch.positions, scratch.found
    head = tail = best = pushed = 0
    for j in range(window.first_end, window.last_end + 1):
        found[j] = np.inf
        if starts[j] == j:
            continue
        head, tail, pushed = move_on(scratch, window, head, tail, pushed, j)
        found[j] = values[head] + critical[j]
        if found[j] >= rings[j] + num * (backward[j] - backward[starts[j]]):
            continue
        best = min(max(best, head), tail - 1)
        ns = _rings_behind(layers, max_bucket, own, num, positions[best], j)
        if values[best] + critical[j] < ns:
            while best + 1 < tail:
                shorter_ns = _rings_behind(layers, max_bucket, own, num, positions[best + 1], j)
                ns = min(ns, max(values[best + 1] + critical[j], shorter_ns))
                if values[best + 1] + critical[j] >= shorter_ns:
                    break
                best += 1
        else:
            ns = values[best] + critical[j]
            while best > head:
                longer_ns = _rings_behind(layers, max_bucket, own, num, positions[best - 1], j)
                ns = min(ns, max(values[best - 1] + critical[j], longer_ns))
                best -= 1
                if values[best] + critical[j] < longer_ns:
                    break
        found[j] = ns


@compiled
def _least_arrival(num: int, rounding_ns: float, scratch: Scratch, window: Window) -> None:
    """Finds when micro-batches leave the stages that end at each boundary, whose replicas run `num` F until then.

    The later such a stage begins, the later the last one is there, and the shorter are so many F, the first of which
    waits as long as `others` says.
    """
    forward, others, starts = scratch.forward, scratch.others, scratch.starts
    values, positions, found = scratch.values, scratch.positions, scratch.found
    head = tail = best = pushed = 0
    for j in range(window.first_end, window.last_end + 1):
        found[j] = np.inf
        if starts[j] == j:
            continue
        head, tail, pushed = move_on(scratch, window, head, tail, pushed, j)
        best = min(max(best, head), tail - 1)
        i = positions[best]
        ns = others[i] + forward[i] + num * (forward[j] - forward[i] - rounding_ns)
        if values[best] + forward[j] < ns:
            while best + 1 < tail:
                i = positions[best + 1]
                sooner_ns = others[i] + forward[i] + num * (forward[j] - forward[i] - rounding_ns)
                ns = min(ns, max(values[best + 1] + forward[j], sooner_ns))
                if values[best + 1] + forward[j] >= sooner_ns:
                    break
                best += 1
        else:
            ns = values[best] + forward[j]
            while best > head:
                i = positions[best - 1]
                later_ns = others[i] + forward[i] + num * (forward[j] - forward[i] - rounding_ns)
                ns = min(ns, max(values[best - 1] + forward[j], later_ns))
                best -= 1
                if values[best] + forward[j] < later_ns:
                    break
        found[j] = ns - rounding_ns


@compiled
def _rings_behind(layers: NDArray[Any], max_bucket: float, own: Any, num: int, i: int, j: int) -> float:
    """From the arrival of a gradient until the rings of the stage of layers [i, j) are done, behind `num` more B."""
    begin, end = layers[own.own, i], layers[own.own, j]
    first_full = until_first_bucket(begin, end) * own.fastest
    ring = rings_ns(own, max_bucket, end.gradients - begin.gradients)
    b = (end.backward - begin.backward) * own.fastest
    return float(num * b + first_full + ring + end.update - begin.update)
