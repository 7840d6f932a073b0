"""The profile/1 file: times and bytes of a model's layers on one kind of device, measured or estimated."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.group_check import check_group
from bapipe.formats.host_times import HostTimes
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.multigraph import to_networkx
from bapipe.formats.settings import Settings, difference
from bapipe.tables import data_frame, rows_html
from bapipe.units import NonNegative, NonNegativeFloat, Positive

if TYPE_CHECKING:
    import networkx as nx

LOSS = "loss"
"""Name of the last layer of every profile and plan; its inputs are the model's outputs and `TARGET`."""

TARGET = "target"
"""Name of the tensor that the loss compares with."""

EQUIVALENCE = "equivalence"
"""Key in `environment`: how the split model was compared with the original, or why it was not."""

ESTIMATE = "estimate"
"""Key in `environment`: what a profile was estimated from, if it was not measured."""

LOSS_OVER_PARTS = "loss_over_parts"
"""Key in `environment`: in which way the loss of a mini-batch is not the mean of its micro-batches'."""

Split = Literal["tensor", "filter", "channel", "spatial", "sharded"]
"""How the members of a group share the layers; docs/groups.md explains each."""

HOST_OVER_DEVICE = "host_over_device"
"""Key in `environment`: by micro-batch size, F + B by the clock on the wall over the time a GPU works on them."""

ONE_LAYER = "one_layer"
"""Key in `environment`: modules that are one layer although nobody asked for it, by path, and why."""


class DeviceKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware of a profile; a cluster's devices refer to it by `kind`.

    Attributes:
        members: of a profile of a group, the number of devices in it. Every byte of the profile is then of one member,
            and its times contain what the members exchange among themselves. Left out for a single device.
        split: how the members share the layers; given if `members` is.
    """

    kind: str
    name: str
    memory_bytes: NonNegative
    members: Positive | msgspec.UnsetType = msgspec.UNSET
    split: Split | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_members(self) -> int:
        """The number of devices that run a micro-batch together."""
        return 1 if self.members is msgspec.UNSET else self.members


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer of the model graph: the figures that do not depend on the micro-batch size.

    Attributes:
        inputs, outputs: names of tensors; an input that is no layer's output is an input of the model.
        param_bytes: bytes of the parameters that no earlier layer uses.
        trained_bytes: how many of `param_bytes` are trained and have gradients. If left out, all.
        update_ns: time of the optimizer's update of this layer.
        shares: names of the layers that share parameters with this one.
        shared_bytes: bytes of the parameters that another layer's `param_bytes` counts: the first layer of `shares`
            that has no `shared_bytes` itself.
        shared_trained_bytes: how many of `shared_bytes` are trained. If left out, all.
        no_gradient: the `outputs` that have no gradient (integers, masks, model constants).
        no_replicas: whether a forward leaves values here that the next forward reads (a moving average that quantises
            its inputs, a queue), so that replicas, which see some of the micro-batches each, would differ.
        group_sum_bytes: of a group, how many bytes of the gradients its members must sum once a step: all where they
            share the samples, none where they share the weights. If left out, none.
        shape: the channels and planes of a layer that a group can split; see `bapipe estimate`.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    param_bytes: NonNegative
    trained_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    optimizer_state_bytes: NonNegative
    update_ns: NonNegative = 0
    shares: tuple[str, ...] = ()
    shared_bytes: NonNegative = 0
    shared_trained_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    no_gradient: tuple[str, ...] = ()
    no_replicas: bool | msgspec.UnsetType = msgspec.UNSET
    group_sum_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    shape: LayerShape | msgspec.UnsetType = msgspec.UNSET

    @property
    def allows_replicas(self) -> bool:
        """Whether a stage with this layer may have replicas."""
        return self.no_replicas is not True

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients: those of the trained parameters."""
        return self.param_bytes if self.trained_bytes is msgspec.UNSET else self.trained_bytes

    @property
    def group_gradient_bytes(self) -> int:
        """The bytes of the gradients that the members of a group sum."""
        return 0 if self.group_sum_bytes is msgspec.UNSET else self.group_sum_bytes

    def summed_bytes(self, *, has_replicas: bool) -> int:
        """The bytes of the gradients that are summed at all, over replicas or over the members of a group."""
        return self.gradient_bytes if has_replicas else self.group_gradient_bytes

    @property
    def shared_gradient_bytes(self) -> int:
        """The bytes of the gradients of the parameters that another layer counts."""
        return self.shared_bytes if self.shared_trained_bytes is msgspec.UNSET else self.shared_trained_bytes


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
    def left_by_input_grad_bytes(self) -> int:
        """The bytes that I produces for W, 0 if the profile does not record them."""
        return 0 if self.gradient_stash_bytes is msgspec.UNSET else self.gradient_stash_bytes

    @property
    def exchange_ns(self) -> int:
        """How much of F and B the members of a group exchange data, 0 if the profile does not record it."""
        known = (self.forward_exchange_ns, self.backward_exchange_ns)
        return sum(0 if ns is msgspec.UNSET else ns for ns in known)


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All layers at one micro-batch size, in the order of the profile's layers."""

    microbatch_size: Positive
    layers: tuple[LayerMeasurement, ...]


