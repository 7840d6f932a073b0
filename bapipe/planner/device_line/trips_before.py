"""Compiled: what comes at least before each boundary, by a dynamic programme over devices and boundaries.

A stage may begin at some boundaries and end at some. The further its end, the later the first begin with which it is
within the limits; so of all stages that end at a boundary those that begin in a window are tried, and windows move one
way. What the rows of a table say behind a stage is found for all of them at once: they lie one after the other in
memory, so that the compiler turns sums over them into vectors. Begins are left out where the next one is no worse.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled, inlined
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
    most_devices,
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
    lows, before, behind = tables.lows, tables.before_begins, tables.behind_ends
    width, num_tried, num_behind = before.shape[1], 0, tracked.behind.size * is_full
    if problem.is_alike and p > 1 and first_class == 0:  # devices may stay idle, but not before the first stage
        for x in range(width):
            other = x + lows[p] - lows[p - 1]
            if 0 <= other < width and x + lows[p] < end:
                _note(before[p - 1, other], 0.0, before[p, x])
    low, last_low = reached(before[p], lows[p], end)
    if low == end or p == num:
        return 0
    layers, savings, max_bucket = problem.layers, problem.savings, problem.max_bucket
    send, back, at_host = tracked.send, tracked.back, tracked.at_host
    known, rest, starts = scratch.known, scratch.rest, scratch.starts
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
        known_before(before[p], lows[p], low, last_low, tracked, stage, g, is_full, known)
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
        window = Window(low, last_low, first, high)
        num_begins = _note_begins(problem, tracked, tables, scratch, num_behind, p, g, window)
        _note_stages(problem, tracked, tables, scratch, num_behind, p, g, most, window, num_begins)
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
    before: Floats,
    lowest: int,
    low: int,
    high: int,
    tracked: Tracked,
    stage: Stage,
    g: int,
    is_full: bool,
    known: Floats,
) -> None:
    """Notes what is before the begins from `low` to `high` of the stages of class `g`, see `excess`.

    Args:
        before: the table behind the devices before the stages, from the boundary `lowest` on. [width, rows]
    """
    num_behind = tracked.behind.size
    first_before = AFTER + num_behind
    for i in range(low, high + 1):
        x = i - lowest
        known[ARRIVAL, i], known[RETURN, i] = before[x, ARRIVED], before[x, BACK]
        if is_full:
            known[FOLLOW, i] = known[FLAT_RETURN, i] = before[x, AFTER]
            known[FOLLOW_LATE, i] = before[x, AFTER + tracked.of_class[g]]
            known[BEFORE_FIRST, i] = before[x, first_before + tracked.waits[g].before_first]
            known[BEFORE_ANY, i] = before[x, first_before + tracked.waits[g].before_any]
            for k in range(stage.num_replicas):
                row, replica = REPLICAS + ROWS_OF_REPLICA * k, tracked.replicas[g, k]
                known[row + FIRST_THERE, i] = before[x, first_before + replica.first]
                known[row + LAST_THERE, i] = before[x, first_before + replica.last]
                known[row + FOLLOW_LAST, i] = before[x, AFTER + replica.behind]
            for k in range(stage.num_rounds):
                known[ROUNDS + k, i] = before[x, AFTER + tracked.rounds[g, k].behind]
            if stage.num_kinds > 0:
                known[OF_KINDS + FIRST_THERE, i] = known[OF_KINDS + LAST_THERE, i] = before[x, first_before]
                known[OF_KINDS + FOLLOW_LAST, i] = before[x, AFTER]
        else:
            known[FOLLOW, i] = known[FLAT_RETURN, i] = known[FOLLOW_LATE, i] = known[RETURN, i]
            known[BEFORE_FIRST, i] = known[BEFORE_ANY, i] = 0.0


@compiled
def _note_begins(
    problem: Problem,
    tracked: Tracked,
    tables: Tables,
    scratch: Scratch,
    num_behind: int,
    p: int,
    g: int,
    window: Window,
) -> int:
    """Notes the begins of the stages of class `g` that may be better than those beside them, and what is there then.

    A begin is no better than the next one if no row rises by more between them than the layers take on the stage: all
    that follows from a row at the begin of a stage falls by at least as much, and rings fall, too. By trips alone it is
    no better than the one before if no row rises by less.

    Args:
        num_behind: how many rows are of micro-batches behind others.

    Returns:
        How many `scratch.begins` there are.
    """
    own, before, high = problem.stages[p, g], tables.before_begins[p], window.last_begin
    layers, lowest, num_rows, in_front = problem.layers[own.own], tables.lows[p], before.shape[1], AFTER + num_behind
    num_begins, rises, falls = 0, 1, 1
    for i in range(window.first_begin, high + 1):
        here, then = before[i - lowest], scratch.then[i]
        for row in range(num_behind):
            then[AFTER + row] = here[AFTER + tracked.then_behind[g, row]]
        for row in range(num_rows - in_front):
            then[in_front + row] = here[in_front + tracked.then_before[g, row]]
        is_below, rises, falls = rises > 0 and falls == 0 and num_rows == AFTER, 1, 1
        if i < high:
            forward = (layers[i + 1].forward - layers[i].forward) * own.fastest
            critical = (layers[i + 1].critical - layers[i].critical) * own.fastest
            there = before[i + 1 - lowest]
            rises = int(there[ARRIVED] > here[ARRIVED] + forward)
            rises += _num_more(there[BACK:in_front], here[BACK:in_front], critical)
            rises += _num_more(there[in_front:], here[in_front:], forward)
            falls = int(there[ARRIVED] < here[ARRIVED] + forward) + int(there[BACK] < here[BACK] + critical)
        if rises > 0 and not is_below:
            scratch.begins[num_begins] = i
            num_begins += 1
    return num_begins


@compiled
def _num_more(times: Floats, others: Floats, ns: float) -> int:
    """How many times are more than others and so many ns."""
    num = 0
    for row in range(times.size):
        num += times[row] > others[row] + ns
    return num


@compiled
def _note_stages(
    problem: Problem,
    tracked: Tracked,
    tables: Tables,
    scratch: Scratch,
    num_behind: int,
    p: int,
    g: int,
    most: int,
    window: Window,
    num_begins: int,
) -> None:
    """Notes what each row says behind the stages of class `g`, on up to `most` devices: of their begins the least.

    Args:
        num_behind: see `_note_begins`.
        num_begins: how many `scratch.begins` are tried for each end, besides the first and the last one.
    """
    own, before, max_bucket = problem.stages[p, g], tables.before_begins[p], problem.max_bucket
    layers, lowest, in_front = problem.layers[own.own], tables.lows[p], AFTER + num_behind
    starts, begins, then, found, number = scratch.starts, scratch.begins, scratch.then, scratch.found, 0
    more_behind, more_before, rounding = tracked.more_behind[g], tracked.more_before[g], problem.rounding_ns
    for j in range(window.first_end, window.last_end + 1):
        if starts[j] == j:
            continue
        end, last = layers[j], min(j - 1, window.last_begin)
        while number < num_begins and begins[number] <= starts[j]:
            number += 1
        found[:] = np.inf
        arrived = returned = np.inf
        k, i = number, starts[j]
        while True:  # two begins at a time, which takes hardly longer than one
            i2 = _next_begin(begins, num_begins, k, last)
            begin, begin2, here, here2 = layers[i], layers[i2], before[i - lowest], before[i2 - lowest]
            f, f2 = (end.forward - begin.forward) * own.fastest, (end.forward - begin2.forward) * own.fastest
            r, r2 = (end.critical - begin.critical) * own.fastest, (end.critical - begin2.critical) * own.fastest
            arrived = min(arrived, here[ARRIVED] + f, here2[ARRIVED] + f2)
            returned = min(returned, here[BACK] + r, here2[BACK] + r2)
            if found.size > AFTER:
                b, b2 = (end.backward - begin.backward) * own.fastest, (end.backward - begin2.backward) * own.fastest
                rings, rings2 = _rings(own, max_bucket, begin, end), _rings(own, max_bucket, begin2, end)
                rows, then1, then2 = slice(AFTER, in_front), then[i], then[i2]
                there, there2 = (then1[rows], r, b, rings), (then2[rows], r2, b2, rings2)
                _note_behind(here[rows], here2[rows], there, there2, more_behind, found[rows])
                rows, f, f2 = slice(in_front, found.size), f - rounding, f2 - rounding
                _note_before(here[rows], here2[rows], then1[rows], then2[rows], more_before, f, f2, found[rows])
            if i2 == last:
                break
            i, k = _next_begin(begins, num_begins, k + 1, last), k + 2
        for to in range(p + own.few, p + most + 1):
            x, link = j - tables.lows[to], tracked.at_host[to]
            if 0 <= x < tables.before_ends.shape[1] and tables.behind_ends[AROUND, to, x] < np.inf:
                ends, sent, back = tables.before_ends[to, x], tracked.send[link, j], tracked.back[link, j]
                ends[ARRIVED], ends[BACK] = min(ends[ARRIVED], arrived + sent), min(ends[BACK], returned + back)
                _note(found[AFTER:in_front], back, ends[AFTER:in_front])
                _note(found[in_front:], sent, ends[in_front:])


@inlined
def _next_begin(begins: Ints, num_begins: int, number: int, last: int) -> int:
    """The begin with a number, or the last one."""
    return min(begins[number], last) if number < num_begins else last


@compiled
def _rings(own: Any, max_bucket: float, begin: Any, end: Any) -> float:
    """From the arrival of a gradient until the rings of a stage are done."""
    rings = rings_ns(own, max_bucket, end.gradients - begin.gradients) + end.update - begin.update
    return float(until_first_bucket(begin, end) * own.fastest + rings)


@inlined
def _note_behind(
    here: Floats,
    here2: Floats,
    there: tuple[Floats, float, float, float],
    there2: tuple[Floats, float, float, float],
    more: Floats,
    found: Floats,
) -> None:
    """Notes what follows behind one of two stages if others are behind a micro-batch there, by their rows.

    Args:
        here, here2: the rows at their begins.
        there, there2: what is at the begins by each row, see `Tracked`; and of the stages what earlier ones wait for in
            B, B, and their rings.
        more: of how many others B follows on the same replica.
    """
    then, r, b, rings = there
    then2, r2, b2, rings2 = there2
    for row in range(found.size):
        ns = max(here[row] + r, more[row] * b + max(then[row] + r, rings))
        ns2 = max(here2[row] + r2, more[row] * b2 + max(then2[row] + r2, rings2))
        ns = ns if ns < ns2 else ns2
        found[row] = ns if ns < found[row] else found[row]


@inlined
def _note_before(
    here: Floats, here2: Floats, then: Floats, then2: Floats, more: Floats, f: float, f2: float, found: Floats
) -> None:
    """Notes when micro-batches leave one of two stages, by their rows.

    Args:
        here, here2, then, then2: as above.
        more: how many F their replica has run then, from the one on of which `then` says when it is there.
    """
    for row in range(found.size):
        ns = max(here[row] + f, then[row] + more[row] * f)
        ns2 = max(here2[row] + f2, then2[row] + more[row] * f2)
        ns = ns if ns < ns2 else ns2
        found[row] = ns if ns < found[row] else found[row]


@inlined
def _note(times: Floats, ns: float, least: Floats) -> None:
    """Notes times, so much later, where they are less than known before."""
    for row in range(least.size):
        later_ns = times[row] + ns
        least[row] = later_ns if later_ns < least[row] else least[row]
