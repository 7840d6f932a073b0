"""Draws a timeline as SVG: a Gantt chart of its ranks, and the memory of each rank over time.

Coordinates are pixels of a picture of width `WIDTH`; times start at `MARGIN`, to the right of the labels. The classes
of texts are those of `templates/page.css`: m inside a box, d on a pale box, e aligned at its end, t a tick.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import floor, log10

import msgspec

from bapipe.formats.plan import Memory
from bapipe.printable import printable
from bapipe.report.formatting import html_text, mib, ms
from bapipe.report.text_gantt import MAX_NAME, PHASE_NAMES
from bapipe.schedules.table import Phase
from bapipe.simulator.timeline import Span, Sync, Timeline, Update

PHASE_COLOURS = {
    Phase.FORWARD: "#5b9bd5",
    Phase.BACKWARD: "#3f9e6b",
    Phase.INPUT_GRAD: "#7fc7a4",
    Phase.WEIGHT_GRAD: "#e0a030",
}
UPDATE_COLOUR, ALL_REDUCE_COLOUR, TRANSFER_COLOUR = "#8a8a8a", "#b46cc0", "#b0b0b0"

MEMORY_COLOURS = {"fixed": "#c8cdd3", "stash": "#5b9bd5", "workspace": "#e0a030"}
"""Bands of the memory picture from the bottom up."""

WIDTH, MARGIN = 1160, 110
ROW_HEIGHT, GAP, CHART_HEIGHT = 24, 10, 64
AXIS_HEIGHT = 18

MAX_TICKS = 10

SVG_NAMESPACE = "http://www.w3.org/2000/svg"

Scale = Callable[[int], float]
"""The x coordinate of a time in nanoseconds."""


def gantt_legend(timeline: Timeline) -> list[tuple[str, str]]:
    """Returns the legend (colour, name) of a timeline's Gantt chart."""
    phases = {span.action.phase for span in timeline.spans}
    entries = [(PHASE_COLOURS[phase], PHASE_NAMES[phase]) for phase in Phase if phase in phases]
    entries += [(UPDATE_COLOUR, "update")] if timeline.updates else []
    entries += [(ALL_REDUCE_COLOUR, "all-reduce")] if timeline.syncs else []
    entries += [(TRANSFER_COLOUR, "transfer")] if timeline.transfers else []
    return entries


def memory_legend() -> list[tuple[str, str]]:
    """Returns the legend (colour, name) of the memory picture."""
    names = {"fixed": "parameters, gradients, optimizer, buffers", "stash": "stashes", "workspace": "workspace"}
    return [(MEMORY_COLOURS[band], name) for band, name in names.items()]


def gantt_svg(timeline: Timeline) -> str:
    """Returns a Gantt chart of ranks (two rows for a rank that runs F and B side by side) and of all-reduces."""
    x = _scale(timeline)
    shapes: list[str] = []
    middle_of_rank: dict[int, float] = {}  # where the lines of transfers begin and end
    updates: defaultdict[int, list[Update]] = defaultdict(list)
    for update in timeline.updates:
        updates[update.rank].append(update)
    y = 0.0
    for rank, device in enumerate(timeline.devices):
        lanes = [lane for lane in timeline.lanes(rank) if lane]
        if lanes:
            height = len(lanes) * ROW_HEIGHT
            middle_of_rank[rank] = y + height / 2
            shapes.append(_label(device, middle_of_rank[rank] + 4))
            shapes += [box for i, lane in enumerate(lanes) for box in _action_boxes(lane, x, y + i * ROW_HEIGHT)]
            shapes += [
                _rect(x(u.start_ns), y, x(u.end_ns), height - 2, UPDATE_COLOUR, f"update of stage {u.stage}")
                for u in updates[rank]
            ]
            y += height + GAP
    transfers = _transfer_lines(timeline, x, middle_of_rank)
    buckets: defaultdict[int, list[Sync]] = defaultdict(list)
    for sync in timeline.syncs:
        buckets[sync.stage].append(sync)
    for stage in sorted(buckets):
        shapes.append(_label(f"stage {stage}", y + ROW_HEIGHT / 2 + 4))
        shapes += [
            _rect(x(sync.start_ns), y, x(sync.end_ns), ROW_HEIGHT - 2, ALL_REDUCE_COLOUR, f"bucket {sync.bucket}")
            for sync in buckets[stage]
        ]
        y += ROW_HEIGHT + GAP
    # Transfers first: later elements are drawn on top of them.
    return _svg([*transfers, *shapes, *_axis(timeline, x, y)], y + AXIS_HEIGHT)


