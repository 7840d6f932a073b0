"""The memory of every device, from the order of its actions alone."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add, itemgetter, sub
from typing import NamedTuple

from bapipe.formats.prediction import Memory
from bapipe.schedules.table import Phase, Schedule, stages_of_ranks
from bapipe.simulator.compiled import CompiledSchedule, compile_schedule
from bapipe.simulator.in_flight import RETURNED, TAKEN, in_flight_bytes
from bapipe.simulator.stage import Stage, received_bytes
from bapipe.simulator.timeline import SpanColumns


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of a rank at its peak, and the bytes of its stashes and workspaces during each of its actions."""

    peak: Memory
    stashes: Sequence[int]
    workspaces: Sequence[int]


def rank_memory(
    schedule: Schedule, stages: Sequence[Stage], compiled: CompiledSchedule, lanes: Sequence[SpanColumns] = ()
) -> tuple[RankMemory, ...]:
    """Returns the memory of each rank; the peak is at the first action at which it is largest.

    A stash lives from the start of its F to the end of its B or W. With recomputation, only the stage's input lives so
    long, and a whole stash from the start of B or I to the end of B or W; if only some layers are recomputed, the
    others' stash and the tensors between the two live so long. What I leaves for W lives from the start of I to the end
    of W. Receive buffers, one for each micro-batch that comes from another device, live all through the step
    (torch 2.13 keeps them; pytorch#136380).

    These bytes follow from the order of the rank's actions alone, unless the rank runs forward and backward side by
    side: then `lanes` says when the actions of each lane run, and their order is that of their starts, forwards first.
    O(n) for n actions.
    """
    takes, workspaces, returns = _changes(stages)
    backward_lane = {compiled.lane_ranks[lane]: lane for lane in range(compiled.num_ranks, len(compiled.lane_ranks))}
    own_stages = stages_of_ranks(schedule)
    memory = []
    for rank, durations in enumerate(compiled.lane_durations[: compiled.num_ranks]):
        # During an action live all that it and the actions before it took, less what those before it returned.
        taken = accumulate(map(takes.__getitem__, durations))
        returned = accumulate(map(returns.__getitem__, durations), initial=0)
        stashes = list(map(sub, taken, returned))
        work = list(map(workspaces.__getitem__, durations))
        if rank in backward_lane:
            both = _by_start([(lanes[lane], compiled.lane_durations[lane]) for lane in (rank, backward_lane[rank])])
            stashes = _stashes_at_starts(both, takes, returns)
            work = _workspaces_at_starts(both, workspaces)
        totals = list(map(add, stashes, work))
        peak = totals.index(max(totals)) if totals else None
        stash, workspace = (0, 0) if peak is None else (stashes[peak], work[peak])
        at_peak = _memory_with(stash, workspace, rank, own_stages[rank], schedule, stages)
        memory.append(RankMemory(at_peak, stashes, work))
    return tuple(memory)


def peak_memory(
    schedule: Schedule, stages: Sequence[Stage], compiled: CompiledSchedule | None = None
) -> tuple[Memory, ...]:
    """Returns the memory of each rank at its peak; see `rank_memory`. `compiled` is the schedule, if it is known so."""
    return tuple(memory.peak for memory in rank_memory(schedule, stages, compiled or compile_schedule(schedule)))


def kept_bytes(stages: Sequence[Stage], stage: int, replica: int = 0) -> int:
    """Returns the bytes that live from the start of a micro-batch's F to the end of its B or W.

    It is the stash or, with recomputation, the stage's input: nothing for the first stage, whose input is not counted.
    If only some layers are recomputed, it is the stash of the others, and the tensors between the two.
    """
    cost, kept_tensor_bytes = stages[stage].costs[replica], stages[stage].kept_tensor_bytes
    if not stages[stage].recompute:
        return cost.stash_bytes
    if kept_tensor_bytes is not None:
        return cost.stash_bytes - cost.recomputed_bytes + kept_tensor_bytes
    return received_bytes(stages[stage - 1], stages[stage]) if stage > 0 else 0


def recomputed_bytes(stages: Sequence[Stage], stage: int, replica: int = 0) -> int:
    """Returns the bytes that live besides `kept_bytes` from the start of B or I to the end of B or W."""
    if not stages[stage].recompute:
        return 0
    cost = stages[stage].costs[replica]
    return cost.stash_bytes if stages[stage].kept_tensor_bytes is None else cost.recomputed_bytes


