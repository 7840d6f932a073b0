"""The simulator: the timeline and the memory of one step, to the nanosecond and the byte.

The rules are those of docs/simulator.md; every time and every byte that a plan reports comes from here.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import itemgetter, sub
from typing import Any

from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.schedules.table import Phase, Schedule, stages_of_ranks
from bapipe.simulator.allreduce import LastBackward, reduce_buckets, sum_ns
from bapipe.simulator.compiled import ActionTimes, CompiledSchedule, compile_schedule
from bapipe.simulator.event_driven import run_event_driven
from bapipe.simulator.fifo_links import run_fifo_links
from bapipe.simulator.groups import check_same_training
from bapipe.simulator.longest_path import run_longest_path
from bapipe.simulator.memory import rank_memory
from bapipe.simulator.stage import Stage, StageCost, transferred_bytes
from bapipe.simulator.stage_cost import build_stages
from bapipe.simulator.tied_weights import TiedGradient
from bapipe.simulator.timeline import SpanColumns, StepColumns, Sync, Timeline, Update


def simulate(plan: Plan, profiles: ProfilesByKind) -> Timeline:
    """Returns the predicted timeline of one step of a plan, with profiles by device kind.

    Raises:
        InvalidSchedule: the plan's order is incomplete, misplaced, or deadlocks.
        InvalidModel: the plan's layers are not the profiles' layers.
        BapipeError: a device kind or a micro-batch size without a profile; profiles of unlike parameters.
    """
    kinds = dict.fromkeys(device.kind for device in plan.cluster.devices)
    check_same_training([profiles[kind] for kind in kinds if kind in profiles])
    stages = build_stages(plan.stages, profiles, plan.cluster, plan.microbatch_size)
    return simulate_schedule(plan.table, stages, plan.cluster)


def unit_cost_timeline(plan: Plan) -> Timeline:
    """Returns the plan's order with F, I and W of a millisecond each and no transfers, to draw the order."""
    unit = StageCost(forward_ns=10**6, input_grad_ns=10**6, weight_grad_ns=10**6)
    stages = [Stage(costs=(unit,) * len(stage.devices)) for stage in plan.stages]
    return simulate_schedule(plan.table, stages, plan.cluster)


def simulate_schedule(schedule: Schedule, stages: Sequence[Stage], cluster: Cluster) -> Timeline:
    """Returns the timeline of a schedule whose stages have known costs.

    Every action starts as early as its device's order and its inputs allow. The tensors of a cut travel together. A
    link carries one transfer at a time, in the order in which they become ready. Zero bytes, or two stages on one
    device, take no time.

    A device that runs side by side has a lane for F and a lane for B, I and W. Let f be the sum of F over its stages,
    and b that of B, which contains a recomputed F. The lanes have the shares f / (f + b) and b / (f + b) of the compute
    all through the step, so (`bapipe.simulator.lanes.cost_on_lanes`)

      - F takes F (f + b) / f, B takes B (f + b) / b, I takes I (f + b) / b, and I and W together (I + W) (f + b) / b,
        each rounded half up. With one stage on the device, F and B take F + B each. If f or b is zero, the actions of
        its lane take as long as without lanes.
      - Each lane runs the actions of its phases in the device's order, one at a time. The only other constraint between
        the lanes is that a backward needs its F. A table that deadlocks on one lane may run on two.
      - In the last backward of a stage, a layer is done when its own I + W and those behind it would be, times
        (f + b) / b and rounded half up; in a W action, when I and those W would be, less what I takes. The update uses
        all of the compute, when both lanes are done.
      - The memory during an action is the memory at its start: the stash of every micro-batch whose F has started and
        whose backward has not ended, and the workspaces of this action and of the one that the other lane runs at that
        instant.
      - Such a device overlaps transfers.

    Raises:
        InvalidSchedule: the table is incomplete, misplaced, or deadlocks.
    """
    return simulate_columns(schedule, stages, cluster).timeline()


