"""A plan as one HTML page that needs nothing else: tables, timelines to scale, and memory over time."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import floor, log10

import msgspec
from rich.table import Table

from bapipe.formats.plan import Memory, Plan
from bapipe.formats.profile import ModelProfile
from bapipe.report import PHASE_NAMES, mib, ms, render_plan, render_profile
from bapipe.report.layer_diagram import layer_svg
from bapipe.schedules.table import Phase
from bapipe.simulator.timeline import Span, Timeline

COLOURS = {
    Phase.FORWARD: "#5b9bd5",
    Phase.BACKWARD: "#3f9e6b",
    Phase.INPUT_GRAD: "#7fc7a4",
    Phase.WEIGHT_GRAD: "#e0a030",
}
UPDATE, ALL_REDUCE, TRANSFER = "#8a8a8a", "#b46cc0", "#b0b0b0"
PARTS = {
    "fixed": "#c8cdd3",
    "stash": "#5b9bd5",
    "workspace": "#e0a030",
}
WIDTH, MARGIN, ROW, GAP, HEIGHT = 1160, 110, 24, 10, 64
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.8em 0 .4em; }
p { white-space: pre-line; max-width: 80em; }
table { border-collapse: collapse; margin: .4em 0 1.2em; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .3em 0; }
th, td { padding: .15em .8em .15em 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th.n, td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; } text { font: 12px system-ui, sans-serif; fill: #222; }
text.m { fill: #fff; font-size: 11px; text-anchor: middle; } text.d { fill: #333; } text.e { text-anchor: end; }
text.t { fill: #777; }
.key { margin: .3em 0 .7em; } .key span { display: inline-block; margin-right: 1.4em; }
.key i { display: inline-block; width: 1em; height: .8em; margin-right: .4em; }
"""


def plan_page(plan: Plan, timelines: Sequence[tuple[str, Timeline]]) -> bytes:
    """Returns the page of a plan, with named timelines; tables come from the first of them."""
    body = [f"<h1>{escape(plan.model)}</h1>"]
    body += [_part(part) for part in render_plan(plan, timelines[0][1] if timelines else None)]
    for title, timeline in timelines:
        body += [f"<h2>{escape(title)}: {ms(timeline.step_ns)}</h2>", _key(timeline), _gantt(timeline)]
        if timeline.usage:
            has = {device.name: device.memory_bytes for device in plan.cluster.devices}
            body += [f"<h2>Memory over time, {escape(title)}</h2>", _memory_key(), _memory(timeline, has)]
    return _document(plan.model, body)


def profile_page(profile: ModelProfile) -> bytes:
    """Returns the page of a profile: the model drawn with what each cut would carry, then its tables."""
    size = max(m.microbatch_size for m in profile.measurements)
    body = [f"<h1>{escape(profile.model)}</h1>", f"<h2>Shape, at micro-batches of {size}</h2>", layer_svg(profile)]
    return _document(profile.model, [*body, *(_part(part) for part in render_profile(profile))])


def _document(title: str, body: Sequence[str]) -> bytes:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    text = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"
    return text.encode()


def _part(part: Table | str) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    kinds = [' class="n"' if column.justify == "right" else "" for column in part.columns]
    heads = "".join(f"<th{k}>{escape(str(c.header))}</th>" for k, c in zip(kinds, part.columns, strict=True))
    rows = zip(*(column.cells for column in part.columns), strict=True)
    lines = ["".join(f"<td{k}>{escape(str(c))}</td>" for k, c in zip(kinds, row, strict=True)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(str(part.title))}</caption><tr>{heads}</tr>{body}</table>"


def _key(timeline: Timeline) -> str:
    phases = {span.action.phase for span in timeline.spans}
    entries = [(COLOURS[phase], PHASE_NAMES[phase]) for phase in Phase if phase in phases]
    entries += [(UPDATE, "update")] if timeline.updates else []
    entries += [(ALL_REDUCE, "all-reduce")] if timeline.syncs else []
    entries += [(TRANSFER, "transfer")] if timeline.transfers else []
    return _keys(entries) + "<p>Numbers are micro-batches; later stages of a device are paler.</p>"


def _memory_key() -> str:
    names = {"fixed": "parameters, gradients, optimizer, buffers", "stash": "stashes", "workspace": "workspace"}
    return _keys([(PARTS[part], name) for part, name in names.items()])


def _keys(entries: Sequence[tuple[str, str]]) -> str:
    spans = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in entries)
    return f'<div class="key">{spans}</div>'


def _gantt(timeline: Timeline) -> str:
    """A row for each rank that works, two where it runs side by side, and one for each stage's all-reduces."""
    x = _scale(timeline)
    shapes: list[str] = []
    middle: dict[int, float] = {}
    y = 0.0
    for rank, device in enumerate(timeline.devices):
        lanes = [lane for lane in timeline.lanes(rank) if lane]
        if lanes:
            middle[rank] = y + len(lanes) * ROW / 2
            shapes.append(_label(device, middle[rank] + 4))
            shapes += [box for place, lane in enumerate(lanes) for box in _boxes(lane, x, y + place * ROW)]
            shapes += [
                _rect(x(u.start_ns), y, x(u.end_ns), len(lanes) * ROW - 2, UPDATE, f"update of stage {u.stage}")
                for u in timeline.updates
                if u.rank == rank
            ]
            y += len(lanes) * ROW + GAP
    lines = [
        f'<line x1="{x(t.start_ns):.2f}" y1="{middle[t.source]:.1f}" x2="{x(t.end_ns):.2f}" y2="{middle[t.target]:.1f}"'
        f' stroke="{TRANSFER}"><title>{t.stage}{t.phase}{t.microbatch}, {_lasts(t.start_ns, t.end_ns)}</title></line>'
        for t in timeline.transfers
    ]
    for stage in sorted({sync.stage for sync in timeline.syncs}):
        shapes.append(_label(f"stage {stage}", y + ROW / 2 + 4))
        own = [sync for sync in timeline.syncs if sync.stage == stage]
        shapes += [_rect(x(s.start_ns), y, x(s.end_ns), ROW - 2, ALL_REDUCE, f"bucket {s.bucket}") for s in own]
        y += ROW + GAP
    return _svg([*lines, *shapes, *_axis(timeline, x, y)], y + 18)


