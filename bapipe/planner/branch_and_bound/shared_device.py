"""Recomputed layers where a device has several stages, which share its memory.

The device's stages are one knapsack (`LayerChoice.best_of_device`): the least forward time that is repeated on the
device. That need not give the shortest step, so such a choice is never said to be the best.
"""

from collections.abc import Callable, Mapping, Sequence

from bapipe.planner.branch_and_bound.recomputation import DeviceState, LayerChoice
from bapipe.schedules.table import Action, Schedule
from bapipe.simulator.compiled import CompiledSchedule
from bapipe.simulator.in_flight import RETURNED, TAKEN
from bapipe.simulator.memory import RankMemory, rank_memory
from bapipe.simulator.stage_cost import Stage

MAX_STATES = 8
"""States of a device that are looked at: each time the one with the most bytes is added."""


Recompute = tuple[frozenset[int], ...]
"""The numbers of the layers that each stage recomputes. [stages]"""


def recomputed_layers(
    schedule: Schedule,
    compiled: CompiledSchedule,
    intervals: Sequence[tuple[int, int]],
    stages_with: Callable[[Recompute], Sequence[Stage]],
    limits: Mapping[int, tuple[int, str]],
    choice: LayerChoice,
) -> Recompute | None:
    """Returns the layers to recompute on devices that do not fit without; None if that is not enough.

    Args:
        intervals: the layers [begin, end) of each stage.
        stages_with: returns the stages if they recompute some layers.
        limits: of each rank that may be used, its bytes and its kind.
    """
    recompute: Recompute = (frozenset(),) * len(intervals)
    states: dict[int, list[DeviceState]] = {}
    for _ in range(MAX_STATES):
        stages = stages_with(recompute)
        memory = rank_memory(schedule, stages, compiled)
        short = [rank for rank, held in enumerate(memory) if rank in limits and held.peak.total > limits[rank][0]]
        if not short:
            return recompute
        chosen = list(recompute)
        for rank in short:
            own = [s for s, ranks in enumerate(schedule.devices) if ranks[0] == rank]
            state = _state_at_peak(memory[rank], schedule.order[rank], own, stages, limits[rank][0])
            states.setdefault(rank, []).append(state)
            layers = choice.best_of_device([intervals[s] for s in own], states[rank], limits[rank][1])
            if layers is None:
                return None
            for s in own:
                chosen[s] = layers & frozenset(range(*intervals[s]))
        recompute = tuple(chosen)
    return None


def _state_at_peak(
    memory: RankMemory, order: Sequence[Action], own: Sequence[int], stages: Sequence[Stage], limit_bytes: int
) -> DeviceState:
    """Returns what is in flight on a device during the action at which it holds the most."""
    totals = [stash + work for stash, work in memory.usage]
    peak = totals.index(max(totals))
    counts = {s: [0, 0, 0] for s in own}
    for i, (stage, phase, _) in enumerate(order[: peak + 1]):
        returned = RETURNED[phase] if i < peak else (0, 0, 0)
        counts[stage] = [n + a - b for n, a, b in zip(counts[stage], TAKEN[phase], returned, strict=True)]
    static = memory.peak.total - memory.peak.stash - memory.peak.workspace
    left_for_w = sum(counts[s][2] * stages[s].costs[0].gradient_stash_bytes for s in own)
    return DeviceState(
        in_flight=tuple((counts[s][0], counts[s][1]) for s in own),
        room_bytes=limit_bytes - static - memory.usage[peak][1] - left_for_w,
    )