def simulate_columns(
    schedule: Schedule, stages: Sequence[Stage], cluster: Cluster, compiled: CompiledSchedule | None = None
) -> StepColumns:
    """Returns the step of `simulate_schedule` as columns, for those who need no record of each action.

    Args:
        compiled: what `compile_for_cluster` returns, if it is known.

    Raises:
        InvalidSchedule: the table is incomplete, misplaced, or deadlocks.
    """
    compiled = compiled or compile_for_cluster(schedule, cluster)
    duration_ns, transfer_ns = stage_durations(stages), transfer_times(compiled, stages, cluster)
    times = _run(compiled, duration_ns, transfer_ns, cluster)
    lanes = _lanes(compiled, duration_ns, times)
    spans = _by_rank(compiled, lanes)
    syncs, synced_ns = _all_reduces(schedule, stages, cluster, spans)
    memory = rank_memory(schedule, stages, compiled, lanes)
    return StepColumns(
        devices=tuple(device.name for device in cluster.devices),
        spans=tuple(spans),
        transfers=_transfers(compiled, transfer_ns, times),
        syncs=tuple(syncs),
        updates=tuple(_updates(schedule, stages, spans, synced_ns)),
        memory=tuple(rank.peak for rank in memory),
        usage=tuple((rank.stashes, rank.workspaces) for rank in memory),
    )


def compile_for_cluster(schedule: Schedule, cluster: Cluster) -> CompiledSchedule:
    """Returns a schedule compiled for a cluster's devices; see `compile_schedule`."""
    return compile_schedule(schedule, tuple(rank for rank, device in enumerate(cluster.devices) if device.side_by_side))


def longest_path_is_exact(compiled: CompiledSchedule, cluster: Cluster) -> bool:
    """Returns whether the longest path gives the simulator's times: no transfer has to queue, and no device stalls."""
    return not any(compiled.may_queue) and all(device.overlaps_transfers for device in cluster.devices)


def finish_ns(compiled: CompiledSchedule, stages: Sequence[Stage], cluster: Cluster) -> list[int]:
    """Returns when each rank has run its actions, as `simulate_schedule` does, without the rest of the timeline.

    For searches, which compile a schedule once and time it with the costs of many stages.
    """
    times = _run(compiled, stage_durations(stages), transfer_times(compiled, stages, cluster), cluster)
    return times.rank_ends_ns(compiled)


def _run(
    compiled: CompiledSchedule, duration_ns: Sequence[int], transfer_ns: Sequence[int], cluster: Cluster
) -> ActionTimes:
    """Returns when everything ends, by the fastest engine that is exact here."""
    if longest_path_is_exact(compiled, cluster):
        return run_longest_path(compiled, duration_ns, transfer_ns)
    overlaps = [device.overlaps_transfers for device in cluster.devices]
    if all(overlaps) and all(duration_ns[duration] for duration in compiled.durations_before_queues):
        return run_fifo_links(compiled, duration_ns, transfer_ns)
    return run_event_driven(compiled, duration_ns, transfer_ns, overlaps)


def stage_durations(stages: Sequence[Stage]) -> list[int]:
    """Returns the time of every phase on every replica of every stage, in that order."""
    return [cost.ns(phase) for stage in stages for cost in stage.costs for phase in Phase]


def transfer_times(compiled: CompiledSchedule, stages: Sequence[Stage], cluster: Cluster) -> list[int]:
    """Returns the time of one transfer of each channel."""
    times = []
    for channel in compiled.channels:
        first = channel.stage if channel.forward else channel.stage - 1
        send_bytes, grad_bytes = transferred_bytes(stages[first], stages[first + 1])
        num_bytes = send_bytes if channel.forward else grad_bytes
        times.append(cluster.link(channel.source, channel.target).transfer_ns(num_bytes) if num_bytes else 0)
    return times


def _lanes(compiled: CompiledSchedule, duration_ns: Sequence[int], times: ActionTimes) -> list[SpanColumns]:
    """Returns the spans of each lane."""
    lanes = []
    for positions, actions, durations in zip(
        compiled.lane_positions, compiled.lane_actions, compiled.lane_durations, strict=True
    ):
        ends_ns = list(map(times.ends_ns.__getitem__, positions))
        lanes.append(SpanColumns(actions, list(map(sub, ends_ns, map(duration_ns.__getitem__, durations))), ends_ns))
    return lanes


def _by_rank(compiled: CompiledSchedule, lanes: Sequence[SpanColumns]) -> list[SpanColumns]:
    """Returns the spans of each rank by their start, forwards first."""
    spans = list(lanes[: compiled.num_ranks])
    for lane in range(compiled.num_ranks, len(lanes)):
        rank = compiled.lane_ranks[lane]
        rows = sorted([*zip(*lanes[rank], strict=True), *zip(*lanes[lane], strict=True)], key=itemgetter(1))
        spans[rank] = SpanColumns(*zip(*rows, strict=True))
    return spans


