"""Compiled: whether a stage is within a step time, by what is known of the layers before and after it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import inlined
from bapipe.planner.device_line.early_waits import Waits, count_cycles, count_turns
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import BoundInputs, Savings
from bapipe.planner.device_line.stage_limits import forwards_apart, least_again, rings_ns, until_first_bucket
from bapipe.planner.device_line.tracked_arrays import MAX_GRADIENTS, MAX_KINDS, MAX_REPLICAS, MAX_ROUNDS, Tracked
from bapipe.planner.device_line.trip_tables import ANY_BACK, FIRST_BACK, FLAT_AROUND, STEEP_AROUND

ARRIVAL, RETURN, FLAT_RETURN, FOLLOW, FOLLOW_LATE, FOLLOW_TURNS, BEFORE_FIRST, BEFORE_ANY, REPLICAS = range(9)
"""The rows of what precedes the begins of the stages of a class, see `excess`; from `REPLICAS` on three per replica."""

FIRST_THERE, LAST_THERE, FOLLOW_LAST, ROWS_OF_REPLICA = range(4)
"""The rows of one replica, counted from its first row."""

ROUNDS = REPLICAS + ROWS_OF_REPLICA * MAX_REPLICAS
"""The first of the rows of what follows the rounds of `Tracked`."""

OF_KINDS = ROUNDS + MAX_ROUNDS
"""The first of the three rows, as of a replica, for replicas of which only the kind is known."""

NUM_KNOWN = OF_KINDS + ROWS_OF_REPLICA


class OfClass(NamedTuple):
    """The replicas and rounds that are considered in the stages of one class after some devices: see `Tracked`.

    Attributes:
        late: when gradients arrive, by row, as a sparse table; see `excess`. [boundaries, levels of rows]
    """

    replicas: NDArray[Any]
    replica_ns: Floats
    rounds: NDArray[Any]
    of_kinds: NDArray[Any]
    gradients: NDArray[Any]
    late: Floats


@inlined
def of_class_behind(tracked: Tracked, late: Floats, p: int, g: int) -> OfClass:
    """Returns what is considered in the stages of class `g` after `p` devices, with the array for gradients."""
    return OfClass(
        tracked.replicas[g],
        tracked.replica_ns[p, g],
        tracked.rounds[g],
        tracked.of_kinds[p, g],
        tracked.gradients[g],
        late,
    )


class Stage(NamedTuple):
    """What is known of a stage of one class after some devices, before its layers are chosen.

    Attributes:
        room: the step time plus the slack.
        apart, late_apart: F of a replica that do not run during the round trip of the micro-batch whose B comes first:
            of the replica with `count`, and of that with the very first micro-batch.
        is_in_turn: whether F and B alternate.
        late_count: micro-batches of the replica with the very first one.
        slope: the maximum growth of the tables for each ns of a layer.
        back_slope: the maximum growth of what follows B for each ns of B.
        num_cycles: how many times B of a micro-batch follows F of a later one here, and F of a still later one follows
            that B on the first stage.
        cycle_slack: by how much these actions may be shorter than the sums over their layers.
        num_turns: how many times a replica alternates F and B between two round trips of all stages.
        turns_slack: by how much these actions may be shorter than the sums.
        turns_left: the micro-batches that these turns leave, for turns of the first stage or to come back at the end.
        first_ns: what the turns of the first stage take if they get all of these.
        waits: whether it is known when gradients arrive.
        num_first, num_any: F before the first B, see `WAIT`.
        num_replicas, num_rounds, num_kinds: how many are considered.
        rounding: by how much an action may be shorter than the sum over its layers, in ns.
    """

    room: float
    apart: float
    late_apart: float
    is_in_turn: bool
    late_count: float
    slope: float
    back_slope: float
    num_cycles: float
    cycle_slack: float
    num_turns: float
    turns_slack: float
    turns_left: int
    first_ns: float
    waits: bool
    num_first: float
    num_any: float
    num_replicas: int
    num_rounds: int
    num_kinds: int
    rounding: float


@inlined
def stage_of(
    problem: BoundInputs, tracked: Tracked, kind: PlanKind, waits: Waits, limit: float, is_full: bool, p: int, g: int
) -> Stage:
    """Returns what is known of the stages of class `g` after `p` devices."""
    own, num, wait = problem.stages[p, g], problem.num_microbatches, tracked.waits[g]
    late_count = -(-num // own.most)
    apart = float(forwards_apart(problem, kind.last_most, p, g))
    late_apart, is_in_turn = apart, not problem.are_forwards_first and own.in_flight > 0
    if is_in_turn:
        late_apart = max(0.0, float(late_count - own.in_flight))
    num_cycles, (num_turns, first_ns) = count_cycles(problem, kind, waits, p, g), count_turns(problem, waits, p, g)
    num_stages = min(kind.most_cuts + 1, problem.stages.shape[0])
    has_two = own.count >= 2 and late_count >= 2
    num_replicas = 0
    while is_full and num_replicas < MAX_REPLICAS and tracked.replicas[g, num_replicas].count > 0:
        num_replicas += 1
    num_rounds = 0
    while is_full and num_rounds < MAX_ROUNDS and tracked.rounds[g, num_rounds].count > 0:
        num_rounds += 1
    num_kinds = 0
    while is_full and num_kinds < MAX_KINDS and tracked.of_kinds[p, g, num_kinds].count > 0:
        num_kinds += 1
    left = tracked.behind[tracked.behind.size - 1]
    return Stage(
        limit + own.slack + problem.rounding_ns * (left + 6 + num_stages * problem.is_rounded),
        apart,
        late_apart,
        is_in_turn,
        float(late_count),
        own.fastest * (1 + tracked.critical_share * has_two),
        own.fastest * (1 + has_two),
        float(num_cycles),
        (4 + 2 * num_cycles) * num_stages * problem.rounding_ns,
        float(num_turns),
        (4 * num_stages + 2 * num_turns) * problem.rounding_ns,
        waits.num_left - num_turns * own.most,
        first_ns,
        is_full,
        float(wait.num_first),
        float(wait.num_any),
        num_replicas,
        num_rounds,
        num_kinds,
        problem.rounding_ns,
    )


@inlined
def excess(
    layers: NDArray[Any],
    savings: Savings,
    max_bucket: float,
    own: Any,
    stage: Stage,
    of_class: OfClass,
    known: Floats,
    rest: Floats,
    i: int,
    j: int,
) -> float:
    """Returns by how much the stage of the layers [i, j) exceeds the limits; at most 0 if it keeps them all.

    Args:
        known: rows by boundary. [NUM_KNOWN, boundaries]
            `ARRIVAL`: when the first micro-batch arrives. `RETURN`: what B takes from there to the first stage.
            `FLAT_RETURN`: `RETURN` and what follows it, growing no faster than a stage with one micro-batch.
            `FOLLOW`: the same, growing up to twice as fast. `FOLLOW_LATE`: the same if as many others follow as after
            the last micro-batch of the replica with the very first one. `FOLLOW_TURNS`: the turns of the first stage,
            and what follows turns. `BEFORE_FIRST`, `BEFORE_ANY`: when the last of the micro-batches arrives whose F the
            first B waits for, for the very first micro-batch and for any. Then the rows from `REPLICAS`, `ROUNDS` and
            `OF_KINDS` on.
        rest: rows by boundary. [4, boundaries]
            `FLAT_AROUND`: the trip from there on, growing no faster than a stage with one micro-batch. `STEEP_AROUND`:
            the same, growing by up to `slope`. `FIRST_BACK`, `ANY_BACK`: when the gradients of the very first
            micro-batch, and of any, arrive.
    """
    begin, end = layers[own.own, i], layers[own.own, j]
    replicas, replica_ns, rounds, of_kinds, gradients, late = of_class
    again = least_again(layers, savings, own, i, j)  # before each backward
    if again == np.inf:
        return np.inf
    n, late_n, apart, late_apart = own.count, stage.late_count, stage.apart, stage.late_apart
    if stage.is_in_turn and j == layers.shape[1] - 1:
        apart, late_apart = max(apart, n - own.last_in_flight), max(late_apart, late_n - own.last_in_flight)
    forward, trip = end.forward - begin.forward, end.trip - begin.trip
    # F, r and B of one micro-batch, on the replica.
    f, own_f = forward * own.forward, forward * own.backward
    r = (end.critical - begin.critical + again) * own.backward
    b = (end.backward - begin.backward + again) * own.backward
    update = end.update - begin.update
    arrival = known[ARRIVAL, i]
    first_around, around = f + r + rest[FLAT_AROUND, j], f + r + rest[STEEP_AROUND, j]
    # For the first and the last micro-batch of the replica.
    returned = arrival + max(own.busiest * (trip + again), around + (n - 1) * r + apart * f)
    ring = rings_ns(own, max_bucket, end.gradients - begin.gradients)
    first_full = until_first_bucket(begin, end) * own.backward
    work = arrival + own.busiest * (end.work - begin.work + again) + own.last_ring + update
    # From the start of the last B on: the first bucket is full, all rings follow, then the update.
    after = again * own.backward + first_full + ring + update
    work = max(work, arrival + after + n * own_f + (n - 1) * b)
    if n >= 2:
        work = max(work, arrival + after + (around if n >= 3 else first_around) + (n - 2) * b + apart * f)
    for way in range(2):
        if own.trips[way] > 0:
            passed = own.trips[way] * first_around + own.steps[way] * (own_f + r)
            returned = max(returned, arrival + passed)
            if own.steps[way] > 0:
                work = max(work, arrival + after - b + passed)
    # For the very first micro-batch, and the last one of its replica, which may be the fastest.
    late_r = (end.critical - begin.critical + again) * own.fastest
    late_f = forward * own.fastest
    late_returned = arrival + rest[STEEP_AROUND, j] + late_f + late_n * late_r + late_apart * late_f
    start = arrival
    if stage.waits:
        short_f = late_f - stage.rounding
        start = max(rest[ANY_BACK, j], known[BEFORE_ANY, i] + short_f, arrival + stage.num_any * short_f)
        apart, late_apart = (apart, late_apart) if stage.is_in_turn else (0.0, 0.0)
        returned = max(returned, start + n * r + apart * f)
        if n >= 2:
            work = max(work, start + after + (n - 1) * b + apart * f)
        start = max(start, rest[FIRST_BACK, j], known[BEFORE_FIRST, i] + short_f, arrival + stage.num_first * short_f)
        late_returned = max(late_returned, start + late_n * late_r + late_apart * late_f)
        if late_n >= 2:
            late_b = (end.backward - begin.backward + again) * own.fastest
            first_full = until_first_bucket(begin, end) * own.fastest
            after = again * own.fastest + first_full + ring + update
            work = max(work, start + after + (late_n - 1) * late_b + late_apart * late_f)
    longest = max(work, known[FOLLOW, i] + returned, known[FOLLOW_LATE, i] + late_returned)
    if longest > stage.room:  # what follows takes most of the time
        return float(longest - stage.room)
    in_flight = own.last_in_flight if j == layers.shape[1] - 1 else own.in_flight
    for number in range(stage.num_rounds):
        num = rounds[number].count
        returned = arrival + late_f + rest[STEEP_AROUND if num >= 2 else FLAT_AROUND, j]
        apart = max(0.0, float(num - in_flight)) if stage.is_in_turn else 0.0
        returned = max(returned, start) + num * late_r + apart * late_f
        longest = max(longest, returned + known[ROUNDS + number, i])
    for number in range(stage.num_replicas):
        row, num, ns = REPLICAS + ROWS_OF_REPLICA * number, replicas[number].count, replica_ns[number]
        ends = _longest_of(layers, own.own, own, stage, num, ns, again, ring + update, known, row, rest, i, j)
        longest = max(longest, ends)
        if late.shape[1] > 0:
            ends = _longest_of_late(
                layers, own.own, gradients[number], ns, again, ring + update, known, row, late, i, j
            )
            longest = max(longest, ends)
    for number in range(stage.num_kinds):
        one = of_kinds[number]
        row, num, ns = int(np.int64(OF_KINDS)), one.count, one.ns  # a constant would make numba compile it once more
        ends = _longest_of(layers, one.own, own, stage, num, ns, again, ring + update, known, row, rest, i, j)
        longest = max(longest, ends)
    if stage.num_cycles > 0:
        k = stage.num_cycles
        cycles = (2 + k) * (arrival + trip * own.fastest) + known[FLAT_RETURN, i] + (1 + k) * known[RETURN, i]
        longest = max(longest, cycles + 2 * rest[FLAT_AROUND, j] - stage.cycle_slack)
    if stage.num_turns > 0:
        trips = 2 * (arrival + trip * own.fastest + rest[FLAT_AROUND, j]) + known[RETURN, i]
        follow = known[FOLLOW_TURNS, i] if stage.waits else stage.first_ns + known[FLAT_RETURN, i]
        longest = max(longest, trips + stage.num_turns * (late_f + late_r) + follow - stage.turns_slack)
    return float(longest - stage.room)


@inlined
def _longest_of(
    layers: NDArray[Any],
    kinds: int,
    own: Any,
    stage: Stage,
    num: int,
    ns: float,
    again: float,
    rings: float,
    known: Floats,
    row: int,
    rest: Floats,
    i: int,
    j: int,
) -> float:
    """Returns when the last gradient of one replica of a stage is back at the first stage, or its update is done.

    Args:
        kinds: the set of kinds whose times of the layers count.
        num: the replica's micro-batches.
        ns: the time that 1 ns of work takes on it.
        again: what is recomputed before each backward, in ns of work.
        rings: the rings and the update of the stage.
        row: its first one in `known`.
    """
    begin, end = layers[kinds, i], layers[kinds, j]
    f, r = (end.forward - begin.forward) * ns, (end.critical - begin.critical + again) * ns
    b = (end.backward - begin.backward + again) * ns
    first_there, is_last = known[row + FIRST_THERE, i], j == layers.shape[1] - 1
    around = flat_around = first_there + f  # the start of the first B after its round trip
    own_forwards = first_there + num * f  # the start of the last B after all F of the replica
    if stage.is_in_turn:
        others = max(0, num - (own.last_in_flight if is_last else own.in_flight)) * f
        around, flat_around, first_b = around + others, flat_around + others, 0.0
    else:
        short_f = f - stage.rounding
        first_b = max(first_there + num * short_f, known[row + LAST_THERE, i] + short_f)
    around += rest[STEEP_AROUND if num >= 2 else FLAT_AROUND, j]
    back = max(first_b, around) + num * r + known[row + FOLLOW_LAST, i]
    # The rest falls by F + r where a layer joins the stage, and the steep one by F + 2 r, so that the F and the B of
    # the stage in the same sum must rise by as much.
    last_b = max(first_b, own_forwards) + (num - 1) * b
    if num >= 3:
        last_b = max(last_b, around + (num - 1) * b)
    elif num == 2:
        last_b = max(last_b, flat_around + rest[FLAT_AROUND, j] + b)
    first_full = until_first_bucket(begin, end)
    return float(max(back, last_b + (again + first_full) * ns + rings))


@inlined
def _longest_of_late(
    layers: NDArray[Any],
    kinds: int,
    gradients: NDArray[Any],
    ns: float,
    again: float,
    rings: float,
    known: Floats,
    row: int,
    late: Floats,
    i: int,
    j: int,
) -> float:
    """Returns the same as `_longest_of`, but after the gradients of some of the replica's micro-batches.

    Args:
        gradients: `GRADIENT`. [MAX_GRADIENTS]
    """
    begin, end = layers[kinds, i], layers[kinds, j]
    r, b = (end.critical - begin.critical + again) * ns, (end.backward - begin.backward + again) * ns
    back = last_b = 0.0
    for number in range(MAX_GRADIENTS):
        one = gradients[number]
        if one.count == 0:
            break
        there = min(late[j, one.rows[0]], late[j, one.rows[1]])
        back = max(back, there + one.count * r)
        if one.count >= 2:  # late falls by r where a layer joins the stage
            last_b = max(last_b, there + (one.count - 1) * b)
    first_full = until_first_bucket(begin, end)
    return float(max(back + known[row + FOLLOW_LAST, i], last_b + (again + first_full) * ns + rings))
