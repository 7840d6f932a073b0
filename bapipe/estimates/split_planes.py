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
    _check_number(layer.name, shape.in_planes, shape.out_planes, num_members)
    planes = halo_of(shape, shape.in_planes, shape.out_planes, num_members)
    _check_halo(layer.name, shape.window, max(planes), shape.in_planes, num_members)
    halo = Exchange(part="forward", how="halo", tensors=inputs.in_parts, halo=planes, planes=shape.in_planes)
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


def halo_of(shape: LayerShape, in_planes: int, out_planes: int, num_members: int) -> tuple[int, int]:
    """Returns the most planes that a member needs of the one before it, and of the one after it.

    Members hold blocks of planes as even as can be, in the order of the members, of the inputs as of the outputs.
    """
    before = after = 0
    for member in range(num_members):
        first, stop = member * in_planes // num_members, (member + 1) * in_planes // num_members
        first_out, stop_out = member * out_planes // num_members, (member + 1) * out_planes // num_members
        first_read = max(0, first_out * shape.stride - shape.padding)
        stop_read = min(in_planes, (stop_out - 1) * shape.stride - shape.padding + shape.window)
        before, after = max(before, first - first_read), max(after, stop_read - stop)
    return before, after


def _check_number(name: str, in_planes: int, out_planes: int, num_members: int) -> None:
    fewest = min(in_planes, out_planes)
    if fewest < num_members:
        raise CannotSplit(
            f"layer '{name}' has {fewest} planes for {num_members} members: use at most {fewest} members, or let every "
            f"member compute it whole, with `whole` {name}",
            limit=f"{fewest} planes of layer '{name}'",
            most=fewest,
        )


def _check_halo(name: str, window: int, halo: int, in_planes: int, num_members: int) -> None:
    if halo > in_planes // num_members:
        raise CannotSplit(
            f"layer '{name}' has {in_planes} planes for {num_members} members, and its window of {window} needs "
            f"{halo} of a neighbour, which has {in_planes // num_members}: use fewer members, or let every "
            f"member compute it whole, with `whole` {name}",
            limit=f"{in_planes} planes of layer '{name}', of which a window needs {halo} of a neighbour",
            most=in_planes // halo,
        )