def _transfers(compiled: CompiledSchedule, transfer_ns: Sequence[int], times: ActionTimes) -> tuple[Sequence[Any], ...]:
    """Returns every transfer that takes time, as columns."""
    channels, messages, fields = compiled.transfers
    durations_ns = list(map(transfer_ns.__getitem__, channels))
    ends_ns = list(map(times.arrivals_ns.__getitem__, messages))
    columns = (*fields, list(map(sub, ends_ns, durations_ns)), ends_ns)
    return columns if all(durations_ns) else tuple(list(compress(column, durations_ns)) for column in columns)


def _all_reduces(
    schedule: Schedule, stages: Sequence[Stage], cluster: Cluster, spans: Sequence[SpanColumns]
) -> tuple[list[Sync], dict[int, int]]:
    """Returns every all-reduce, and for each stage that takes part in any, when the last one ends."""
    syncs: list[Sync] = []
    synced_ns: dict[int, int] = {}
    for s, stage in enumerate(stages):
        if not stage.bucket_bytes:
            continue
        ranks = schedule.devices[s]
        last = [_last_backward(spans[rank], s) for rank in ranks]
        for bucket, (start_ns, end_ns) in enumerate(reduce_buckets(stage, ranks, last, cluster)):
            syncs.append(Sync(s, bucket, stage.bucket_bytes[bucket], start_ns, end_ns))
            synced_ns[s] = end_ns
    for sync, sharing_stages in _tied_weight_sums(schedule, stages, cluster, spans, synced_ns):
        syncs.append(sync)
        synced_ns |= dict.fromkeys(sharing_stages, sync.end_ns)
    return syncs, synced_ns


def _tied_weight_sums(
    schedule: Schedule,
    stages: Sequence[Stage],
    cluster: Cluster,
    spans: Sequence[SpanColumns],
    synced_ns: Mapping[int, int],
) -> Iterator[tuple[Sync, list[int]]]:
    """Yields the sums of the gradients of tied weights, one after another, and the stages of each.

    Those of the earliest stage come first. A sum begins when the stages' last backwards and their own all-reduces are
    done, and is a ring over all their devices; on a single device it takes no time. The updates wait for it.
    """
    stages_of: dict[TiedGradient, list[int]] = {}
    for s, stage in enumerate(stages):
        for gradient in stage.tied_gradients:
            stages_of.setdefault(gradient, []).append(s)
    end_ns = 0
    for index, (gradient, users) in enumerate(stages_of.items()):
        ranks = sorted({rank for s in users for rank in schedule.devices[s]})
        if len(ranks) == 1:
            continue
        computed_ns = [_end_ns(spans[rank], s) for s in users for rank in schedule.devices[s]]
        start_ns = max(end_ns, *computed_ns, *(synced_ns.get(s, 0) for s in users))
        end_ns = start_ns + sum_ns(gradient.num_bytes, gradient.group_bytes, ranks, cluster)
        bucket = len(stages[users[0]].bucket_bytes) + index
        yield Sync(users[0], bucket, gradient.num_bytes, start_ns, end_ns), users


def _updates(
    schedule: Schedule, stages: Sequence[Stage], spans: Sequence[SpanColumns], synced_ns: Mapping[int, int]
) -> list[Update]:
    """Returns the updates: after its actions, a device updates its stages one at a time, as they are synchronized."""
    updates = []
    for rank, (rank_spans, own_stages) in enumerate(zip(spans, stages_of_ranks(schedule), strict=True)):
        now = rank_spans.ends_ns[-1] if rank_spans.ends_ns else 0
        ready = [(synced_ns[s] if s in synced_ns else _end_ns(rank_spans, s), s) for s in own_stages]
        for ready_ns, s in sorted(ready):
            start_ns = max(now, ready_ns)
            now = start_ns + stages[s].costs[schedule.devices[s].index(rank)].update_ns
            updates.append(Update(rank, s, start_ns, now))
    return updates


def _last_backward(spans: SpanColumns, stage: int) -> LastBackward | None:
    """Returns the start and the phase of the last B or W of a stage on a device; None if it has no micro-batch."""
    for action, start_ns in zip(reversed(spans.actions), reversed(spans.starts_ns), strict=True):
        if action.stage == stage and action.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
            return start_ns, action.phase
    return None


def _end_ns(spans: SpanColumns, stage: int) -> int:
    """Returns when a device is done with a stage; 0 if it has no micro-batch of it."""
    ends = zip(map(itemgetter(0), spans.actions), spans.ends_ns, strict=True)
    return max((end_ns for of_stage, end_ns in ends if of_stage == stage), default=0)
