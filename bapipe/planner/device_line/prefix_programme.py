"""The dynamic programme of `prefix_bound.py` and `ring_bound.py`, compiled.

A state is a number of devices and of cuts, and with delays the level of the longest delay so far; of each the furthest
boundary is known that the layers before it reach. A stage is tried only where it would end further than what is known:
most are not within the limits even then, and one look says so.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Boundaries = NDArray[np.int32]


class Layers(NamedTuple):
    """Sums over the layers before each boundary: those of `TimeSums`, for several sets of kinds. [sets, boundaries]

    Attributes:
        update, gradients, held: the update, bytes of gradients, and what a stage holds with one micro-batch.
            [boundaries]
    """

    forward: Floats
    backward: Floats
    critical: Floats
    work: Floats
    trip: Floats
    first_bucket: Floats
    before_gradients: Floats
    update: Floats
    gradients: Floats
    held: Floats


OF_KINDS = ("forward", "backward", "critical", "work", "trip", "first_bucket", "before_gradients")
"""The sums that differ between kinds of devices."""


class Stages(NamedTuple):
    """What is known of stages by their first device and class of numbers of devices. [positions, groups]

    Attributes:
        own, before: the set of kinds of a stage, and with the devices before it.
        behind: that of the devices from a position on. [positions]
        num_before, num_behind: time of the work of 1 ns on the devices before a stage, and behind it.
        from_here: the same of any devices from a position on. [positions]
        in_flight: micro-batches in flight on one replica at most, 0 if the schedule has no limit.
        num_rounds: micro-batches that make a round trip to the last stage one after another, at least.
        slack: what a chain of actions may be shorter than the sums, in ns.
        last_ring: of a stage's last bucket, in ns.
        ring_latency, ring_rate: of each bucket, in ns and ns per byte.
        limit_bytes: what each device may hold.
        few, most: the devices of a class. [groups]
    """

    own: Ints
    before: Ints
    behind: Ints
    counts: Ints
    speed: Floats
    forward_speed: Floats
    busiest: Floats
    num_before: Floats
    num_behind: Floats
    from_here: Floats
    in_flight: Ints
    num_rounds: Ints
    slack: Floats
    last_ring: Floats
    ring_latency: Floats
    ring_rate: Floats
    limit_bytes: Floats
    few: Ints
    most: Ints


class Transfers(NamedTuple):
    """Transfers over cuts, in ns: of 0, 1, 2 ... cuts at least, one way and both ways. [cuts]

    Attributes:
        boundaries_before: the boundaries between hosts before each position. [positions + 1]
        extra_one_way, extra_both: what a boundary that no stage spans adds.
    """

    one_way: Floats
    both_ways: Floats
    boundaries_before: Ints
    extra_one_way: float
    extra_both: float


class Problem(NamedTuple):
    """What does not depend on the step time that is asked for.

    Attributes:
        every: the set of all kinds.
        step_share: the part of F + r that lies between one F or r and the next one.
        max_bucket: bytes that no bucket has.
    """

    layers: Layers
    stages: Stages
    transfers: Transfers
    num_devices: int
    num_microbatches: int
    every: int
    max_speed: float
    max_bucket: float
    step_share: float
    is_alike: bool
    are_forwards_first: bool
    has_whole_backward: bool


class Delays(NamedTuple):
    """What follows behind the way back of later stages, by level; see `ring_bound.py`.

    Attributes:
        from_ns: the lower end of each level. [levels]
        left_ns: what the micro-batches that end behind those of a stage add to it. [groups]
        cell_of: the cell of each boundary in the tables. [boundaries]
        by_filler, by_rings: the last ends of stages with less than so many steps of delay. [groups, cells, steps]
        steps_back: of the transfers back over so many cuts, at most. [cuts]
        steps_of_level: steps of a level.
    """

    from_ns: Floats
    left_ns: Floats
    cell_of: Ints
    by_filler: Ints
    by_rings: Ints
    steps_back: Ints
    steps_of_level: int


def without_delays() -> Delays:
    """Delays of one level, in which nothing follows behind the way back of a stage."""
    no_tables = np.zeros((0, 0, 1), dtype=np.int64)
    none, no_ns = np.zeros(0, dtype=np.int64), np.zeros(0)
    return Delays(np.zeros(1), no_ns, none, no_tables, no_tables, none, 1)


@compiled
def _forwards_apart(problem: Problem, last_most: int, p: int, g: int) -> int:
    """F of a replica that do not run during the round trip of its micro-batch whose backward is first."""
    stages = problem.stages
    if problem.are_forwards_first:
        # The last stage is this one, or has devices behind it.
        few, most = stages.few[g], stages.most[g]
        last = min(max(last_most, few), max(most, problem.num_devices - p - few))
        return int(max(0, (problem.num_microbatches - last) // most))
    if stages.in_flight[p, g] == 0:
        return 0
    return int(max(0, stages.counts[p, g] - stages.in_flight[p, g]))


@compiled
def _excess(
    problem: Problem,
    room: float,
    apart: int,
    one_way: float,
    both_ways: float,
    behind: float,
    delay: float,
    p: int,
    g: int,
    i: int,
    j: int,
) -> float:
    """By how much the stage of the layers [i, j) exceeds the limits, at most 0 if it keeps them all.

    Args:
        room: the step time and the slack.
        apart: see `_forwards_apart`.
        one_way, both_ways: the transfers before the stage.
        behind: the transfers behind it, both ways.
        delay: what follows behind the way back of the stage's last micro-batch.
    """
    layers, s = problem.layers, problem.stages
    if layers.held[j] - layers.held[i] > s.limit_bytes[p, g]:
        return np.inf
    own, here, rest = s.own[p, g], s.before[p, g], s.behind[p]
    n, v, q, w = s.counts[p, g], s.speed[p, g], s.forward_speed[p, g], s.busiest[p, g]
    f = layers.forward[own, j] - layers.forward[own, i]
    r = layers.critical[own, j] - layers.critical[own, i]
    b = layers.backward[own, j] - layers.backward[own, i]
    arrival = layers.forward[here, i] * s.num_before[p, g] + one_way
    return_ns = layers.trip[here, i] * s.num_before[p, g] + both_ways
    update = layers.update[j] - layers.update[i]
    work = arrival + w * (f + b) + s.last_ring[p, g] + update
    around = f / q + r / v + (layers.trip[rest, -1] - layers.trip[rest, j]) * s.num_behind[p, g] + behind
    returned = return_ns + max(w * (f + r), around + (n - 1) * r / v + apart * f / q)
    gradients = layers.gradients[j] - layers.gradients[i]
    ring = s.ring_latency[p, g] * np.ceil(gradients / problem.max_bucket) + s.ring_rate[p, g] * gradients
    first_full = max(layers.backward[own, j] - layers.before_gradients[own, i], 0.0)
    first_full = min(first_full, layers.first_bucket[own, j])
    # From the start of the last B on: the first bucket is full, all rings follow, then the update.
    after = arrival + first_full / v + ring + update
    work = max(work, after + (n * f + (n - 1) * b) / v)
    after -= b / v
    if problem.has_whole_backward and n >= 2:
        work = max(work, after + around + (n - 1) * b / v + apart * f / q)
    in_flight = s.in_flight[p, g]
    if in_flight > 0:
        for k in (2, 1 + (n - 1) // in_flight):
            steps = n - 1 - (k - 1) * in_flight
            if k >= 2 and steps >= 0:
                passed = k * around + problem.step_share * steps * (f + r) / v
                returned = max(returned, return_ns + passed)
                if problem.has_whole_backward and steps >= 1:
                    work = max(work, after + passed)
    return float(max(work, returned + delay) - room)


@compiled
def _last_within(
    problem: Problem,
    room: float,
    apart: int,
    one_way: float,
    both_ways: float,
    behind: float,
    delay: float,
    p: int,
    g: int,
    i: int,
    low: int,
    high: int,
) -> int:
    """The last end from `low` to `high` with which a stage keeps the limits, -1 if none is. Excess rises with it."""
    if low > high or _excess(problem, room, apart, one_way, both_ways, behind, delay, p, g, i, low) > 0:
        return -1
    # Invariant: `low` is within the limits, `beyond` is not.
    step, beyond = 1, high + 1
    while low + 1 < beyond:
        middle = min(low + step, (low + beyond + 1) // 2)
        if _excess(problem, room, apart, one_way, both_ways, behind, delay, p, g, i, middle) > 0:
            beyond = middle
        else:
            low, step = middle, 2 * step
    return low


@compiled
def first_begins(problem: Problem, kind: PlanKind, limit: float) -> Boundaries:
    """The first boundaries behind which the devices from each position on can do all work. [positions + 1]

    As `extend` backwards, without rings, memory and transfers over known cuts: stages begin as early as they can.
    """
    layers, s, num = problem.layers, problem.stages, problem.num_devices
    trip = layers.trip[problem.every]
    last = trip.size - 1
    arrival = 1 / problem.max_speed
    whole_trip = trip[last] * arrival + problem.transfers.both_ways[kind.fewest_cuts]
    first = np.full(num + 1, last, np.int32)
    for p in range(num - 1, -1, -1):
        best = first[p + 1] if problem.is_alike else last
        for g in range(s.few.size):
            if s.few[g] > num - p:
                break
            most = s.few[g] if problem.is_alike else min(s.most[g], num - p)
            end = last
            for number in range(s.few[g], most + 1):
                end = min(end, first[p + number])
            apart = _forwards_apart(problem, kind.last_most, p, g)
            room = limit + s.slack[p, g]
            n, v, q, own = s.counts[p, g], s.speed[p, g], s.forward_speed[p, g], s.own[p, g]
            while best > 0:
                i = best - 1
                if i < end:
                    before = arrival * trip[i]
                    if layers.work[own, end] - layers.work[own, i] > room / s.busiest[p, g] * (1 + 1e-9):
                        break
                    if before + s.busiest[p, g] * (layers.trip[own, end] - layers.trip[own, i]) > room * (1 + 1e-9):
                        break
                    r = layers.critical[own, end] - layers.critical[own, i]
                    f = layers.forward[own, end] - layers.forward[own, i]
                    if whole_trip + (n - 1) * r / v + apart * f / q > room * (1 + 1e-9):
                        break
                    if not _has_time_for_rounds(
                        problem, room, before, trip[end] - trip[i], trip[last] - trip[end], p, g
                    ):
                        break
                best = i
        first[p] = best
    return first


@compiled
def _has_time_for_rounds(
    problem: Problem, room: float, before: float, own: float, behind: float, p: int, g: int
) -> bool:
    """Whether micro-batches can make their round trips from a stage on, one after another, in the time there is."""
    s = problem.stages
    in_flight, n = s.in_flight[p, g], s.counts[p, g]
    if in_flight == 0:
        return True
    for k in (2, 1 + (n - 1) // in_flight):
        steps = n - 1 - (k - 1) * in_flight
        if k >= 2 and steps >= 0:
            passed = k * s.from_here[p] * (own + behind) + problem.step_share * steps * own / s.speed[p, g]
            if before + passed > room * (1 + 1e-9):
                return False
    return True


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
) -> int:
    """Adds a stage to all prefixes of `begin` to `end` devices; returns the devices of one with all layers, or -1.

    Args:
        first: from `first_begins`.
        furthest: -1 where nothing is known. [levels, devices + 1, cuts + 2]
        origin: the devices before the last stage, of the first level. [devices + 1, cuts + 2]
    """
    num, last = problem.num_devices, problem.layers.update.size - 1
    num_levels, num_cuts = furthest.shape[0], min(kind.most_cuts, furthest.shape[2] - 2)
    for p in range(begin, end):
        for level in range(num_levels):
            for c in range(num_cuts + 2):
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
                    _add_stages(problem, kind, delays, limit, first, furthest, origin, level, p, c)
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
) -> None:
    """Adds a stage of each class of devices to one prefix."""
    layers, s, transfers = problem.layers, problem.stages, problem.transfers
    num, last, i = problem.num_devices, layers.update.size - 1, furthest[level, p, c]
    has_delays = furthest.shape[0] > 1
    forced = max(0, transfers.boundaries_before[p] - (p - c))
    one_way = transfers.one_way[c] + forced * transfers.extra_one_way
    both_ways = transfers.both_ways[c] + forced * transfers.extra_both
    behind = transfers.both_ways[max(0, kind.fewest_cuts - c)]
    # Or none: the layers of a plan's stage may lie before, if the devices before it can do more than theirs.
    may_be_empty = c < kind.fewest_cuts or not problem.is_alike
    trip, rest = layers.trip, s.behind[p]
    from_here = (trip[rest, last] - trip[rest, i]) * s.from_here[p] + behind
    arrived = trip[problem.every, i] / problem.max_speed + transfers.both_ways[c]
    for g in range(s.few.size):
        if s.few[g] > num - p:
            break
        room = limit + s.slack[p, g]
        if s.num_rounds[p, g] > 0 and arrived + s.num_rounds[p, g] * from_here > room:
            if not may_be_empty:
                continue
            highest = i
        else:
            may_end = s.few[g] <= kind.last_most and s.most[g] >= kind.last_fewest
            highest = last if may_end else last - 1
        most = s.few[g] if problem.is_alike else min(s.most[g], num - p)
        lowest = last + 1
        for number in range(s.few[g], most + 1):
            lowest = min(lowest, max(furthest[level, p + number, c + 1] + 1, first[p + number]))
        if lowest > highest:
            continue
        delay = 0.0
        if has_delays:
            delay = max(0.0, delays.from_ns[level] + delays.left_ns[g] - forced * transfers.extra_both)
        apart = _forwards_apart(problem, kind.last_most, p, g)
        end = _last_within(
            problem, room, apart, one_way, both_ways, behind, delay, p, g, i, max(lowest, i + 1), highest
        )
        if end < 0:
            if not may_be_empty or i < lowest:
                continue
            end = i
        for number in range(s.few[g], most + 1):
            if has_delays:
                _place(delays, furthest, may_be_empty, level, p + number, c, g, i, end, first[p + number])
            elif end >= first[p + number] and end > furthest[0, p + number, c + 1]:
                furthest[0, p + number, c + 1] = end
                origin[p + number, c + 1] = p


@compiled
def _place(
    delays: Delays,
    furthest: NDArray[np.int32],
    may_be_empty: bool,
    level: int,
    p: int,
    c: int,
    g: int,
    i: int,
    end: int,
    first: int,
) -> None:
    """Notes the ends of a stage up to `end`, each in the level of the longest delay so far."""
    num_levels, num_steps, cell = furthest.shape[0], delays.by_rings.shape[2] - 1, delays.cell_of[i]
    back = delays.steps_back[min(c, delays.steps_back.size - 1)]
    for to in range(level, num_levels):
        steps = (to + 1) * delays.steps_of_level
        within = end
        if to < num_levels - 1 and steps + back <= num_steps:
            within = min(end, min(delays.by_filler[g, cell, steps], delays.by_rings[g, cell, steps + back]))
        if may_be_empty:
            within = max(within, i)
        if within >= first and within > furthest[to, p, c + 1] and (within > i or may_be_empty):
            furthest[to, p, c + 1] = within
        if within >= end:
            break
