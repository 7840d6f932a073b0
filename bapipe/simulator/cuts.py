"""Cuts of a chain or graph of layers into stages: which are valid, and what crosses them or is kept at them."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import NamedTuple, Protocol

from bapipe.errors import InvalidModel
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan


def check_layers(stages: Sequence[StagePlan], profile: ModelProfile) -> None:
    """Raises InvalidModel unless the stages have exactly the profile's layers and no tensor flows backwards."""
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.layers}
    known = {layer.name for layer in profile.layers}
    for name in stage_of:
        if name not in known:
            raise InvalidModel(
                f"the plan's layer '{name}' is not in the profile of {profile.model}: "
                "use the profile that the plan was made from, or plan again"
            )
    for layer in profile.layers:
        if layer.name not in stage_of:
            raise InvalidModel(
                f"the profile's layer '{layer.name}' is in no stage of the plan: "
                "use the profile that the plan was made from, or plan again"
            )
    check_flow(profile.layers, stage_of)


class Layer(Protocol):
    """A layer, profiled or traced, with the tensors that it uses and makes."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


def check_flow(layers: Iterable[Layer], stage_of: Mapping[str, int]) -> None:
    """Raises InvalidModel if a tensor would flow to an earlier stage; layers come in topological order."""
    stage_of_tensor: dict[str, int] = {}
    for layer in layers:
        for tensor in layer.inputs:
            if stage_of_tensor.get(tensor, 0) > stage_of[layer.name]:
                raise InvalidModel(
                    f"tensor '{tensor}' is made in stage {stage_of_tensor[tensor]} but used by '{layer.name}' "
                    f"in stage {stage_of[layer.name]}: stages must follow the flow of the model"
                )
        stage_of_tensor |= dict.fromkeys(layer.outputs, stage_of[layer.name])


class Cut(NamedTuple):
    """What crosses the cut between two stages.

    Attributes:
        send_bytes, grad_bytes: activations of a micro-batch, and their gradients.
        num_gradients: how many of the tensors have a gradient.
    """

    send_bytes: int = 0
    grad_bytes: int = 0
    num_gradients: int = 0


def find_cuts(layers: Sequence[tuple[LayerProfile, LayerMeasurement]], stage_of: Mapping[str, int]) -> list[Cut]:
    """Returns the cut behind each stage; nothing crosses the last one.

    A tensor crosses the cuts between the stage that makes it and the last stage that uses it.
    """
    last_use: dict[str, int] = {}
    for layer, _ in layers:
        for tensor in layer.inputs:
            last_use[tensor] = max(last_use.get(tensor, 0), stage_of[layer.name])
    # What is added at the first cut that a tensor crosses, and taken away behind the last one. [stages]
    send, grad, num_gradients = ([0] * (max(stage_of.values()) + 1) for _ in range(3))
    for layer, measured in layers:
        made = stage_of[layer.name]
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True):
            used = last_use.get(tensor, made)
            if used == made:
                continue
            changes = [(send, num_bytes)]
            if tensor not in layer.no_gradient:
                changes += [(grad, num_bytes), (num_gradients, 1)]
            for change, value in changes:
                change[made] += value
                change[used] -= value
    return [Cut(*values) for values in zip(*map(accumulate, (send, grad, num_gradients)), strict=True)]


def kept_tensor_bytes(
    layers: Sequence[tuple[LayerProfile, LayerMeasurement]], stage: Iterable[str], recomputed: AbstractSet[str]
) -> int:
    """Returns the bytes that a stage keeps of a micro-batch because some of its layers are recomputed.

    They are the tensors that a recomputed layer takes from elsewhere, and those that it makes for the stage's other
    layers, each once. The model's inputs are not counted.
    """
    kept = frozenset(stage) - recomputed
    used_by_recomputed = {tensor for layer, _ in layers if layer.name in recomputed for tensor in layer.inputs}
    used_by_kept = {tensor for layer, _ in layers if layer.name in kept for tensor in layer.inputs}
    return sum(
        num_bytes
        for layer, measured in layers
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True)
        if tensor in (used_by_kept if layer.name in recomputed else used_by_recomputed)
    )