def memory_svg(timeline: Timeline, capacity_bytes: Mapping[str, int]) -> str:
    """Returns a chart for each rank with a stage, all to one scale, with a dashed line at the capacity of its device.

    The line is left out if it lies above the chart.
    """
    x = _scale(timeline)
    shapes: list[str] = []
    y = 0.0
    max_bytes = max((memory.total for memory in timeline.memory), default=0) or 1
    for rank, (device, memory_of_span) in enumerate(zip(timeline.devices, timeline.memory_over_time, strict=True)):
        spans = sorted(timeline.spans_of(rank), key=lambda s: s.start_ns)
        if not spans:
            continue
        before_first_span = msgspec.structs.replace(memory_of_span[0], stash=0, workspace=0)
        times = [x(0), *(x(span.start_ns) for span in spans), x(timeline.step_ns)]
        shapes += _memory_bands((before_first_span, *memory_of_span), times, y + CHART_HEIGHT, max_bytes)
        shapes.append(_label(device, y + CHART_HEIGHT / 2))
        peak = mib(timeline.memory[rank].total)
        shapes.append(f'<text class="e t" x="{MARGIN - 8}" y="{y + CHART_HEIGHT / 2 + 15:.1f}">{peak}</text>')
        limit_y = y + CHART_HEIGHT * (1 - capacity_bytes.get(device, 0) / max_bytes)
        if y <= limit_y < y + CHART_HEIGHT:
            shapes.append(
                f'<line x1="{MARGIN}" x2="{WIDTH}" y1="{limit_y:.1f}" y2="{limit_y:.1f}" stroke="#c00" '
                f'stroke-dasharray="4 3"><title>{mib(capacity_bytes[device])} in all</title></line>'
            )
        y += CHART_HEIGHT + GAP
    return _svg([*shapes, *_axis(timeline, x, y)], y + AXIS_HEIGHT)


def svg_file(svg: str) -> str:
    """Returns a picture as a file of its own, with the styles that `templates/page.css` gives it on a page."""
    texts = "text{font:12px sans-serif;fill:#222}.m{fill:#fff;font-size:11px;text-anchor:middle}.d{fill:#333}"
    head = f'<svg xmlns="{SVG_NAMESPACE}"'
    return svg.replace("<svg", head, 1).replace(">", f"><style>{texts}.e{{text-anchor:end}}.t{{fill:#777}}</style>", 1)


def _action_boxes(spans: Sequence[Span], x: Scale, y: float) -> Iterator[str]:
    place = {stage: i for i, stage in enumerate(sorted({span.action.stage for span in spans}))}
    for span in spans:
        left, right, action = x(span.start_ns), x(span.end_ns), span.action
        # The first stage of a device is opaque, its last one 45 % less so.
        opacity = 1 - 0.45 * place[action.stage] / max(1, len(place) - 1)
        title = f"{action}, {_time_range(span.start_ns, span.end_ns)}"
        yield _rect(left, y, right, ROW_HEIGHT - 2, PHASE_COLOURS[action.phase], title, opacity)
        label_width = 7 * len(str(action.microbatch)) + 2
        if right - left > label_width:
            css = "m" if opacity == 1 else "m d"
            yield f'<text class="{css}" x="{(left + right) / 2:.2f}" y="{y + 15:.1f}">{action.microbatch}</text>'


