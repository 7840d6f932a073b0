"""The layers of a model with the tensors alive between them: rails of text, or a drawing in SVG.

Every tensor has a lane, a column to the right of the layers, from the layer that makes it to the last one that uses it,
like a branch in `git log --graph`. A cut sends the tensors whose lanes it crosses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapipe.formats.profile import LayerMeasurement, LayerProfile, ModelProfile
from bapipe.report.formatting import html_text

ROW_HEIGHT, LANE_WIDTH = 22, 26
LAYERS_RIGHT = 360
"""Pixels: names and times of layers lie to the left of this, lanes to the right."""

BAR_WIDTH = 150
"""Pixels of the longest bar: of times to the left of the layers, of bytes to the right of the lanes."""

MAX_NAME = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A layer and the cut after it.

    Attributes:
        rails: one character for each lane of tensors alive next to the layer.
        lanes: the tensor in each lane after the layer, None if the lane is free.
        forward_backward_ns: F + B of the layer.
        cut_bytes: bytes of the tensors that cross a cut after the layer, for one micro-batch.
        num_tensors: the number of these tensors.
    """

    layer: LayerProfile
    rails: str
    lanes: tuple[str | None, ...]
    forward_backward_ns: int
    cut_bytes: int
    num_tensors: int


def layer_rows(profile: ModelProfile) -> tuple[LayerRow, ...]:
    """Returns the layers in order, at the largest measured micro-batch size; O(layers x tensors alive).

    `●` is a layer whose output takes over a lane of its inputs, `╮` begins a lane, `╯` ends one, `├` uses one, and `│`
    passes by.
    """
    measured = max(profile.measurements, key=lambda m: m.microbatch_size).layers
    last_use = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.inputs}
    num_bytes: dict[str, int] = {}
    lanes: list[str | None] = []
    rows = []
    for index, (layer, m) in enumerate(zip(profile.layers, measured, strict=True)):
        num_bytes |= dict(zip(layer.outputs, m.output_bytes, strict=True))
        lanes_before = list(lanes)
        ended = {t for t in lanes if t is not None and last_use.get(t, -1) <= index}
        lanes = [None if tensor in ended else tensor for tensor in lanes]
        begun = [tensor for tensor in layer.outputs if last_use.get(tensor, -1) > index]
        _assign_lanes(lanes, begun, [i for i, tensor in enumerate(lanes_before) if tensor in ended])
        while lanes and lanes[-1] is None:
            lanes.pop()
        alive = [tensor for tensor in lanes if tensor is not None]
        rows.append(
            LayerRow(
                layer=layer,
                rails=_rails(lanes_before, lanes, set(layer.inputs)),
                lanes=tuple(lanes),
                forward_backward_ns=_forward_backward_ns(m),
                cut_bytes=sum(num_bytes[tensor] for tensor in alive),
                num_tensors=len(alive),
            )
        )
    return tuple(rows)


def bar(value: int, largest: int, width: int = 16) -> str:
    """Returns a bar of eighths of a character, at least one eighth for any value above 0."""
    eighths = max(round(8 * width * value / largest), 1) if value and largest else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def layer_svg(profile: ModelProfile) -> str:
    """Returns the model as a drawing: a row for each layer, with bars of its time and of the bytes a cut sends."""
    rows = layer_rows(profile)
    max_ns = max((row.forward_backward_ns for row in rows), default=0) or 1
    max_bytes = max((row.cut_bytes for row in rows), default=0) or 1
    num_lanes = max((len(row.lanes) for row in rows), default=0)
    cuts_left = LAYERS_RIGHT + LANE_WIDTH * (num_lanes + 1)
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{cuts_left + 320}" height="{ROW_HEIGHT * (len(rows) + 2)}" '
        'font-family="ui-monospace, monospace" font-size="12">',
        f'<text x="8" y="16" font-weight="bold">layer</text><text x="{cuts_left}" y="16" font-weight="bold">'
        "a cut here carries</text>",
    ]
    for index, row in enumerate(rows):
        y = ROW_HEIGHT * (index + 1) + 8
        next_row = rows[index + 1] if index + 1 < len(rows) else None
        shapes += _layer_shapes(row, next_row, y, max_ns)
        if row.num_tensors:
            shapes += _cut_shapes(row, y, cuts_left, max_bytes)
    return "\n".join([*shapes, "</svg>"])


