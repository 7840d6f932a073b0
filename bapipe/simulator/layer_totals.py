"""Sums over layers that follow one another: all that the cost of a stage depends on, besides its largest workspace."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import UNSET

from bapipe.formats.host_times import HostTimes
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement

NO_HOST_TIMES = HostTimes(forward_ns=0, input_grad_ns=0, weight_grad_ns=0, backward_ns=0)
"""Of a device that is its own host."""


class LayerTotals(NamedTuple):
    """Sums over some layers of one micro-batch, on a device of speed 1; see `bapipe.formats.profile`.

    Attributes:
        backward_ns: B, which is I + W for layers whose B was not measured.
        num_measured_backward: the number of layers whose B was measured.
        forward_exchange_ns, input_grad_exchange_ns, weight_grad_exchange_ns, backward_exchange_ns: how much of F, I, W
            and B the members of a group exchange data, which no speed of theirs changes.
        host_forward_ns, host_input_grad_ns, host_weight_grad_ns, host_backward_ns: what the host needs for F, I, W and
            B; 0 for layers without times of the host.
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
    forward_exchange_ns: int = 0
    input_grad_exchange_ns: int = 0
    weight_grad_exchange_ns: int = 0
    backward_exchange_ns: int = 0
    host_forward_ns: int = 0
    host_input_grad_ns: int = 0
    host_weight_grad_ns: int = 0
    host_backward_ns: int = 0

    @property
    def has_host_times(self) -> bool:
        """Whether the host needs any time."""
        return any((self.host_forward_ns, self.host_input_grad_ns, self.host_weight_grad_ns, self.host_backward_ns))


def layer_totals(layer: LayerProfile, measured: LayerMeasurement) -> LayerTotals:
    """Returns the totals of one layer."""
    host, exchange = measured.host or NO_HOST_TIMES, measured.exchange
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
        forward_exchange_ns=exchange.forward_ns,
        input_grad_exchange_ns=exchange.input_grad_ns,
        weight_grad_exchange_ns=exchange.weight_grad_ns,
        backward_exchange_ns=exchange.backward_ns,
        host_forward_ns=host.forward_ns,
        host_input_grad_ns=host.input_grad_ns,
        host_weight_grad_ns=host.weight_grad_ns,
        host_backward_ns=host.backward_ns,
    )


def sum_totals(totals: Iterable[LayerTotals]) -> LayerTotals:
    """Returns the sum of the totals of some layers."""
    return LayerTotals(*map(sum, zip(LayerTotals(), *totals, strict=True)))
