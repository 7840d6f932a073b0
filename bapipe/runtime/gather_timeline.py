"""The measured timeline of a step, gathered from all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bapipe.formats.prediction import NO_MEMORY, Memory
from bapipe.job.groups import gathered
from bapipe.runtime.clock import Clock, clock_offset_ns
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.schedules.table import Action
from bapipe.simulator.timeline import Span, Sync, Timeline, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTimeline:
    """What one rank measured of a step: stamps of its clock, but nanoseconds of this process in `spans`.

    Attributes:
        spans: (action, start, end).
        updates: (stage, start, end).
        syncs: (stage, bucket, bytes, start, end) of each all-reduce.
    """

    start: object
    spans: Sequence[tuple[Action, int, int]]
    updates: Sequence[tuple[int, object, object]]
    syncs: Sequence[tuple[int, int, int, object, object]]
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentTimeline:
    """A `LocalTimeline` in nanoseconds of rank 0's clock, which unlike stamps can be pickled and sent to all ranks."""

    start_ns: int
    spans: list[tuple[Action, int, int]]
    updates: list[tuple[int, int, int]]
    syncs: list[tuple[int, int, int, int, int]]
    memory: Memory


def gather_timeline(layout: ProcessLayout, local: LocalTimeline, clock: Clock, device_names: Sequence[str]) -> Timeline:
    """Returns the timeline of all ranks, on rank 0's clock; every rank calls it together, and all get the same.

    `device_names` are the devices of all ranks of the schedule, in order. An all-reduce begins when its last replica
    begins it and ends when the last replica sees its end.
    """
    own = _on_rank_0_clock(local, clock, clock_offset_ns(layout.device, layout.group))
    of_all = gathered(own, layout.group)
    origin_ns = min(one.start_ns for one in of_all)
    memory = dict(zip(layout.ranks, (one.memory for one in of_all), strict=True))
    spans, updates = [], []
    for rank, one in zip(layout.ranks, of_all, strict=True):
        spans += [Span(rank, Action(*action), start - origin_ns, end - origin_ns) for action, start, end in one.spans]
        updates += [Update(rank, s, start - origin_ns, end - origin_ns) for s, start, end in one.updates]
    return Timeline(
        devices=tuple(device_names),
        spans=tuple(spans),
        updates=tuple(updates),
        syncs=tuple(_merge_syncs((sync for one in of_all for sync in one.syncs), origin_ns)),
        memory=tuple(memory.get(rank, NO_MEMORY) for rank in range(len(device_names))),
    )


def _on_rank_0_clock(local: LocalTimeline, clock: Clock, offset_ns: int) -> _SentTimeline:
    return _SentTimeline(
        start_ns=clock.ns(local.start) - offset_ns,
        spans=[(action, start - offset_ns, end - offset_ns) for action, start, end in local.spans],
        updates=[(s, clock.ns(start) - offset_ns, clock.ns(end) - offset_ns) for s, start, end in local.updates],
        syncs=[
            (s, bucket, num_bytes, clock.ns(start) - offset_ns, clock.ns(end) - offset_ns)
            for s, bucket, num_bytes, start, end in local.syncs
        ],
        memory=local.memory,
    )


def _merge_syncs(syncs: Iterable[tuple[int, int, int, int, int]], origin_ns: int) -> list[Sync]:
    """Returns each all-reduce once: from its latest start to its latest end over the replicas."""
    merged: dict[tuple[int, int, int], tuple[int, int]] = {}
    for stage, bucket, num_bytes, start_ns, end_ns in syncs:
        start, end = merged.get((stage, bucket, num_bytes), (start_ns, end_ns))
        merged[stage, bucket, num_bytes] = max(start, start_ns), max(end, end_ns)
    return [Sync(*key, start - origin_ns, end - origin_ns) for key, (start, end) in sorted(merged.items())]