def _layer_shapes(row: LayerRow, next_row: LayerRow | None, y: int, max_ns: int) -> Iterator[str]:
    """Yields the name of a layer, a bar of its time, its dot, and its tensors down to the next layer."""
    width = BAR_WIDTH * row.forward_backward_ns / max_ns
    layer = row.layer
    name = html_text(layer.name if len(layer.name) < MAX_NAME else "…" + layer.name[-(MAX_NAME - 2) :])
    title = f"{html_text(layer.name)} ({html_text(layer.kind)}): F + B {row.forward_backward_ns / 1e6:.3f} ms"
    yield (
        f'<rect x="{LAYERS_RIGHT - 20 - width:.1f}" y="{y - 8}" width="{width:.1f}" height="14" fill="#9ecae1">'
        f"<title>{title}</title></rect>"
    )
    yield f'<text x="8" y="{y + 3}">{name}<title>{title}</title></text>'
    yield from _tensor_strokes(row, next_row, y)
    yield f'<circle cx="{LAYERS_RIGHT - 8}" cy="{y}" r="4" fill="#08519c"/>'


def _cut_shapes(row: LayerRow, y: int, cuts_left: int, max_bytes: int) -> Iterator[str]:
    """Yields the line of the cut after a layer, and a bar of the bytes that cross it."""
    middle = y + ROW_HEIGHT / 2
    width = BAR_WIDTH * row.cut_bytes / max_bytes
    plural = "" if row.num_tensors == 1 else "s"
    yield f'<line x1="{LAYERS_RIGHT - 14}" x2="{cuts_left - 6}" y1="{middle}" y2="{middle}" stroke="#ddd"/>'
    yield f'<rect x="{cuts_left}" y="{middle - 5}" width="{width:.1f}" height="10" fill="#fdae6b"/>'
    yield (
        f'<text x="{cuts_left + width + 6:.1f}" y="{middle + 4}" fill="#555">'
        f"{row.cut_bytes / 2**20:.2f} MiB, {row.num_tensors} tensor{plural}</text>"
    )


def _tensor_strokes(row: LayerRow, next_row: LayerRow | None, y: int) -> Iterator[str]:
    """Yields the lines of the tensors that are alive between a layer at height `y` and the next one.

    A line begins at the layer's dot if the layer makes the tensor, follows its lane down, and ends at the next dot if
    that layer uses the tensor.
    """
    used = set(next_row.layer.inputs) if next_row else set()
    dot, bottom = LAYERS_RIGHT - 8, y + ROW_HEIGHT
    for lane, tensor in enumerate(row.lanes):
        if tensor is None:
            continue
        x = LAYERS_RIGHT + LANE_WIDTH * lane + 6
        title = f"<title>{html_text(tensor)}</title>"
        start = y
        if tensor in row.layer.outputs:
            yield _path(f"M {dot} {y} L {x} {y + 8}", title)
            start = y + 8
        end = bottom - 8 if tensor in used else bottom
        yield _path(f"M {x} {start} L {x} {end}", title)
        if tensor in used:
            yield _path(f"M {x} {end} L {dot} {bottom}", title)
            if next_row is not None and tensor in next_row.lanes:  # the next layer uses it, and it stays alive
                yield _path(f"M {x} {end} L {x} {bottom}", title)


def _path(path: str, title: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#3182bd" stroke-width="2">{title}</path>'


def _assign_lanes(lanes: list[str | None], begun: Sequence[str], freed: Sequence[int]) -> None:
    """Gives new tensors lanes: first the lanes that the layer's inputs free, then any free lane, then new lanes."""
    for tensor in begun:
        free = [*(i for i in freed if lanes[i] is None), *(i for i, other in enumerate(lanes) if other is None)]
        if free:
            lanes[free[0]] = tensor
        else:
            lanes.append(tensor)


def _rails(before: Sequence[str | None], after: Sequence[str | None], used: set[str]) -> str:
    """Returns one mark for each lane, by the tensor in it before and after a layer that uses the tensors `used`."""
    marks = []
    for lane in range(max(len(before), len(after), 1)):
        old = before[lane] if lane < len(before) else None
        new = after[lane] if lane < len(after) else None
        if old == new:
            marks.append(" " if old is None else "├" if old in used else "│")
        elif old is None:
            marks.append("╮" if lane else "●")
        elif new is None:
            marks.append("╯" if lane else "●")
        else:
            marks.append("●")
    return "".join(marks).rstrip()


def _forward_backward_ns(m: LayerMeasurement) -> int:
    return m.forward_ns + m.whole_backward_ns
