"""Layers that others measured, with what they leave out, as a profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bapipe.errors import BapipeError
from bapipe.formats.profile import DeviceKind, LayerMeasurement, LayerProfile, Measurement, ModelProfile
from bapipe.importers.metadata import NUM_OPTIMIZER_STATES, Origin
from bapipe.units import round_half_up


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLayer:
    """A layer as foreign profiles know it: one backward time, and no more memory than outputs and parameters.

    Attributes:
        backward_ns: of I and W together.
        output_bytes: of each output, for the whole batch that was measured.
        kept_bytes: what it adds to the stash: its outputs, or nothing where they are another layer's storage.
        no_gradient: those of `outputs` that have none.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    forward_ns: int
    backward_ns: int
    output_bytes: tuple[int, ...]
    kept_bytes: int
    param_bytes: int
    no_gradient: tuple[str, ...] = ()


def profile_of(layers: Sequence[ImportedLayer], origin: Origin) -> ModelProfile:
    """Returns the profile of foreign layers.

    They tell B, not I and W: a layer with parameters gets half of B each, one that only model inputs feed all as W,
    one without parameters all as I. Updates and workspaces are unknown and taken as nothing.
    """
    if origin.optimizer not in NUM_OPTIMIZER_STATES:
        raise BapipeError(f"unknown optimizer '{origin.optimizer}'; want one of {', '.join(NUM_OPTIMIZER_STATES)}")
    made = {name for layer in layers for name in layer.outputs}
    scaled = [size for size in origin.sizes if size != origin.batch_size]
    return ModelProfile(
        model=origin.model,
        device=DeviceKind(kind=origin.kind, name=origin.device_name, memory_bytes=origin.memory_bytes),
        dtype="float32",
        optimizer=origin.optimizer,
        environment={
            "source": origin.source,
            "batch_size": origin.batch_size,
            "input_and_weight_gradient": "halves of the measured backward",
        }
        | ({"scaled_in_proportion": scaled} if scaled else {}),
        layers=tuple(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                inputs=layer.inputs,
                outputs=layer.outputs,
                param_bytes=layer.param_bytes,
                optimizer_state_bytes=layer.param_bytes * NUM_OPTIMIZER_STATES[origin.optimizer],
                no_gradient=layer.no_gradient,
            )
            for layer in layers
        ),
        measurements=tuple(
            Measurement(
                microbatch_size=size,
                layers=tuple(_measured(layer, made, Fraction(size, origin.batch_size)) for layer in layers),
            )
            for size in sorted(set(origin.sizes))
        ),
    )


def _measured(layer: ImportedLayer, made: set[str], share: Fraction) -> LayerMeasurement:
    backward_ns = round_half_up(layer.backward_ns * share)
    if not layer.param_bytes:
        weight_ns = 0
    elif made.isdisjoint(layer.inputs):
        weight_ns = backward_ns
    else:
        weight_ns = backward_ns // 2
    return LayerMeasurement(
        forward_ns=round_half_up(layer.forward_ns * share),
        input_grad_ns=backward_ns - weight_ns,
        weight_grad_ns=weight_ns,
        stash_bytes=round_half_up(layer.kept_bytes * share),
        output_bytes=tuple(round_half_up(num_bytes * share) for num_bytes in layer.output_bytes),
    )
