"""Compiled: the rows after stages with each sum minimized separately, which takes less time.

Each row after a stage is the maximum of three sums (docs/many_devices.md), minimized over all begins: see
`trips_before.py`. The maximum of the three minima is a lower bound on that. And the minimum of one sum over a sliding
window of begins takes one or two steps for each begin, however many ends there are.
"""

from typing import Any

import numpy as np

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import inlined, least
from bapipe.planner.device_line.around_stages import note_least
from bapipe.planner.device_line.stage_arrays import BACKWARD, CRITICAL, FORWARD, BoundInputs
from bapipe.planner.device_line.stage_limits import rings_ns, until_first_bucket
from bapipe.planner.device_line.tracked_arrays import Tracked
from bapipe.planner.device_line.trip_tables import AFTER, AROUND, ARRIVED, BACK, Scratch, Tables, Window


@inlined
def note_apart(
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
    """Stores lower bounds on each row after the stages of class `g`, on up to `most` devices.

    The window of begins is divided at a middle: suffix minima are known of the begins before it, and the minimum over
    all begins after it. Once the window has passed the middle, that moves to the window's end.

    Args:
        num_behind: how many rows are for numbers of micro-batches that follow.
    """
    own, in_front = problem.stages[p, g], AFTER + num_behind
    columns, apart, least_behind, found = problem.columns[own.own], scratch.apart, scratch.least_behind, scratch.found
    at = middle = window.first_begin
    least_behind[:] = np.inf
    for j in range(window.first_end, window.last_end + 1):
        start, last = scratch.starts[j], min(j - 1, window.last_begin)
        while at <= last:
            _note_sums(columns, tracked, own, g, in_front, at, scratch.levels[at], apart[at])
            note_least(apart[at], least_behind)
            at += 1
        if start == j:
            continue
        if start >= middle:
            for i in range(at - 2, start - 1, -1):
                note_least(apart[i + 1], apart[i])
            middle = at
            least_behind[:] = np.inf
        begin, end = problem.layers[own.own, last], problem.layers[own.own, j]
        f, r, b = end.forward * own.fastest, end.critical * own.fastest, end.backward * own.fastest
        found[ARRIVED] = min(apart[start, ARRIVED], least_behind[ARRIVED]) + f
        found[BACK] = min(apart[start, BACK], least_behind[BACK]) + r
        rows, others = slice(AFTER, in_front), slice(found.size + AFTER, found.size + in_front)
        here, there = (apart[start, rows], least_behind[rows]), (apart[start, others], least_behind[others])
        shortest = rings_of(own, problem.max_bucket, begin, end), (end.backward - begin.backward) * own.fastest
        _join_behind(here, there, tracked.more_behind[g], r, b, shortest, found[rows])
        rows, others = slice(in_front, found.size), slice(found.size + in_front, apart.shape[1])
        here, there = (apart[start, rows], least_behind[rows]), (apart[start, others], least_behind[others])
        _join_before(here, there, tracked.more_before[g], f - problem.rounding_ns, found[rows])
        note_found(tracked, tables, own, p, most, j, in_front, found)


@inlined
def _note_sums(
    columns: Floats, tracked: Tracked, own: Any, g: int, in_front: int, i: int, here: Floats, sums: Floats
) -> None:
    """Stores each row at a begin, and the minimum that `Tracked` gives for it, less the stage's layers before."""
    f, r, b = own.fastest * columns[FORWARD, i], own.fastest * columns[CRITICAL, i], own.fastest * columns[BACKWARD, i]
    num_rows, more_behind, more_before = sums.size // 2, tracked.more_behind[g], tracked.more_before[g]
    sums[ARRIVED], sums[BACK] = here[ARRIVED] - f, here[BACK] - r
    sums[num_rows + ARRIVED] = sums[num_rows + BACK] = 0.0
    for row in range(more_behind.size):
        sums[AFTER + row] = here[AFTER + row] - r
        then = min(here[tracked.then_behind[g, row, 0]], here[tracked.then_behind[g, row, 1]])
        sums[num_rows + AFTER + row] = then - r - more_behind[row] * b
    for row in range(more_before.size):
        sums[in_front + row] = here[in_front + row] - f
        then = min(here[tracked.then_before[g, row, 0]], here[tracked.then_before[g, row, 1]])
        sums[num_rows + in_front + row] = then - more_before[row] * f


@inlined
def _join_behind(
    here: tuple[Floats, Floats],
    there: tuple[Floats, Floats],
    more: Floats,
    r: float,
    b: float,
    shortest: tuple[float, float],
    found: Floats,
) -> None:
    """Stores the maximum of the sums, for the rows of micro-batches that follow.

    Args:
        here, there: the minima of the two sums of `_note_sums`, each over the begins before and after the middle.
        r, b: what earlier stages wait for in B, and B, of the layers before the end.
        shortest: the rings of the shortest stage, and its B.
    """
    first, behind = here
    first_then, behind_then = there
    rings, least_b = shortest
    for row in range(found.size):
        ns = min(first[row], behind[row]) + r
        then_ns = min(first_then[row], behind_then[row]) + (r + more[row] * b)
        found[row] = max(ns, then_ns, more[row] * least_b + rings)


@inlined
def _join_before(
    here: tuple[Floats, Floats], there: tuple[Floats, Floats], more: Floats, f: float, found: Floats
) -> None:
    """Stores the maximum of the sums, for the rows of micro-batches before; `f`: of the layers before the end."""
    first, behind = here
    first_then, behind_then = there
    for row in range(found.size):
        ns, then_ns = min(first[row], behind[row]) + f, min(first_then[row], behind_then[row]) + more[row] * f
        found[row] = max(ns, then_ns)


@inlined
def note_found(
    tracked: Tracked, tables: Tables, own: Any, p: int, most: int, j: int, in_front: int, found: Floats
) -> None:
    """Lowers the rows after the end `j` of stages to `found` plus the transfers over that cut, if some plan can follow.

    Args:
        in_front: the first of the rows for numbers of micro-batches before.
    """
    for to in range(p + own.few, p + most + 1):
        x, link = j - tables.lows[to], tracked.at_host[to]
        if 0 <= x < tables.before_ends.shape[1] and tables.behind_ends[AROUND, to, x] < np.inf:
            ends, sent = tables.before_ends[to, x], tracked.send[link, j]
            ends[ARRIVED] = min(ends[ARRIVED], found[ARRIVED] + sent)
            note_later(found[BACK:in_front], tracked.back[link, j], ends[BACK:in_front])
            note_later(found[in_front:], sent, ends[in_front:])


@inlined
def rings_of(own: Any, max_bucket: float, begin: Any, end: Any) -> float:
    """Returns the time from the arrival of a gradient until the rings and the update of a stage are done."""
    rings = rings_ns(own, max_bucket, end.gradients - begin.gradients) + end.update - begin.update
    return float(until_first_bucket(begin, end) * own.fastest + rings)


@inlined
def note_later(times: Floats, ns: float, noted: Floats) -> None:
    """Lowers `noted` to `times + ns` where that is less."""
    for row in range(noted.size):
        noted[row] = least(times[row] + ns, noted[row])
