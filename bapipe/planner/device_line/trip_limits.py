"""Compiled: whether a stage is within a step time, by what is known of the layers before it and behind it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_limits import Floats, Ints, Problem, count_cycles, forwards_apart, rings_ns

TRIP, RETURN, LATE, PURE, PURE_LATE, FLAT_TRIP, FLAT_RETURN = range(7)
FLAT_REST, REST, PURE_REST = range(3)


class Late(NamedTuple):
    """How many micro-batches follow the last one of a stage, of all; see `trip_bound.py`.

    Attributes:
        numbers: those that are told apart, the first is 0. [late]
        more, then: of each number, how many the replica of the first one has at least, and which of them are behind
            the last of these then. [groups, late]
        of_class: which of them counts for the stages of a class. [groups]
        forward_share: of F in the trip through any layers and over their cuts, at least.
        critical_share: of what earlier stages wait for in the trip through any layers, at least.
        transfers: of one micro-batch over the cut at each boundary, both ways: on any link, and from host to host.
            [2, boundaries]
        at_host: whether a cut behind so many devices is one from host to host. [devices + 1]
    """

    numbers: Ints
    more: Ints
    then: Ints
    of_class: Ints
    forward_share: float
    critical_share: float
    transfers: Floats
    at_host: Ints


class Stage(NamedTuple):
    """What is known of a stage of one class behind some devices before its layers are.

    Attributes:
        room: the step time and the slack.
        apart, late_apart: F of a replica that do not run during the round trip of the micro-batch whose B is first: of
            the replica with `count`, and of that of the very first micro-batch.
        is_in_turn: whether F and B take turns.
        late_count: micro-batches of the replica with the very first one.
        slope: the tables grow by no more than that for each ns of a layer.
        once: the transfers over all cuts, both ways, at least.
        num_cycles: how often B of a micro-batch follows F of a later one here, and F of a yet later one that B on the
            first stage.
        cycle_slack: by how much those actions may be shorter than the sums.
    """

    room: float
    apart: float
    late_apart: float
    is_in_turn: bool
    late_count: float
    slope: float
    once: float
    num_cycles: float
    cycle_slack: float


@compiled
def stage_of(problem: Problem, late: Late, kind: PlanKind, limit: float, p: int, g: int) -> Stage:
    """What is known of the stages of class `g` behind `p` devices."""
    own, num = problem.stages[p, g], problem.num_microbatches
    late_count = -(-num // own.most)
    left = late.numbers[late.of_class[g]]
    apart = float(forwards_apart(problem, kind.last_most, p, g))
    late_apart, is_in_turn = apart, not problem.are_forwards_first and own.in_flight > 0
    if is_in_turn:
        late_apart = max(0.0, float(late_count - own.in_flight))
    num_cycles = float(count_cycles(problem, kind, p, g)) if problem.has_cycles and p > 0 else 0.0
    num_stages = min(kind.most_cuts + 1, problem.stages.shape[0])
    share = late.critical_share if own.count >= 2 and late_count >= 2 else 0.0
    return Stage(
        limit + own.slack + problem.rounding_ns * (left + 3 + num_stages * problem.is_rounded),
        apart,
        late_apart,
        is_in_turn,
        float(late_count),
        own.fastest * (1 + share),
        problem.both_ways[min(kind.fewest_cuts, problem.both_ways.size - 1)],
        num_cycles,
        (4 + 2 * num_cycles) * num_stages * problem.rounding_ns,
    )


@compiled
def excess(
    layers: NDArray[Any],
    max_bucket: float,
    has_whole_backward: bool,
    forward_share: float,
    own: Any,
    stage: Stage,
    before: Floats,
    behind: Floats,
    i: int,
    j: int,
) -> float:
    """By how much the stage of the layers [i, j) exceeds the limits, at most 0 if it keeps them all.

    Args:
        before: by boundary, of a micro-batch there: its trip; that, and what follows behind its way back; the same if
            others are behind it as behind the stage's; the first and the last again without transfers; and the first
            two, where they grow no more than a stage of one micro-batch. [7, boundaries]
        behind: by boundary, the trip from there on, where it grows no more than a stage of one micro-batch; the same,
            no more than `slope`; and that without transfers. [3, boundaries]
    """
    begin, end = layers[own.own, i], layers[own.own, j]
    state, stash = end.state - begin.state, end.stash - begin.stash
    recomputes = state + own.num_stashes * stash > own.limit_bytes
    if state + stash > own.limit_bytes or (recomputes and not own.may_recompute):
        return np.inf
    n, late_n, apart, late_apart = own.count, stage.late_count, stage.apart, stage.late_apart
    if stage.is_in_turn and j == layers.shape[1] - 1:
        apart, late_apart = max(apart, n - own.last_in_flight), max(late_apart, late_n - own.last_in_flight)
    forward, trip = end.forward - begin.forward, end.trip - begin.trip
    again = forward if recomputes else 0.0  # in front of each backward
    # F and r of one micro-batch, and B, on the replica.
    f, own_f = forward * own.forward, forward * own.backward
    r = (end.critical - begin.critical + again) * own.backward
    b = (end.backward - begin.backward + again) * own.backward
    update = end.update - begin.update
    arrival = forward_share * before[TRIP, i]
    first_around, around = f + r + behind[FLAT_REST, j], f + r + behind[REST, j]
    # Of the micro-batches that are first and last on the replica.
    returned = max(own.busiest * (trip + again), around + (n - 1) * r + apart * f)
    returned_once = before[PURE, i] + behind[PURE_REST, j] + stage.once + f + n * r + apart * f
    ring = rings_ns(own, max_bucket, end.gradients - begin.gradients)
    first_full = min(max(end.backward - begin.before_gradients, 0.0), end.first_bucket) * own.backward
    work = arrival + own.busiest * (end.work - begin.work + again) + own.last_ring + update
    # From the start of the last B on: the first bucket is full, all rings follow, then the update.
    after = arrival + again * own.backward + first_full + ring + update
    work = max(work, after + n * own_f + (n - 1) * b)
    after -= b
    if has_whole_backward and n >= 2:
        work = max(work, after + (around if n >= 3 else first_around) + (n - 1) * b + apart * f)
    for way in range(2):
        if own.trips[way] > 0:
            passed = own.trips[way] * first_around + own.steps[way] * (own_f + r)
            returned = max(returned, passed)
            if has_whole_backward and own.steps[way] > 0:
                work = max(work, after + passed)
    # Of the very first micro-batch, and the last one of its replica, which may be the fastest.
    r = (end.critical - begin.critical + again) * own.fastest
    f = forward * own.fastest
    around = max(before[LATE, i] + behind[REST, j], before[PURE_LATE, i] + behind[PURE_REST, j] + stage.once)
    late_ns = around + f + late_n * r + late_apart * f
    if stage.num_cycles > 0:
        here, k = before[FLAT_TRIP, i] + trip * own.fastest, stage.num_cycles
        cycles = before[FLAT_RETURN, i] - before[FLAT_TRIP, i] + (2 + k) * here + 2 * behind[FLAT_REST, j]
        late_ns = max(late_ns, cycles - stage.cycle_slack)
    return float(max(work, before[RETURN, i] + returned, returned_once, late_ns) - stage.room)
