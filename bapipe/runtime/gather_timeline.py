"""The measured timeline of a step, gathered from all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bapipe.formats.plan import Memory, Plan
from bapipe.runtime.clock import Clock, clock_offset_ns
from bapipe.schedules.table import Action
from bapipe.simulator.timeline import Span, Sync, Timeline, Update

_NO_MEMORY = Memory(params=0, gradients=0, optimizer=0, stash=0, workspace=0, buffers=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank saw of a step; stamps are of its clock, spans in its nanoseconds.

    Attributes:
        updates: (stage, start, end).
        syncs: (stage, bucket, bytes, start, end).
    """

    start: object
    spans: Sequence[tuple[Action, int, int]]
    updates: Sequence[tuple[int, object, object]]
    syncs: Sequence[tuple[int, int, int, object, object]]
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """The same in nanoseconds of rank 0's clock, to be sent to everyone."""

    start_ns: int
    spans: list[tuple[Action, int, int]]
    updates: list[tuple[int, int, int]]
    syncs: list[tuple[int, int, int, int, int]]
    memory: Memory


def gather(
    own: Measured,
    clock: Clock,
    plan: Plan,
    ranks: Sequence[int],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Timeline:
    """Returns the timeline of all ranks, on rank 0's clock; every rank calls it together, and all get the same.

    `ranks[i]` is the plan's rank that process i of the group plays. An all-reduce begins when its last replica begins
    it and ends when the last one sees its end.
    """
    told = _tell(own, clock, clock_offset_ns(device, group))
    everyone = [told] * len(ranks)
    dist.all_gather_object(everyone, told, group=group)
    origin_ns = min(one.start_ns for one in everyone)
    memory = dict(zip(ranks, (one.memory for one in everyone), strict=True))
    spans, updates = [], []
    for rank, one in zip(ranks, everyone, strict=True):
        spans += [Span(rank, Action(*action), start - origin_ns, end - origin_ns) for action, start, end in one.spans]
        updates += [Update(rank, s, start - origin_ns, end - origin_ns) for s, start, end in one.updates]
    return Timeline(
        devices=tuple(device.name for device in plan.cluster.devices),
        spans=tuple(spans),
        updates=tuple(updates),
        syncs=tuple(_syncs((sync for one in everyone for sync in one.syncs), origin_ns)),
        memory=tuple(memory.get(rank, _NO_MEMORY) for rank in range(len(plan.cluster.devices))),
    )


def _tell(own: Measured, clock: Clock, offset_ns: int) -> _Told:
    return _Told(
        start_ns=clock.ns(own.start) - offset_ns,
        spans=[(action, start - offset_ns, end - offset_ns) for action, start, end in own.spans],
        updates=[(s, clock.ns(a) - offset_ns, clock.ns(b) - offset_ns) for s, a, b in own.updates],
        syncs=[(s, b, n, clock.ns(a) - offset_ns, clock.ns(z) - offset_ns) for s, b, n, a, z in own.syncs],
        memory=own.memory,
    )


def _syncs(seen: Iterable[tuple[int, int, int, int, int]], origin_ns: int) -> list[Sync]:
    merged: dict[tuple[int, int, int], tuple[int, int]] = {}
    for stage, bucket, num_bytes, start_ns, end_ns in seen:
        start, end = merged.get((stage, bucket, num_bytes), (start_ns, end_ns))
        merged[stage, bucket, num_bytes] = max(start, start_ns), max(end, end_ns)
    return [Sync(*key, start - origin_ns, end - origin_ns) for key, (start, end) in sorted(merged.items())]
