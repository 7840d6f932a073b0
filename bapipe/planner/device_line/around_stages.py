"""Compiled: what is known before the begins and after the ends of the stages of a class, by boundary."""

from typing import Any

import numpy as np

from bapipe.planner.compute.arrays import Floats, Ints
from bapipe.planner.compute.compiled import inlined, least
from bapipe.planner.device_line.early_waits import Waits
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import CRITICAL, FORWARD, TRIP
from bapipe.planner.device_line.tracked_arrays import Tracked
from bapipe.planner.device_line.trip_limits import (
    ARRIVAL,
    BEFORE_ANY,
    BEFORE_FIRST,
    FIRST_THERE,
    FLAT_RETURN,
    FOLLOW,
    FOLLOW_LAST,
    FOLLOW_LATE,
    FOLLOW_TURNS,
    LAST_THERE,
    NUM_KNOWN,
    OF_KINDS,
    REPLICAS,
    RETURN,
    ROUNDS,
    ROWS_OF_REPLICA,
    OfClass,
    Stage,
)
from bapipe.planner.device_line.trip_tables import (
    AFTER,
    ANY,
    ANY_BACK,
    AROUND,
    ARRIVED,
    BACK,
    FIRST,
    FIRST_BACK,
    FLAT_AROUND,
    STEEP_AROUND,
    Scratch,
    Tables,
)

PARTS_LEFT = 4
"""Of the micro-batches left by a stage's F-B turns, those of the first stage get 0, 1/`PARTS_LEFT`, ... or all."""


@inlined
def reached(before: Floats, low: int, end: int) -> tuple[int, int]:
    """Returns the first and the last boundary before `end` that any stages reach, `end` twice if there is none.

    Args:
        before: the table after some devices, from the boundary `low` on. [width, rows]
    """
    first, last = 0, min(before.shape[0], end - low) - 1
    while first <= last and before[first, ARRIVED] == np.inf:
        first += 1
    while last > first and before[last, ARRIVED] == np.inf:
        last -= 1
    return (low + first, low + last) if first <= last else (end, end)


@inlined
def most_devices(own: Any, kind: PlanKind, num_left: int, is_first: bool, is_alike: bool) -> int:
    """Returns how many devices a stage of this class may have if `num_left` remain; 0 if none of its sizes is allowed.

    That is the maximum; of equal devices the fewest of the class, as the others may stay idle.
    """
    if own.few > num_left or (is_first and (own.few > kind.first_most or own.most < kind.first_fewest)):
        return 0
    return int(own.few if is_alike else min(own.most, num_left))


@inlined
def note_levels(rows: Floats, num_levels: int, levels: Floats) -> None:
    """Builds a sparse table for each boundary: level k holds the minimum of the 2^k rows from each row on.

    Args:
        rows: [boundaries, rows]
        levels: [boundaries, levels of rows]
    """
    num = rows.shape[1]
    for x in range(rows.shape[0]):
        for row in range(num):
            levels[x, row] = rows[x, row]
    join_levels(num, num_levels, levels)


@inlined
def join_levels(num_rows: int, num_levels: int, levels: Floats) -> None:
    """Fills the levels 1, 2, ... of a sparse table from level 0; see `note_levels`."""
    for level in range(1, num_levels):
        below, here, half = (level - 1) * num_rows, level * num_rows, 1 << (level - 1)
        for x in range(levels.shape[0]):
            for row in range(num_rows - half):
                levels[x, here + row] = min(levels[x, below + row], levels[x, below + row + half])


