"""How long the host needs to enqueue the work of a layer on a device that works by itself, such as a GPU."""

import msgspec

from bapipe.units import NonNegative


class HostTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of the host for one micro-batch of a layer: launching kernels, and what Python and torch do between.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns, backward_ns: for F, I, W and B.
    """

    forward_ns: NonNegative
    input_grad_ns: NonNegative
    weight_grad_ns: NonNegative
    backward_ns: NonNegative
