"""A timeline as a text Gantt chart, and as a trace for Perfetto."""

from collections.abc import Sequence

import msgspec

from bapipe.formats.plan import Memory
from bapipe.report.formatting import ms
from bapipe.schedules.table import Phase
from bapipe.simulator.timeline import Timeline

FILL = {Phase.FORWARD: "░", Phase.BACKWARD: "▓", Phase.INPUT_GRAD: "▒", Phase.WEIGHT_GRAD: "█"}

PHASE_NAMES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT_GRAD: "input gradient",
    Phase.WEIGHT_GRAD: "weight gradient",
}

UPDATE = "u"


def gantt(timeline: Timeline, width: int) -> str:
    """Returns a line of about `width` characters for each rank that works, to scale.

    A rank that runs forward and backward side by side has a line for each.
    Every action begins with its micro-batch's number where there is room: ░ F, ▓ B, ▒ I, █ W, u update.
    """
    names = [name for rank, name in enumerate(timeline.devices) if any(s.rank == rank for s in timeline.spans)]
    margin = max(map(len, names), default=0)
    columns = max(width - margin - 1, 10)
    step_ns = max(timeline.step_ns, 1)

    def paint(line: list[str], start_ns: int, end_ns: int, fill: str, label: str) -> None:
        start, stop = start_ns * columns // step_ns, end_ns * columns // step_ns
        text = label if len(label) < stop - start or len(label) == stop - start == 1 else ""
        line[start:stop] = (text + fill * (stop - start - len(text)))[: stop - start]

    lines = []
    for rank, name in enumerate(timeline.devices):
        if name not in names:
            continue
        for place, spans in enumerate(timeline.lanes(rank)):
            line = [" "] * columns
            for span in spans:
                paint(line, span.start_ns, span.end_ns, FILL[span.action.phase], str(span.action.microbatch))
            for update in timeline.updates:
                if update.rank == rank:
                    paint(line, update.start_ns, update.end_ns, UPDATE, "")
            lines.append(f"{'' if place else name:>{margin}} " + "".join(line).rstrip())
    phases = {span.action.phase for span in timeline.spans}
    legend = "  ".join(f"{FILL[phase]} {PHASE_NAMES[phase]}" for phase in Phase if phase in phases)
    return "\n".join([*lines, f"{'':>{margin}} {legend}  {UPDATE} update  (0 to {ms(timeline.step_ns)})"])


def encode_trace(timelines: Sequence[tuple[str, Timeline]]) -> bytes:
    """Returns named timelines as a Chrome trace (a JSON file that Perfetto and chrome://tracing open).

    One process for each timeline, one thread for each rank; transfers are on the sender, beside its actions.
    """
    events: list[dict[str, object]] = []
    for process, (title, timeline) in enumerate(timelines):
        events.append(_name("process_name", process, 0, title))
        for rank, device in enumerate(timeline.devices):
            events.append(_name("thread_name", process, 2 * rank, device))
            events.append(_name("thread_name", process, 2 * rank + 1, f"{device} sends"))
        for rank, device in enumerate(timeline.devices):
            first, *beside = timeline.lanes(rank)
            for spans, thread in [(first, 2 * rank), *((lane, 10_000 + rank) for lane in beside)]:
                events += [_slice(process, thread, str(s.action), s.start_ns, s.end_ns) for s in spans]
            events += [_name("thread_name", process, 10_000 + rank, f"{device} backwards") for _ in beside]
        for update in timeline.updates:
            events.append(_slice(process, 2 * update.rank, f"update {update.stage}", update.start_ns, update.end_ns))
        for t in timeline.transfers:
            label = f"{t.stage}{t.phase}{t.microbatch} to {timeline.devices[t.target]}"
            events.append(_slice(process, 2 * t.source + 1, label, t.start_ns, t.end_ns))
        for rank, held in enumerate(timeline.memory_over_time):
            own = [span for span in timeline.spans if span.rank == rank]
            events += [_counter(process, timeline.devices[rank], s.start_ns, m) for s, m in zip(own, held, strict=True)]
        for sync in timeline.syncs:
            events.append(
                _slice(process, 2 * len(timeline.devices) + sync.stage, "all-reduce", sync.start_ns, sync.end_ns)
            )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}


def _counter(process: int, device: str, at_ns: int, memory: Memory) -> dict[str, object]:
    parts = {name: getattr(memory, name) for name in Memory.__struct_fields__}
    return {"ph": "C", "name": f"memory {device}", "pid": process, "ts": at_ns / 1e3, "args": parts}


def _slice(process: int, thread: int, label: str, start_ns: int, end_ns: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": label,
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
    }
