"""The judge: runs a schedule on paper, to the nanosecond, and adds up its memory."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import sub

from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.schedules.table import Phase, Schedule
from bapipe.simulator.compiled import CompiledSchedule, Times, compile_schedule
from bapipe.simulator.event_driven import run_event_driven
from bapipe.simulator.fifo_links import run_fifo_links
from bapipe.simulator.longest_path import run
from bapipe.simulator.memory import hold
from bapipe.simulator.stage_cost import Stage, build_stages
from bapipe.simulator.tied_weights import TiedGradient
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update


def simulate(plan: Plan, profiles: Mapping[str, ModelProfile]) -> Timeline:
    """Returns the predicted timeline of one step of a plan, with profiles by device kind.

    Raises:
        InvalidSchedule: the plan's order is incomplete, misplaced, or deadlocks.
        InvalidModel: the plan's layers are not the profiles' layers.
        BapipeError: a device kind or a micro-batch size without a profile.
    """
    stages = build_stages(plan.stages, profiles, plan.cluster, plan.microbatch_size)
    return simulate_schedule(plan.table, stages, plan.cluster)


def simulate_schedule(schedule: Schedule, stages: Sequence[Stage], cluster: Cluster) -> Timeline:
    """Returns the timeline of a schedule whose stages have known costs.

    Every action starts as early as its device's order and its inputs allow. A cut's tensors travel together, one
    transfer a link at a time in the order they become ready; zero bytes, or two stages on one device, take no time.

    A device that runs side by side has a lane for F and a lane for B, I and W. Let f be the sum of F over its stages,
    and b that of B, which contains a recomputed F. The lanes have the shares f / (f + b) and b / (f + b) of the compute
    all through the step, so (`bapipe.simulator.stage_cost.cost_on_lanes`)

      - F takes F (f + b) / f, B takes B (f + b) / b, I takes I (f + b) / b, and I and W together (I + W) (f + b) / b,
        each rounded half up. With one stage on the device, F and B take F + B each. Where f or b is nothing, the
        actions of its lane take what they take alone.
      - Each lane runs the actions of its phases in the device's order, one at a time. Nothing else ties the lanes but
        that a backward needs its F. The table is legal as any other is, but deadlocks only where the lanes do.
      - In the last backward of a stage, a layer is done when its own I + W and those behind it would be, times
        (f + b) / b and rounded half up; in a W action, when I and those W would be, less what I takes. The update uses
        all of the compute, when both lanes are done.
      - While an action runs, the device holds what it holds at the action's start: the stash of every micro-batch whose
        F has started and whose backward has not ended, and the workspaces of this action and of the one that the other
        lane runs at that instant.
      - Such a device overlaps transfers.

    Raises:
        InvalidSchedule: the table is incomplete, misplaced, or deadlocks.
    """
    program = compile_for_cluster(schedule, cluster)
    duration_ns, transfer_ns = _durations(stages), _transfer_times(program, stages, cluster)
    times = _times(program, duration_ns, transfer_ns, cluster)
    lines = _spans(program, duration_ns, times)
    spans = _by_rank(program, lines)
    syncs, synced_ns = _all_reduces(schedule, stages, cluster, spans)
    held = hold(schedule, stages, program, lines)
    return Timeline(
        devices=tuple(device.name for device in cluster.devices),
        spans=tuple(span for rank in spans for span in rank),
        transfers=_transfers(program, transfer_ns, times),
        syncs=tuple(syncs),
        updates=tuple(_updates(schedule, stages, spans, synced_ns)),
        memory=tuple(rank.peak for rank in held),
        usage=tuple(rank.usage for rank in held),
    )


def compile_for_cluster(schedule: Schedule, cluster: Cluster) -> CompiledSchedule:
    """Returns the program of a schedule on a cluster's devices; see `compile_schedule`."""
    return compile_schedule(schedule, tuple(rank for rank, device in enumerate(cluster.devices) if device.side_by_side))


def longest_path_is_exact(program: CompiledSchedule, cluster: Cluster) -> bool:
    """Returns whether the recurrence is the judge's rules here: no transfer has to queue, and no device stalls."""
    return not any(program.shared) and all(device.overlaps_transfers for device in cluster.devices)


