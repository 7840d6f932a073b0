"""What one member of a group does of each layer, and what the members exchange for it, by the way they split layers.

A tensor between two layers is held whole by every member, or each member holds its channels, its heads of attention or
its planes of it. A layer that needs more than that has it gathered first. The gradient of a tensor is held as the
tensor is.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from msgspec import UNSET

from bapipe.errors import BapipeError
from bapipe.estimates.exchange import Exchange
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.profile import LOSS, LayerProfile, Split

STATISTIC_BYTES = 8
"""Bytes of the sums of a batch norm for each channel: of the values and of their squares, in float32."""


MANY_MEMBERS = 2**40
"""More members than any layer can be split over."""


class CannotSplit(BapipeError):
    """A layer has too few of what the members would share.

    Attributes:
        limit: what the layer has, in words.
        most: the most members that can split it.
    """

    def __init__(self, message: str, limit: str, most: int) -> None:
        super().__init__(message)
        self.limit, self.most = limit, most


class Held(Enum):
    """How the members hold a tensor."""

    WHOLE = "whole"
    CHANNELS = "channels"
    HEADS = "heads"
    PLANES = "planes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLayer:
    """What one member does of a layer.

    Attributes:
        share: its share of the layer's time, that of the member with the most to do.
        weight_share: its share of the layer's parameters, gradients and optimizer state.
        stash_share: its share of the stash and the workspace.
        stashed_whole: inputs that are in the stash whole; `stash_share` is of the rest.
        output_share: its share of the outputs.
        held: how the members hold the outputs.
        gathered_bytes: what it gathers for the time that the layer runs, besides the workspace.
        sums_gradients: whether the members sum the gradients of the parameters once a step.
        exchanges: what the members exchange for a micro-batch.
    """

    share: Fraction = Fraction(1)
    weight_share: Fraction = Fraction(1)
    stash_share: Fraction = Fraction(1)
    stashed_whole: tuple[str, ...] = ()
    output_share: Fraction = Fraction(1)
    held: Held = Held.WHOLE
    gathered_bytes: int = 0
    sums_gradients: bool = False
    exchanges: tuple[Exchange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """The inputs of a layer that other layers make, by how the members hold them.

    Attributes:
        in_parts: those of which each member holds a part.
        by_heads: of these, the queries, keys and values of each member's heads.
        part: the largest part that a member holds of any of those in parts.
        elementwise: those that the layer's module does not read, only the elementwise operators behind it.
        with_gradient: those that have a gradient.
    """

    whole: tuple[str, ...]
    in_parts: tuple[str, ...]
    by_heads: frozenset[str]
    part: Fraction
    elementwise: frozenset[str]
    with_gradient: frozenset[str]

    def to_gather(self, kept_apart: frozenset[str]) -> tuple[str, ...]:
        """Returns those in parts but for some that are needed as they are held."""
        return tuple(tensor for tensor in self.in_parts if tensor not in kept_apart)

    def gradients_of(self, tensors: Sequence[str]) -> tuple[str, ...]:
        return tuple(tensor for tensor in tensors if tensor in self.with_gradient)


def split_layers(
    layers: Sequence[LayerProfile], split: Split, num_members: int, whole: Collection[str] = ()
) -> list[MemberLayer]:
    """Returns what a member does of each layer; `whole` names layers that every member computes whole.

    Raises:
        CannotSplit: a layer has fewer channels than members, or fewer planes than the members or a window need.
    """
    rule = _RULES[split]
    held: dict[str, Held] = {}
    parts: dict[str, Fraction] = {}
    with_gradient: set[str] = set()
    members = []
    for layer in layers:
        known = [tensor for tensor in layer.inputs if tensor in held]
        inputs = LayerInputs(
            whole=tuple(tensor for tensor in known if held[tensor] is Held.WHOLE),
            in_parts=tuple(tensor for tensor in known if held[tensor] is not Held.WHOLE),
            by_heads=frozenset(tensor for tensor in known if held[tensor] is Held.HEADS),
            part=max((parts[tensor] for tensor in known if held[tensor] is not Held.WHOLE), default=Fraction(1)),
            elementwise=frozenset(layer.shape.elementwise_inputs if layer.shape is not UNSET else ()),
            with_gradient=frozenset(with_gradient),
        )
        member = _computed_whole(inputs) if layer.name in whole else rule(layer, inputs, num_members)
        members.append(member)
        held |= dict.fromkeys(layer.outputs, member.held)
        parts |= dict.fromkeys(layer.outputs, member.output_share)
        with_gradient |= set(layer.outputs) - set(layer.no_gradient)
    return members


def tightest_limit(layers: Sequence[LayerProfile], split: Split, whole: Collection[str] = ()) -> CannotSplit | None:
    """Returns what allows the fewest members; None if no layer has a limit."""
    found, num_members = None, MANY_MEMBERS
    while True:
        try:
            split_layers(layers, split, num_members, whole)
        except CannotSplit as limit:
            found, num_members = limit, limit.most
        else:
            return found
        if num_members < 1:
            return found


def _computed_whole(inputs: LayerInputs) -> MemberLayer:
    """Every member computes the whole layer, and keeps the part of its inputs' gradients that it needs."""
    return MemberLayer(exchanges=_exchanges(Exchange(part="forward", how="gather", tensors=inputs.in_parts)))


