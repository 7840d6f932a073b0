"""Compiled: the limits of a stage within a step time, which are those of `prefix_bound.py`."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.compiled import inlined
from bapipe.planner.device_line.early_waits import Waits, count_cycles, count_turns
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import BoundInputs, Savings

FLOAT_ROUNDING = 1e-12
"""The relative rounding error of sums of floats."""


class Start(NamedTuple):
    """What is known of a stage before its end is chosen.

    Attributes:
        room: the step time plus the slack.
        apart: F of a replica that do not run during the round trip of the micro-batch whose backward comes first.
        one_way, both_ways: the transfers before the stage, in ns.
        behind: the transfers after it, both ways.
        once_one_way, once: the transfers before it or after it, one way and both ways, if cuts are not counted.
        delay: what follows the way back of the stage's last micro-batch.
        num_cycles: how many times B of a micro-batch follows F of a later one here, and F of a still later one follows
            that B on the first stage.
        around_cycles: the round trips before and after these cycles, and what follows.
        num_turns: how many times a replica alternates F and B between those round trips.
        around_turns: the round trips before and after these turns, with the first stage's further turns between them.
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
    num_turns: float
    around_turns: float


@inlined
def start_behind(
    problem: BoundInputs,
    kind: PlanKind,
    waits: Waits,
    limit: float,
    p: int,
    c: int,
    g: int,
    counts_cuts: bool,
    level: float,
    left: float,
) -> Start:
    """Returns what is known of a stage of class `g` after `p` devices and `c` cuts.

    Args:
        counts_cuts: whether prefixes with different numbers of cuts are distinguished; if not, `c` is 0.
        level: what follows the way back of any micro-batch, not counting hosts that no stage spans.
        left: what follows the way back of the stage's last micro-batch in addition.
    """
    forced = forced_host_cuts(problem, p, c)
    behind, once_one_way, once = problem.both_ways[max(0, kind.fewest_cuts - c)], 0.0, 0.0
    if not counts_cuts:
        behind, once_one_way, once = 0.0, problem.one_way[kind.fewest_cuts], problem.both_ways[kind.fewest_cuts]
    num_cycles = num_turns = 0
    around_cycles = around_turns = 0.0
    if waits.num_left > 0:
        num_cycles = count_cycles(problem, kind, waits, p, g)
        num_turns, first_ns = count_turns(problem, waits, p, g)
        trip = problem.layers[0, -1].trip / problem.max_speed + problem.both_ways[kind.fewest_cuts]
        num_stages = min(kind.most_cuts + 1, problem.stages.shape[0])
        around = 2 * trip + max(0.0, level - forced * problem.extra_both)
        around_cycles = around - (4 + 2 * num_cycles) * num_stages * problem.rounding_ns
        around_turns = around + first_ns - (4 * num_stages + 2 * num_turns) * problem.rounding_ns
    return Start(
        limit + problem.stages[p, g].slack,
        float(forwards_apart(problem, kind.last_most, p, g)),
        problem.one_way[c] + forced * problem.extra_one_way,
        problem.both_ways[c] + forced * problem.extra_both,
        behind,
        once_one_way,
        once,
        max(0.0, level + left - forced * problem.extra_both),
        float(num_cycles),
        around_cycles,
        float(num_turns),
        around_turns,
    )


@inlined
def forced_host_cuts(problem: BoundInputs, p: int, c: int) -> int:
    """Returns how many host boundaries among the first `p` devices must be cuts if there are `c` cuts between them."""
    return int(max(0, problem.boundaries_before[p] - (p - c)))


@inlined
def is_passed(
    problem: BoundInputs, kind: PlanKind, limit: float, p: int, c: int, g: int, i: int, counts_cuts: bool
) -> bool:
    """Returns whether enough micro-batches can make consecutive round trips through the layers after boundary `i`."""
    stage, num_rounds = problem.stages[p, g], problem.stages[p, g].num_rounds
    if num_rounds == 0:
        return True
    rest, behind = problem.layers[stage.behind], problem.both_ways[max(0, kind.fewest_cuts - c)] * counts_cuts
    from_here = (rest[-1].trip - rest[i].trip) * stage.from_here + behind
    arrived = problem.layers[0, i].trip / problem.max_speed + problem.both_ways[c]
    return bool(arrived + num_rounds * from_here <= limit + stage.slack)