def _changes(stages: Sequence[Stage]) -> tuple[list[int], list[int], list[int]]:
    """Returns the bytes that an action takes at its start, its workspace, and the bytes that it returns at its end.

    The lists are indexed as durations in `CompiledSchedule`: every phase of every replica of every stage.
    """
    takes: list[int] = []
    workspaces: list[int] = []
    returns: list[int] = []
    for s, stage in enumerate(stages):
        for replica, cost in enumerate(stage.costs):
            kept, recomputed = kept_bytes(stages, s, replica), recomputed_bytes(stages, s, replica)
            taken, returned = _by_phase(kept, recomputed, cost.gradient_stash_bytes)
            takes += taken
            workspaces += [cost.workspace_bytes] * len(Phase)
            returns += returned
    return takes, workspaces, returns


@lru_cache(maxsize=4096)
def _by_phase(kept: int, recomputed: int, left_for_w: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns what the action of each phase takes at its start, and what it returns at its end."""
    taken, returned = (
        tuple(in_flight_bytes(changes[phase], kept, recomputed, left_for_w) for phase in Phase)
        for changes in (TAKEN, RETURNED)
    )
    return taken, returned


class _Timed(NamedTuple):
    """An action of a device that runs side by side; `duration` as in `CompiledSchedule`."""

    start_ns: int
    end_ns: int
    duration: int
    is_forward: bool


def _by_start(lanes: Sequence[tuple[SpanColumns, Sequence[int]]]) -> list[_Timed]:
    """Returns the actions of both lanes with their durations, in the order of their starts."""
    both = [
        _Timed(start_ns, end_ns, duration, action.phase is Phase.FORWARD)
        for spans, durations in lanes
        for action, start_ns, end_ns, duration in zip(*spans, durations, strict=True)
    ]
    return sorted(both, key=lambda action: action.start_ns)


def _stashes_at_starts(both: Sequence[_Timed], takes: Sequence[int], returns: Sequence[int]) -> list[int]:
    """Returns the bytes of the stashes that live on a device when each action of its lanes starts."""
    starts_ns = [action.start_ns for action in both]
    taken = list(accumulate((takes[action.duration] for action in both), initial=0))
    ends = sorted((action.end_ns, returns[action.duration]) for action in both)
    returned = list(accumulate((num_bytes for _, num_bytes in ends), initial=0))
    return [
        taken[bisect_right(starts_ns, start_ns)]
        - returned[bisect_right(ends, start_ns, key=itemgetter(0))]
        + (returns[duration] if end_ns == start_ns else 0)  # what an action of zero time returns lives during it
        for start_ns, end_ns, duration, _ in both
    ]


def _workspaces_at_starts(both: Sequence[_Timed], workspaces: Sequence[int]) -> list[int]:
    """Returns for each action its workspace and that of the action that the other lane runs when it starts."""
    total = [workspaces[action.duration] for action in both]
    lanes: tuple[list[int], list[int]] = ([], [])
    for index, action in enumerate(both):
        lanes[action.is_forward].append(index)
    for lane, other_lane in (lanes, lanes[::-1]):
        other_starts_ns = [both[index].start_ns for index in other_lane]
        for index in lane:
            start_ns = both[index].start_ns
            latest = bisect_right(other_starts_ns, start_ns) - 1
            if latest >= 0 and both[other_lane[latest]].end_ns > start_ns:
                total[index] += workspaces[both[other_lane[latest]].duration]
    return total


def _memory_with(
    stash: int, workspace: int, rank: int, own_stages: Sequence[int], schedule: Schedule, stages: Sequence[Stage]
) -> Memory:
    """Returns the memory of a rank with some stash and workspace, besides what lives all through the step."""
    params = gradients = optimizer = buffers = 0
    for s in own_stages:
        cost = stages[s].costs[schedule.devices[s].index(rank)]
        params += cost.param_bytes
        gradients += cost.gradient_bytes
        optimizer += cost.optimizer_bytes
        buffers += _buffer_bytes(rank, s, schedule, stages)
    return Memory(
        params=params, gradients=gradients, optimizer=optimizer, stash=stash, workspace=workspace, buffers=buffers
    )


def _buffer_bytes(rank: int, stage: int, schedule: Schedule, stages: Sequence[Stage]) -> int:
    """Returns a stage's receive buffers on a rank: activations from the stage before, gradients from the one after."""
    total = 0
    if stage > 0:
        total += _num_received(rank, stage, stage - 1, schedule) * received_bytes(stages[stage - 1], stages[stage])
    if stage + 1 < len(stages):
        total += _num_received(rank, stage, stage + 1, schedule) * stages[stage].grad_bytes
    return total


def _num_received(rank: int, stage: int, sender: int, schedule: Schedule) -> int:
    """Returns how many micro-batches of a stage on a rank come from another rank that runs the stage `sender`."""
    ranks = schedule.devices[stage]
    microbatches = range(ranks.index(rank), schedule.num_microbatches, len(ranks))
    if rank not in schedule.devices[sender]:
        return len(microbatches)
    return sum(schedule.rank_of(sender, microbatch) != rank for microbatch in microbatches)
