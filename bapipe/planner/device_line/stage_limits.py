"""Compiled: the limits of a stage within a step time, which are those of `prefix_bound.py`."""

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
        ("last_in_flight", np.int64),  # the same if the stage is the last one
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
        has_cycles: whether F and B of the first stages wait for each other: 1F1B, and more micro-batches than devices.
        rounding_ns: by how much an action may be shorter than the sum over its layers.
        is_rounded: whether actions on other speeds are rounded.
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
    has_cycles: bool
    rounding_ns: float
    is_rounded: bool


class Start(NamedTuple):
    """What is known of a stage before its end is.

    Attributes:
        room: the step time and the slack.
        apart: F of a replica that do not run during the round trip of its micro-batch whose backward is first.
        one_way, both_ways: the transfers before the stage, in ns.
        behind: the transfers behind it, both ways.
        once_one_way, once: transfers before it or behind it, where the cuts are not counted.
        delay: what follows behind the way back of the stage's last micro-batch.
        num_cycles: how often B of a micro-batch follows F of a later one here, and F of a yet later one that B on the
            first stage.
        around_cycles: the round trips before and after that, and what follows.
    """

    room: float
    apart: float
    one_way: float
    both_ways: float
    behind: float
    once_one_way: float
    once: float
    delay: float
    num_cycles: float
    around_cycles: float


@compiled
def count_cycles(problem: Problem, kind: PlanKind, p: int, g: int) -> int:
    """Returns how often the stages up to one of class `g` behind `p` devices wait for each other, at least: 1F1B.

    Behind B of micro-batch m the first stage runs F of one up to m + the devices + its replicas - 1.
    """
    num_devices = problem.stages.shape[0]
    up_to = min(p + problem.stages[p, g].most, num_devices) + kind.first_most - 1
    return int(max(0, (problem.num_microbatches - num_devices - kind.first_most) // up_to))


@compiled
def start_behind(
    problem: Problem, kind: PlanKind, limit: float, p: int, c: int, g: int, counts_cuts: bool, level: float, left: float
) -> Start:
    """What is known of a stage of class `g` behind `p` devices and `c` cuts.

    Args:
        counts_cuts: whether prefixes with different numbers of cuts are told apart; if not, `c` is 0.
        level: what follows behind the way back of any micro-batch, without hosts that no stage spans, ...
        left: ... and more of that behind the stage's last one.
    """
    forced = max(0, problem.boundaries_before[p] - (p - c))
    behind, once_one_way, once = problem.both_ways[max(0, kind.fewest_cuts - c)], 0.0, 0.0
    if not counts_cuts:
        behind, once_one_way, once = 0.0, problem.one_way[kind.fewest_cuts], problem.both_ways[kind.fewest_cuts]
    num_cycles = around_cycles = 0.0
    if problem.has_cycles and p > 0:
        num_cycles = float(count_cycles(problem, kind, p, g))
        if num_cycles > 0:
            trip = problem.layers[0, -1].trip / problem.max_speed + problem.both_ways[kind.fewest_cuts]
            num_actions = (4 + 2 * num_cycles) * min(kind.most_cuts + 1, problem.stages.shape[0])
            level_ns = max(0.0, level - forced * problem.extra_both)
            around_cycles = 2 * trip + level_ns - num_actions * problem.rounding_ns
    return Start(
        limit + problem.stages[p, g].slack,
        float(forwards_apart(problem, kind.last_most, p, g)),
        problem.one_way[c] + forced * problem.extra_one_way,
        problem.both_ways[c] + forced * problem.extra_both,
        behind,
        once_one_way,
        once,
        max(0.0, level + left - forced * problem.extra_both),
        num_cycles,
        around_cycles,
    )


@compiled
def is_passed(
    problem: Problem, kind: PlanKind, limit: float, p: int, c: int, g: int, i: int, counts_cuts: bool
) -> bool:
    """Whether enough micro-batches can make their round trips one after another behind the first `i` boundaries."""
    stage, num_rounds = problem.stages[p, g], problem.stages[p, g].num_rounds
    if num_rounds == 0:
        return True
    rest, behind = problem.layers[stage.behind], problem.both_ways[max(0, kind.fewest_cuts - c)] * counts_cuts
    from_here = (rest[-1].trip - rest[i].trip) * stage.from_here + behind
    arrived = problem.layers[0, i].trip / problem.max_speed + problem.both_ways[c]
    return bool(arrived + num_rounds * from_here <= limit + stage.slack)


@compiled
def forwards_apart(problem: Problem, last_most: int, p: int, g: int) -> int:
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
def rings_ns(stage: Any, max_bucket: float, gradients: float) -> float:
    """Returns what the rings of a stage with so many bytes of gradients take at least, in ns."""
    return float(stage.ring_latency * np.ceil(gradients / max_bucket) + stage.ring_rate * gradients)


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
    if start.num_cycles > 0:
        cycle = layers[stage.before, j].trip * stage.until + start.both_ways
        if start.around_cycles + start.num_cycles * cycle > start.room:
            return np.inf
    work = arrival + stage.busiest * (end.work - begin.work + again) + stage.last_ring + update
    around = f + r + (rest[-1].trip - rest[j].trip) * stage.behind_ns + start.behind
    returned = max(stage.busiest * (end.trip - begin.trip + again), around + start.once + (n - 1) * r + start.apart * f)
    ring = rings_ns(stage, max_bucket, end.gradients - begin.gradients)
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
def last_within(problem: Problem, start: Start, p: int, g: int, i: int, low: int, high: int) -> int:
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
def first_within(problem: Problem, start: Start, p: int, g: int, high: int, j: int) -> int:
    """The first begin up to `high` with which a stage keeps the limits, -1 if none is. Excess falls as it rises."""
    layers, stage = problem.layers, problem.stages[p, g]
    max_bucket, is_whole = problem.max_bucket, problem.has_whole_backward
    if high < 0 or _excess(layers, stage, max_bucket, is_whole, start, high, j) > 0:
        return -1
    # Invariant: `high` is within the limits, `before` is not.
    step, before = 1, -1
    while before + 1 < high:
        middle = max(high - step, (before + high) // 2)
        if _excess(layers, stage, max_bucket, is_whole, start, middle, j) > 0:
            before = middle
        else:
            high, step = middle, 2 * step
    return high
