"""What every device holds at its peak, from the order of its actions alone."""

from collections.abc import Sequence

from bapipe.cost import Stage, StageCost
from bapipe.plan import Memory
from bapipe.schedule import Action, Phase, Schedule


def peak_memory(schedule: Schedule, stages: Sequence[Stage]) -> tuple[Memory, ...]:
    """Returns the memory of each rank at the action where it is largest.

    A stash lives from the start of its F to the end of its B or W. With recompute, only the stage's input does, and a
    whole stash from the start of B or I to the end of B or W. Receive buffers, one for each micro-batch that comes from
    another device, live all through (torch 2.13 keeps them; pytorch#136380). O(n) for n actions.
    """
    return tuple(_rank(rank, schedule, stages) for rank in range(len(schedule.order)))


def _rank(rank: int, schedule: Schedule, stages: Sequence[Stage]) -> Memory:
    own = {s: stages[s].on[ranks.index(rank)] for s, ranks in enumerate(schedule.devices) if rank in ranks}
    stash = _stash_bytes_at_peak(schedule.order[rank], own, stages)
    params = sum(cost.param_bytes for cost in own.values())
    return Memory(
        params=params,
        gradients=params,
        optimizer=sum(cost.optimizer_bytes for cost in own.values()),
        stash=stash[0],
        workspace=stash[1],
        buffers=sum(_buffer_bytes(rank, s, schedule, stages) for s in own),
    )


def _stash_bytes_at_peak(
    order: Sequence[Action], own: dict[int, StageCost], stages: Sequence[Stage]
) -> tuple[int, int]:
    """Returns stash and workspace at the action where their sum is largest, the first such one."""
    held, peak = 0, (0, 0)
    for stage, phase, _ in order:
        cost = own[stage]
        whole, kept = cost.stash_bytes, cost.stash_bytes
        if stages[stage].recompute:
            kept = stages[stage - 1].send_bytes if stage > 0 else 0
        if phase is Phase.FORWARD:
            held += kept
        elif phase is not Phase.WEIGHT_GRAD and stages[stage].recompute:
            held += whole
        if held + cost.workspace_bytes > sum(peak):
            peak = held, cost.workspace_bytes
        if phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
            held -= kept + whole if stages[stage].recompute else kept
    return peak


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