def _transfer_lines(timeline: Timeline, x: Scale, middle_of_rank: Mapping[int, float]) -> list[str]:
    return [
        f'<line x1="{x(t.start_ns):.2f}" y1="{middle_of_rank[t.source]:.1f}" '
        f'x2="{x(t.end_ns):.2f}" y2="{middle_of_rank[t.target]:.1f}"'
        f' stroke="{TRANSFER_COLOUR}">'
        f"<title>{t.stage}{t.phase}{t.microbatch}, {_time_range(t.start_ns, t.end_ns)}</title></line>"
        for t in timeline.transfers
        if t.source in middle_of_rank and t.target in middle_of_rank  # a recorded device may have run nothing
    ]


def _memory_bands(memory: Sequence[Memory], times: Sequence[float], y: float, max_bytes: int) -> Iterator[str]:
    """Yields the bands of one chart whose base line is at `y`, each on top of the one before.

    Args:
        memory: bytes in use from each of `times` to the next; one fewer than `times`.
    """
    base = [0.0] * len(memory)
    for band, colour in MEMORY_COLOURS.items():
        top = [low + _band_bytes(m, band) * CHART_HEIGHT / max_bytes for low, m in zip(base, memory, strict=True)]
        yield _band(times, base, top, y, colour)
        base = top


def _band_bytes(memory: Memory, band: str) -> int:
    if band == "fixed":
        return memory.total - memory.stash - memory.workspace
    return memory.stash if band == "stash" else memory.workspace


def _band(times: Sequence[float], low: Sequence[float], high: Sequence[float], y: float, colour: str) -> str:
    """Returns the area between two step functions, each value valid from its time to the next."""
    steps = list(zip(times, times[1:], low, high, strict=False))
    top = [f"{t:.2f},{y - b:.2f}" for start, end, _, b in steps for t in (start, end)]
    bottom = [f"{t:.2f},{y - a:.2f}" for start, end, a, _ in reversed(steps) for t in (end, start)]
    return f'<polygon points="{" ".join([*top, *bottom])}" fill="{colour}"/>'


def _scale(timeline: Timeline) -> Scale:
    pixels_per_ns = (WIDTH - MARGIN) / max(timeline.step_ns, 1)
    return lambda time_ns: MARGIN + time_ns * pixels_per_ns


def _axis(timeline: Timeline, x: Scale, y: float) -> Iterator[str]:
    """Yields ticks at 1, 2 or 5 times a power of ten nanoseconds, at most about `MAX_TICKS` of them."""
    min_tick = max(timeline.step_ns, 10) / MAX_TICKS
    power = 10 ** floor(log10(min_tick))
    tick = max(1, next(power * k for k in (1, 2, 5, 10) if power * k >= min_tick))
    for time_ns in range(0, timeline.step_ns + 1, int(tick)):
        yield f'<line x1="{x(time_ns):.2f}" x2="{x(time_ns):.2f}" y1="{y - 4:.1f}" y2="{y:.1f}" stroke="#999"/>'
        near_right_edge = x(time_ns) > WIDTH - 40
        css = ' class="t e"' if near_right_edge else ' class="t"'
        yield f'<text{css} x="{x(time_ns):.2f}" y="{y + 13:.1f}">{ms(time_ns)}</text>'


def _label(text: str, y: float) -> str:
    return f'<text class="e" x="{MARGIN - 8}" y="{y:.1f}">{html_text(printable(text, MAX_NAME))}</text>'


def _rect(left: float, y: float, right: float, height: float, colour: str, title: str, opacity: float = 1.0) -> str:
    fill_opacity = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    width = max(right - left, 0.3)  # so that a very short action can still be seen
    return (
        f'<rect x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.0f}" fill="{colour}"'
        f'{fill_opacity} stroke="#fff" stroke-width=".5"><title>{html_text(title)}</title></rect>'
    )


def _time_range(start_ns: int, end_ns: int) -> str:
    return f"{ms(start_ns)} to {ms(end_ns)}"


def _svg(shapes: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">' + "".join(shapes) + "</svg>"
