"""A stage that runs in one process as it will in training, to be compared with the module that it was cut from."""

import torch
from torch import nn

from bapipe.equivalence.outcome import Conditions
from bapipe.equivalence.stage_pass import Stage
from bapipe.formats.stage_plan import StagePlan
from bapipe.module_state.python_random import (
    GlobalGeneratorStates,
    generators_restored,
    global_generator_states,
    restore_global_generators,
)
from bapipe.runtime.autocast import AutocastStage
from bapipe.runtime.recompute import RecomputedStage
from bapipe.runtime.recompute_layers import PartlyRecomputedStage
from bapipe.runtime.whole_backward import can_split, has_hooks_of_the_model
from bapipe.tracing.stage_module import needs_seal, stage_module
from bapipe.tracing.stage_parts import stage_parts
from bapipe.tracing.stages import Split


def planned_stage(
    parts: Split, index: int, plan: StagePlan, device: torch.device, conditions: Conditions, *, has_i_and_w: bool
) -> Stage:
    """Returns a stage that runs as in the plan, on one device; without backwards nothing is recomputed.

    Raises:
        InvalidModel: only some of its layers are recomputed, and one of these changes in place what another reads.
    """
    tensors, recomputed = parts.stages[index], frozenset(plan.recomputed if conditions.trains else ())
    is_partial = 0 < len(recomputed) < len(plan.layers)
    of_layers = _RecomputedLayers(parts, index, recomputed, device, conditions) if is_partial else None
    whole = stage_module(parts, index, device)
    module: nn.Module = whole if of_layers is None else of_layers.stage
    examples = [parts.examples[name] for name in tensors.outputs]
    if conditions.autocast is not None:
        module = AutocastStage(module, device, conditions.autocast, [example.dtype for example in examples])
    never_split = has_hooks_of_the_model(whole)
    recomputation = RecomputedStage(module, device) if recomputed and not is_partial else None
    return Stage(
        tensors=tensors,
        module=recomputation or module,
        recomputation=recomputation,
        of_layers=of_layers,
        needs_gradient=tuple(example.requires_grad for example in examples),
        can_split=(lambda *backward: not never_split and can_split(*backward)) if has_i_and_w else None,
    )


class _RecomputedLayers:
    """A stage of which some layers are recomputed, as in training but for the numbers that it draws.

    The comparison seeds operators of torch. Other code draws from the generators of Python and numpy what comes next,
    as in the original: when a layer runs again, they are set to what they were when it ran first.

    Attributes:
        stage: takes what the stage receives and then what it loads, by position.
        microbatch: the one that runs.
    """

    def __init__(
        self, parts: Split, index: int, recomputed: frozenset[str], device: torch.device, conditions: Conditions
    ) -> None:
        tensors = parts.stages[index]
        self.microbatch = 0
        self._generators: dict[tuple[int, str], GlobalGeneratorStates] = {}  # by micro-batch and operator
        self.stage = PartlyRecomputedStage(
            stage_module(parts, index, device, self._before_random),
            stage_parts(parts, index, recomputed, device, self._before_random),
            received=(*tensors.received, *tensors.loaded),
            arguments={},
            outputs=tensors.outputs,
            is_sealed=needs_seal(parts, index),
            device=device,
            autocast=conditions.autocast,
            rng=self,
        )

    def enter(self, microbatch: int) -> None:
        self.microbatch = microbatch

    def recompute(self) -> None:
        with generators_restored():
            self.stage.recompute()

    def _before_random(self, operator: str, other_code: bool) -> None:
        if other_code:
            now = global_generator_states()
            restore_global_generators(self._generators.setdefault((self.microbatch, operator), now))
