"""What every device holds at its peak, from the order of its actions alone."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bapipe.cost import Stage, StageCost
from bapipe.plan import Memory
from bapipe.schedule import Action, Phase, Schedule


def peak_memory(schedule: Schedule, stages: Sequence[Stage]) -> tuple[Memory, ...]:
    """Returns the memory of each rank at the action where it is largest, the first such one.

    A stash lives from the start of its F to the end of its B or W. With recompute, only the stage's input does, and a
    whole stash from the start of B or I to the end of B or W. What I leaves for W lives from the start of I to the end
    of W. Receive buffers, one for each micro-batch that comes from
    another device, live all through (torch 2.13 keeps them; pytorch#136380). O(n) for n actions.
    """
    peaks = []
    for rank, order in enumerate(schedule.order):
        own = _own(rank, schedule, stages)
        stash, work = max(_stashes(order, own, stages), key=sum, default=(0, 0))
        peaks.append(msgspec.structs.replace(_held(rank, own, schedule, stages), stash=stash, workspace=work))
    return tuple(peaks)


def memory_over_time(schedule: Schedule, stages: Sequence[Stage]) -> tuple[tuple[Memory, ...], ...]:
    """Returns the memory of each rank during each of its actions, in the order of the schedule."""
    return tuple(
        tuple(
            msgspec.structs.replace(held, stash=stash, workspace=work) for stash, work in _stashes(order, own, stages)
        )
        for rank, order in enumerate(schedule.order)
        for own in [_own(rank, schedule, stages)]
        for held in [_held(rank, own, schedule, stages)]
    )


def _own(rank: int, schedule: Schedule, stages: Sequence[Stage]) -> dict[int, StageCost]:
    return {s: stages[s].on[ranks.index(rank)] for s, ranks in enumerate(schedule.devices) if rank in ranks}


def _held(rank: int, own: Mapping[int, StageCost], schedule: Schedule, stages: Sequence[Stage]) -> Memory:
    """What a rank holds all through the step."""
    params = sum(cost.param_bytes for cost in own.values())
    return Memory(
        params=params,
        gradients=params,
        optimizer=sum(cost.optimizer_bytes for cost in own.values()),
        stash=0,
        workspace=0,
        buffers=sum(_buffer_bytes(rank, s, schedule, stages) for s in own),
    )


def _stashes(
    order: Sequence[Action], own: Mapping[int, StageCost], stages: Sequence[Stage]
) -> Iterator[tuple[int, int]]:
    """Yields the stashes held and the workspace during each action."""
    held = 0
    for stage, phase, _ in order:
        cost = own[stage]
        whole, kept = cost.stash_bytes, cost.stash_bytes
        if stages[stage].recompute:
            kept = stages[stage - 1].send_bytes if stage > 0 else 0
        if phase is Phase.FORWARD:
            held += kept
        elif phase is not Phase.WEIGHT_GRAD and stages[stage].recompute:
            held += whole
        if phase is Phase.INPUT_GRAD:
            held += cost.gradient_stash_bytes
        yield held, cost.workspace_bytes
        if phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
            held -= kept + whole if stages[stage].recompute else kept
        if phase is Phase.WEIGHT_GRAD:
            held -= cost.gradient_stash_bytes


def _buffer_bytes(rank: int, stage: int, schedule: Schedule, stages: Sequence[Stage]) -> int:
    """Receive buffers of a stage on a rank: activations from the stage before, gradients from the one after."""
    ranks = schedule.devices[stage]
    total = 0
    for microbatch in range(ranks.index(rank), schedule.num_microbatches, len(ranks)):
        if stage > 0 and schedule.rank_of(stage - 1, microbatch) != rank:
            total += stages[stage - 1].send_bytes
        if stage + 1 < len(stages) and schedule.rank_of(stage + 1, microbatch) != rank:
            total += stages[stage].grad_bytes
    return total
