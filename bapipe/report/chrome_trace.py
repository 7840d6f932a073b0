"""Timelines as Chrome traces, JSON files that Perfetto and chrome://tracing open: written, and read back.

A timeline is one process of the trace. Its threads are, for rank r of n:

    2r            the actions and updates of rank r, named after its device
    2r + 1        the transfers that rank r sends, named "DEVICE sends"
    10,000 + r    backwards of rank r if it runs them side by side with its forwards, named "DEVICE backwards"
    2n + s        the all-reduces of stage s

Memory is a counter "memory DEVICE" with one value for each part, set when an action begins. Times are microseconds.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bapipe.errors import BapipeError, InvalidFile, InvalidSchedule
from bapipe.formats.codec import TRACE, kind_in_words
from bapipe.formats.files import read_limited
from bapipe.formats.plan import Plan
from bapipe.formats.prediction import NO_MEMORY, Memory
from bapipe.formats.strict_json import decode_json
from bapipe.schedules.table import parse_action
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update
from bapipe.units import MAX_INT

_PROCESS_NAME, _THREAD_NAME = "process_name", "thread_name"
_SLICE, _COUNTER, _METADATA = "X", "C", "M"  # kinds of events, in the format's letters

_SENDS = " sends"
_BACKWARDS = " backwards"
_MEMORY = "memory "
_UPDATE = "update "
_ALL_REDUCE = "all-reduce"
_TRANSFER = re.compile(r"([0-9]+)([FB])([0-9]+) to (.+)", re.DOTALL)
_UPDATED = re.compile(_UPDATE + r"([0-9]{1,9})")


def _compute_thread(rank: int) -> int:
    return 2 * rank


def _send_thread(rank: int) -> int:
    return 2 * rank + 1


def _backward_thread(rank: int) -> int:
    return 10_000 + rank


def _all_reduce_thread(stage: int, num_ranks: int) -> int:
    return 2 * num_ranks + stage


def encode_trace(timelines: Sequence[tuple[str, Timeline]]) -> bytes:
    """Returns named timelines as a Chrome trace."""
    events = [event for process, (title, t) in enumerate(timelines) for event in _events(process, title, t)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _events(process: int, title: str, timeline: Timeline) -> Iterator[dict[str, object]]:
    yield _name(_PROCESS_NAME, process, 0, title)
    for rank, device in enumerate(timeline.devices):
        yield _name(_THREAD_NAME, process, _compute_thread(rank), device)
        yield _name(_THREAD_NAME, process, _send_thread(rank), device + _SENDS)
    for rank, device in enumerate(timeline.devices):
        first_lane, *second_lane = timeline.lanes(rank)
        lanes = [(first_lane, _compute_thread(rank)), *((lane, _backward_thread(rank)) for lane in second_lane)]
        for spans, thread in lanes:
            for span in spans:
                yield _slice(process, thread, str(span.action), span.start_ns, span.end_ns)
        if second_lane:
            yield _name(_THREAD_NAME, process, _backward_thread(rank), device + _BACKWARDS)
    for update in timeline.updates:
        thread = _compute_thread(update.rank)
        yield _slice(process, thread, f"{_UPDATE}{update.stage}", update.start_ns, update.end_ns)
    for t in timeline.transfers:
        label = f"{t.stage}{t.phase}{t.microbatch} to {timeline.devices[t.target]}"
        yield _slice(process, _send_thread(t.source), label, t.start_ns, t.end_ns)
    for rank, memory_of_span in enumerate(timeline.memory_over_time):
        for span, memory in zip(timeline.spans_of(rank), memory_of_span, strict=True):
            yield _counter(process, timeline.devices[rank], span.start_ns, memory)
    for sync in timeline.syncs:
        thread = _all_reduce_thread(sync.stage, len(timeline.devices))
        yield _slice(process, thread, _ALL_REDUCE, sync.start_ns, sync.end_ns)


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, object]:
    return {"ph": _METADATA, "name": kind, "pid": process, "tid": thread, "args": {"name": text}}


def _counter(process: int, device: str, at_ns: int, memory: Memory) -> dict[str, object]:
    parts = {name: getattr(memory, name) for name in Memory.__struct_fields__}
    return {"ph": _COUNTER, "name": f"{_MEMORY}{device}", "pid": process, "ts": at_ns / 1e3, "args": parts}


def _slice(process: int, thread: int, label: str, start_ns: int, end_ns: int) -> dict[str, object]:
    return {
        "ph": _SLICE,
        "name": label,
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
    }


_Microseconds = Annotated[float, msgspec.Meta(ge=-MAX_INT / 2e3, le=MAX_INT / 2e3)]


class _Event(msgspec.Struct, frozen=True):
    """One slice, counter or name of a trace."""

    ph: str
    name: str
    pid: int
    tid: int = 0
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: dict[str, Any] = {}

    @property
    def start_ns(self) -> int:
        return round(self.ts * 1000)

    @property
    def end_ns(self) -> int:
        return self.start_ns + round(self.dur * 1000)


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - the format's own word


def recorded_timelines(plan: Plan, paths: Sequence[Path]) -> list[tuple[str, Timeline]]:
    """Returns the timelines in some traces of a plan, with their titles.

    Raises:
        BapipeError: a file is no trace, or one of another plan.
    """
    recorded = [named for path in paths for named in read_trace(path)]
    for title, timeline in recorded:
        if not _is_step_of(timeline, plan):
            raise BapipeError(f"the timeline '{title}' is not of this plan: its devices run other actions")
    return recorded


def _is_step_of(timeline: Timeline, plan: Plan) -> bool:
    """Returns whether every action of a timeline is one that the plan has its device run."""
    planned = {
        (device.name, action)
        for device, actions in zip(plan.cluster.devices, plan.order, strict=True)
        for action in actions
    }
    return all((timeline.devices[span.rank], str(span.action)) in planned for span in timeline.spans)


def read_trace(path: Path) -> list[tuple[str, Timeline]]:
    """Returns the named timelines of a trace.

    Raises:
        BapipeError: it cannot be read, or bapipe did not write it.
    """
    text = read_limited(path)
    try:
        trace: _Trace = decode_json(text, _Trace)
        events: defaultdict[int, list[_Event]] = defaultdict(list)
        for event in trace.traceEvents:
            events[event.pid].append(event)
        return [_timeline(events[pid]) for pid in sorted(events)]
    except (InvalidFile, InvalidSchedule, msgspec.ValidationError) as error:
        kind = kind_in_words(text)
        if kind in (None, TRACE):
            raise BapipeError(f"{path} is not a trace of bapipe ({error}): write one with `trace`") from None
        raise BapipeError(f"{path} is {kind}, and {TRACE} is wanted: write one with `trace`") from None


def _timeline(events: Sequence[_Event]) -> tuple[str, Timeline]:
    """Returns the title and the timeline of one process of a trace; raises InvalidFile if a part is missing."""
    titles = [_label(e) for e in events if e.name == _PROCESS_NAME]
    names = {e.tid: _label(e) for e in events if e.name == _THREAD_NAME}
    devices = _devices(names)
    if not titles or not devices:
        raise InvalidFile("a process without a name or without devices")
    rank_of_device = {name: rank for rank, name in enumerate(devices)}
    rank_of_thread = {_compute_thread(rank): rank for rank in range(len(devices))}
    rank_of_thread |= {_backward_thread(rank): rank for rank in range(len(devices))}
    spans: list[Span] = []
    updates: list[Update] = []
    transfers: list[Transfer] = []
    syncs: list[Sync] = []
    for event in (event for event in events if event.ph == _SLICE):
        start_ns, end_ns = event.start_ns, event.end_ns
        if event.name == _ALL_REDUCE:
            stage = event.tid - _all_reduce_thread(0, len(devices))
            syncs.append(Sync(stage, len(syncs), 0, start_ns, end_ns))
        elif (sent := _TRANSFER.fullmatch(event.name)) is not None:
            source, target = (event.tid - 1) // 2, rank_of_device.get(sent[4], -1)
            if target < 0 or event.tid != _send_thread(source) or not 0 <= source < len(devices):
                raise InvalidFile(f"the transfer '{event.name}' of thread {event.tid} joins no two devices")
            action = parse_action("".join(sent.groups()[:3]))
            transfers.append(Transfer(source, target, action.stage, action.phase, action.microbatch, start_ns, end_ns))
        elif event.tid not in rank_of_thread:
            raise InvalidFile(f"'{event.name}' is on thread {event.tid}, which is no device's")
        elif (updated := _UPDATED.fullmatch(event.name)) is not None:
            updates.append(Update(rank_of_thread[event.tid], int(updated[1]), start_ns, end_ns))
        else:
            spans.append(Span(rank_of_thread[event.tid], parse_action(event.name), start_ns, end_ns))
    memory_of_rank = _memory(events, devices)
    known = any(memory_of_rank)
    num_spans = Counter(span.rank for span in spans)
    if known and any(len(memory) != num_spans[rank] for rank, memory in enumerate(memory_of_rank)):
        raise InvalidFile("not one value of memory for each action")
    return titles[0], Timeline(
        devices=devices,
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start_ns))),
        transfers=tuple(transfers),
        syncs=tuple(syncs),
        updates=tuple(updates),
        memory=tuple(max(rank, key=lambda memory: memory.total, default=NO_MEMORY) for rank in memory_of_rank),
        usage=tuple(tuple((m.stash, m.workspace) for m in rank) for rank in memory_of_rank) if known else (),
    )


def _label(event: _Event) -> str:
    name = event.args.get("name")
    if not isinstance(name, str):
        raise InvalidFile(f"a {event.name} without a name")
    return name


def _devices(names: Mapping[int, str]) -> tuple[str, ...]:
    """Returns the names of the devices in rank order; each has a thread, and after it one of its sends."""
    devices: list[str] = []
    while names.get(_send_thread(len(devices))) == names.get(_compute_thread(len(devices)), "") + _SENDS:
        devices.append(names[_compute_thread(len(devices))])
    if len(set(devices)) < len(devices):
        raise InvalidFile("two devices have one name")
    return tuple(devices)


def _memory(events: Sequence[_Event], devices: Sequence[str]) -> list[list[Memory]]:
    """Returns the memory of each rank in the order of its counter's values."""
    found: dict[str, list[Memory]] = {f"{_MEMORY}{device}": [] for device in devices}
    for event in events:
        if event.ph == _COUNTER and event.name in found:
            found[event.name].append(msgspec.convert(event.args, Memory))
    return list(found.values())
