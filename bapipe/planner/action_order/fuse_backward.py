"""Joins I and W back into B where that costs nothing: B takes no longer, and a runtime has one call less to make."""

from collections.abc import Sequence
from dataclasses import replace

from bapipe.formats.cluster import Cluster
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import Stage

Pair = tuple[int, int]
"""The rank and the place of an I that its own W follows at once."""


def fuse_backward(schedule: Schedule, stages: Sequence[Stage], cluster: Cluster) -> Schedule:
    """Returns the schedule with B for as many adjacent I and W as a search by halves finds, its step no longer.

    Memory does not grow: I and W with nothing between hold what B holds, and what I leaves for W. At most two
    judgements a pair.
    """
    most_ns = simulate_schedule(schedule, stages, cluster).step_ns
    joined: set[Pair] = set()
    groups = [_pairs(schedule)]
    while groups:
        group = groups.pop()
        if not group:
            continue
        if simulate_schedule(_with(schedule, joined | set(group)), stages, cluster).step_ns <= most_ns:
            joined |= set(group)
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return _with(schedule, joined)


def _pairs(schedule: Schedule) -> list[Pair]:
    return [
        (rank, place)
        for rank, actions in enumerate(schedule.order)
        for place in range(len(actions) - 1)
        if actions[place].phase is Phase.INPUT_GRAD
        and actions[place + 1] == actions[place]._replace(phase=Phase.WEIGHT_GRAD)
    ]


def _with(schedule: Schedule, joined: set[Pair]) -> Schedule:
    def rank(number: int, actions: Sequence[Action]) -> tuple[Action, ...]:
        return tuple(
            action._replace(phase=Phase.BACKWARD) if (number, place) in joined else action
            for place, action in enumerate(actions)
            if (number, place - 1) not in joined
        )

    return replace(schedule, order=tuple(rank(number, actions) for number, actions in enumerate(schedule.order)))