def finish_ns(schedule: Schedule, program: CompiledSchedule, stages: Sequence[Stage], cluster: Cluster) -> list[int]:
    """Returns when each rank has run its actions, as `judge` does, without the rest of the timeline.

    For searches: `program` is the schedule's, compiled once.
    """
    times = _times(program, _durations(stages), _transfer_times(program, stages, cluster), cluster)
    return times.ranks_ns(program)


def _times(
    program: CompiledSchedule, duration_ns: Sequence[int], transfer_ns: Sequence[int], cluster: Cluster
) -> Times:
    """Returns when everything ends, by the quickest clockwork that is exact here."""
    if longest_path_is_exact(program, cluster):
        return run(program, duration_ns, transfer_ns)
    overlaps = [device.overlaps_transfers for device in cluster.devices]
    if all(overlaps) and all(duration_ns[cost] for cost in program.shared_costs):
        return run_fifo_links(program, duration_ns, transfer_ns)
    return run_event_driven(program, duration_ns, transfer_ns, overlaps)


def _durations(stages: Sequence[Stage]) -> list[int]:
    """Returns the time of every phase on every device of every stage, in that order."""
    return [cost.ns(phase) for stage in stages for cost in stage.costs for phase in Phase]


def _transfer_times(program: CompiledSchedule, stages: Sequence[Stage], cluster: Cluster) -> list[int]:
    times = []
    for flow in program.all_flows:
        num_bytes = stages[flow.stage].send_bytes if flow.forward else stages[flow.stage - 1].grad_bytes
        times.append(cluster.link(flow.source, flow.target).transfer_ns(num_bytes) if num_bytes else 0)
    return times


def _spans(program: CompiledSchedule, duration_ns: Sequence[int], times: Times) -> list[list[Span]]:
    """Returns the actions of each line."""
    spans: list[list[Span]] = [[] for _ in program.line_ranks]
    starts_ns = map(sub, times.ends_ns, map(duration_ns.__getitem__, program.costs))
    ranks = map(program.line_ranks.__getitem__, program.lines)
    fields = zip(ranks, program.actions, starts_ns, times.ends_ns, strict=True)
    every = map(partial(tuple.__new__, Span), fields)
    for line, span in zip(program.lines, every, strict=True):
        spans[line].append(span)
    return spans


def _by_rank(program: CompiledSchedule, lines: Sequence[list[Span]]) -> list[list[Span]]:
    """Returns the actions of each rank by their start, forwards first."""
    spans = list(lines[: program.num_ranks])
    for line in range(program.num_ranks, len(lines)):
        rank = program.line_ranks[line]
        spans[rank] = sorted([*lines[rank], *lines[line]], key=lambda span: span.start_ns)
    return spans


def _transfers(program: CompiledSchedule, transfer_ns: Sequence[int], times: Times) -> tuple[Transfer, ...]:
    flows, gives, columns = program.sent
    lasts_ns = list(map(transfer_ns.__getitem__, flows))
    ends_ns = list(map(times.arrivals_ns.__getitem__, gives))
    every = zip(*columns, map(sub, ends_ns, lasts_ns), ends_ns, strict=True)
    return tuple(map(partial(tuple.__new__, Transfer), compress(every, lasts_ns)))


def _all_reduces(
    schedule: Schedule, stages: Sequence[Stage], cluster: Cluster, spans: Sequence[Sequence[Span]]
) -> tuple[list[Sync], dict[int, int]]:
    """Returns every all-reduce, and when the last one of each stage that takes part in any ends."""
    syncs: list[Sync] = []
    synced_ns: dict[int, int] = {}
    for s, stage in enumerate(stages):
        end_ns = 0
        for bucket, num_bytes in enumerate(stage.bucket_bytes):
            if cluster.host_sum_link(schedule.devices[s]) is None:
                ready_ns = max(_gradient_end_ns(s, stage, bucket, schedule, spans))
            else:
                ready_ns = max(_end_ns(spans[rank], s) for rank in schedule.devices[s])
            start_ns = max(end_ns, ready_ns)
            end_ns = start_ns + ring_ns(num_bytes, schedule.devices[s], cluster)
            syncs.append(Sync(s, bucket, num_bytes, start_ns, end_ns))
            synced_ns[s] = end_ns
    for sync, sharers in _shared_sums(schedule, stages, cluster, spans, synced_ns):
        syncs.append(sync)
        synced_ns |= dict.fromkeys(sharers, sync.end_ns)
    return syncs, synced_ns


