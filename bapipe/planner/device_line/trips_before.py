"""Compiled: what a micro-batch takes at least before each boundary, by a dynamic programme over devices and boundaries.

A stage may begin at some boundaries and end at some. The further its end, the later the first begin with which it is
within the limits; so of all stages that end at a boundary those that begin in a window are tried, and windows move one
way. The least of a sum over a window is at the head of a queue in which values rise.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_limits import Floats, Ints, Problem, rings_ns
from bapipe.planner.device_line.trip_limits import (
    FLAT_REST,
    FLAT_RETURN,
    FLAT_TRIP,
    LATE,
    PURE,
    PURE_LATE,
    PURE_REST,
    REST,
    RETURN,
    TRIP,
    Late,
    excess,
    stage_of,
)
from bapipe.planner.device_line.trip_tables import MANY, Tables, drop, least_from, push, reached, rest_behind


@compiled
def fill_before(
    problem: Problem, late: Late, kind: PlanKind, limit: float, tables: Tables, num_late: int, p: int
) -> int:
    """Adds stages behind the first `p` devices; returns how many ends and begins of stages were tried.

    Args:
        num_late: 0 if nothing that follows behind the way back counts, else all.
    """
    (num, num_groups), size = problem.stages.shape, problem.layers.shape[1]
    before, cuts_before, behind, cuts_behind = tables.before, tables.cuts_before, tables.behind, tables.cuts_behind
    num_tried = 0
    if problem.is_alike and p > 1:  # devices may stay idle, but not before the first stage
        before[:, : 1 + num_late, p] = np.minimum(before[:, : 1 + num_late, p], before[:, : 1 + num_late, p - 1])
        cuts_before[p] = np.minimum(cuts_before[p], cuts_before[p - 1])
    low, last_low = reached(before[0, 0, p])
    if low == size - 1 or p == num:
        return 0
    layers, max_bucket, is_whole, share = (
        problem.layers,
        problem.max_bucket,
        problem.has_whole_backward,
        late.forward_share,
    )
    transfers, at_host, more, then = late.transfers, late.at_host, late.more, late.then
    fewest = least_from(cuts_before[p])
    known, rest, cuts = np.empty((7, size)), np.empty((3, size)), np.empty(size, np.int64)
    num_queues = 2 * (1 + 2 * num_late)
    values, positions = np.empty((num_queues, size)), np.empty((num_queues, size), np.int64)
    heads, tails = np.zeros(num_queues, np.int64), np.zeros(num_queues, np.int64)
    for g in range(num_groups):
        own, stage = problem.stages[p, g], stage_of(problem, late, kind, limit, p, g)
        if own.few > num - p:
            break
        if p == 0 and not (own.few <= kind.first_most and own.most >= kind.first_fewest):
            continue
        most = own.few if problem.is_alike else min(own.most, num - p)
        high = rest_behind(transfers, at_host, kind, behind, cuts_behind, own, p, most, low, rest, cuts)
        if high <= low:
            continue
        for j in range(high - 1, low, -1):
            layer = layers[own.own, j + 1].trip - layers[own.own, j].trip
            rest[FLAT_REST, j] = min(rest[FLAT_REST, j], rest[FLAT_REST, j + 1] + own.fastest * layer)
            rest[REST, j] = min(rest[REST, j], rest[REST, j + 1] + stage.slope * layer)
            rest[PURE_REST, j] = min(rest[PURE_REST, j], rest[PURE_REST, j + 1] + stage.slope * layer)
        at_return, at_late = min(1, num_late), (1 + late.of_class[g]) * min(1, num_late)
        for i in range(low, last_low + 1):
            known[TRIP, i] = known[FLAT_TRIP, i] = before[0, 0, p, i]
            known[RETURN, i] = known[FLAT_RETURN, i] = before[0, at_return, p, i]
            known[LATE, i], known[PURE, i] = before[0, at_late, p, i], before[1, 0, p, i]
            known[PURE_LATE, i] = before[1, at_late, p, i]
        heads[:], tails[:] = 0, 0
        at = pushed = low
        fewest_behind = MANY
        for j in range(low + 1, high + 1):
            fewest_behind = min(fewest_behind, cuts[j])
            while pushed < min(j, last_low + 1) and fewest[pushed] + fewest_behind <= kind.most_cuts:
                if before[0, 0, p, pushed] < np.inf:
                    _push_begin(
                        layers, own, before, values, positions, heads, tails, more, then, num_late, p, g, pushed
                    )
                pushed += 1
            if cuts[j] == MANY:
                continue
            while at < pushed and (
                before[0, 0, p, at] == np.inf
                or excess(layers, max_bucket, is_whole, share, own, stage, known, rest, at, j) > 0
            ):
                at += 1
                num_tried += 1
            num_tried += 1
            if at < pushed:
                num_cuts = fewest[at] + (j < size - 1)
                _place(
                    layers,
                    max_bucket,
                    share,
                    transfers,
                    at_host,
                    own,
                    before,
                    cuts_before,
                    values,
                    positions,
                    heads,
                    tails,
                    more,
                    num_late,
                    p,
                    g,
                    most,
                    at,
                    j,
                    num_cuts,
                )
    return num_tried


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
    p: int,
    g: int,
    i: int,
) -> None:
    """Adds a begin of a stage to the window: what each table says there, less the layers before it as on the stage."""
    sums = layers[own.own, i]
    trip, backward = sums.trip * own.fastest, sums.backward * own.fastest
    for way in range(2):
        for k in range(1 + num_late):
            push(values, positions, heads, tails, way * (1 + num_late) + k, i, before[way, k, p, i] - trip)
            if k > 0 and more[g, k - 1] > 0:
                q = 2 * (1 + num_late) + way * num_late + k - 1
                push(
                    values,
                    positions,
                    heads,
                    tails,
                    q,
                    i,
                    before[way, 1 + then[g, k - 1], p, i] - trip - more[g, k - 1] * backward,
                )


@compiled
def _place(
    layers: NDArray[Any],
    max_bucket: float,
    forward_share: float,
    transfers: Floats,
    at_host: Ints,
    own: Any,
    before: NDArray[np.float64],
    cuts_before: NDArray[np.int32],
    values: Floats,
    positions: Ints,
    heads: Ints,
    tails: Ints,
    more: Ints,
    num_late: int,
    p: int,
    g: int,
    most: int,
    at: int,
    j: int,
    num_cuts: int,
) -> None:
    """Notes what is known of boundary j behind a stage that begins at `at` or later."""
    end, last = layers[own.own, j], layers.shape[1] - 1
    trip, backward = end.trip * own.fastest, end.backward * own.fastest
    arrived = 0.0
    for way in range(2):
        for k in range(1 + num_late):
            q = way * (1 + num_late) + k
            if not drop(positions, heads, tails, q, at, 1):
                return
            ns = values[q, heads[q]] + trip
            if k == 0 and way == 0:
                arrived = forward_share * ns
            if k > 0:
                num = more[g, k - 1]
                if num > 0:
                    of_others = 2 * (1 + num_late) + way * num_late + k - 1
                    drop(positions, heads, tails, of_others, at, 1)
                    ns = max(ns, values[of_others, heads[of_others]] + trip + num * backward)
                if way == 0:
                    ns = max(
                        ns,
                        _with_rings(
                            layers, max_bucket, own, values, positions, heads[q], tails[q] - 1, q, trip, arrived, num, j
                        ),
                    )
            for to in range(p + own.few, p + most + 1):
                cut_ns = transfers[at_host[to], j] if way == 0 and j < last else 0.0
                before[way, k, to, j] = min(before[way, k, to, j], ns + cut_ns)
    for to in range(p + own.few, p + most + 1):
        cuts_before[to, j] = min(cuts_before[to, j], num_cuts)


@compiled
def _with_rings(
    layers: NDArray[Any],
    max_bucket: float,
    own: Any,
    values: Floats,
    positions: Ints,
    head: int,
    tail: int,
    q: int,
    trip: float,
    arrived: float,
    num: int,
    j: int,
) -> float:
    """The least over the begins in a queue of what follows: on the way back, or the rings behind `num` more B.

    The later the stage begins, the longer the one and the shorter the other.
    """
    low, high = head, tail
    if values[q, low] + trip >= arrived + _rings_behind(layers, max_bucket, own, num, positions[q, low], j):
        return float(values[q, low] + trip)
    while low < high:
        middle = (low + high) // 2
        if values[q, middle] + trip >= arrived + _rings_behind(layers, max_bucket, own, num, positions[q, middle], j):
            high = middle
        else:
            low = middle + 1
    rings = arrived + _rings_behind(layers, max_bucket, own, num, positions[q, low], j)
    ns = max(values[q, low] + trip, rings)
    if low > head:
        rings = arrived + _rings_behind(layers, max_bucket, own, num, positions[q, low - 1], j)
        ns = min(ns, max(values[q, low - 1] + trip, rings))
    return float(ns)


@compiled
def _rings_behind(layers: NDArray[Any], max_bucket: float, own: Any, num: int, i: int, j: int) -> float:
    """From the arrival of a gradient until the rings of the stage of layers [i, j) are done, behind `num` more B."""
    begin, end = layers[own.own, i], layers[own.own, j]
    first_full = min(max(end.backward - begin.before_gradients, 0.0), end.first_bucket) * own.fastest
    ring = rings_ns(own, max_bucket, end.gradients - begin.gradients)
    b = (end.backward - begin.backward) * own.fastest
    return float(num * b + first_full + ring + end.update - begin.update)
