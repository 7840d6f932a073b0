"""The layers of a model with the tensors alive between them, as rails of text.

Every tensor has a lane, a column to the right of the layers, from the layer that makes it to the last one that uses it,
like a branch in `git log --graph`. A cut sends the tensors whose lanes it crosses. Beyond `MAX_LANES` no tensor gets a
lane: nobody could follow them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import ModelProfile

MAX_LANES = 64
"""Most lanes that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A layer and the cut after it.

    Attributes:
        rails: one character for each lane of tensors alive next to the layer, and `…` if tensors behind it have none.
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
    """Returns the layers in order, at the largest measured micro-batch size; O(layers + tensors).

    `●` is a layer whose output takes over a lane of its inputs, `╮` begins a lane, `╯` ends one, `├` uses one, and `│`
    passes by.
    """
    measured = max(profile.measurements, key=lambda m: m.microbatch_size).layers
    last_use = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.inputs}
    num_bytes: dict[str, int] = {}  # of the tensors alive
    lanes: list[str | None] = []
    cut_bytes, rows = 0, []
    for index, (layer, m) in enumerate(zip(profile.layers, measured, strict=True)):
        lanes_before = list(lanes)
        ended = {tensor for tensor in layer.inputs if tensor in num_bytes and last_use[tensor] == index}
        lanes = [None if tensor in ended else tensor for tensor in lanes]
        begun = {t: size for t, size in zip(layer.outputs, m.output_bytes, strict=True) if last_use.get(t, -1) > index}
        cut_bytes += sum(begun.values()) - sum(num_bytes.pop(tensor) for tensor in ended)
        num_bytes |= begun
        _assign_lanes(lanes, [*begun], [i for i, tensor in enumerate(lanes_before) if tensor in ended])
        while lanes and lanes[-1] is None:
            lanes.pop()
        has_others = len(num_bytes) > len(lanes) - lanes.count(None)
        rows.append(
            LayerRow(
                layer=layer,
                rails=_rails(lanes_before, lanes, set(layer.inputs)) + "…" * has_others,
                lanes=tuple(lanes),
                forward_backward_ns=m.forward_backward_ns,
                cut_bytes=cut_bytes,
                num_tensors=len(num_bytes),
            )
        )
    return tuple(rows)


def bar(value: int, largest: int, width: int = 16) -> str:
    """Returns a bar of eighths of a character, at least one eighth for any value above 0."""
    eighths = max(round(8 * width * value / largest), 1) if value and largest else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _assign_lanes(lanes: list[str | None], begun: Sequence[str], freed: Sequence[int]) -> None:
    """Gives new tensors lanes: first the lanes that the layer's inputs free, then any free lane, then new lanes."""
    for tensor in begun:
        free = [*(i for i in freed if lanes[i] is None), *(i for i, other in enumerate(lanes) if other is None)]
        if free:
            lanes[free[0]] = tensor
        elif len(lanes) < MAX_LANES:
            lanes.append(tensor)
        else:
            return


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