class ModelProfile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="bapipe",
    tag="profile/1",
    dict=True,  # stores what is computed once, such as interpolated layers; not part of the file nor of equality
):
    """A model on one kind of device. Layers are in topological order.

    Attributes:
        settings: how it was computed, `dtype` and `optimizer` included; left out if that is not known.

    Raises:
        InvalidFile: names are not unique, a tensor is used before it is made, or a sequence has the wrong length.
    """

    model: str
    factory: str | None = None
    arguments: dict[str, Any] = {}
    device: DeviceKind
    dtype: str
    optimizer: str
    settings: Settings | msgspec.UnsetType = msgspec.UNSET
    environment: dict[str, Any] = {}
    layers: tuple[LayerProfile, ...]
    measurements: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidFile("a profile needs at least one layer", "$.layers")
        if not self.measurements:
            raise InvalidFile("a profile needs at least one measured micro-batch size", "$.measurements")
        if self.settings is not msgspec.UNSET and (self.settings.dtype, self.settings.optimizer) != (
            self.dtype,
            self.optimizer,
        ):
            raise InvalidFile("the settings name another dtype or optimizer than the profile", "$.settings")
        _check_layers(self.layers)
        _check_measurements(self.layers, self.measurements)
        check_group(self)

    def __repr__(self) -> str:
        """Returns what was measured in one line: the whole profile would fill a notebook."""
        sizes = ", ".join(map(str, self.microbatch_sizes))
        what = f"{self.model!r} on {self.device.kind!r}"
        return f"ModelProfile({what}, {len(self.layers)} layers, micro-batches of {sizes})"

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each layer at each micro-batch size, as `to_pandas` has them."""
        return [
            {
                "microbatch_size": measured.microbatch_size,
                "layer": layer.name,
                "kind": layer.kind,
                "forward_ns": m.forward_ns,
                "input_grad_ns": m.input_grad_ns,
                "weight_grad_ns": m.weight_grad_ns,
                "backward_ns": m.whole_backward_ns,
                "update_ns": layer.update_ns,
                "param_bytes": layer.param_bytes,
                "stash_bytes": m.stash_bytes,
                "workspace_bytes": m.workspace_bytes,
                "output_bytes": sum(m.output_bytes),
            }
            for measured in sorted(self.measurements, key=lambda m: m.microbatch_size)
            for layer, m in zip(self.layers, measured.layers, strict=True)
        ]

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with a row for each layer at each micro-batch size."""
        return data_frame(self.rows())

    def to_networkx(self) -> "nx.MultiDiGraph[str]":
        """Returns the layers as a graph of networkx: layers as nodes, tensors as edges; see `bapipe.to_networkx`."""
        return to_networkx(self)

    def _repr_html_(self) -> str:
        """Returns the layers at the largest micro-batch size, for a notebook."""
        largest = max(self.microbatch_sizes)
        rows = [row for row in self.rows() if row["microbatch_size"] == largest]
        title = f"{self.model} on {self.device.name} ({self.device.kind}), {self.dtype}, {self.optimizer}"
        return rows_html([title, f"micro-batches of {', '.join(map(str, self.microbatch_sizes))} were measured"], rows)

    @property
    def threads(self) -> int:
        """The number of compute threads in the measurement, 1 if the profile does not record it."""
        return 1 if self.settings is msgspec.UNSET else self.settings.threads

    @cached_property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The measured micro-batch sizes, ascending."""
        return tuple(sorted(m.microbatch_size for m in self.measurements))

    def covers(self, microbatch_size: int) -> bool:
        """Returns whether `at` accepts a micro-batch size: it is measured, or between two measured sizes."""
        sizes = self.microbatch_sizes
        return sizes[0] <= microbatch_size <= sizes[-1]

    @cached_property
    def _layers_at(self) -> dict[int, tuple[LayerMeasurement, ...]]:
        """The layers at each measured micro-batch size, and at those that were interpolated so far."""
        return {m.microbatch_size: m.layers for m in self.measurements}

    def at(self, microbatch_size: int) -> tuple[LayerMeasurement, ...]:
        """Returns every layer at a micro-batch size; between two measured sizes each figure is interpolated, once.

        Raises:
            BapipeError: the size lies outside the measured ones.
        """
        known = self._layers_at
        if microbatch_size not in known:
            known[microbatch_size] = self._interpolated(microbatch_size)
        return known[microbatch_size]

    def _interpolated(self, microbatch_size: int) -> tuple[LayerMeasurement, ...]:
        sizes = self.microbatch_sizes
        if not self.covers(microbatch_size):
            raise BapipeError(
                f"the profile of {self.model} on {self.device.kind} holds micro-batch sizes "
                f"{sizes[0]} to {sizes[-1]}, not {microbatch_size}: choose one of those, or profile again "
                f"with `microbatch_sizes` {microbatch_size}"
            )
        above = bisect_left(sizes, microbatch_size)
        low, high = sizes[above - 1], sizes[above]
        weight = Fraction(microbatch_size - low, high - low)
        return tuple(_between(a, b, weight) for a, b in zip(self._layers_at[low], self._layers_at[high], strict=True))


def has_host_times(profile: ModelProfile) -> bool:
    """Returns whether a profile has times of the host."""
    return any(layer.host is not msgspec.UNSET for measured in profile.measurements for layer in measured.layers)


def is_estimate(profile: ModelProfile) -> bool:
    """Returns whether a profile was estimated, not measured."""
    return ESTIMATE in profile.environment


def common_settings(profiles: Iterable[ModelProfile]) -> Settings | msgspec.UnsetType:
    """Returns the settings of profiles that one plan is made from; UNSET if none of them has any.

    Raises:
        BapipeError: two of them differ.
    """
    known = [profile for profile in profiles if profile.settings is not msgspec.UNSET]
    for a, b in pairwise(known):
        assert a.settings is not msgspec.UNSET and b.settings is not msgspec.UNSET  # noqa: PT018
        if found := difference(a.settings, b.settings):
            raise BapipeError(
                f"the profile of {a.device.kind} was measured with {found[0]}, that of {b.device.kind} "
                f"with {found[1]}: profile both with the same settings"
            )
    return known[0].settings if known else msgspec.UNSET


def _between(a: LayerMeasurement, b: LayerMeasurement, weight: Fraction) -> LayerMeasurement:
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


def _check_layers(layers: tuple[LayerProfile, ...]) -> None:
    all_outputs = {name for layer in layers for name in layer.outputs}
    names = {layer.name for layer in layers}
    seen: set[str] = set()
    made: set[str] = set()
    for index, layer in enumerate(layers):
        where = f"$.layers[{index}]"
        if layer.name in seen:
            raise InvalidFile(f"a second layer is named '{layer.name}'; names must be unique", f"{where}.name")
        seen.add(layer.name)
        for name in layer.inputs:
            if name in all_outputs and name not in made:
                raise InvalidFile(
                    f"tensor '{name}' is used before the layer that makes it; layers must be in "
                    "topological order, without cycles",
                    f"{where}.inputs",
                )
        for name in layer.outputs:
            if name in made:
                raise InvalidFile(f"tensor '{name}' is made twice", f"{where}.outputs")
            made.add(name)
        outputs = set(layer.outputs)
        for name in layer.no_gradient:
            if name not in outputs:
                raise InvalidFile(f"'{name}' is not an output of the layer", f"{where}.no_gradient")
        for name in layer.shares:
            if name not in names:
                raise InvalidFile(f"'{name}' is not a layer of the profile", f"{where}.shares")
    index_of = {layer.name: index for index, layer in enumerate(layers)}
    for index, layer in enumerate(layers):
        holders = sorted({index_of[name] for name in layer.shares if not layers[index_of[name]].shared_bytes})
        _check_bytes(layer, layers[holders[0]] if holders else None, f"$.layers[{index}]")
    for index, layer in enumerate(layers):
        for name in layer.inputs:
            if name in made or name not in names:
                continue
            raise InvalidFile(
                f"'{name}' is the name of a layer, but no layer gives a tensor of that name",
                f"$.layers[{index}].inputs",
            )


def _check_bytes(layer: LayerProfile, owner: LayerProfile | None, where: str) -> None:
    """Raises InvalidFile if a layer has more trained or shared bytes than there are; `owner` counts the shared ones."""
    if layer.gradient_bytes > layer.param_bytes:
        raise InvalidFile(f"{layer.gradient_bytes} is more than `param_bytes`", f"{where}.trained_bytes")
    if layer.shared_gradient_bytes > layer.shared_bytes:
        raise InvalidFile(f"{layer.shared_gradient_bytes} is more than `shared_bytes`", f"{where}.shared_trained_bytes")
    if not layer.shared_bytes:
        return
    for field, shared, held in (
        ("shared_bytes", layer.shared_bytes, owner.param_bytes if owner else 0),
        ("shared_trained_bytes", layer.shared_gradient_bytes, owner.gradient_bytes if owner else 0),
    ):
        if shared > held:
            raise InvalidFile(
                f"{shared} is more than the {held} bytes that the layer it shares them with counts", f"{where}.{field}"
            )


def _check_measurements(layers: tuple[LayerProfile, ...], measurements: tuple[Measurement, ...]) -> None:
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
