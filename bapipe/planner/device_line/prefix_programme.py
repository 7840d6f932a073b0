"""The dynamic programme of `prefix_bound.py` and `ring_bound.py`, compiled.

A state is a number of devices and of cuts, and with delays the level of the longest delay so far; its value is the
furthest boundary that such prefixes reach. A stage is tried only if it would end further than the known value: most
stages exceed the limits even then, and one test says so.
"""

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.compiled import compiled, inlined
from bapipe.planner.device_line.early_waits import Waits, count_cycles
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import Boundaries, BoundInputs
from bapipe.planner.device_line.stage_delays import Delays, place
from bapipe.planner.device_line.stage_limits import forced_host_cuts, is_passed, last_within, start_behind


@compiled
def extend(
    problem: BoundInputs,
    kind: PlanKind,
    waits: Waits,
    delays: Delays,
    limit: float,
    first: Boundaries,
    furthest: NDArray[np.int32],
    origin: NDArray[np.int32],
    begin: int,
    end: int,
    num_tried: Ints,
) -> int:
    """Adds a stage to all prefixes of `begin` to `end` devices; returns the devices of one with all layers, or -1.

    Args:
        first: from `suffix_programme.py`. [devices + 1, cuts + 2]
        furthest: -1 where nothing is known. If cuts are not counted, it has one column. [levels, devices + 1, cuts + 2]
        origin: the devices before the last stage, of the first level. [devices + 1, cuts + 2]
        num_tried: counts (prefix, class of stages) pairs. [1]
    """
    num, last = problem.stages.shape[0], problem.layers.shape[1] - 1
    num_levels, num_columns = furthest.shape[0], furthest.shape[2]
    num_cuts = min(kind.most_cuts, max(0, num_columns - 2))
    for p in range(begin, end):
        for level in range(num_levels):
            for c in range(min(num_cuts + 2, num_columns)):
                i = furthest[level, p, c]
                if i == last:
                    return p
                # Devices may stay idle, but not before the first stage.
                if problem.is_alike and p < num and i > max(0, furthest[level, p + 1, c]):
                    furthest[level, p + 1, c] = i
                    origin[p + 1, c] = origin[p, c]
        if p == num:
            break
        of_fewer = -1
        for c in range(num_cuts + 1):
            reached = by_one_less = -1  # with less delay; with one device less
            forced = forced_host_cuts(problem, p, c)
            for level in range(num_levels):
                i = furthest[level, p, c]
                # With one device less and as many cuts, more of these may have to be between hosts.
                if problem.is_alike and p > 0 and forced == forced_host_cuts(problem, p - 1, c):
                    by_one_less = max(by_one_less, furthest[level, p - 1, c])
                # Without delays also by prefixes with fewer cuts; from a delay, more cuts deduct more transfers.
                if i >= first[p, c] and i > reached and not (num_levels == 1 and i <= of_fewer):
                    is_known = i <= by_one_less
                    num_tried[0] += _add_stages(
                        problem, kind, waits, delays, limit, first, furthest, origin, level, p, c, is_known
                    )
                reached = max(reached, i)
            if num_levels == 1 and c >= kind.fewest_cuts:
                of_fewer = max(of_fewer, furthest[0, p, c])
    return -1


@inlined
def _add_stages(
    problem: BoundInputs,
    kind: PlanKind,
    waits: Waits,
    delays: Delays,
    limit: float,
    first: Boundaries,
    furthest: NDArray[np.int32],
    origin: NDArray[np.int32],
    level: int,
    p: int,
    c: int,
    is_known: bool,
) -> int:
    """Adds a stage of each class of devices to one prefix; returns the number of classes.

    Args:
        is_known: whether a prefix with one device less reaches as far: then another device only matters for cycles.
    """
    if is_known and waits.num_left == 0:
        return 0
    (num, num_classes), last = problem.stages.shape, problem.layers.shape[1] - 1
    has_delays, counts_cuts = furthest.shape[0] > 1, furthest.shape[2] > 1
    i = int(np.int64(furthest[level, p, c]))  # 32 bits would make numba compile all callees once more
    following = c + 1 if counts_cuts else 0
    # Or none: earlier devices may be able to hold all layers of a plan's stage in addition to theirs.
    may_be_empty = (counts_cuts and c < kind.fewest_cuts) or not problem.is_alike
    for g in range(num_classes):
        stage = problem.stages[p, g]
        if stage.few > num - p:
            return int(g)
        most = stage.few if problem.is_alike else min(stage.most, num - p)
        lowest = last + 1
        for to in range(p + stage.few, p + most + 1):
            lowest = min(lowest, max(furthest[level, to, following] + 1, first[to, following]))
        lowest = max(lowest, 1)  # the first stage of a plan has a layer
        may_end = stage.few <= kind.last_most and stage.most >= kind.last_fewest
        highest = last if may_end else last - 1
        if is_known and count_cycles(problem, kind, waits, p, g) == count_cycles(problem, kind, waits, p - 1, g):
            continue
        if p == 0:
            highest = min(highest, kind.latest_end)
            if stage.few > kind.first_most or stage.most < kind.first_fewest:
                continue
        if lowest > highest:
            continue
        if not is_passed(problem, kind, limit, p, c, g, i, counts_cuts):
            highest = i
        from_ns, left = (delays.from_ns[level], delays.left[g]) if has_delays else (0.0, 0.0)
        start = start_behind(problem, kind, waits, limit, p, c, g, counts_cuts, from_ns, left)
        end = last_within(problem, start, p, g, i, max(lowest, i + 1), highest)
        if end < 0:
            if not may_be_empty or i < lowest:
                continue
            end = i
        if has_delays:
            lowest = max(lowest, i if may_be_empty else i + 1)
            before = c if counts_cuts else kind.most_cuts
            place(problem, delays, first, furthest, level, p, following, before, g, i, lowest, end)
            continue
        for to in range(p + stage.few, p + most + 1):
            if end >= first[to, following] and end > furthest[0, to, following]:
                furthest[0, to, following], origin[to, following] = end, p
    return int(num_classes)
