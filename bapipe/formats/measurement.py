"""The layers of a profile at one micro-batch size: measured, or interpolated between two measured sizes."""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import msgspec

from bapipe.errors import InvalidFile
from bapipe.formats.host_times import HostTimes
from bapipe.formats.layer_profile import LayerProfile
from bapipe.units import NonNegative, NonNegativeFloat, Positive


class ExchangeTimes(NamedTuple):
    """How long the members of a group exchange data for a layer, in F, I, W and B."""

    forward_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    backward_ns: int


class LayerMeasurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer at one micro-batch size.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns: times of F, and of I and W if they run separately.
        backward_ns: time of B if it differs from I + W: a layer that computes both at once, such as an LSTM, does much
            of its work twice when they run separately. If left out, it is I + W.
        stash_bytes: bytes kept from F to the backward.
        gradient_stash_bytes: bytes that I produces for W, kept beside the stash from I to W. If left out, none.
        workspace_bytes: bytes that are allocated only while the layer runs.
        output_bytes: bytes of each output of the layer; 0 for an output that needs no transfer.
        spread: precision of the times: half the width of the 95 % confidence interval of the median of F + B, relative
            to that median. Left out if it is not known.
        forward_exchange_ns, backward_exchange_ns: how much of F, and of B, the members of a group exchange data for the
            layer. Left out if it is not known.
        host: times of the host, which enqueues the layer's work while the device does it; the other times are then the
            device's. Left out if device and host are one, or the host's times are not known.
    """

    forward_ns: NonNegative
    input_grad_ns: NonNegative
    weight_grad_ns: NonNegative
    backward_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    stash_bytes: NonNegative
    gradient_stash_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    workspace_bytes: NonNegative = 0
    output_bytes: tuple[NonNegative, ...]
    spread: NonNegativeFloat | msgspec.UnsetType = msgspec.UNSET
    forward_exchange_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    backward_exchange_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    host: HostTimes | msgspec.UnsetType = msgspec.UNSET

    @property
    def whole_backward_ns(self) -> int:
        """The time of B: measured, or I + W."""
        return self.input_grad_ns + self.weight_grad_ns if self.backward_ns is msgspec.UNSET else self.backward_ns

    @property
    def forward_backward_ns(self) -> int:
        """The time of F and B."""
        return self.forward_ns + self.whole_backward_ns

    @property
    def min_backward_ns(self) -> int:
        """The shorter of B, and I and W: no schedule has less. Lower bounds count it."""
        return min(self.whole_backward_ns, self.input_grad_ns + self.weight_grad_ns)

    @property
    def min_input_grad_ns(self) -> int:
        """The shorter of B and I: no schedule sends gradients back earlier. Lower bounds count it."""
        return min(self.whole_backward_ns, self.input_grad_ns)

    @property
    def left_by_input_grad_bytes(self) -> int:
        """The bytes that I produces for W, 0 if the profile does not record them."""
        return 0 if self.gradient_stash_bytes is msgspec.UNSET else self.gradient_stash_bytes

    @property
    def exchange(self) -> ExchangeTimes:
        """How much of F, I, W and B the members of a group exchange data, 0 if the profile does not record it.

        A profile has that of B. Of I and W apart it counts for I, as far as I takes so long, and the rest for W.
        """
        forward_ns, backward_ns = (ns or 0 for ns in (self.forward_exchange_ns, self.backward_exchange_ns))
        input_grad_ns = min(backward_ns, self.input_grad_ns)
        weight_grad_ns = min(backward_ns - input_grad_ns, self.weight_grad_ns)
        return ExchangeTimes(
            forward_ns=forward_ns,
            input_grad_ns=input_grad_ns,
            weight_grad_ns=weight_grad_ns,
            backward_ns=input_grad_ns + weight_grad_ns if self.backward_ns is msgspec.UNSET else backward_ns,
        )

    @property
    def exchange_ns(self) -> int:
        """How much of F and B the members of a group exchange data, 0 if the profile does not record it."""
        return self.exchange.forward_ns + self.exchange.backward_ns


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All layers at one micro-batch size, in the order of the profile's layers."""

    microbatch_size: Positive
    layers: tuple[LayerMeasurement, ...]


