"""Makes a profile of imported layers: adds the figures that other tools do not measure, and scales to other sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import HALVED, DeviceKind, ModelProfile
from bapipe.importers.metadata import NUM_OPTIMIZER_STATES, ImportMetadata
from bapipe.optimizers import unknown_optimizer
from bapipe.units import round_half_up


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLayer:
    """A layer as other tools measure it: one backward time, and no memory except outputs and parameters.

    Attributes:
        backward_ns: time of I and W together.
        output_bytes: bytes of each output, for the whole measured batch.
        stash_bytes: the outputs, or 0 if they share the storage of another layer's outputs.
        no_gradient: the outputs without a gradient.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    forward_ns: int
    backward_ns: int
    output_bytes: tuple[int, ...]
    stash_bytes: int
    param_bytes: int
    no_gradient: tuple[str, ...] = ()


def forward_of(total_ns: int) -> int:
    """Returns the part of forward and backward that a forward takes: of three products of matrices it has one."""
    return total_ns // 3


def to_profile(layers: Sequence[ImportedLayer], metadata: ImportMetadata) -> ModelProfile:
    """Returns the profile of imported layers.

    Their B is divided into I and W: halves for a layer with parameters, all W if its only inputs are the model's, and
    all I without parameters. Updates and workspaces are unknown, and 0 in the profile.
    """
    if metadata.optimizer not in NUM_OPTIMIZER_STATES:
        raise unknown_optimizer(metadata.optimizer, NUM_OPTIMIZER_STATES)
    layer_outputs = {name for layer in layers for name in layer.outputs}
    scaled = [size for size in metadata.sizes if size != metadata.batch_size]
    return ModelProfile(
        model=metadata.model,
        device=DeviceKind(kind=metadata.kind, name=metadata.device_name, memory_bytes=metadata.memory_bytes),
        dtype="float32",
        optimizer=metadata.optimizer,
        environment={
            "source": metadata.source,
            "batch_size": metadata.batch_size,
            HALVED: "halves of the measured backward",
        }
        | ({"scaled_in_proportion": scaled} if scaled else {}),
        layers=tuple(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                inputs=layer.inputs,
                outputs=layer.outputs,
                param_bytes=layer.param_bytes,
                optimizer_state_bytes=layer.param_bytes * NUM_OPTIMIZER_STATES[metadata.optimizer],
                no_gradient=layer.no_gradient,
            )
            for layer in layers
        ),
        measurements=tuple(
            Measurement(
                microbatch_size=size,
                layers=tuple(_scaled(layer, layer_outputs, Fraction(size, metadata.batch_size)) for layer in layers),
            )
            for size in sorted(set(metadata.sizes))
        ),
    )


def _scaled(layer: ImportedLayer, layer_outputs: set[str], factor: Fraction) -> LayerMeasurement:
    backward_ns = round_half_up(layer.backward_ns * factor)
    if not layer.param_bytes:
        weight_ns = 0
    elif layer_outputs.isdisjoint(layer.inputs):
        weight_ns = backward_ns
    else:
        weight_ns = backward_ns // 2
    return LayerMeasurement(
        forward_ns=round_half_up(layer.forward_ns * factor),
        input_grad_ns=backward_ns - weight_ns,
        weight_grad_ns=weight_ns,
        stash_bytes=round_half_up(layer.stash_bytes * factor),
        output_bytes=tuple(round_half_up(num_bytes * factor) for num_bytes in layer.output_bytes),
    )
