"""How long the members of a group exchange data: gathers, sums and halos over their links."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bapipe.formats.cluster import Bandwidth

How = Literal["gather", "sum", "halo"]
"""A gather gives every member the parts of all others, or the other way round each member the sum of its part; a sum
is both one after the other; a halo is planes of the neighbours."""

Part = Literal["forward", "input_grad", "weight_grad"]
"""The part of a layer's time that contains an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange of a layer.

    Attributes:
        tensors: those exchanged, by name.
        num_bytes: what is exchanged besides, whatever the size of the micro-batch.
        halo: of a halo, the planes from the member before and from the one after, of `planes`.
    """

    part: Part
    how: How
    tensors: tuple[str, ...] = ()
    num_bytes: int = 0
    halo: tuple[int, int] = (0, 0)
    planes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The members of a group and the links between any two of them; a message is as slow as on the slowest."""

    num: int
    links: tuple[Bandwidth, ...]

    def exchange_ns(self, exchange: Exchange, tensor_bytes: Mapping[str, int]) -> int:
        """Returns the time of an exchange of tensors of these sizes."""
        if exchange.how == "halo":
            return sum(self._halo_ns(exchange, tensor_bytes[tensor]) for tensor in exchange.tensors)
        num_bytes = exchange.num_bytes + sum(tensor_bytes[tensor] for tensor in exchange.tensors)
        num_rounds = 2 if exchange.how == "sum" else 1
        # Around a ring, each member sends k - 1 messages of a k-th of the bytes, rounded up (Patarasuk, Yuan 2009).
        return num_rounds * (self.num - 1) * self._message_ns(-(-num_bytes // self.num))

    def _halo_ns(self, exchange: Exchange, num_bytes: int) -> int:
        """A member of two has one neighbour; of more, it sends to one after the other."""
        before, after = (self._message_ns(-(-num_bytes * width // exchange.planes)) for width in exchange.halo)
        return max(before, after) if self.num == 2 else before + after

    def _message_ns(self, num_bytes: int) -> int:
        return max(link.transfer_ns(num_bytes) for link in self.links) if num_bytes else 0
