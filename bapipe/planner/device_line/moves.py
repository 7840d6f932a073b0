"""Compiled: random moves from a plan on a line of devices to plans like it.

Moves shift one cut, or all cuts between two, by a few boundaries, alone or with the devices that these layers are
worth; move a few devices from one stage to another; give a stage as many as it needs for one micro-batch less on each;
split a stage; merge it with the next; or leave idle the devices that a stage does not need. One to three moves are made
at a time.
"""

from math import floor

import numpy as np

from bapipe.planner.compute.compiled import compiled, inlined
from bapipe.planner.device_line.search_arrays import Moves, Plan, Random
from bapipe.planner.stages.intervals import MANY_BOUNDARIES

NUM_MOVES = (1, 1, 1, 2, 3)
"""How many moves are made at once."""

CUT_STEPS, DEVICE_STEPS = (1, 2, 3), (1, 1, 2, 3, 5, 8, 15)
"""By how many boundaries a cut is moved, and how many devices are moved at once."""


@inlined
def _next(random: Random) -> np.uint64:
    """Returns 64 random bits: xorshift (Marsaglia 2003)."""
    state: np.uint64 = random[0]
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    random[0] = state
    return state


@inlined
def _below(random: Random, limit: int) -> int:
    """Returns a random integer in [0, limit)."""
    return int((_next(random) >> np.uint64(11)) % np.uint64(limit))


@inlined
def fraction(random: Random) -> float:
    """Returns a random number in (0, 1]."""
    return float((_next(random) >> np.uint64(11)) + np.uint64(1)) / 2.0**53


@compiled
def draw(moves: Moves, plan: Plan, other: Plan, random: Random) -> bool:
    """Sets `other` to `plan` changed by one to three random moves; returns whether the result is a valid plan."""
    copy_plan(plan, other)
    for _ in range(NUM_MOVES[_below(random, len(NUM_MOVES))]):
        _move(moves, other, random)
    num_devices = 0
    for s in range(other.num_stages[0]):
        num_devices += other.counts[s]
        if other.cuts[s] >= other.cuts[s + 1] or not 1 <= other.counts[s] <= moves.num_microbatches:
            return False
    return num_devices <= moves.num_devices


@inlined
def copy_plan(plan: Plan, other: Plan) -> None:
    num_stages = plan.num_stages[0]
    other.num_stages[0] = num_stages
    for s in range(num_stages):
        other.cuts[s], other.counts[s] = plan.cuts[s], plan.counts[s]
    other.cuts[num_stages] = plan.cuts[num_stages]


@inlined
def _move(moves: Moves, plan: Plan, random: Random) -> None:
    """Makes a random move, its kind drawn by weight; the result may be no valid plan."""
    kind, drawn = 0, _below(random, moves.weights.sum())
    while drawn >= moves.weights[kind]:
        drawn, kind = drawn - moves.weights[kind], kind + 1
    if kind <= 1:
        _shift_cuts(moves, plan, random, kind == 1)
    elif kind == 2:
        _move_devices(moves, plan, random)
    elif kind == 3:
        _move_round(moves, plan, random)
    elif kind == 4:
        s = _below(random, plan.num_stages[0])
        plan.counts[s] = _enough(moves, _enough(moves, plan.counts[s]))
    elif kind == 5:
        _split(plan, random)
    else:
        _merge(plan, random)


@inlined
def _enough(moves: Moves, num: int) -> int:
    """Returns ceil(M / num): the devices needed for `num` micro-batches each, or the micro-batches on each of `num`."""
    return (moves.num_microbatches + max(1, num) - 1) // max(1, num)


@inlined
def _num_idle(moves: Moves, plan: Plan) -> int:
    return moves.num_devices - int(plan.counts[: plan.num_stages[0]].sum())


@inlined
def _shift_cuts(moves: Moves, plan: Plan, random: Random, with_devices: bool) -> None:
    """Moves one cut, or all cuts between two, by a few boundaries.

    If `with_devices`, the devices that these layers are worth go with them, rounded up or down at random.
    """
    num_stages, last = plan.num_stages[0], moves.devices_before.size - 1
    if num_stages < 2:
        return
    one = 1 + _below(random, num_stages - 1)
    other = one if fraction(random) < 0.6 else 1 + _below(random, num_stages - 1)
    by = CUT_STEPS[_below(random, len(CUT_STEPS))] * (1 if fraction(random) < 0.5 else -1)
    by *= max(1, last // MANY_BOUNDARIES) if fraction(random) < 0.5 else 1
    for s in range(min(one, other), max(one, other) + 1):
        old = plan.cuts[s]
        plan.cuts[s] = new = old + by
        if with_devices and min(old, new) >= 0 and max(old, new) <= last:  # a move before may have left the layers
            worth = moves.devices_before[new] - moves.devices_before[old]
            num = floor(worth + fraction(random))
            plan.counts[s - 1] += num
            plan.counts[s] -= num


@inlined
def _move_devices(moves: Moves, plan: Plan, random: Random) -> None:
    """Moves some devices from one stage to another; in half of the cases it takes idle ones first."""
    source, target = _below(random, plan.num_stages[0]), _below(random, plan.num_stages[0])
    num = DEVICE_STEPS[_below(random, len(DEVICE_STEPS))]
    num_idle = _num_idle(moves, plan) if fraction(random) < 0.5 else 0
    plan.counts[target] += num
    plan.counts[source] -= max(0, num - num_idle)


@inlined
def _move_round(moves: Moves, plan: Plan, random: Random) -> None:
    """Gives a stage the devices that it needs for one micro-batch less on each, from idle ones and another stage."""
    source, target = _below(random, plan.num_stages[0]), _below(random, plan.num_stages[0])
    num_each = _enough(moves, plan.counts[target])
    if num_each > 1 and source != target:
        plan.counts[target] = _enough(moves, num_each - 1)
        plan.counts[source] += min(0, _num_idle(moves, plan))


@inlined
def _split(plan: Plan, random: Random) -> None:
    num_stages = plan.num_stages[0]
    s = _below(random, num_stages)
    num_layers, num_devices = plan.cuts[s + 1] - plan.cuts[s], plan.counts[s]
    if num_layers < 2 or num_devices < 2 or num_stages == plan.counts.size:
        return
    num, cut = 1 + _below(random, num_devices - 1), plan.cuts[s] + 1 + _below(random, num_layers - 1)
    for later in range(num_stages, s, -1):
        plan.counts[later], plan.cuts[later + 1] = plan.counts[later - 1], plan.cuts[later]
    plan.counts[s], plan.counts[s + 1], plan.cuts[s + 1] = num, num_devices - num, cut
    plan.num_stages[0] = num_stages + 1


@inlined
def _merge(plan: Plan, random: Random) -> None:
    num_stages = plan.num_stages[0]
    if num_stages < 2:
        return
    s = _below(random, num_stages - 1)
    plan.counts[s] += plan.counts[s + 1]
    for later in range(s + 1, num_stages - 1):
        plan.counts[later], plan.cuts[later] = plan.counts[later + 1], plan.cuts[later + 1]
    plan.cuts[num_stages - 1] = plan.cuts[num_stages]
    plan.num_stages[0] = num_stages - 1
