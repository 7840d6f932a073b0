"""Fuses adjacent I and W into one B if the step does not get longer: the runtime then makes one call fewer."""

from collections.abc import Sequence
from dataclasses import replace

from bapipe.formats.cluster import Cluster
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage import Stage

Pair = tuple[int, int]
"""The rank and the position of an I that is immediately followed by the W of its micro-batch."""


def fuse_backward(
    schedule: Schedule, stages: Sequence[Stage], cluster: Cluster, deadline: Deadline = UNLIMITED
) -> Schedule:
    """Returns the schedule with B for as many adjacent pairs of I and W as bisection finds in time, its step no longer.

    A B can delay the step, because its gradient is sent after its W. Pairs are fused all together if the step allows
    it, else each half of them is tried in turn on top of what has been fused. At most two simulations per pair.

    Memory does not grow: adjacent I and W use the memory of B, and that of the gradients that I leaves for W.
    """
    if deadline.is_over:
        return schedule
    max_step_ns = simulate_columns(schedule, stages, cluster).step_ns
    fused: set[Pair] = set()
    groups = [_adjacent_pairs(schedule)]
    while groups and not deadline.is_over:
        group = groups.pop()
        if not group:
            continue
        # Accept the whole group if the step does not get longer, else try each half.
        if simulate_columns(_fuse(schedule, fused | set(group)), stages, cluster).step_ns <= max_step_ns:
            fused |= set(group)
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return _fuse(schedule, fused)


def _adjacent_pairs(schedule: Schedule) -> list[Pair]:
    return [
        (rank, position)
        for rank, actions in enumerate(schedule.order)
        for position in range(len(actions) - 1)
        if actions[position].phase is Phase.INPUT_GRAD
        and actions[position + 1] == actions[position]._replace(phase=Phase.WEIGHT_GRAD)
    ]


def _fuse(schedule: Schedule, fused: set[Pair]) -> Schedule:
    """Returns the schedule with B in place of each I of `fused`, and without the W that follows it."""

    def fuse_rank(rank: int, actions: Sequence[Action]) -> tuple[Action, ...]:
        return tuple(
            action._replace(phase=Phase.BACKWARD) if (rank, position) in fused else action
            for position, action in enumerate(actions)
            if (rank, position - 1) not in fused
        )

    return replace(schedule, order=tuple(fuse_rank(rank, actions) for rank, actions in enumerate(schedule.order)))