@inlined
def known_before(
    levels: Floats,
    low: int,
    high: int,
    tracked: Tracked,
    stage: Stage,
    g: int,
    is_full: bool,
    waits: Waits,
    known: Floats,
) -> None:
    """Stores what is known before the begins from `low` to `high` of the stages of class `g`, see `excess`.

    Args:
        levels: see `Scratch`.
    """
    here, begins = levels[low : high + 1], slice(low, high + 1)
    _copy(here, ARRIVED, known[ARRIVAL, begins])
    _copy(here, BACK, known[RETURN, begins])
    if not is_full:
        for row in (FLAT_RETURN, FOLLOW, FOLLOW_LATE):
            _copy(here, BACK, known[row, begins])
        known[BEFORE_FIRST, begins] = known[BEFORE_ANY, begins] = 0.0
        return
    # After turns and cycles any micro-batch may be the one that comes back.
    _copy_least(here, tracked.of_all, known[FLAT_RETURN, begins])
    if stage.num_turns > 0:
        _note_behind_turns(here, tracked, waits, stage.turns_left, known[FOLLOW_TURNS, begins])
    _copy_least(here, tracked.of_any[g], known[FOLLOW, begins])
    _copy_least(here, tracked.of_class[g], known[FOLLOW_LATE, begins])
    _copy_least(here, tracked.waits[g].before_first, known[BEFORE_FIRST, begins])
    _copy_least(here, tracked.waits[g].before_any, known[BEFORE_ANY, begins])
    for k in range(stage.num_replicas):
        row, replica = REPLICAS + ROWS_OF_REPLICA * k, tracked.replicas[g, k]
        _copy_least(here, replica.first, known[row + FIRST_THERE, begins])
        _copy_least(here, replica.last, known[row + LAST_THERE, begins])
        _copy_least(here, replica.behind, known[row + FOLLOW_LAST, begins])
    for k in range(stage.num_rounds):
        _copy_least(here, tracked.rounds[g, k].behind, known[ROUNDS + k, begins])
    if stage.num_kinds > 0:
        _copy(here, ARRIVED, known[OF_KINDS + FIRST_THERE, begins])
        _copy(here, ARRIVED, known[OF_KINDS + LAST_THERE, begins])
        _copy_least(here, tracked.of_any[g], known[OF_KINDS + FOLLOW_LAST, begins])


@inlined
def _note_behind_turns(levels: Floats, tracked: Tracked, waits: Waits, num_left: int, times: Floats) -> None:
    """Stores the first stage's F-B turns plus what follows: the maximum over ways to divide `num_left` among both."""
    times[:] = 0.0
    for part in range(PARTS_LEFT + 1):
        num_first = num_left * part // PARTS_LEFT
        while num_first > 0 and waits.first_ns[num_first - 1] == waits.first_ns[num_first]:
            num_first -= 1
        first, second = tracked.of_more[num_left - num_first]
        for x in range(times.size):
            times[x] = max(times[x], waits.first_ns[num_first] + min(levels[x, first], levels[x, second]))


@inlined
def _copy(levels: Floats, row: int, times: Floats) -> None:
    for x in range(times.size):
        times[x] = levels[x, row]


@inlined
def _copy_least(levels: Floats, places: Ints, times: Floats) -> None:
    """Stores the minimum of a range of rows, by boundary: that of two places of the sparse table."""
    first, second = places[0], places[1]
    for x in range(times.size):
        times[x] = min(levels[x, first], levels[x, second])


