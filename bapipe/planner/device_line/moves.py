"""Compiled: random moves from a plan on a line of devices to plans like it.

One cut, or all from one to another, by a few boundaries, alone or with the devices that these layers are worth; a few
devices from one stage to another; as many as a stage needs for one micro-batch less on each; a stage is split, or
merged with the next; devices that a stage does not need are left idle. One to three moves are made at a time.
"""

from math import floor

import numpy as np

from bapipe.planner.compute.compiled import compiled, inlined
from bapipe.planner.device_line.search_arrays import Moves, Plan, Random

NUM_MOVES = (1, 1, 1, 2, 3)
"""How many moves are made at once."""

CUT_STEPS, DEVICE_STEPS = (1, 2, 3), (1, 1, 2, 3, 5, 8, 15)
"""By how many boundaries a cut is moved, and how many devices at once."""

MANY_BOUNDARIES = 200
"""In longer chains cuts are also moved by so many times as much as there are so many boundaries."""


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
    """Returns one of 0, 1 ... limit - 1."""
    return int((_next(random) >> np.uint64(11)) % np.uint64(limit))


@inlined
def fraction(random: Random) -> float:
    """Returns a number above 0 and up to 1."""
    return float((_next(random) >> np.uint64(11)) + np.uint64(1)) / 2.0**53


@compiled
def draw(moves: Moves, plan: Plan, other: Plan, random: Random) -> bool:
    """Changes `other` into a plan like one, by one to three moves; returns whether it is a plan."""
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
    """Makes a move of a kind drawn by its weight; not every one leaves a plan."""
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
    """Returns the fewest devices with no more than so many micro-batches each, and the other way around."""
    return (moves.num_microbatches + max(1, num) - 1) // max(1, num)


@inlined
def _num_idle(moves: Moves, plan: Plan) -> int:
    return moves.num_devices - int(plan.counts[: plan.num_stages[0]].sum())


@inlined
def _shift_cuts(moves: Moves, plan: Plan, random: Random, with_devices: bool) -> None:
    """Moves one cut, or all from one to another, by a few boundaries.

    Maybe with the devices that these layers are worth, rounded up or down at random.
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
    """Moves some devices from one stage to another, idle ones first in half of the cases."""
    source, target = _below(random, plan.num_stages[0]), _below(random, plan.num_stages[0])
    num = DEVICE_STEPS[_below(random, len(DEVICE_STEPS))]
    num_idle = _num_idle(moves, plan) if fraction(random) < 0.5 else 0
    plan.counts[target] += num
    plan.counts[source] -= max(0, num - num_idle)


@inlined
def _move_round(moves: Moves, plan: Plan, random: Random) -> None:
    """Gives a stage as many devices as it takes for one micro-batch less on each, from idle ones and another stage."""
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