def _spatial(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    if layer.name == LOSS and inputs.in_parts and not inputs.whole:
        own = Fraction(1, num_members)  # of its planes; the sum of one number over the members is not counted
        return MemberLayer(share=own, stash_share=own)
    shape = layer.shape
    if shape is UNSET or shape.in_planes is UNSET or shape.out_planes is UNSET:
        return _computed_whole(inputs)
    _check_planes(layer.name, shape, shape.in_planes, shape.out_planes, num_members)
    halo = Exchange(part="forward", how="halo", tensors=inputs.in_parts, halo=shape.halo, planes=shape.in_planes)
    back = replace(halo, part="input_grad", tensors=inputs.gradients_of(inputs.in_parts))
    gathered = Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(inputs.whole))
    statistics = _statistics(shape)
    share = _share(shape.out_planes, num_members)
    return MemberLayer(
        share=share,
        stash_share=share,
        output_share=share,
        held=Held.PLANES,
        sums_gradients=True,
        exchanges=_exchanges(halo, back, gathered, *statistics),
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


def _filter(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    return _by_channels(layer, inputs, num_members, _own_filters)


def _channel(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    return _by_channels(layer, inputs, num_members, _own_channels)


def _tensor(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    """A layer of own filters, then one of own channels whose outputs all members sum."""
    is_second = bool(inputs.to_gather(inputs.elementwise)) and set(inputs.whole) <= inputs.elementwise
    return _by_channels(layer, inputs, num_members, _own_channels_summed if is_second else _own_filters)


def _by_channels(
    layer: LayerProfile,
    inputs: LayerInputs,
    num_members: int,
    mixing: Callable[[LayerProfile, LayerInputs, int, int, int], MemberLayer],
) -> MemberLayer:
    """A layer that works on each channel by itself follows its inputs; `mixing` is for one that mixes channels."""
    shape = layer.shape
    if shape is UNSET or shape.in_channels is UNSET or shape.out_channels is UNSET:
        return _computed_whole(inputs)
    if shape.heads is not UNSET:
        return _computed_whole(inputs) if mixing is _own_channels else _own_heads(layer, inputs, shape, num_members)
    if shape.mixes_channels:
        return mixing(layer, inputs, shape.in_channels, shape.out_channels, num_members)
    if not inputs.in_parts:
        return _computed_whole(inputs)
    share = _share(shape.out_channels, num_members)
    gathered = Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(inputs.whole))
    return MemberLayer(
        share=share,
        weight_share=share,
        stash_share=share,
        output_share=share,
        held=Held.CHANNELS,
        exchanges=_exchanges(gathered),
    )


def _own_filters(
    layer: LayerProfile, inputs: LayerInputs, in_channels: int, out_channels: int, num_members: int
) -> MemberLayer:
    """Each member computes some output channels from all input channels, which it keeps for the backward."""
    _check_channels(layer.name, "filters", out_channels, num_members)
    # Of what is added to the outputs, or multiplied by them, a member needs its own channels.
    return _own_outputs(inputs, _share(out_channels, num_members), inputs.elementwise)


def _own_heads(layer: LayerProfile, inputs: LayerInputs, shape: LayerShape, num_members: int) -> MemberLayer:
    """Each member computes the filters of its heads, and attends with them to the queries, keys and values it has."""
    assert shape.heads is not UNSET
    _check_channels(layer.name, "heads of attention", shape.heads, num_members)
    outputs = _own_outputs(inputs, _share(shape.heads, num_members), inputs.by_heads)
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
        exchanges=_exchanges(
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
        output_share=_share(out_channels, num_members),
        held=Held.CHANNELS,
        exchanges=_exchanges(
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
    share = inputs.part if inputs.to_gather(inputs.elementwise) else _share(in_channels, num_members)
    # Every member has the sum, and computes the elementwise operators behind it whole.
    joined_in_parts = tuple(tensor for tensor in inputs.in_parts if tensor in inputs.elementwise)
    read_whole = tuple(tensor for tensor in inputs.whole if tensor not in inputs.elementwise)
    return MemberLayer(
        share=share,
        weight_share=share,
        stash_share=share,
        exchanges=_exchanges(
            Exchange(part="forward", how="sum", tensors=layer.outputs),
            Exchange(part="forward", how="gather", tensors=joined_in_parts),
            Exchange(part="input_grad", how="gather", tensors=inputs.gradients_of(read_whole)),
        ),
    )


def _sharded(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    """Each member computes its samples, and keeps its part of the parameters between the times that all need them."""
    weights = Exchange(part="forward", how="gather", num_bytes=layer.param_bytes)
    own = Fraction(1, num_members)
    return MemberLayer(
        share=own,
        weight_share=own,
        stash_share=own,
        output_share=own,
        gathered_bytes=layer.param_bytes,
        exchanges=_exchanges(
            weights,
            replace(weights, part="input_grad"),
            Exchange(part="weight_grad", how="gather", num_bytes=layer.gradient_bytes),
        ),
    )


_RULES: dict[Split, Callable[[LayerProfile, LayerInputs, int], MemberLayer]] = {
    "tensor": _tensor,
    "filter": _filter,
    "channel": _channel,
    "spatial": _spatial,
    "sharded": _sharded,
}


def _exchanges(*exchanges: Exchange) -> tuple[Exchange, ...]:
    """Those that exchange anything."""
    return tuple(each for each in exchanges if each.num_bytes or each.tensors)


def _with_gradient(layer: LayerProfile) -> tuple[str, ...]:
    return tuple(tensor for tensor in layer.outputs if tensor not in layer.no_gradient)


def _share(count: int, num_members: int) -> Fraction:
    """The part of the member that has the most of `count` equal parts."""
    return Fraction(-(-count // num_members), count)


def _check_channels(name: str, what: str, count: int, num_members: int) -> None:
    if count < num_members:
        raise CannotSplit(
            f"layer '{name}' has {count} {what} for {num_members} members: use at most {count} members, or let every "
            f"member compute it whole, with `whole` {name}",
            limit=f"{count} {what} of layer '{name}'",
            most=count,
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
