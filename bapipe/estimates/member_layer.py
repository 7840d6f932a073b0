"""What one member of a group does of a layer, and how the members hold the tensors between layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from bapipe.errors import BapipeError
from bapipe.estimates.exchange import Exchange


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
        whole_bytes: of the parameters and buffers, what it holds whole; `weight_share` is of the rest.
        splits_samples: whether it computes some samples, or planes of them, with all parameters.
        stash_share: its share of the stash, and of what the workspace has besides gradients; if it splits samples, of
            what grows with these.
        stashed_whole: inputs that are in the stash whole; `stash_share` is of the rest.
        output_share: its share of the outputs.
        held: how the members hold the outputs.
        whole_gradients: inputs and outputs whose gradients it has whole while the layer's backward runs: those that are
            gathered, and those of which each member has a part of the sum.
        gathered_bytes: what it gathers for the time that the layer runs, besides the workspace.
        sums_gradients: whether the members sum the gradients of the parameters once a step.
        exchanges: what the members exchange for a micro-batch.
    """

    share: Fraction = Fraction(1)
    weight_share: Fraction = Fraction(1)
    whole_bytes: int = 0
    splits_samples: bool = False
    stash_share: Fraction = Fraction(1)
    stashed_whole: tuple[str, ...] = ()
    output_share: Fraction = Fraction(1)
    held: Held = Held.WHOLE
    whole_gradients: frozenset[str] = frozenset()
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


def computed_whole(inputs: LayerInputs) -> MemberLayer:
    """Every member computes the whole layer, and keeps the part of its inputs' gradients that it needs."""
    return MemberLayer(exchanges=exchanges_of(Exchange(part="forward", how="gather", tensors=inputs.in_parts)))


def exchanges_of(*exchanges: Exchange) -> tuple[Exchange, ...]:
    """Those that exchange anything."""
    return tuple(each for each in exchanges if each.num_bytes or each.tensors)


def largest_share(count: int, num_members: int) -> Fraction:
    """The part of the member that has the most of `count` equal parts."""
    return Fraction(-(-count // num_members), count)