@inlined
def behind_ends(
    tracked: Tracked,
    kind: PlanKind,
    tables: Tables,
    may_be_last: bool,
    own: Any,
    p: int,
    most: int,
    low: int,
    is_full: bool,
    rest: Floats,
    late: Floats,
) -> tuple[int, int]:
    """Stores what is known after each end of a stage of up to `most` devices, with the transfer over the cut there.

    Args:
        is_full: whether to store more than trips.
        rest, late: see `excess` and `OfClass`.

    Returns:
        The first end and the last one; the last one is at most `low` if there are none.
    """
    behind, end, first, last = tables.behind_ends, rest.shape[1] - 1, rest.shape[1], low
    may_end = may_be_last and own.few <= kind.last_most and own.most >= kind.last_fewest
    earliest, latest = (kind.earliest_end, kind.latest_end) if p == 0 else (0, end)
    for to in range(p + own.few, p + most + 1):
        first = min(first, max(low + 1, tables.lows[to]))
        last = max(last, min(tables.lows[to] + behind.shape[2], end + may_end) - 1)
    rest[:, first : last + 1] = np.inf
    late[first : last + 1] = np.inf
    for to in range(p + own.few, p + most + 1):
        link, lowest = tracked.at_host[to], tables.lows[to]
        begin = max(low + 1, lowest, earliest)
        after = min(lowest + behind.shape[2], end + may_end, latest + 1)
        if begin < after:
            ends, there = slice(begin, after), slice(begin - lowest, after - lowest)
            _note_behind(behind[AROUND, to, there], tracked.both[link, ends], rest[FLAT_AROUND, ends])
            if is_full:
                _note_behind(behind[FIRST, to, there], tracked.back[link, ends], rest[FIRST_BACK, ends])
                _note_behind(behind[ANY, to, there], tracked.back[link, ends], rest[ANY_BACK, ends])
                _note_late(tables.gradient_ends[to, there], tracked.back[link, ends], late[ends])
    while first <= last and rest[FLAT_AROUND, first] == np.inf:
        first += 1
    while last > low and (last < first or rest[FLAT_AROUND, last] == np.inf):
        last -= 1
    for j in range(first, last + 1):
        rest[STEEP_AROUND, j] = rest[FLAT_AROUND, j]
    return first, last


@inlined
def note_row_ns(tracked: Tracked, own: Any, p: int, g: int, num_known: int, scratch: Scratch) -> int:
    """Stores how long 1 ns of work takes on the replica of each row, for stages of class `g` after `p` devices.

    Args:
        num_known: how many devices `scratch.speeds` already holds, sorted.

    Returns:
        How many it holds now.
    """
    speeds, row_ns, rows_ns = scratch.speeds, scratch.row_ns, scratch.rows_ns
    num_devices = min(own.most, tracked.speeds.size - p)
    for number in range(num_known, num_devices):
        speed, at = tracked.speeds[p + number], number
        while at > 0 and speeds[at - 1] < speed:
            speeds[at] = speeds[at - 1]
            at -= 1
        speeds[at] = speed
    for row in range(row_ns.size - AFTER):
        ns = own.fastest
        if num_devices > 0:
            ns = max(ns, 1 / speeds[min(tracked.places[g, row], num_devices - 1)])
        is_behind = row < tracked.behind.size
        more = tracked.more_behind[g, row] if is_behind else tracked.more_before[g, row - tracked.behind.size]
        row_ns[AFTER + row], rows_ns[AFTER + row] = ns, more * ns
    return int(max(num_known, num_devices))


@inlined
def add(times: Floats, more: Floats, weight: float, total: Floats) -> None:
    """Sets `total` to `times + weight * more`, by boundary."""
    for x in range(total.size):
        total[x] = times[x] + weight * more[x]


@inlined
def note_least(times: Floats, known: Floats) -> None:
    """Lowers `known` to `times` where these are less."""
    for x in range(known.size):
        known[x] = least(times[x], known[x])


@inlined
def _note_behind(times: Floats, over_cut: Floats, known: Floats) -> None:
    """Lowers `known` to the times after a cut plus the transfers over it, where these are less."""
    for x in range(known.size):
        known[x] = least(times[x] + over_cut[x], known[x])


@inlined
def _note_late(times: Floats, over_cut: Floats, known: Floats) -> None:
    """Lowers the first level of `known`, by row, to when gradients arrive over the cut, where that is less."""
    for x in range(times.shape[0]):
        for row in range(times.shape[1]):
            known[x, row] = least(times[x, row] + over_cut[x], known[x, row])


