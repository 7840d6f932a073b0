"""The dynamic programme of `prefix_bound.py` and `ring_bound.py`, compiled.

A state is a number of devices and of cuts, and with delays the level of the longest delay so far; of each the furthest
boundary is known that the layers before it reach. A stage is tried only where it would end further than what is known:
most are not within the limits even then, and one look says so.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Boundaries = NDArray[np.int32]

LAYER_SUMS = np.dtype(
    [
        (name, np.float64)
        for name in (
            # Those of `TimeSums`, which differ between sets of kinds of devices.
            *("forward", "backward", "critical", "work", "trip", "first_bucket", "before_gradients"),
            "update",
            "gradients",  # bytes
            "state",  # bytes of parameters, gradients, and of the optimizer
            "stash",  # bytes of one micro-batch
        )
    ]
)
"""Sums over the layers before a boundary."""

STAGE = np.dtype(
    [
        ("own", np.int64),  # the set of kinds of the stage,
        ("before", np.int64),  # of the stage and the devices before it,
        ("behind", np.int64),  # and from its first device on
        ("few", np.int64),  # devices, at least
        ("most", np.int64),
        ("in_flight", np.int64),  # micro-batches on one replica at most, 0 if the schedule has no limit
        ("num_rounds", np.int64),  # micro-batches that make a round trip to the last stage one after another, at least
        ("count", np.float64),  # micro-batches of one replica
        ("fastest", np.float64),  # ns of the work of 1 ns on any replica, at least,
        ("forward", np.float64),  # on the one with `count`,
        ("backward", np.float64),
        ("until", np.float64),  # on the devices up to the stage's last one,
        ("before_ns", np.float64),  # before it, no more than on the replica,
        ("behind_ns", np.float64),  # behind,
        ("from_here", np.float64),  # and on any from the first one on
        ("busiest", np.float64),  # the same of all micro-batches of the busiest replica
        ("slack", np.float64),  # ns by which a chain of actions may be shorter than the sums
        ("last_ring", np.float64),  # ns of the ring of the last bucket
        ("ring_latency", np.float64),  # ns of each bucket
        ("ring_rate", np.float64),  # ns per byte
        ("limit_bytes", np.float64),  # of each device
        ("num_stashes", np.float64),  # that some device holds at least if the stage does not recompute
        ("may_recompute", np.int64),
        ("trips", np.float64, 2),  # round trips one after another, 0 if there are none,
        ("steps", np.float64, 2),  # and the F and r between them, in two ways
    ]
)
"""What is known of stages by their first device and class of numbers of devices."""


class Problem(NamedTuple):
    """What does not depend on the step time that is asked for.

    Attributes:
        layers: `LAYER_SUMS` on each set of kinds, the first one all. [sets, boundaries]
        stages: `STAGE`. [positions, groups]
        one_way, both_ways: transfers over 0, 1, 2 ... cuts at least, in ns. [cuts]
        boundaries_before: the boundaries between hosts before each position. [positions + 1]
        extra_one_way, extra_both: what a boundary between hosts that no stage spans adds, in ns.
        max_bucket: bytes that no bucket has.
        max_gradients: bytes between two boundaries, at most.
    """

    layers: NDArray[Any]
    stages: NDArray[Any]
    one_way: Floats
    both_ways: Floats
    boundaries_before: Ints
    extra_one_way: float
    extra_both: float
    num_microbatches: int
    max_speed: float
    max_bucket: float
    max_gradients: float
    is_alike: bool
    are_forwards_first: bool
    has_whole_backward: bool


class Delays(NamedTuple):
    """What follows behind the way back of later stages, by level; see `ring_bound.py`. In ns.

    Attributes:
        from_ns: the lower end of each level. [levels]
        least_ns, level_ns: the lower end of the first level, and the width of each.
        left: what the micro-batches that end with the last one of a stage count, by density. [groups]
        rounds: how many of the most such micro-batches each replica of an earlier stage has. [groups]
        filler: the backwards of none, all but one, and all of the rounds count for so much less. [groups, 3]
        back: the transfers back over so many cuts, at most. [cuts]
    """

    from_ns: Floats
    least_ns: float
    level_ns: float
    left: Floats
    rounds: Floats
    filler: Floats
    back: Floats


def without_delays() -> Delays:
    """Delays of one level, in which nothing follows behind the way back of a stage."""
    return Delays(np.zeros(1), 0.0, 1.0, np.zeros(0), np.zeros(0), np.zeros((0, 0)), np.zeros(0))


class Start(NamedTuple):
    """What is known of a stage before its end is.

    Attributes:
        room: the step time and the slack.
        apart: F of a replica that do not run during the round trip of its micro-batch whose backward is first.
        one_way, both_ways: the transfers before the stage, in ns.
        behind: the transfers behind it, both ways.
        once_one_way, once: transfers before it or behind it, where the cuts are not counted.
        delay: what follows behind the way back of the stage's last micro-batch.
    """

    room: float
    apart: float
    one_way: float
    both_ways: float
    behind: float
    once_one_way: float
    once: float
    delay: float


@compiled
def _forwards_apart(problem: Problem, last_most: int, p: int, g: int) -> int:
    """F of a replica that do not run during the round trip of its micro-batch whose backward is first."""
    stage = problem.stages[p, g]
    if problem.are_forwards_first:
        # The last stage is this one, or has devices behind it.
        num_behind = problem.stages.shape[0] - p - stage.few
        last = min(max(last_most, stage.few), max(stage.most, num_behind))
        return int(max(0, (problem.num_microbatches - last) // stage.most))
    if stage.in_flight == 0:
        return 0
    return int(max(0, int(stage.count) - stage.in_flight))


@compiled
def _excess(
    layers: NDArray[Any],
    stage: Any,
    max_bucket: float,
    has_whole_backward: bool,
    start: Start,
    i: int,
    j: int,
) -> float:
    """By how much the stage of the layers [i, j) exceeds the limits, at most 0 if it keeps them all."""
    begin, end, before, rest = layers[stage.own, i], layers[stage.own, j], layers[stage.before, i], layers[stage.behind]
    state, stash = end.state - begin.state, end.stash - begin.stash
    recomputes = state + stage.num_stashes * stash > stage.limit_bytes
    if state + stash > stage.limit_bytes or (recomputes and not stage.may_recompute):
        return np.inf
    n = stage.count
    # F and r of one micro-batch, and B, on the replica.
    f, r = (end.forward - begin.forward) * stage.forward, (end.critical - begin.critical) * stage.backward
    b = (end.backward - begin.backward) * stage.backward
    own_f = (end.forward - begin.forward) * stage.backward
    again = end.forward - begin.forward if recomputes else 0.0  # in front of each backward
    r, b = r + again * stage.backward, b + again * stage.backward
    arrival = before.forward * stage.before_ns + start.one_way
    return_ns = before.trip * stage.before_ns + start.both_ways
    update = end.update - begin.update
    work = arrival + stage.busiest * (end.work - begin.work + again) + stage.last_ring + update
    around = f + r + (rest[-1].trip - rest[j].trip) * stage.behind_ns + start.behind
    returned = max(stage.busiest * (end.trip - begin.trip + again), around + start.once + (n - 1) * r + start.apart * f)
    gradients = end.gradients - begin.gradients
    ring = stage.ring_latency * np.ceil(gradients / max_bucket) + stage.ring_rate * gradients
    first_full = min(max(end.backward - begin.before_gradients, 0.0), end.first_bucket) * stage.backward
    # From the start of the last B on: the first bucket is full, all rings follow, then the update.
    after = arrival + again * stage.backward + first_full + ring + update
    work = max(work, after + n * own_f + (n - 1) * b)
    after -= b
    if has_whole_backward and n >= 2:
        work = max(work, after + around + start.once_one_way + (n - 1) * b + start.apart * f)
    for way in range(2):
        if stage.trips[way] > 0:
            passed = stage.trips[way] * around + stage.steps[way] * (own_f + r)
            returned = max(returned, passed + start.once)
            if has_whole_backward and stage.steps[way] > 0:
                work = max(work, after + passed + start.once_one_way)
    return float(max(work, return_ns + returned + start.delay) - start.room)


@compiled
def _last_within(problem: Problem, start: Start, p: int, g: int, i: int, low: int, high: int) -> int:
    """The last end from `low` to `high` with which a stage keeps the limits, -1 if none is. Excess rises with it."""
    layers, stage = problem.layers, problem.stages[p, g]
    max_bucket, is_whole = problem.max_bucket, problem.has_whole_backward
    if low > high or _excess(layers, stage, max_bucket, is_whole, start, i, low) > 0:
        return -1
    # Invariant: `low` is within the limits, `beyond` is not.
    step, beyond = 1, high + 1
    while low + 1 < beyond:
        middle = min(low + step, (low + beyond + 1) // 2)
        if _excess(layers, stage, max_bucket, is_whole, start, i, middle) > 0:
            beyond = middle
        else:
            low, step = middle, 2 * step
    return low


@compiled
def first_begins(problem: Problem, kind: PlanKind, limit: float) -> Boundaries:
    """The first boundaries behind which the devices from each position on can do all work. [positions + 1]

    As `extend` backwards, without rings, memory and transfers over known cuts: stages begin as early as they can.
    """
    num, num_groups = problem.stages.shape
    trip = problem.layers[0].trip
    last = trip.size - 1
    arrival = 1 / problem.max_speed
    whole_trip = trip[last] * arrival + problem.both_ways[kind.fewest_cuts]
    first = np.full(num + 1, last, np.int32)
    for p in range(num - 1, -1, -1):
        best = first[p + 1] if problem.is_alike else last
        for g in range(num_groups):
            stage = problem.stages[p, g]
            if stage.few > num - p:
                break
            most = stage.few if problem.is_alike else min(stage.most, num - p)
            end = last
            for number in range(stage.few, most + 1):
                end = min(end, first[p + number])
            apart = _forwards_apart(problem, kind.last_most, p, g)
            room = (limit + stage.slack) * (1 + 1e-9)
            own = problem.layers[stage.own]
            while best > 0:
                i = best - 1
                if i < end:
                    before, at_end, begin = arrival * trip[i], own[end], own[i]
                    if stage.busiest * (at_end.work - begin.work) > room:
                        break
                    if before + stage.busiest * (at_end.trip - begin.trip) > room:
                        break
                    r = (at_end.critical - begin.critical) * stage.backward
                    f = (at_end.forward - begin.forward) * stage.forward
                    if whole_trip + (stage.count - 1) * r + apart * f > room:
                        break
                    around = (trip[last] - trip[i]) * stage.from_here
                    step = (trip[end] - trip[i]) * stage.backward
                    if before + _longest_rounds(stage, around, step) > room:
                        break
                best = i
        first[p] = best
    return first


@compiled
def _longest_rounds(stage: Any, around: float, step: float) -> float:
    """Round trips of micro-batches from a stage on, one after another, and what lies between them, in ns."""
    longest = 0.0
    for way in range(2):
        if stage.trips[way] > 0:
            longest = max(longest, stage.trips[way] * around + stage.steps[way] * step)
    return longest


@compiled
def extend(
    problem: Problem,
    kind: PlanKind,
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
        first: from `first_begins`.
        furthest: -1 where nothing is known. If cuts are not counted, it has one column. [levels, devices + 1, cuts + 2]
        origin: the devices before the last stage, of the first level. [devices + 1, cuts + 2]
        num_tried: counts classes of stages behind prefixes. [1]
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
                if problem.is_alike and p < num and i > furthest[level, p + 1, c]:  # devices may stay idle
                    furthest[level, p + 1, c] = i
                    origin[p + 1, c] = origin[p, c]
        if p == num:
            break
        of_fewer = -1
        for c in range(num_cuts + 1):
            reached = -1  # with less delay, or with a device less
            for level in range(num_levels):
                i = furthest[level, p, c]
                if problem.is_alike and p > 0:
                    reached = max(reached, furthest[level, p - 1, c])
                # Or without delays with fewer cuts; from delays more cuts take more transfers.
                if i >= first[p] and i > reached and not (num_levels == 1 and i <= of_fewer):
                    num_tried[0] += _add_stages(problem, kind, delays, limit, first, furthest, origin, level, p, c)
                reached = max(reached, i)
            if num_levels == 1 and c >= kind.fewest_cuts:
                of_fewer = max(of_fewer, furthest[0, p, c])
    return -1


@compiled
def _add_stages(
    problem: Problem,
    kind: PlanKind,
    delays: Delays,
    limit: float,
    first: Boundaries,
    furthest: NDArray[np.int32],
    origin: NDArray[np.int32],
    level: int,
    p: int,
    c: int,
) -> int:
    """Adds a stage of each class of devices to one prefix; returns the number of classes."""
    (num, num_groups), last = problem.stages.shape, problem.layers.shape[1] - 1
    i, has_delays, counts_cuts = furthest[level, p, c], furthest.shape[0] > 1, furthest.shape[2] > 1
    following = c + 1 if counts_cuts else 0
    forced = max(0, problem.boundaries_before[p] - (p - c))
    one_way = problem.one_way[c] + forced * problem.extra_one_way
    both_ways = problem.both_ways[c] + forced * problem.extra_both
    behind, once_one_way, once = problem.both_ways[max(0, kind.fewest_cuts - c)], 0.0, 0.0
    if not counts_cuts:
        behind, once_one_way, once = 0.0, problem.one_way[kind.fewest_cuts], problem.both_ways[kind.fewest_cuts]
    # Or none: the layers of a plan's stage may lie before, if the devices before it can do more than theirs.
    may_be_empty = (counts_cuts and c < kind.fewest_cuts) or not problem.is_alike
    stages, rest = problem.stages[p], problem.layers[problem.stages[p, 0].behind]
    from_here = (rest[last].trip - rest[i].trip) * stages[0].from_here + behind
    arrived = problem.layers[0, i].trip / problem.max_speed + problem.both_ways[c]
    for g in range(num_groups):
        stage = stages[g]
        if stage.few > num - p:
            return int(g)
        room = limit + stage.slack
        may_end = stage.few <= kind.last_most and stage.most >= kind.last_fewest
        highest = last if may_end else last - 1
        if stage.num_rounds > 0 and arrived + stage.num_rounds * from_here > room:
            highest = i
        most = stage.few if problem.is_alike else min(stage.most, num - p)
        lowest = last + 1
        for to in range(p + stage.few, p + most + 1):
            lowest = min(lowest, max(furthest[level, to, following] + 1, first[to]))
        lowest = max(lowest, 1)  # the first stage of a plan has a layer
        if lowest > highest:
            continue
        delay = 0.0
        if has_delays:
            delay = max(0.0, delays.from_ns[level] + delays.left[g] - forced * problem.extra_both)
        apart = float(_forwards_apart(problem, kind.last_most, p, g))
        start = Start(room, apart, one_way, both_ways, behind, once_one_way, once, delay)
        end = _last_within(problem, start, p, g, i, max(lowest, i + 1), highest)
        if end < 0:
            if not may_be_empty or i < lowest:
                continue
            end = i
        if has_delays:
            lowest = max(lowest, i if may_be_empty else i + 1)
            before = c if counts_cuts else kind.most_cuts
            _place(problem, delays, first, furthest, level, p, following, before, g, i, lowest, end)
            continue
        for to in range(p + stage.few, p + most + 1):
            if end >= first[to] and end > furthest[0, to, following]:
                furthest[0, to, following], origin[to, following] = end, p
    return int(num_groups)


@compiled
def _place(
    problem: Problem,
    delays: Delays,
    first: Boundaries,
    furthest: NDArray[np.int32],
    level: int,
    p: int,
    column: int,
    num_cuts: int,
    g: int,
    i: int,
    lowest: int,
    end: int,
) -> None:
    """Notes the ends of a stage from `lowest` to `end`, of each level of the longest delay so far the last one.

    Args:
        num_cuts: before the stage, at most.
    """
    num, num_levels, stage = problem.stages.shape[0], furthest.shape[0], problem.stages[p, g]
    most = stage.few if problem.is_alike else min(stage.most, num - p)
    # How much shorter the rings of a stage with one boundary less are at most, but for one bucket's latency.
    drop = problem.max_gradients * (stage.ring_latency / problem.max_bucket + stage.ring_rate)
    shortest = _filler(problem.layers, stage, delays, g, i, lowest) - stage.ring_latency
    above, j = num_levels, end
    while j >= lowest:
        at, skipped = level, 1
        if j > i:
            first_full, others = _delay(problem.layers, stage, problem.max_bucket, delays, num_cuts, i, j)
            ns = max(0.0, first_full + others) + _filler(problem.layers, stage, delays, g, i, j)
            at = max(level, min(num_levels - 1, int(max(0.0, (ns - delays.least_ns) / delays.level_ns))))
            # Of no use are levels in which others reach as far. Shorter stages stay above a level for a while.
            below = min(at, above)
            while problem.is_alike and below > level + 1 and furthest[below - 1, p + most, column] >= j - 1:
                below -= 1
            room = others + shortest - delays.least_ns - delays.level_ns * below
            skipped = 1 if room <= 0 else 1 + int(min(room / max(drop, 1e-9), 1e6))
        if at < above:
            for to in range(p + stage.few, p + most + 1):
                if j >= first[to] and j > furthest[at, to, column]:
                    furthest[at, to, column] = j
            above = at
            if at == level:
                return
        j = max(j - skipped, lowest) if j > lowest else lowest - 1


@compiled
def _delay(
    layers: NDArray[Any], stage: Any, max_bucket: float, delays: Delays, num_cuts: int, i: int, j: int
) -> tuple[float, float]:
    """What follows behind a backward before the stage of the layers [i, j) is done, less the way back from its end.

    In ns at least: until the first bucket is full, and the rest.
    """
    begin, end = layers[stage.own, i], layers[stage.own, j]
    gradients = end.gradients - begin.gradients
    ring = stage.ring_latency * np.ceil(gradients / max_bucket) + stage.ring_rate * gradients
    first_full = min(max(end.backward - begin.before_gradients, 0.0), end.first_bucket) * stage.fastest
    way_back = layers[stage.before, j].backward * stage.until + delays.back[min(num_cuts, delays.back.size - 1)]
    return float(first_full), float(ring - way_back)


@compiled
def _filler(layers: NDArray[Any], stage: Any, delays: Delays, g: int, i: int, j: int) -> float:
    """The backwards of a stage in front of that, less what the micro-batches count for; it rises with the stage."""
    b = (layers[stage.own, j].backward - layers[stage.own, i].backward) * stage.fastest
    rounds, filler = delays.rounds[g], delays.filler[g]
    if rounds < 1:
        return float(filler[0])
    return float(min(filler[0], min((rounds - 1) * b + filler[1], rounds * b + filler[2])))
