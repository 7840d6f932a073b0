"""The stash and the workspace of one member of a group, from those of a device that computes the whole layer.

A workspace holds new gradients: of the parameters, before they are added to those that are kept, and of the tensors
that the layer reads and makes. Members split some of these and have others whole.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from bapipe.estimates.member_layer import MemberLayer
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile

_Part = tuple[int, Fraction]
"""Bytes, and a member's share of them."""

_WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """What the memory of a layer consists of, in bytes.

    Attributes:
        gradient_bytes: a new gradient of all its parameters, be they shared with another layer or not.
        fixed_stash, fixed_workspace: what does not grow with the samples (weights copied to another precision), besides
            that gradient.
        inputs, outputs: the names of the tensors that have gradients.
    """

    gradient_bytes: int
    fixed_stash: int
    fixed_workspace: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def layer_memories(profile: ModelProfile) -> list[LayerMemory]:
    """Returns the memory of each layer.

    What does not grow with the samples is what a line through the two smallest micro-batches leaves at no samples; of a
    profile of one size it is not known, and nothing.
    """
    by_size = sorted(profile.measurements, key=lambda measured: measured.microbatch_size)
    first, second = by_size[0], by_size[min(1, len(by_size) - 1)]
    a, b = first.microbatch_size, second.microbatch_size

    def at_no_samples(num_bytes: Callable[[LayerMeasurement], int], layer: int) -> int:
        if a == b:
            return 0
        of_first, of_second = num_bytes(first.layers[layer]), num_bytes(second.layers[layer])
        return max(0, (of_first * b - of_second * a) // (b - a))

    with_gradient = {name for layer in profile.layers for name in layer.outputs if name not in layer.no_gradient}
    found = []
    for i, layer in enumerate(profile.layers):
        gradient_bytes = layer.gradient_bytes + layer.shared_gradient_bytes
        found.append(
            LayerMemory(
                gradient_bytes=gradient_bytes,
                fixed_stash=at_no_samples(lambda m: m.stash_bytes, i),
                fixed_workspace=max(0, at_no_samples(lambda m: m.workspace_bytes, i) - gradient_bytes),
                inputs=tuple(name for name in layer.inputs if name in with_gradient),
                outputs=tuple(name for name in layer.outputs if name in with_gradient),
            )
        )
    return found


def stash_bytes(
    measured: LayerMeasurement, memory: LayerMemory, member: MemberLayer, tensor_bytes: Mapping[str, int]
) -> int:
    """Returns what a member keeps of a micro-batch for the backward of a layer."""
    whole = sum(tensor_bytes[tensor] for tensor in member.stashed_whole)
    whole += memory.fixed_stash if member.splits_samples else 0
    return _share(measured.stash_bytes, [(whole, _WHOLE)], member.stash_share)


def workspace_bytes(
    measured: LayerMeasurement, memory: LayerMemory, member: MemberLayer, tensor_bytes: Mapping[str, int]
) -> int:
    """Returns what a member needs while it runs a layer, with what it gathers for that time."""
    parts = [(memory.gradient_bytes, _WHOLE if member.splits_samples else member.weight_share)]
    parts += [(memory.fixed_workspace, _WHOLE)] if member.splits_samples else []
    for tensors, share in ((memory.inputs, member.share), (memory.outputs, member.output_share)):
        parts += [(tensor_bytes[name], _WHOLE if name in member.whole_gradients else share) for name in tensors]
    return _share(measured.workspace_bytes, parts, member.stash_share) + member.gathered_bytes


def _share(num_bytes: int, parts: Iterable[_Part], share_of_rest: Fraction) -> int:
    """A member's share of some bytes, rounded up; parts that are more than these are those with the largest shares."""
    total = Fraction(0)
    for part, share in sorted(parts, key=lambda part: part[1], reverse=True):
        counted = min(part, num_bytes)
        total += counted * share
        num_bytes -= counted
    return ceil(total + num_bytes * share_of_rest)
