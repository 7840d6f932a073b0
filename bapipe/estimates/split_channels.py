"""Layers that members share by channels or by heads of attention: each has some of their parameters."""

from collections.abc import Callable
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


def by_filters(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    return _channel_layer(layer, inputs, num_members, _own_filters)


def by_channels(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    return _channel_layer(layer, inputs, num_members, _own_channels)


def by_both(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    """A layer of own filters, then one of own channels whose outputs all members sum."""
    if layer.kind.endswith("Embedding"):  # torch's, and classes derived from it, such as OPTLearnedPositionalEmbedding
        return _channel_layer(layer, inputs, num_members, _own_rows)
    is_second = bool(inputs.to_gather(inputs.elementwise)) and set(inputs.whole) <= inputs.elementwise
    return _channel_layer(layer, inputs, num_members, _own_channels_summed if is_second else _own_filters)


def _channel_layer(
    layer: LayerProfile,
    inputs: LayerInputs,
    num_members: int,
    mixing: Callable[[LayerProfile, LayerInputs, int, int, int], MemberLayer],
) -> MemberLayer:
    """A layer that works on each channel by itself follows its inputs; `mixing` is for one that mixes channels."""
    shape = layer.shape
    if shape is UNSET or shape.in_channels is UNSET or shape.out_channels is UNSET:
        return computed_whole(inputs)
    if shape.heads is not UNSET:
        return computed_whole(inputs) if mixing is _own_channels else _own_heads(layer, inputs, shape, num_members)
    if shape.mixes_channels:
        return mixing(layer, inputs, shape.in_channels, shape.out_channels, num_members)
    if not inputs.in_parts:
        return computed_whole(inputs)
    share = largest_share(shape.out_channels, num_members)
    gathered = Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(inputs.whole))
    return MemberLayer(
        share=share,
        weight_share=share,
        stash_share=share,
        output_share=share,
        held=Held.CHANNELS,
        exchanges=exchanges_of(gathered),
    )


def _own_filters(
    layer: LayerProfile, inputs: LayerInputs, in_channels: int, out_channels: int, num_members: int
) -> MemberLayer:
    """Each member computes some output channels from all input channels, which it keeps for the backward."""
    _check_channels(layer.name, "filters", out_channels, num_members)
    # Of what is added to the outputs, or multiplied by them, a member needs its own channels.
    return _own_outputs(inputs, largest_share(out_channels, num_members), inputs.elementwise)


def _own_rows(
    layer: LayerProfile, inputs: LayerInputs, in_channels: int, out_channels: int, num_members: int
) -> MemberLayer:
    """Each member looks up the rows of the table that it has, and all sum: Megatron-LM's vocabulary-parallel embedding.

    The hidden states are then whole from the start, and a last layer that shares the table splits it the same way, as
    its filters. Positions or segments, added to another embedding, are computed whole, which saves a sum.
    """
    is_added = any(tensor in inputs.elementwise for tensor in (*inputs.whole, *inputs.in_parts))
    if (is_added and not layer.shares) or in_channels < num_members:
        return computed_whole(inputs)
    return _own_channels_summed(layer, inputs, in_channels, out_channels, num_members)


def _own_heads(layer: LayerProfile, inputs: LayerInputs, shape: LayerShape, num_members: int) -> MemberLayer:
    """Each member computes the filters of its heads, and attends with them to the queries, keys and values it has."""
    assert shape.heads is not UNSET
    _check_channels(layer.name, "heads of attention", shape.heads, num_members)
    outputs = _own_outputs(inputs, largest_share(shape.heads, num_members), inputs.by_heads)
    return replace(
        outputs,
        stash_share=outputs.share,
        stashed_whole=(*inputs.whole, *inputs.to_gather(inputs.by_heads)),
        held=Held.CHANNELS if shape.attends else Held.HEADS,
    )


def _own_outputs(inputs: LayerInputs, share: Fraction, kept_apart: frozenset[str]) -> MemberLayer:
    """Each member computes a share of the outputs from all inputs, but of those `kept_apart` from its own part."""
    gathered = inputs.to_gather(kept_apart)
    summed = tuple(tensor for tensor in inputs.whole if tensor not in inputs.elementwise)
    in_channels = tuple(tensor for tensor in inputs.whole if tensor in inputs.elementwise)
    return MemberLayer(
        share=share,
        weight_share=share,
        output_share=share,
        held=Held.CHANNELS,
        exchanges=exchanges_of(
            Exchange(part="forward", how="gather", tensors=gathered),
            # Every member has a part of the sum that is the gradient of each input channel.
            Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(gathered)),
            Exchange(part="input_grad", how="sum", tensors=inputs.gradients_of(summed)),
            Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(in_channels)),
        ),
    )


def _own_channels(
    layer: LayerProfile, inputs: LayerInputs, in_channels: int, out_channels: int, num_members: int
) -> MemberLayer:
    """Each member computes its part of the sum that is each output channel, from some input channels."""
    summed = _own_channels_summed(layer, inputs, in_channels, out_channels, num_members)
    if out_channels < num_members:  # too few to hold in parts
        return summed
    return replace(
        summed,
        output_share=largest_share(out_channels, num_members),
        held=Held.CHANNELS,
        exchanges=exchanges_of(
            Exchange(part="forward", how="gather", tensors=layer.outputs),
            Exchange(part="input_grad", how="gather", tensors=_with_gradient(layer)),
            Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(inputs.whole)),
        ),
    )


def _own_channels_summed(
    layer: LayerProfile, inputs: LayerInputs, in_channels: int, out_channels: int, num_members: int
) -> MemberLayer:
    _check_channels(layer.name, "input channels", in_channels, num_members)
    # A member computes with the channels that it has, which are those of whole heads or filters.
    share = inputs.part if inputs.to_gather(inputs.elementwise) else largest_share(in_channels, num_members)
    # Every member has the sum, and computes the elementwise operators behind it whole.
    joined_in_parts = tuple(tensor for tensor in inputs.in_parts if tensor in inputs.elementwise)
    read_whole = tuple(tensor for tensor in inputs.whole if tensor not in inputs.elementwise)
    return MemberLayer(
        share=share,
        weight_share=share,
        stash_share=share,
        exchanges=exchanges_of(
            Exchange(part="forward", how="sum", tensors=layer.outputs),
            Exchange(part="forward", how="gather", tensors=joined_in_parts),
            Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(read_whole)),
        ),
    )


def _with_gradient(layer: LayerProfile) -> tuple[str, ...]:
    return tuple(tensor for tensor in layer.outputs if tensor not in layer.no_gradient)


def _check_channels(name: str, what: str, count: int, num_members: int) -> None:
    if count < num_members:
        raise CannotSplit(
            f"layer '{name}' has {count} {what} for {num_members} members: use at most {count} members, or let every "
            f"member compute it whole, with `whole` {name}",
            limit=f"{count} {what} of layer '{name}'",
            most=count,
        )