@inlined
def forwards_apart(problem: BoundInputs, last_most: int, p: int, g: int) -> int:
    """Returns how many F of a replica do not run during the round trip of the micro-batch whose B comes first."""
    stage = problem.stages[p, g]
    if problem.are_forwards_first:
        # The last stage is this one, or has devices after it.
        num_behind = problem.stages.shape[0] - p - stage.few
        last = min(max(last_most, stage.few), max(stage.most, num_behind))
        return int(max(0, (problem.num_microbatches - last) // stage.most))
    if stage.in_flight == 0:
        return 0
    return int(max(0, int(stage.count) - stage.in_flight))


@inlined
def rings_ns(stage: Any, max_bucket: float, gradients: float) -> float:
    """Returns a lower bound on the rings of a stage with `gradients` bytes of gradients, in ns."""
    return float(stage.ring_latency * np.ceil(gradients / max_bucket) + stage.ring_rate * gradients)


@inlined
def until_first_bucket(begin: Any, end: Any) -> float:
    """Returns the B of the layers between two boundaries until their first bucket is full, in ns of work."""
    return float(min(max(end.backward - begin.before_gradients, 0.0), end.first_bucket))


@inlined
def least_again(layers: NDArray[Any], savings: Savings, stage: Any, i: int, j: int) -> float:
    """Returns a lower bound on the F that the stage of the layers [i, j) runs again per micro-batch so that it fits.

    The Lagrange dual of a knapsack, whose items are runs of layers, each with what is kept at its ends: at any price
    of a byte, the saved bytes less their F are worth no more than the sum over all runs that are worth their F.

    Returns:
        ns of work; 0 if it fits with all stashes, infinite if it does not even fit with one. It rises with j and falls
        as i rises: a layer adds at least as much to the bytes beyond the limit as to those that are worth their F.
    """
    begin, end = layers[stage.own, i], layers[stage.own, j]
    state, held = end.state - begin.state, end.held - begin.stash
    is_beyond = state + stage.num_stashes * held > stage.limit_bytes
    if state + held > stage.limit_bytes or (is_beyond and not stage.may_recompute):
        return np.inf
    if not is_beyond:
        return 0.0
    # One micro-batch is in its B. The buffers for what comes back are deducted in `reached`.
    beyond = state + stage.num_stashes * (end.stash - begin.stash) - stage.limit_bytes
    saved, again = beyond / (stage.num_stashes - 1), 0.0
    for k in range(savings.rates.size):
        again = max(again, savings.rates[k] * saved - (savings.reached[k, j] - savings.begun[stage.is_behind, k, i]))
    return float(again * (1 - FLOAT_ROUNDING))


@inlined
def _excess(
    layers: NDArray[Any],
    savings: Savings,
    stage: Any,
    max_bucket: float,
    has_whole_backward: bool,
    start: Start,
    i: int,
    j: int,
) -> float:
    """Returns by how much the stage of the layers [i, j) exceeds the limits; at most 0 if it keeps them all."""
    begin, end, before, rest = layers[stage.own, i], layers[stage.own, j], layers[stage.before, i], layers[stage.behind]
    again = least_again(layers, savings, stage, i, j)  # before each backward
    if again == np.inf:
        return np.inf
    n = stage.count
    # F, r and B of one micro-batch, on the replica.
    f, r = (end.forward - begin.forward) * stage.forward, (end.critical - begin.critical) * stage.backward
    b = (end.backward - begin.backward) * stage.backward
    own_f = (end.forward - begin.forward) * stage.backward
    r, b = r + again * stage.backward, b + again * stage.backward
    arrival = before.forward * stage.before_ns + start.one_way
    return_ns = before.trip * stage.before_ns + start.both_ways
    update = end.update - begin.update
    if start.num_cycles > 0:
        cycle = layers[stage.before, j].trip * stage.until + start.both_ways
        if start.around_cycles + start.num_cycles * cycle > start.room:
            return np.inf
    if start.num_turns > 0:
        turn = (end.forward - begin.forward + again + end.critical - begin.critical) * stage.fastest
        if start.around_turns + start.num_turns * turn > start.room:
            return np.inf
    work = arrival + stage.busiest * (end.work - begin.work + again) + stage.last_ring + update
    around = f + r + (rest[-1].trip - rest[j].trip) * stage.behind_ns + start.behind
    returned = max(stage.busiest * (end.trip - begin.trip + again), around + start.once + (n - 1) * r + start.apart * f)
    ring = rings_ns(stage, max_bucket, end.gradients - begin.gradients)
    first_full = until_first_bucket(begin, end) * stage.backward
    # From the start of the last B on: the first bucket is full, all rings follow, then the update.
    after = arrival + again * stage.backward + first_full + ring + update
    work = max(work, after + n * own_f + (n - 1) * b)
    # Behind the first round trip come all other backwards, and the F that are not in flight with it.
    around_first = arrival + around + start.once_one_way + start.apart * f - r
    work = max(work, around_first + n * b + stage.last_ring + update)
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


@inlined
def last_within(problem: BoundInputs, start: Start, p: int, g: int, i: int, low: int, high: int) -> int:
    """Returns the last end in [low, high] with which a stage keeps the limits, else -1. Excess rises with the end."""
    layers, savings, stage = problem.layers, problem.savings, problem.stages[p, g]
    max_bucket, is_whole = problem.max_bucket, problem.has_whole_backward
    if low > high or _excess(layers, savings, stage, max_bucket, is_whole, start, i, low) > 0:
        return -1
    # Invariant: `low` is within the limits, `beyond` is not.
    step, beyond = 1, high + 1
    while low + 1 < beyond:
        middle = min(low + step, (low + beyond + 1) // 2)
        if _excess(layers, savings, stage, max_bucket, is_whole, start, i, middle) > 0:
            beyond = middle
        else:
            low, step = middle, 2 * step
    return low


@inlined
def first_within(problem: BoundInputs, start: Start, p: int, g: int, high: int, j: int) -> int:
    """Returns the first begin up to `high` with which a stage keeps the limits, else -1. Excess falls as it rises."""
    layers, savings, stage = problem.layers, problem.savings, problem.stages[p, g]
    max_bucket, is_whole = problem.max_bucket, problem.has_whole_backward
    if high < 0 or _excess(layers, savings, stage, max_bucket, is_whole, start, high, j) > 0:
        return -1
    # Invariant: `high` is within the limits, `before` is not.
    step, before = 1, -1
    while before + 1 < high:
        middle = max(high - step, (before + high) // 2)
        if _excess(layers, savings, stage, max_bucket, is_whole, start, middle, j) > 0:
            before = middle
        else:
            high, step = middle, 2 * step
    return high
