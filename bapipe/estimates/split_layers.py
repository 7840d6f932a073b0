"""What one member of a group does of each layer, and what the members exchange for it, by the way they split layers.

A tensor between two layers is held whole by every member, or each member holds its channels, its heads of attention or
its planes of it. A layer that needs more than that has it gathered first. The gradient of a tensor is held as the
tensor is.
"""

from collections.abc import Callable, Collection, Sequence
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
from bapipe.estimates.split_channels import by_both, by_channels, by_filters
from bapipe.estimates.split_planes import by_planes
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import Split

MANY_MEMBERS = 2**40
"""More members than any layer can be split over."""


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
    summed: set[str] = set()
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
        member = computed_whole(inputs) if layer.name in whole else rule(layer, inputs, num_members)
        member = replace(
            member,
            whole_gradients=_whole_gradients(member.exchanges),
            exchanges=_first_sums(member.exchanges, summed),
        )
        members.append(member)
        held |= dict.fromkeys(layer.outputs, member.held)
        parts |= dict.fromkeys(layer.outputs, member.output_share)
        with_gradient |= set(layer.outputs) - set(layer.no_gradient)
    return members


def _whole_gradients(exchanges: Sequence[Exchange]) -> frozenset[str]:
    """The tensors whose gradients the members gather or sum."""
    return frozenset(
        name for each in exchanges if each.part == "input_grad" and each.how != "halo" for name in each.tensors
    )


def _first_sums(exchanges: Sequence[Exchange], summed: set[str]) -> tuple[Exchange, ...]:
    """Leaves out the sums of gradients that an earlier reader of the tensor makes, and adds the others to `summed`.

    Each member adds its own parts of a gradient for all layers that read the tensor. The first of them, whose backward
    is the last, sums over the members, as in Megatron-LM. A gradient sent from a later stage is still in parts.
    """
    found = []
    for exchange in exchanges:
        if exchange.part == "input_grad" and exchange.how == "sum" and exchange.tensors:
            exchange = replace(exchange, tensors=tuple(name for name in exchange.tensors if name not in summed))
            summed.update(exchange.tensors)
        found.append(exchange)
    return exchanges_of(*found)


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


def _sharded(layer: LayerProfile, inputs: LayerInputs, num_members: int) -> MemberLayer:
    """Each member computes its samples, and keeps its part of the parameters between the times that all need them.

    So it gathers parameters that another layer counts, too. Buffers are whole on each. `with_samples` has the shares of
    its samples.
    """
    weights = Exchange(part="forward", how="gather", num_bytes=layer.weight_bytes + layer.shared_bytes)
    return MemberLayer(
        weight_share=Fraction(1, num_members),
        whole_bytes=layer.param_bytes - layer.weight_bytes,
        splits_samples=True,
        gathered_bytes=weights.num_bytes,
        exchanges=exchanges_of(
            weights,
            replace(weights, part="input_grad"),
            Exchange(part="weight_grad", how="gather", num_bytes=layer.gradient_bytes + layer.shared_gradient_bytes),
        ),
    )


def with_samples(members: Sequence[MemberLayer], num_samples: int, num_members: int) -> list[MemberLayer]:
    """Returns what the member with the most of `num_samples` samples does of each layer of a `sharded` split."""
    own = largest_share(num_samples, num_members)
    return [replace(member, share=own, stash_share=own, output_share=own) for member in members]


_RULES: dict[Split, Callable[[LayerProfile, LayerInputs, int], MemberLayer]] = {
    "tensor": by_both,
    "filter": by_filters,
    "channel": by_channels,
    "spatial": by_planes,
    "sharded": _sharded,
}
