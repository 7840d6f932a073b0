"""Sums over layers that follow one another: all that the cost of a stage depends on, besides its largest workspace."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import UNSET

from bapipe.formats.profile import LayerMeasurement, LayerProfile


class LayerTotals(NamedTuple):
    """Sums over some layers of one micro-batch, on a device of speed 1; see `bapipe.formats.profile`.

    Attributes:
        backward_ns: B, which is I + W for layers whose B was not measured.
        num_measured_backward: the number of layers whose B was measured.
    """

    forward_ns: int = 0
    input_grad_ns: int = 0
    weight_grad_ns: int = 0
    backward_ns: int = 0
    num_measured_backward: int = 0
    update_ns: int = 0
    param_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    stash_bytes: int = 0
    gradient_stash_bytes: int = 0


def layer_totals(layer: LayerProfile, measured: LayerMeasurement) -> LayerTotals:
    """Returns the totals of one layer."""
    return LayerTotals(
        forward_ns=measured.forward_ns,
        input_grad_ns=measured.input_grad_ns,
        weight_grad_ns=measured.weight_grad_ns,
        backward_ns=measured.whole_backward_ns,
        num_measured_backward=int(measured.backward_ns is not UNSET),
        update_ns=layer.update_ns,
        param_bytes=layer.param_bytes,
        gradient_bytes=layer.gradient_bytes,
        optimizer_bytes=layer.optimizer_state_bytes,
        stash_bytes=measured.stash_bytes,
        gradient_stash_bytes=measured.left_by_input_grad_bytes,
    )


def sum_totals(totals: Iterable[LayerTotals]) -> LayerTotals:
    """Returns the sum of the totals of some layers."""
    return LayerTotals(*map(sum, zip(LayerTotals(), *totals, strict=True)))
