"""The shape of a model: which tensors are alive between its layers, as rails of text or as a drawing in SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bapipe.formats.profile import LayerMeasurement, LayerProfile, ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A layer and the cut after it.

    Attributes:
        rails: one character for each lane of tensors alive beside the layer.
        lanes: the tensor in each lane after the layer, None where the lane is free.
        forward_backward_ns: F + B of the layer.
        cut_bytes: what a cut after the layer carries forward, of one micro-batch.
        num_tensors: how many tensors that is.
    """

    layer: LayerProfile
    rails: str
    lanes: tuple[str | None, ...]
    forward_backward_ns: int
    cut_bytes: int
    num_tensors: int


def layer_rows(profile: ModelProfile) -> tuple[LayerRow, ...]:
    """Returns the layers in order, at the largest measured micro-batch size; O(layers x tensors alive).

    A tensor keeps its lane from the layer that makes it to the last that uses it. `●` is a layer that hands its lane
    on, `╮` begins one, `╯` ends one, `├` uses one, `│` passes by.
    """
    measured = max(profile.measurements, key=lambda m: m.microbatch_size).layers
    last_use = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.inputs}
    num_bytes: dict[str, int] = {}
    lanes: list[str | None] = []
    found = []
    for index, (layer, m) in enumerate(zip(profile.layers, measured, strict=True)):
        num_bytes |= dict(zip(layer.outputs, m.output_bytes, strict=True))
        before = list(lanes)
        ended = {t for t in lanes if t is not None and last_use.get(t, -1) <= index}
        lanes = [None if tensor in ended else tensor for tensor in lanes]
        begun = [tensor for tensor in layer.outputs if last_use.get(tensor, -1) > index]
        _place(lanes, begun, [i for i, tensor in enumerate(before) if tensor in ended])
        while lanes and lanes[-1] is None:
            lanes.pop()
        alive = [tensor for tensor in lanes if tensor is not None]
        found.append(
            LayerRow(
                layer=layer,
                rails=_rails(before, lanes, set(layer.inputs)),
                lanes=tuple(lanes),
                forward_backward_ns=_forward_backward_ns(m),
                cut_bytes=sum(num_bytes[tensor] for tensor in alive),
                num_tensors=len(alive),
            )
        )
    return tuple(found)


def bar(value: int, largest: int, width: int = 16) -> str:
    """Returns a bar of eighths of a character, at least one of them where there is anything."""
    eighths = max(round(8 * width * value / largest), 1) if value and largest else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def layer_svg(profile: ModelProfile) -> str:
    """Returns the model as a drawing: layers as boxes as wide as their time, tensors as strokes as wide as their bytes.

    Layers go down in order, each lane of tensors to the right of the one before; what crosses a horizontal line is what
    a cut there would carry.
    """
    found = layer_rows(profile)
    step, left, pitch = 22, 360, 26
    longest = max((row.forward_backward_ns for row in found), default=0) or 1
    largest = max((row.cut_bytes for row in found), default=0) or 1
    num_lanes = max((len(row.lanes) for row in found), default=0)
    cuts_at = left + pitch * (num_lanes + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{cuts_at + 320}" height="{step * (len(found) + 2)}" '
        'font-family="ui-monospace, monospace" font-size="12">',
        f'<text x="8" y="16" font-weight="bold">layer</text><text x="{cuts_at}" y="16" font-weight="bold">'
        "a cut here carries</text>",
    ]
    for index, row in enumerate(found):
        y = step * (index + 1) + 8
        width = 150 * row.forward_backward_ns / longest
        name = escape(row.layer.name if len(row.layer.name) < 25 else "…" + row.layer.name[-23:])
        title = f"{escape(row.layer.name)} ({escape(row.layer.kind)}): F + B {row.forward_backward_ns / 1e6:.3f} ms"
        parts += [
            f'<rect x="{left - 20 - width:.1f}" y="{y - 8}" width="{width:.1f}" height="14" fill="#9ecae1">'
            f"<title>{title}</title></rect>",
            f'<text x="8" y="{y + 3}">{name}<title>{title}</title></text>',
            *_strokes(row, found[index + 1] if index + 1 < len(found) else None, y, step, left, pitch),
            f'<circle cx="{left - 8}" cy="{y}" r="4" fill="#08519c"/>',
        ]
        if row.num_tensors:
            wide = 150 * row.cut_bytes / largest
            plural = "" if row.num_tensors == 1 else "s"
            parts += [
                f'<line x1="{left - 14}" x2="{cuts_at - 6}" y1="{y + step / 2}" y2="{y + step / 2}" stroke="#ddd"/>',
                f'<rect x="{cuts_at}" y="{y + step / 2 - 5}" width="{wide:.1f}" height="10" fill="#fdae6b"/>',
                f'<text x="{cuts_at + wide + 6:.1f}" y="{y + step / 2 + 4}" fill="#555">'
                f"{row.cut_bytes / 2**20:.2f} MiB, {row.num_tensors} tensor{plural}</text>",
            ]
    return "\n".join([*parts, "</svg>"])


def _strokes(row: LayerRow, following: LayerRow | None, y: int, step: int, left: int, pitch: int) -> list[str]:
    """The tensors that go on from a layer to the next."""
    strokes = []
    used = set(following.layer.inputs) if following else set()
    for lane, tensor in enumerate(row.lanes):
        if tensor is None:
            continue
        x = left + pitch * lane + 6
        title = f"<title>{escape(tensor)}</title>"
        top = y
        if tensor in row.layer.outputs:
            strokes.append(_path(f"M {left - 8} {y} L {x} {y + 8}", title))
            top = y + 8
        bottom = y + step - 8 if tensor in used else y + step
        strokes.append(_path(f"M {x} {top} L {x} {bottom}", title))
        if tensor in used:
            strokes.append(_path(f"M {x} {bottom} L {left - 8} {y + step}", title))
            if following is not None and tensor in following.lanes:
                strokes.append(_path(f"M {x} {bottom} L {x} {y + step}", title))
    return strokes


def _path(path: str, title: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#3182bd" stroke-width="2">{title}</path>'


def _place(lanes: list[str | None], begun: Sequence[str], freed: Sequence[int]) -> None:
    """Gives new tensors lanes: first those that the layer's own inputs leave, then any free one, then new ones."""
    for tensor in begun:
        free = [*(i for i in freed if lanes[i] is None), *(i for i, other in enumerate(lanes) if other is None)]
        if free:
            lanes[free[0]] = tensor
        else:
            lanes.append(tensor)


def _rails(before: Sequence[str | None], after: Sequence[str | None], used: set[str]) -> str:
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