def _shared_sums(
    schedule: Schedule,
    stages: Sequence[Stage],
    cluster: Cluster,
    spans: Sequence[Sequence[Span]],
    synced_ns: Mapping[int, int],
) -> Iterator[tuple[Sync, list[int]]]:
    """Yields the sums of gradients that stages share, one after another, and those stages.

    First come those of the earliest stage. A sum begins when the stages' last backwards and their own all-reduces are
    done, and is a ring over all their devices; on a single device it takes nothing. The updates wait for it.
    """
    sharers: dict[TiedGradient, list[int]] = {}
    for s, stage in enumerate(stages):
        for gradient in stage.tied_gradients:
            sharers.setdefault(gradient, []).append(s)
    end_ns = 0
    for place, (gradient, users) in enumerate(sharers.items()):
        ranks = sorted({rank for s in users for rank in schedule.devices[s]})
        if len(ranks) == 1:
            continue
        own_ns = [_end_ns(spans[rank], s) for s in users for rank in schedule.devices[s]]
        start_ns = max(end_ns, *own_ns, *(synced_ns.get(s, 0) for s in users))
        end_ns = start_ns + ring_ns(gradient.num_bytes, ranks, cluster)
        bucket = len(stages[users[0]].bucket_bytes) + place
        yield Sync(users[0], bucket, gradient.num_bytes, start_ns, end_ns), users


def _gradient_end_ns(
    s: int, stage: Stage, bucket: int, schedule: Schedule, spans: Sequence[Sequence[Span]]
) -> list[int]:
    """When each device of a stage has the gradients of a bucket; 0 on one that has no micro-batch."""
    done = []
    for rank, cost in zip(schedule.devices[s], stage.costs, strict=True):
        last = [x for x in spans[rank] if x.action.stage == s and x.action.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)]
        after_b, after_w = cost.gradient_done_ns[bucket]
        if not last:
            done.append(0)
        else:
            done.append(last[-1].start_ns + (after_w if last[-1].action.phase is Phase.WEIGHT_GRAD else after_b))
    return done


def ring_ns(num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> int:
    """Ring all-reduce over the slowest link among `ranks`: 2(r-1) messages of a r-th of the bytes.

    Where they sum with their own compute, a message takes no less than that.
    """
    share, own = -(-num_bytes // len(ranks)), cluster.host_sum_link(ranks)
    slowest = max(cluster.link(a, b).transfer_ns(share) for a in ranks for b in ranks if a != b)
    return 2 * (len(ranks) - 1) * (slowest if own is None else max(slowest, own.transfer_ns(share)))


def _updates(
    schedule: Schedule, stages: Sequence[Stage], spans: Sequence[Sequence[Span]], synced_ns: Mapping[int, int]
) -> list[Update]:
    """A device that has run its actions updates its stages, one at a time, in the order they are synchronised."""
    updates = []
    for rank, ran in enumerate(spans):
        now = ran[-1].end_ns if ran else 0
        ready = []
        for s, ranks in enumerate(schedule.devices):
            if rank in ranks:
                ready.append((synced_ns[s] if s in synced_ns else _end_ns(ran, s), s))
        for ready_ns, s in sorted(ready):
            start_ns = max(now, ready_ns)
            now = start_ns + stages[s].costs[schedule.devices[s].index(rank)].update_ns
            updates.append(Update(rank, s, start_ns, now))
    return updates


def _end_ns(ran: Sequence[Span], stage: int) -> int:
    """When a device is done with a stage; 0 where it has no micro-batch of it."""
    return max((span.end_ns for span in ran if span.action.stage == stage), default=0)
