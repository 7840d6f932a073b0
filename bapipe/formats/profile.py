"""The profile/1 file: times and bytes of a model's layers on one kind of device, measured or estimated."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from bapipe.device_types import type_of_kind
from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.group_check import check_group
from bapipe.formats.layer_profile import LayerProfile, check_layers
from bapipe.formats.measurement import LayerMeasurement, Measurement, between, check_measurements
from bapipe.formats.multigraph import to_networkx
from bapipe.formats.settings import Settings, difference
from bapipe.printable import counted
from bapipe.tables import data_frame, rows_html
from bapipe.units import NonNegative, Positive

if TYPE_CHECKING:
    import networkx as nx

LOSS = "loss"
"""Name of the last layer of every profile and plan; its inputs are the model's outputs and `TARGET`."""

TARGET = "target"
"""Name of the tensor that the loss compares with; `input:target` in a model that has a layer of this name."""

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

HALVED = "input_and_weight_gradient"
"""Key in `environment`: of imported profiles, that I and W are halves of a backward that was measured whole."""

ONE_LAYER = "one_layer"
"""Key in `environment`: modules that are one layer although nobody asked for it, by path, and why."""

SHARED_BUFFERS = "shared_buffers"
"""Key in `environment`: the buffers that training may change and that several layers use, which no cut may part."""


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
        check_layers(self.layers)
        check_measurements(self.layers, self.measurements)
        check_group(self)

    def __hash__(self) -> int:
        """Returns a hash of the measurements: equal profiles have equal ones. Two fields are dictionaries without."""
        return hash((self.model, self.device, self.layers, self.measurements))

    def __repr__(self) -> str:
        """Returns what was measured in one line: the whole profile would fill a notebook."""
        sizes = ", ".join(map(str, self.microbatch_sizes))
        what = f"{self.model!r} on {self.device.kind!r}"
        return f"ModelProfile({what}, {counted(len(self.layers), 'layer')}, micro-batches of {sizes})"

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
        title = f"{self.model} on {self.device.name} ({self.device.kind}), {self.precision}, {self.optimizer}"
        return rows_html([title, f"micro-batches of {', '.join(map(str, self.microbatch_sizes))} were measured"], rows)

    @property
    def precision(self) -> str:
        """The types of numbers that the model computes with, in words."""
        if self.settings is msgspec.UNSET:
            return self.dtype
        autocast = f", {self.settings.autocast} by autocast" if self.settings.autocast else ""
        return f"{self.dtype}{autocast}{', TF32' if self.settings.tf32 else ''}"

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
        return tuple(between(a, b, weight) for a, b in zip(self._layers_at[low], self._layers_at[high], strict=True))


ProfilesByKind = Mapping[str, ModelProfile]
"""Profiles of one model, each by the kind of device that it was measured on."""


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
    known = _settings_by_kind(profiles)
    if found := _difference(known):
        raise BapipeError(f"{found}: profile both with the same settings")
    return known[0][1] if known else msgspec.UNSET


def have_common_settings(profiles: Iterable[ModelProfile]) -> bool:
    """Returns whether one plan can be made from profiles; see `common_settings`."""
    return _difference(_settings_by_kind(profiles)) is None


def _settings_by_kind(profiles: Iterable[ModelProfile]) -> list[tuple[str, Settings]]:
    """Returns the kinds and the settings that are known, those of GPUs, which say nothing of threads, last."""
    known = [(one.device.kind, one.settings) for one in profiles if one.settings is not msgspec.UNSET]
    return sorted(known, key=lambda one: type_of_kind(one[0]) == "cuda")


def _difference(known: Iterable[tuple[str, Settings]]) -> str | None:
    """Returns in words how the settings of two kinds differ; None if none do."""
    for (kind, mine), (other, theirs) in pairwise(known):
        if type_of_kind(other) == "cuda":
            theirs = msgspec.structs.replace(theirs, threads=mine.threads)
        if found := difference(mine, theirs):
            return f"the profile of {kind} was measured with {found[0]}, that of {other} with {found[1]}"
    return None
