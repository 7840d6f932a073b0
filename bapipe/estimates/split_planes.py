"""Layers that members share by planes: each has some planes of every sample, and all parameters."""

from dataclasses import replace
from fractions import Fraction

from msgspec import UNSET

from bapipe.estimates.exchange import Exchange
from bapipe.estimates.member_layer import (
    CannotSplit,
    Held,
    LayerInputs,
    MemberLayer,
    computed_whole,
    exchanges_of,
    largest_share,
)
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.profile import LOSS

STATISTIC_BYTES = 8
"""Bytes of the sums of a batch norm for each channel: of the values and of their squares, in float32."""


def by_planes(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    if layer.name == LOSS and inputs.in_parts and not inputs.whole:
        own = Fraction(1, num_members)  # of its planes; the sum of one number over the members is not counted
        return MemberLayer(share=own, splits_samples=True, stash_share=own)
    shape = layer.shape
    if shape is UNSET or shape.in_planes is UNSET or shape.out_planes is UNSET:
        return computed_whole(inputs)
    _check_planes(layer.name, shape, shape.in_planes, shape.out_planes, num_members)
    halo = Exchange(part="forward", how="halo", tensors=inputs.in_parts, halo=shape.halo, planes=shape.in_planes)
    back = replace(halo, part="input_grad", tensors=inputs.gradients_of(inputs.in_parts))
    gathered = Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(inputs.whole))
    statistics = _statistics(shape)
    share = largest_share(shape.out_planes, num_members)
    return MemberLayer(
        share=share,
        splits_samples=True,
        stash_share=share,
        output_share=share,
        held=Held.PLANES,
        sums_gradients=True,
        exchanges=exchanges_of(halo, back, gathered, *statistics),
    )


def _statistics(shape: LayerShape) -> tuple[Exchange, ...]:
    """The sums of a batch norm, and those of its backward."""
    if not shape.sums_samples or shape.out_channels is UNSET:
        return ()
    num_bytes = STATISTIC_BYTES * shape.out_channels
    return (
        Exchange(part="forward", how="sum", num_bytes=num_bytes),
        Exchange(part="input_grad", how="sum", num_bytes=num_bytes),
    )


def _check_planes(name: str, shape: LayerShape, in_planes: int, out_planes: int, num_members: int) -> None:
    fewest = min(in_planes, out_planes)
    if fewest < num_members:
        raise CannotSplit(
            f"layer '{name}' has {fewest} planes for {num_members} members: use at most {fewest} members, or let every "
            f"member compute it whole, with `whole` {name}",
            limit=f"{fewest} planes of layer '{name}'",
            most=fewest,
        )
    if max(shape.halo) > in_planes // num_members:
        raise CannotSplit(
            f"layer '{name}' has {in_planes} planes for {num_members} members, and its window of {shape.window} needs "
            f"{max(shape.halo)} of a neighbour, which has {in_planes // num_members}: use fewer members, or let every "
            f"member compute it whole, with `whole` {name}",
            limit=f"{in_planes} planes of layer '{name}', of which a window needs {max(shape.halo)} of a neighbour",
            most=in_planes // max(shape.halo),
        )