def between(a: LayerMeasurement, b: LayerMeasurement, weight: Fraction) -> LayerMeasurement:
    """Returns a layer between two sizes, each figure interpolated; weight 0 gives the first one, 1 the second."""
    up, down = weight.as_integer_ratio()

    def mix(x: int, y: int) -> int:  # rounded half up
        return (2 * (x * down + (y - x) * up) + down) // (2 * down)

    def either(mixed: int, *given: int | msgspec.UnsetType) -> int | msgspec.UnsetType:
        return msgspec.UNSET if all(value is msgspec.UNSET for value in given) else mixed

    def optional(x: int | msgspec.UnsetType, y: int | msgspec.UnsetType) -> int | msgspec.UnsetType:
        return either(mix(0 if x is msgspec.UNSET else x, 0 if y is msgspec.UNSET else y), x, y)

    return LayerMeasurement(
        forward_ns=mix(a.forward_ns, b.forward_ns),
        input_grad_ns=mix(a.input_grad_ns, b.input_grad_ns),
        weight_grad_ns=mix(a.weight_grad_ns, b.weight_grad_ns),
        backward_ns=either(mix(a.whole_backward_ns, b.whole_backward_ns), a.backward_ns, b.backward_ns),
        stash_bytes=mix(a.stash_bytes, b.stash_bytes),
        gradient_stash_bytes=either(
            mix(a.left_by_input_grad_bytes, b.left_by_input_grad_bytes), a.gradient_stash_bytes, b.gradient_stash_bytes
        ),
        workspace_bytes=mix(a.workspace_bytes, b.workspace_bytes),
        output_bytes=tuple(mix(x, y) for x, y in zip(a.output_bytes, b.output_bytes, strict=True)),
        forward_exchange_ns=optional(a.forward_exchange_ns, b.forward_exchange_ns),
        backward_exchange_ns=optional(a.backward_exchange_ns, b.backward_exchange_ns),
        host=_host_between(a.host, b.host, mix),
    )


def _host_between(
    a: HostTimes | msgspec.UnsetType, b: HostTimes | msgspec.UnsetType, mix: Callable[[int, int], int]
) -> HostTimes | msgspec.UnsetType:
    """Times of the host hardly depend on the size: where one size has none, those of the other count."""
    if a is msgspec.UNSET or b is msgspec.UNSET:
        return b if a is msgspec.UNSET else a
    return HostTimes(
        forward_ns=mix(a.forward_ns, b.forward_ns),
        input_grad_ns=mix(a.input_grad_ns, b.input_grad_ns),
        weight_grad_ns=mix(a.weight_grad_ns, b.weight_grad_ns),
        backward_ns=mix(a.backward_ns, b.backward_ns),
    )


def check_measurements(layers: tuple[LayerProfile, ...], measurements: tuple[Measurement, ...]) -> None:
    """Raises InvalidFile if a size is measured twice, or not all layers and all their outputs are."""
    seen: set[int] = set()
    for index, measurement in enumerate(measurements):
        where = f"$.measurements[{index}]"
        if measurement.microbatch_size in seen:
            raise InvalidFile(
                f"micro-batch size {measurement.microbatch_size} is measured twice", f"{where}.microbatch_size"
            )
        seen.add(measurement.microbatch_size)
        if len(measurement.layers) != len(layers):
            raise InvalidFile(f"{len(measurement.layers)} layers measured, want {len(layers)}", f"{where}.layers")
        for i, (layer, measured) in enumerate(zip(layers, measurement.layers, strict=True)):
            if len(measured.output_bytes) != len(layer.outputs):
                raise InvalidFile(
                    f"{len(measured.output_bytes)} sizes for the {len(layer.outputs)} outputs of '{layer.name}'",
                    f"{where}.layers[{i}].output_bytes",
                )
