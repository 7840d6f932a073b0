"""What every device holds at its peak, from the order of its actions alone."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, itemgetter, sub

import msgspec

from bapipe.formats.plan import Memory
from bapipe.schedules.table import Phase, Schedule
from bapipe.simulator.compiled import CompiledSchedule, compile_schedule
from bapipe.simulator.stage_cost import Stage
from bapipe.simulator.timeline import Span


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds: at its peak, and of stashes and workspace during each of its actions."""

    peak: Memory
    usage: tuple[tuple[int, int], ...]


def hold(
    schedule: Schedule, stages: Sequence[Stage], program: CompiledSchedule, lines: Sequence[Sequence[Span]] = ()
) -> tuple[Held, ...]:
    """Returns what each rank holds in the order of its actions; the peak is at the first action where it is largest.

    What a rank holds follows from its order alone, unless it runs forward and backward side by side: then `lines` says
    when the actions of each line of the program run, and their order is that of their starts, forwards first.

    A stash lives from the start of its F to the end of its B or W. With recompute, only the stage's input does, and a
    whole stash from the start of B or I to the end of B or W. What I leaves for W lives from the start of I to the end
    of W. Receive buffers, one for each micro-batch that comes from
    another device, live all through (torch 2.13 keeps them; pytorch#136380). O(n) for n actions.
    """
    takes, works, returns = _changes(stages)
    beside = {program.line_ranks[line]: line for line in range(program.num_ranks, len(program.line_ranks))}
    held = []
    for rank, costs in enumerate(program.line_costs[: program.num_ranks]):
        taken = accumulate(map(takes.__getitem__, costs))
        returned = accumulate(map(returns.__getitem__, costs), initial=0)
        stashes = list(map(sub, taken, returned))
        work = list(map(works.__getitem__, costs))
        if rank in beside:
            both = _by_start([(lines[lane], program.line_costs[lane]) for lane in (rank, beside[rank])])
            stashes = _stashes_at_starts(both, takes, returns)
            work = _works_at_starts(both, works)
        totals = list(map(add, stashes, work))
        most = totals.index(max(totals)) if totals else None
        peak = msgspec.structs.replace(
            _held(rank, schedule, stages),
            stash=0 if most is None else stashes[most],
            workspace=0 if most is None else work[most],
        )
        held.append(Held(peak, tuple(zip(stashes, work, strict=True))))
    return tuple(held)


def _by_start(lanes: Sequence[tuple[Sequence[Span], Sequence[int]]]) -> list[tuple[Span, int]]:
    """Returns the actions of both lanes with their costs, in the order of their starts."""
    both = [ran for spans, costs in lanes for ran in zip(spans, costs, strict=True)]
    return sorted(both, key=lambda ran: ran[0].start_ns)


def _stashes_at_starts(both: Sequence[tuple[Span, int]], takes: Sequence[int], returns: Sequence[int]) -> list[int]:
    """Returns the stashes that a device holds when each action of its lanes starts."""
    starts_ns = [span.start_ns for span, _ in both]
    taken = list(accumulate((takes[cost] for _, cost in both), initial=0))
    ends = sorted((span.end_ns, returns[cost]) for span, cost in both)
    returned = list(accumulate((num_bytes for _, num_bytes in ends), initial=0))
    return [
        taken[bisect_right(starts_ns, start_ns)]
        - returned[bisect_right(ends, start_ns, key=itemgetter(0))]
        + (returns[cost] if end_ns == start_ns else 0)  # an action of no length holds its own
        for (_, _, start_ns, end_ns), cost in both
    ]


def _works_at_starts(both: Sequence[tuple[Span, int]], works: Sequence[int]) -> list[int]:
    """Returns the workspaces of each action and of what the other lane runs when it starts."""
    found = [works[cost] for _, cost in both]
    lanes: tuple[list[int], list[int]] = ([], [])
    for place, (span, _) in enumerate(both):
        lanes[span.action.phase is Phase.FORWARD].append(place)
    for own, other in (lanes, lanes[::-1]):
        starts_ns = [both[place][0].start_ns for place in other]
        for place in own:
            start_ns = both[place][0].start_ns
            latest = bisect_right(starts_ns, start_ns) - 1
            if latest >= 0 and both[other[latest]][0].end_ns > start_ns:
                found[place] += works[both[other[latest]][1]]
    return found


def peak_memory(schedule: Schedule, stages: Sequence[Stage]) -> tuple[Memory, ...]:
    """Returns what each rank holds at its peak; see `hold`."""
    return tuple(rank.peak for rank in hold(schedule, stages, compile_schedule(schedule)))


def memory_over_time(schedule: Schedule, stages: Sequence[Stage]) -> tuple[tuple[Memory, ...], ...]:
    """Returns what each rank holds during each of its actions; see `hold`."""
    return tuple(
        tuple(msgspec.structs.replace(rank.peak, stash=stash, workspace=work) for stash, work in rank.usage)
        for rank in hold(schedule, stages, compile_schedule(schedule))
    )


def _changes(stages: Sequence[Stage]) -> tuple[list[int], list[int], list[int]]:
    """Returns by cost the stash that an action takes when it starts, its workspace, and what it gives back at its end.

    Costs are numbered as in `CompiledSchedule`: every phase of every device of every stage.
    """
    takes, works, returns = [], [], []
    for s, stage in enumerate(stages):
        for cost in stage.costs:
            whole, kept = 0, cost.stash_bytes
            if stage.recompute:
                whole, kept = kept, stages[s - 1].send_bytes if s > 0 else 0
            left = cost.gradient_stash_bytes
            takes += [kept, whole, whole + left, 0]  # F, B, I, W
            works += [cost.workspace_bytes] * 4
            returns += [0, kept + whole, 0, kept + whole + left]
    return takes, works, returns


def _held(rank: int, schedule: Schedule, stages: Sequence[Stage]) -> Memory:
    """What a rank holds all through the step."""
    own = {s: stages[s].costs[ranks.index(rank)] for s, ranks in enumerate(schedule.devices) if rank in ranks}
    params = sum(cost.param_bytes for cost in own.values())
    return Memory(
        params=params,
        gradients=params,
        optimizer=sum(cost.optimizer_bytes for cost in own.values()),
        stash=0,
        workspace=0,
        buffers=sum(_buffer_bytes(rank, s, schedule, stages) for s in own),
    )


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