@inlined
def limit_rest(
    columns: Floats, tracked: Tracked, own: Any, stage: Stage, first: int, high: int, rest: Floats, late: Floats
) -> None:
    """Lowers what follows the ends where it falls faster than the stages grow, so that `excess` rises with the end.

    Args:
        columns: those of the layers on the kinds of the stage. [LAYER_SUMS, boundaries]
        first, high: the first end and the last one.
        rest, late: see `excess` and `OfClass`.
    """
    for k in range(high - first):
        j = high - 1 - k
        trip, critical = columns[TRIP, j + 1] - columns[TRIP, j], columns[CRITICAL, j + 1] - columns[CRITICAL, j]
        rest[FLAT_AROUND, j] = min(rest[FLAT_AROUND, j], rest[FLAT_AROUND, j + 1] + own.fastest * trip)
        rest[STEEP_AROUND, j] = min(rest[STEEP_AROUND, j], rest[STEEP_AROUND, j + 1] + stage.slope * trip)
        if stage.waits:
            rest[FIRST_BACK, j] = min(rest[FIRST_BACK, j], rest[FIRST_BACK, j + 1] + own.fastest * critical)
            rest[ANY_BACK, j] = min(rest[ANY_BACK, j], rest[ANY_BACK, j + 1] + own.fastest * critical)
            for row in range(tracked.num_gradients):
                late[j, row] = least(late[j + 1, row] + own.fastest * critical, late[j, row])


@inlined
def limit_known(
    columns: Floats,
    own: Any,
    stage: Stage,
    of_class: OfClass,
    low: int,
    high: int,
    slopes: Floats,
    known: Floats,
) -> None:
    """Lowers what precedes the begins where it rises faster than the stages shrink; the counterpart of `limit_rest`.

    Args:
        columns: see `limit_rest`.
        low, high: the first begin and the last one.
        slopes: see `Scratch`.
    """
    num, highest = _note_slopes(own, stage, of_class, slopes), slopes[2]
    for row in range(num):
        highest[row] = known[row, low]
    for i in range(low + 1, high + 1):
        forward = columns[FORWARD, i] - columns[FORWARD, i - 1]
        critical = columns[CRITICAL, i] - columns[CRITICAL, i - 1]
        is_reached = known[ARRIVAL, i] < np.inf
        for row in range(num):
            highest[row] = min(known[row, i], highest[row] + slopes[0, row] * forward + slopes[1, row] * critical)
            known[row, i] = highest[row]
        if not is_reached:  # no stage begins there
            known[ARRIVAL, i] = np.inf


@inlined
def _note_slopes(own: Any, stage: Stage, of_class: OfClass, slopes: Floats) -> int:
    """Stores by how much each row may rise per ns of F and of r of the layers; returns the number of rows."""
    slopes[:] = 0.0
    slopes[0, ARRIVAL] = slopes[0, BEFORE_ANY] = slopes[0, BEFORE_FIRST] = own.fastest
    slopes[1, RETURN] = slopes[1, FLAT_RETURN] = own.fastest
    slopes[1, FOLLOW] = slopes[1, FOLLOW_LATE] = stage.back_slope
    slopes[0, FOLLOW_TURNS] = stage.num_turns * own.fastest
    slopes[1, FOLLOW_TURNS] = (1 + stage.num_turns) * own.fastest
    if not stage.waits:
        return int(REPLICAS)
    slopes[0, REPLICAS:ROUNDS] = slopes[0, OF_KINDS:] = own.fastest
    for k in range(stage.num_replicas):
        row = REPLICAS + ROWS_OF_REPLICA * k + FOLLOW_LAST
        slopes[0, row], slopes[1, row] = 0.0, (2 if of_class.replicas[k].count >= 2 else 1) * own.fastest
    for k in range(stage.num_rounds):
        slopes[1, ROUNDS + k] = of_class.rounds[k].count * own.fastest
    slopes[0, OF_KINDS + FOLLOW_LAST], slopes[1, OF_KINDS + FOLLOW_LAST] = 0.0, own.fastest
    return int(NUM_KNOWN)
