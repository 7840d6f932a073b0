"""Runs the stages of a traced model in one process, as the ranks of a pipeline would."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch import Tensor, fx

from bapipe.equivalence.outcome import TRAINING, Conditions, Loss, Microbatch, Outcome, device_of, trial
from bapipe.equivalence.own_attributes import OwnAttributes
from bapipe.equivalence.stage_pass import (
    NoTensor,
    Stage,
    StagesPass,
    WeightGrads,
    forward_of,
    run_weight_grads,
)
from bapipe.errors import InvalidModel
from bapipe.module_state.python_state import numbers_kept
from bapipe.tracing.changing_state import layers_in_one_stage
from bapipe.tracing.model import TracedModel
from bapipe.tracing.stage_module import stage_module
from bapipe.tracing.stages import Split, StageTensors, stages_of

Found = TypeVar("Found")


def finest_stages(model: TracedModel, no_cut_after: Collection[str]) -> tuple[Stage, ...]:
    """Returns as many stages as there can be: each layer is one, but for those that a cut must not separate."""
    cuts = [cut for cut in _allowed_cuts(model) if model.layers[cut - 1].name not in no_cut_after]
    made: dict[StageTensors, fx.GraphModule] = {}
    device = device_of(model.root)
    while True:
        stage_of = {layer.name: bisect_right(cuts, place) for place, layer in enumerate(model.layers)}
        parts = Split(model=model, stages=stages_of(model, stage_of), examples={}, tied=(), inputs=())
        for index, tensors in enumerate(parts.stages):
            try:
                made[tensors] = made.get(tensors) or stage_module(parts, index, device)
            except InvalidModel:  # a value that is no tensor would cross the cut before this stage, or after it
                if not cuts:
                    raise
                del cuts[max(index - 1, 0)]
                break
        else:
            return tuple(Stage(tensors=tensors, module=made[tensors]) for tensors in parts.stages)


def _allowed_cuts(model: TracedModel) -> list[int]:
    """Returns the layers before which a cut may be."""
    place = {layer.name: index for index, layer in enumerate(model.layers)}
    together = [(place[layers[0]], place[layer]) for layers in layers_in_one_stage(model) for layer in layers]
    return [cut for cut in range(1, len(model.layers)) if not any(min(pair) < cut <= max(pair) for pair in together)]


def run_finest_stages(
    model: TracedModel, loss: Loss, microbatches: Sequence[Microbatch]
) -> tuple[tuple[Stage, ...], Outcome]:
    """Returns the finest stages that hand on tensors only, and their outcome.

    Raises:
        StageFailed: a stage fails.
    """
    return on_finest_stages(model, lambda stages: run_stages(model, stages, loss, microbatches))


def on_finest_stages(model: TracedModel, run: Callable[[Sequence[Stage]], Found]) -> tuple[tuple[Stage, ...], Found]:
    """Returns the finest stages that hand on tensors only, and what `run` returns for them.

    Raises:
        StageFailed: `run` raises it.
    """
    no_cut_after: set[str] = set()
    while True:
        stages = finest_stages(model, no_cut_after)
        try:
            return stages, run(stages)
        except NoTensor as error:
            no_cut_after.add(error.layer)


def run_stages(
    model: TracedModel,
    stages: Sequence[Stage],
    loss: Loss,
    microbatches: Sequence[Microbatch],
    conditions: Conditions = TRAINING,
    recording: tuple[AbstractContextManager[object], AbstractContextManager[object]] = (nullcontext(), nullcontext()),
) -> Outcome:
    """Returns the outcome of the stages: a micro-batch's backward comes after the next one's forward.

    Only the tensors of a cut are handed on, without their graph, and only their gradients back; of attributes that
    forwards set, every stage has its own.

    Args:
        recording: contexts to enter for each forward, and for each backward.

    Raises:
        StageFailed: a stage fails.
    """
    with trial(model.root, conditions, loss) as one:
        own_attributes = OwnAttributes(model.root, [stage.module for stage in stages], loss)
        losses: list[Tensor] = []
        in_flight: list[StagesPass] = []
        weight_grads: list[WeightGrads] = []  # of the last backward: a W comes after another micro-batch's forward

        def backward() -> None:
            one.begin_backward(len(losses) - len(in_flight))
            with recording[1]:
                run_weight_grads(stages, weight_grads)
                weight_grads[:] = in_flight.pop(0).backward()

        for index, microbatch in enumerate(microbatches):
            own = microbatch.copy()
            one.begin_forward(index)
            with recording[0]:
                in_flight.append(forward_of(model, stages, loss, own, index, own_attributes))
            losses.append(in_flight[-1].loss.detach())
            if index and conditions.trains:
                backward()
        while in_flight and conditions.trains:
            backward()
        run_weight_grads(stages, weight_grads)
        own_attributes.set_numbers()
        return one.outcome(losses, numbers_kept(model.root))
