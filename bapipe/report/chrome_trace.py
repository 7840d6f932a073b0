"""Timelines as Chrome traces, JSON files that Perfetto and chrome://tracing open: written, and read back.

A timeline is one process of the trace. Its threads are, for rank r of n:

    2r            the actions and updates of rank r, named after its device
    2r + 1        the transfers that rank r sends, named "DEVICE sends"
    10,000 + r    backwards of rank r if it runs them side by side with its forwards, named "DEVICE backwards"
    2n + s        the all-reduces of stage s

Memory is a counter "memory DEVICE" with one value for each part, set when an action begins. Times are microseconds.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bapipe.errors import BapipeError, InvalidSchedule
from bapipe.formats.plan import Memory
from bapipe.schedules.table import Phase, parse_action
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update

_PROCESS_NAME, _THREAD_NAME = "process_name", "thread_name"
_SLICE, _COUNTER, _METADATA = "X", "C", "M"  # kinds of events, in the format's letters

_SENDS = " sends"
_BACKWARDS = " backwards"
_MEMORY = "memory "
_UPDATE = "update "
_ALL_REDUCE = "all-reduce"
_TRANSFER = re.compile(r"([0-9]+)([FB])([0-9]+) to (.+)")

_NO_MEMORY = Memory(params=0, gradients=0, optimizer=0, stash=0, workspace=0, buffers=0)


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
        spans_of_rank = [span for span in timeline.spans if span.rank == rank]
        for span, memory in zip(spans_of_rank, memory_of_span, strict=True):
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


class _Event(msgspec.Struct, frozen=True):
    """One slice, counter or name of a trace; times in microseconds."""

    ph: str
    name: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}

    @property
    def start_ns(self) -> int:
        return round(self.ts * 1000)

    @property
    def end_ns(self) -> int:
        return self.start_ns + round(self.dur * 1000)


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - the format's own word


def read_trace(path: Path) -> list[tuple[str, Timeline]]:
    """Returns the named timelines of a trace.

    Raises:
        BapipeError: it cannot be read, or bapipe did not write it.
    """
    try:
        events = msgspec.json.decode(path.read_bytes(), type=_Trace).traceEvents
        return [_timeline([e for e in events if e.pid == pid]) for pid in sorted({e.pid for e in events})]
    except OSError as error:
        raise BapipeError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, InvalidSchedule, KeyError, ValueError, TypeError) as error:
        raise BapipeError(f"{path} is not a trace of bapipe ({error}): write one with `trace`") from None


def _timeline(events: list[_Event]) -> tuple[str, Timeline]:
    """Returns the title and the timeline of one process of a trace."""
    titles = [e.args["name"] for e in events if e.name == _PROCESS_NAME]
    threads = {e.tid: str(e.args["name"]) for e in events if e.name == _THREAD_NAME}
    # A thread belongs to a device if there is also a thread of its sends; threads are numbered in rank order.
    devices = tuple(name for tid, name in sorted(threads.items()) if name + _SENDS in threads.values())
    rank_of_device = {name: rank for rank, name in enumerate(devices)}
    device_of_thread = {tid: name.removesuffix(_BACKWARDS) for tid, name in threads.items()}
    rank_of_thread = {tid: rank_of_device[name] for tid, name in device_of_thread.items() if name in rank_of_device}
    spans: list[Span] = []
    updates: list[Update] = []
    transfers: list[Transfer] = []
    syncs: list[Sync] = []
    for event in (event for event in events if event.ph == _SLICE):
        start_ns, end_ns = event.start_ns, event.end_ns
        if event.name == _ALL_REDUCE:
            stage = event.tid - _all_reduce_thread(0, len(devices))
            syncs.append(Sync(stage, len(syncs), 0, start_ns, end_ns))
        elif event.name.startswith(_UPDATE):
            stage = int(event.name.removeprefix(_UPDATE))
            updates.append(Update(rank_of_thread[event.tid], stage, start_ns, end_ns))
        elif (sent := _TRANSFER.fullmatch(event.name)) is not None:
            source = rank_of_device[threads[event.tid].removesuffix(_SENDS)]
            stage, phase, microbatch = int(sent[1]), Phase(sent[2]), int(sent[3])
            transfers.append(Transfer(source, rank_of_device[sent[4]], stage, phase, microbatch, start_ns, end_ns))
        else:
            spans.append(Span(rank_of_thread[event.tid], parse_action(event.name), start_ns, end_ns))
    memory_of_rank = [
        [msgspec.convert(e.args, Memory) for e in events if e.ph == _COUNTER and e.name == f"{_MEMORY}{device}"]
        for device in devices
    ]
    known = any(memory_of_rank)
    return str(titles[0]), Timeline(
        devices=devices,
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start_ns))),
        transfers=tuple(transfers),
        syncs=tuple(syncs),
        updates=tuple(updates),
        memory=tuple(max(rank, key=lambda memory: memory.total, default=_NO_MEMORY) for rank in memory_of_rank),
        usage=tuple(tuple((m.stash, m.workspace) for m in rank) for rank in memory_of_rank) if known else (),
    )
