"""Runs the finest stages of a traced model in one process, as the ranks of a pipeline would."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from bapipe.equivalence.outcome import Loss, Microbatch, Outcome, trial
from bapipe.errors import InvalidModel
from bapipe.formats.profile import LOSS
from bapipe.tracing.changing_state import layers_with_same_changing_buffer
from bapipe.tracing.model import TracedModel
from bapipe.tracing.python_state import numbers_kept
from bapipe.tracing.stage_module import stage_module
from bapipe.tracing.stages import Split, StageTensors, stages_of


class StageFailed(Exception):
    """A stage raised an error; `layer` is its first layer."""

    def __init__(self, layer: str, phase: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.layer, self.phase, self.cause = layer, phase, cause


class _NoTensor(Exception):
    """A value that is no tensor would cross the cut after a layer."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage and its module."""

    tensors: StageTensors
    module: fx.GraphModule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The forward of one micro-batch: what each stage received and gave, and the loss."""

    received: list[list[Tensor]]
    outputs: list[tuple[Tensor, ...]]
    loss: Tensor


def finest_stages(model: TracedModel, no_cut_after: Collection[str] = ()) -> tuple[Stage, ...]:
    """Returns as many stages as there can be: each layer is one, but for those that a cut must not separate."""
    cuts = [cut for cut in _allowed_cuts(model) if model.layers[cut - 1].name not in no_cut_after]
    made: dict[StageTensors, fx.GraphModule] = {}
    device = next((tensor.device for tensor in model.root.parameters()), None)
    while True:
        stage_of = {layer.name: bisect_right(cuts, place) for place, layer in enumerate(model.layers)}
        parts = Split(model=model, stages=stages_of(model, stage_of), examples={}, tied=())
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
    together = [
        (place[hazard.reader], place[hazard.writer])
        for hazard in model.hazards
        if hazard.same_stage or place[hazard.reader] > place[hazard.writer]
    ]
    for layers in layers_with_same_changing_buffer(model):
        together += [(place[layers[0]], place[layer]) for layer in layers]
    return [cut for cut in range(1, len(model.layers)) if not any(min(pair) < cut <= max(pair) for pair in together)]


def run_finest_stages(
    model: TracedModel, loss: Loss, microbatches: Sequence[Microbatch]
) -> tuple[tuple[Stage, ...], Outcome]:
    """Returns the finest stages that hand on tensors only, and their outcome.

    Raises:
        StageFailed: a stage fails.
    """
    no_cut_after: set[str] = set()
    while True:
        stages = finest_stages(model, no_cut_after)
        try:
            return stages, run_stages(model, stages, loss, microbatches)
        except _NoTensor as error:
            no_cut_after.add(error.layer)


def run_stages(
    model: TracedModel,
    stages: Sequence[Stage],
    loss: Loss,
    microbatches: Sequence[Microbatch],
    recording: tuple[AbstractContextManager[object], AbstractContextManager[object]] = (nullcontext(), nullcontext()),
) -> Outcome:
    """Returns the outcome of the stages: a micro-batch's backward comes after the next one's forward.

    Only the tensors of a cut are handed on, without their graph, and only their gradients back.

    Args:
        recording: contexts to enter for each forward, and for each backward.

    Raises:
        StageFailed: a stage fails.
    """
    with trial(model.root) as one:
        losses: list[Tensor] = []
        in_flight: list[_Pass] = []

        def backward() -> None:
            one.begin_backward(len(losses) - len(in_flight))
            with recording[1]:
                _backward(stages, in_flight.pop(0))

        for index, microbatch in enumerate(microbatches):
            own = microbatch.copy()
            one.begin_forward(index)
            with recording[0]:
                in_flight.append(_forward(model, stages, loss, own))
            losses.append(in_flight[-1].loss.detach())
            if index:
                backward()
        while in_flight:
            backward()
        return one.outcome(losses, numbers_kept(model.root))


def _forward(model: TracedModel, stages: Sequence[Stage], loss: Loss, microbatch: Microbatch) -> _Pass:
    given = dict(zip(model.inputs, microbatch.inputs, strict=True))
    held: dict[str, Tensor] = {}
    all_received, all_outputs = [], []
    for stage in stages:
        names = stage.tensors
        received = [held[name].detach().clone().requires_grad_(held[name].requires_grad) for name in names.received]
        try:
            outputs = stage.module.forward(*received, *(given[name] for name in names.loaded))
        except InvalidModel as error:
            raise _NoTensor(names.layers[-1]) from error
        except Exception as error:  # whatever a layer raises
            raise StageFailed(names.layers[0], "forward", error) from error
        held = dict(zip(names.outputs, outputs, strict=True))
        all_received.append(received)
        all_outputs.append(outputs)
    try:
        value = loss(model.result.rebuild(all_outputs[-1]), microbatch.target)
    except Exception as error:  # whatever the loss raises
        raise StageFailed(LOSS, "forward", error) from error
    return _Pass(received=all_received, outputs=all_outputs, loss=value)


def _backward(stages: Sequence[Stage], forward: _Pass) -> None:
    roots: list[Tensor] = [forward.loss]
    grads: list[Tensor | None] = [None]
    for index in range(len(stages) - 1, -1, -1):
        try:
            torch.autograd.backward(roots, grads)
        except Exception as error:  # whatever a layer raises
            raise StageFailed(stages[index].tensors.layers[-1], "backward", error) from error
        pairs = [] if index == 0 else _gradients(forward.outputs[index - 1], forward.received[index])
        if not pairs:  # nothing before this stage is trained
            return
        roots, grads = [output for output, _ in pairs], [grad for _, grad in pairs]


def _gradients(outputs: Sequence[Tensor], received: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns the outputs that need a gradient, with what the next stage sends back: zeros if it has none."""
    return [
        (output, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        for output, tensor in zip(outputs, received, strict=True)
        if output.requires_grad
    ]
