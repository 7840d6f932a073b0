"""A stage whose layers are partly recomputed, as modules that run one after another."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import fx

from bapipe.errors import InvalidModel
from bapipe.tracing.extract import BeforeRandom, extract
from bapipe.tracing.model import TracedLayer, TracedModel
from bapipe.tracing.stages import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Consecutive layers of a stage that are all recomputed, or all not.

    Attributes:
        module: takes `inputs` by position, which it does not change, and returns a tuple of `outputs`.
        layers: the names of its layers.
        last_used: names of tensors that neither later parts nor what follows the stage need.
    """

    module: fx.GraphModule
    layers: tuple[str, ...]
    recomputed: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_used: tuple[str, ...]


def stage_parts(
    parts: Split,
    index: int,
    recomputed: AbstractSet[str],
    device: torch.device | None = None,
    before_random: BeforeRandom | None = None,
) -> tuple[StagePart, ...]:
    """Returns the parts of a stage, in the order in which they run; for the last arguments see `extract`.

    Raises:
        InvalidModel: a layer changes in place what one in another part reads too.
    """
    model, stage = parts.model, parts.stages[index]
    own = [layer for layer in model.layers if layer.name in set(stage.layers)]
    groups = [(again, tuple(of)) for again, of in groupby(own, key=lambda layer: layer.name in recomputed)]
    _check_hazards(model, groups)
    made: list[StagePart] = []
    needed = set(stage.outputs)  # by what follows
    for again, layers in reversed(groups):
        outputs = tuple(name for layer in layers for name in layer.outputs if name in needed)
        used = {name for layer in layers for name in layer.inputs}
        inside = {name for layer in layers for name in layer.outputs}
        inputs = tuple(n for n in dict.fromkeys(n for layer in layers for n in layer.inputs) if n not in inside)
        names = tuple(layer.name for layer in layers)
        made.append(
            StagePart(
                module=extract(model, names, inputs, outputs, device=device, before_random=before_random),
                layers=names,
                recomputed=again,
                inputs=inputs,
                outputs=outputs,
                last_used=tuple(name for name in inputs if name not in needed),
            )
        )
        needed = (needed - inside) | (used - inside)
    return tuple(reversed(made))


def _check_hazards(model: TracedModel, groups: list[tuple[bool, tuple[TracedLayer, ...]]]) -> None:
    part_of = {layer.name: number for number, (_, layers) in enumerate(groups) for layer in layers}
    for hazard in model.hazards:
        if hazard.is_broken(part_of):
            raise InvalidModel(
                f"layer '{hazard.writer}' changes in place what layer '{hazard.reader}' reads too, and only one of the "
                f"two is recomputed: recompute both or none, or let '{hazard.writer}' give a new tensor"
            )
