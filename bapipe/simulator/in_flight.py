"""Memory in flight: what the micro-batches of a stage keep on a device, and how each action changes that.

The one place of this rule. `in_flight_bytes` is its scalar form and, with an array in place of each number of bytes,
its vectorized form, [intervals] for example; searches take the numbers of micro-batches from `TAKEN` and `RETURNED`.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bapipe.schedules.table import Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes = TypeVar("Bytes", int, "NDArray[Any]")


class InFlight(NamedTuple):
    """Numbers of micro-batches of a stage on a device.

    Attributes:
        kept: between the start of their F and the end of their B or W. Each keeps its stash or, with recomputation,
            what the recomputed layers need.
        in_backward: between the start of their B or I and the end of their B or W. With recomputation, each has the
            stash of the recomputed layers besides.
        before_weight_grad: between the start of their I and the end of their W. Each keeps what I leaves for W.
    """

    kept: int
    in_backward: int
    before_weight_grad: int


TAKEN = {
    Phase.FORWARD: InFlight(1, 0, 0),
    Phase.BACKWARD: InFlight(0, 1, 0),
    Phase.INPUT_GRAD: InFlight(0, 1, 1),
    Phase.WEIGHT_GRAD: InFlight(0, 0, 0),
}
"""What an action adds when it starts."""

RETURNED = {
    Phase.FORWARD: InFlight(0, 0, 0),
    Phase.BACKWARD: InFlight(1, 1, 0),
    Phase.INPUT_GRAD: InFlight(0, 0, 0),
    Phase.WEIGHT_GRAD: InFlight(1, 1, 1),
}
"""What it removes when it ends."""


def in_flight_during(phases: Iterable[Phase]) -> Iterator[InFlight]:
    """Yields what is in flight during each action of a stage on a device, which runs one action at a time."""
    in_flight = InFlight(0, 0, 0)
    for phase in phases:
        in_flight = InFlight(*map(int.__add__, in_flight, TAKEN[phase]))
        yield in_flight
        in_flight = InFlight(*map(int.__sub__, in_flight, RETURNED[phase]))


def in_flight_bytes(in_flight: InFlight, kept: Bytes, recomputed: Bytes, left_for_w: Bytes) -> Bytes:
    """Returns the bytes of the micro-batches in flight, from those of one; arrays broadcast together.

    Args:
        kept: from F to the end of the backward.
        recomputed: besides, during the backward.
        left_for_w: what I leaves for W.
    """
    num_bytes: Bytes = in_flight.kept * kept
    # Most schedules need only some of the terms: arrays of all intervals are large, so those times 0 are left out.
    if in_flight.in_backward:
        num_bytes = num_bytes + in_flight.in_backward * recomputed
    if in_flight.before_weight_grad:
        num_bytes = num_bytes + in_flight.before_weight_grad * left_for_w
    return num_bytes