def _boxes(spans: Sequence[Span], x: Callable[[int], float], y: float) -> Iterator[str]:
    stages = sorted({span.action.stage for span in spans})
    for span in spans:
        left, right, action = x(span.start_ns), x(span.end_ns), span.action
        pale = 1 - 0.45 * stages.index(action.stage) / max(1, len(stages) - 1) if len(stages) > 1 else 1.0
        title = f"{action}, {_lasts(span.start_ns, span.end_ns)}"
        yield _rect(left, y, right, ROW - 2, COLOURS[action.phase], title, pale)
        if right - left > 7 * len(str(action.microbatch)) + 2:
            kind = "m" if pale == 1 else "m d"
            yield f'<text class="{kind}" x="{(left + right) / 2:.2f}" y="{y + 15:.1f}">{action.microbatch}</text>'


def _memory(timeline: Timeline, has: dict[str, int]) -> str:
    """A chart for each rank that works, all to one scale; a dashed line where its device is full, if that is near."""
    x = _scale(timeline)
    shapes: list[str] = []
    y = 0.0
    most = max((memory.total for memory in timeline.memory), default=0) or 1
    for rank, (device, held) in enumerate(zip(timeline.devices, timeline.memory_over_time, strict=True)):
        spans = sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.start_ns)
        if not spans:
            continue
        held = (msgspec.structs.replace(held[0], stash=0, workspace=0), *held)  # before its first action
        times = [x(0), *(x(span.start_ns) for span in spans), x(timeline.step_ns)]
        base = [0.0] * len(held)
        for part, colour in PARTS.items():
            top = [low + _bytes(memory, part) * HEIGHT / most for low, memory in zip(base, held, strict=True)]
            shapes.append(_area(times, base, top, y + HEIGHT, colour))
            base = top
        peak = timeline.memory[rank].total
        shapes.append(_label(device, y + HEIGHT / 2))
        shapes.append(f'<text class="e t" x="{MARGIN - 8}" y="{y + HEIGHT / 2 + 15:.1f}">{mib(peak)}</text>')
        limit = y + HEIGHT * (1 - has.get(device, 0) / most)
        if y <= limit < y + HEIGHT:
            shapes.append(
                f'<line x1="{MARGIN}" x2="{WIDTH}" y1="{limit:.1f}" y2="{limit:.1f}" stroke="#c00" '
                f'stroke-dasharray="4 3"><title>{mib(has[device])} in all</title></line>'
            )
        y += HEIGHT + GAP
    return _svg([*shapes, *_axis(timeline, x, y)], y + 18)


def _bytes(memory: Memory, part: str) -> int:
    if part == "fixed":
        return memory.total - memory.stash - memory.workspace
    return memory.stash if part == "stash" else memory.workspace


def _area(times: Sequence[float], low: Sequence[float], high: Sequence[float], y: float, colour: str) -> str:
    """A band between two step functions, each value from its time to the next."""
    steps = list(zip(times, times[1:], low, high, strict=False))
    top = [f"{t:.2f},{y - b:.2f}" for start, end, _, b in steps for t in (start, end)]
    bottom = [f"{t:.2f},{y - a:.2f}" for start, end, a, _ in reversed(steps) for t in (end, start)]
    return f'<polygon points="{" ".join([*top, *bottom])}" fill="{colour}"/>'


def _scale(timeline: Timeline) -> Callable[[int], float]:
    """Returns the place of a time in the picture."""
    per_ns = (WIDTH - MARGIN) / max(timeline.step_ns, 1)
    return lambda time_ns: MARGIN + time_ns * per_ns


def _axis(timeline: Timeline, x: Callable[[int], float], y: float) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten, ten or fewer."""
    rough = max(timeline.step_ns, 10) / 10
    power = 10 ** floor(log10(rough))
    tick = max(1, next(power * k for k in (1, 2, 5, 10) if power * k >= rough))
    for time_ns in range(0, timeline.step_ns + 1, int(tick)):
        yield f'<line x1="{x(time_ns):.2f}" x2="{x(time_ns):.2f}" y1="{y - 4:.1f}" y2="{y:.1f}" stroke="#999"/>'
        anchor = ' class="t e"' if x(time_ns) > WIDTH - 40 else ' class="t"'
        yield f'<text{anchor} x="{x(time_ns):.2f}" y="{y + 13:.1f}">{ms(time_ns)}</text>'


def _label(text: str, y: float) -> str:
    return f'<text class="e" x="{MARGIN - 8}" y="{y:.1f}">{escape(text)}</text>'


def _rect(left: float, y: float, right: float, height: float, colour: str, title: str, opacity: float = 1.0) -> str:
    paler = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return (
        f'<rect x="{left:.2f}" y="{y:.1f}" width="{max(right - left, 0.3):.2f}" height="{height:.0f}" fill="{colour}"'
        f'{paler} stroke="#fff" stroke-width=".5"><title>{escape(title)}</title></rect>'
    )


def _lasts(start_ns: int, end_ns: int) -> str:
    return f"{ms(start_ns)} to {ms(end_ns)}"


def _svg(shapes: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">' + "".join(shapes) + "</svg>"
