"""Compiled: what a micro-batch takes at least behind each boundary, as `trips_before.py` has it before them."""

import numpy as np

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_limits import Problem
from bapipe.planner.device_line.trip_limits import (
    FLAT_REST,
    FLAT_RETURN,
    FLAT_TRIP,
    LATE,
    PURE,
    PURE_LATE,
    PURE_REST,
    RETURN,
    TRIP,
    Late,
    excess,
    stage_of,
)
from bapipe.planner.device_line.trip_tables import MANY, Tables, drop, least_from, push, reached, rest_behind


@compiled
def fill_behind(
    problem: Problem, late: Late, kind: PlanKind, limit: float, tables: Tables, num_late: int, p: int
) -> int:
    """Adds stages on the devices from `p` on, in front of what is known; returns how many were tried, as above."""
    (num, num_groups), size = problem.stages.shape, problem.layers.shape[1]
    before, behind, cuts_behind, num_tried = tables.before, tables.behind, tables.cuts_behind, 0
    if problem.is_alike and 0 < p < num - 1:
        behind[:, p] = np.minimum(behind[:, p], behind[:, p + 1])
        cuts_behind[p] = np.minimum(cuts_behind[p], cuts_behind[p + 1])
    low, last_low = reached(before[0, 0, p])
    if low == size - 1:
        return 0
    layers, max_bucket, is_whole, share = (
        problem.layers,
        problem.max_bucket,
        problem.has_whole_backward,
        late.forward_share,
    )
    transfers, at_host = late.transfers, late.at_host
    fewest = least_from(tables.cuts_before[p])
    known, rest, cuts = np.empty((7, size)), np.empty((3, size)), np.empty(size, np.int64)
    values, positions = np.empty((2, size)), np.empty((2, size), np.int64)
    heads, tails = np.zeros(2, np.int64), np.zeros(2, np.int64)
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
        at_return, at_late = min(1, num_late), (1 + late.of_class[g]) * min(1, num_late)
        for i in range(low, last_low + 1):
            known[TRIP, i], known[RETURN, i] = before[0, 0, p, i], before[0, at_return, p, i]
            known[LATE, i], known[PURE, i], known[PURE_LATE, i] = (
                before[0, at_late, p, i],
                before[1, 0, p, i],
                before[1, at_late, p, i],
            )
            known[FLAT_TRIP, i], known[FLAT_RETURN, i] = known[TRIP, i], known[RETURN, i]
            if i > low:
                layer = layers[own.own, i].trip - layers[own.own, i - 1].trip
                for row in range(7):
                    slope = own.fastest if row in (FLAT_TRIP, FLAT_RETURN) else stage.slope
                    known[row, i] = min(known[row, i], known[row, i - 1] + slope * layer)
        fewest_cuts = cuts.copy()
        for j in range(low + 1, size):
            fewest_cuts[j] = min(fewest_cuts[j], fewest_cuts[j - 1])
        heads[:], tails[:] = 0, 0
        at = pushed = high
        for i in range(min(high - 1, last_low), low - 1, -1):
            begin = layers[own.own, i].trip * own.fastest
            while pushed > i and fewest[i] + fewest_cuts[pushed] <= kind.most_cuts:
                if cuts[pushed] < MANY:
                    end = layers[own.own, pushed].trip * own.fastest
                    push(values, positions, heads, tails, 0, pushed, rest[FLAT_REST, pushed] + end)
                    push(values, positions, heads, tails, 1, pushed, rest[PURE_REST, pushed] + end)
                pushed -= 1
            if before[0, 0, p, i] == np.inf:
                continue
            while at > pushed and (
                cuts[at] == MANY or excess(layers, max_bucket, is_whole, share, own, stage, known, rest, i, at) > 0
            ):
                at -= 1
                num_tried += 1
            num_tried += 1
            if at > pushed and drop(positions, heads, tails, 0, at, -1) and drop(positions, heads, tails, 1, at, -1):
                behind[0, p, i] = min(behind[0, p, i], values[0, heads[0]] - begin)
                behind[1, p, i] = min(behind[1, p, i], values[1, heads[1]] - begin)
                cuts_behind[p, i] = min(cuts_behind[p, i], fewest_cuts[at])
    return num_tried
