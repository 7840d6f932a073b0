"""Timelines read back from the Chrome traces that `bapipe simulate` and `bapipe run` write."""

import re
from pathlib import Path
from typing import Any

import msgspec

from bapipe.errors import BapipeError, InvalidSchedule
from bapipe.formats.plan import Memory
from bapipe.schedules.table import Phase, parse_action
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update

_TRANSFER = re.compile(r"([0-9]+)([FB])([0-9]+) to (.+)")
_NO_MEMORY = Memory(params=0, gradients=0, optimizer=0, stash=0, workspace=0, buffers=0)


class _Event(msgspec.Struct, frozen=True):
    """What a trace says of one slice, one counter or one name; times in microseconds."""

    ph: str
    name: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - the format's own word


def read_trace(path: Path) -> list[tuple[str, Timeline]]:
    """Returns the named timelines of a trace.

    Raises:
        BapipeError: it cannot be read, or is no trace that bapipe wrote.
    """
    try:
        events = msgspec.json.decode(path.read_bytes(), type=_Trace).traceEvents
        return [_timeline([e for e in events if e.pid == pid]) for pid in sorted({e.pid for e in events})]
    except OSError as error:
        raise BapipeError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, InvalidSchedule, KeyError, ValueError, TypeError) as error:
        raise BapipeError(f"{path} is no trace of bapipe ({error}): write one with --trace") from None


def _timeline(events: list[_Event]) -> tuple[str, Timeline]:
    titles = [e.args["name"] for e in events if e.name == "process_name"]
    threads = {e.tid: str(e.args["name"]) for e in events if e.name == "thread_name"}
    devices = tuple(name for tid, name in sorted(threads.items()) if f"{name} sends" in threads.values())
    rank_of = {name: rank for rank, name in enumerate(devices)}
    ranks = {tid: rank_of[name.removesuffix(" backwards")] for tid, name in threads.items() if _acts(name, rank_of)}
    spans: list[Span] = []
    updates: list[Update] = []
    transfers: list[Transfer] = []
    syncs: list[Sync] = []
    for event in (event for event in events if event.ph == "X"):
        start_ns = round(event.ts * 1000)
        end_ns = start_ns + round(event.dur * 1000)
        if event.name == "all-reduce":
            syncs.append(Sync(event.tid - 2 * len(devices), len(syncs), 0, start_ns, end_ns))
        elif event.name.startswith("update "):
            updates.append(Update(ranks[event.tid], int(event.name.removeprefix("update ")), start_ns, end_ns))
        elif (sent := _TRANSFER.fullmatch(event.name)) is not None:
            source = rank_of[threads[event.tid].removesuffix(" sends")]
            stage, microbatch = int(sent[1]), int(sent[3])
            transfers.append(Transfer(source, rank_of[sent[4]], stage, Phase(sent[2]), microbatch, start_ns, end_ns))
        else:
            spans.append(Span(ranks[event.tid], parse_action(event.name), start_ns, end_ns))
    held = [
        [msgspec.convert(e.args, Memory) for e in events if e.ph == "C" and e.name == f"memory {device}"]
        for device in devices
    ]
    return str(titles[0]), Timeline(
        devices=devices,
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start_ns))),
        transfers=tuple(transfers),
        syncs=tuple(syncs),
        updates=tuple(updates),
        memory=tuple(max(rank, key=lambda memory: memory.total, default=_NO_MEMORY) for rank in held),
        usage=tuple(tuple((m.stash, m.workspace) for m in rank) for rank in held) if any(held) else (),
    )


def _acts(name: str, rank_of: dict[str, int]) -> bool:
    return name.removesuffix(" backwards") in rank_of
