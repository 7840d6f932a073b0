"""The layers of a model with the tensors alive between them, drawn as text.

Every tensor has a rail, a column to the right of the layers, from the layer that makes it to the last one that uses it,
like a branch in `git log --graph`. A cut sends the tensors whose rails it crosses. Beyond `MAX_RAILS` no tensor gets a
rail: nobody could follow them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import ModelProfile

MAX_RAILS = 64
"""Most rails that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A layer and the cut after it.

    Attributes:
        marks: one character for each rail of tensors alive next to the layer, and `…` if tensors behind it have none.
        rails: the tensor in each rail after the layer, None if the rail is free.
        forward_backward_ns: F + B of the layer.
        cut_bytes: bytes of the tensors that cross a cut after the layer, for one micro-batch.
        num_tensors: the number of these tensors.
    """

    layer: LayerProfile
    marks: str
    rails: tuple[str | None, ...]
    forward_backward_ns: int
    cut_bytes: int
    num_tensors: int


def layer_rows(profile: ModelProfile) -> tuple[LayerRow, ...]:
    """Returns the layers in order, at the largest measured micro-batch size; O(layers + tensors).

    `●` is a layer whose output takes over a rail of its inputs, `╮` begins a rail, `╯` ends one, `├` uses one, and `│`
    passes by.
    """
    measured = max(profile.measurements, key=lambda m: m.microbatch_size).layers
    last_use = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.inputs}
    num_bytes: dict[str, int] = {}  # of the tensors alive
    rails: list[str | None] = []
    cut_bytes, rows = 0, []
    for index, (layer, m) in enumerate(zip(profile.layers, measured, strict=True)):
        rails_before = list(rails)
        ended = {tensor for tensor in layer.inputs if tensor in num_bytes and last_use[tensor] == index}
        rails = [None if tensor in ended else tensor for tensor in rails]
        begun = {t: size for t, size in zip(layer.outputs, m.output_bytes, strict=True) if last_use.get(t, -1) > index}
        cut_bytes += sum(begun.values()) - sum(num_bytes.pop(tensor) for tensor in ended)
        num_bytes |= begun
        _assign_rails(rails, [*begun], [i for i, tensor in enumerate(rails_before) if tensor in ended])
        while rails and rails[-1] is None:
            rails.pop()
        has_others = len(num_bytes) > len(rails) - rails.count(None)
        rows.append(
            LayerRow(
                layer=layer,
                marks=_marks(rails_before, rails, set(layer.inputs)) + "…" * has_others,
                rails=tuple(rails),
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


def _assign_rails(rails: list[str | None], begun: Sequence[str], freed: Sequence[int]) -> None:
    """Gives new tensors rails: first the rails that the layer's inputs free, then any free rail, then new rails."""
    for tensor in begun:
        free = [*(i for i in freed if rails[i] is None), *(i for i, other in enumerate(rails) if other is None)]
        if free:
            rails[free[0]] = tensor
        elif len(rails) < MAX_RAILS:
            rails.append(tensor)
        else:
            return


def _marks(before: Sequence[str | None], after: Sequence[str | None], used: set[str]) -> str:
    """Returns one mark for each rail, by the tensor in it before and after a layer that uses the tensors `used`."""
    marks = []
    for rail in range(max(len(before), len(after), 1)):
        old = before[rail] if rail < len(before) else None
        new = after[rail] if rail < len(after) else None
        if old == new:
            marks.append(" " if old is None else "├" if old in used else "│")
        elif old is None:
            marks.append("╮" if rail else "●")
        elif new is None:
            marks.append("╯" if rail else "●")
        else:
            marks.append("●")
    return "".join(marks).rstrip()
