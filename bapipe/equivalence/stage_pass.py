"""The forward and the backward of one micro-batch through stages, each of which runs as a plan says."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bapipe.equivalence.cut_gradients import check_gradients
from bapipe.equivalence.outcome import Loss, Microbatch, check_scalar
from bapipe.equivalence.own_attributes import OwnAttributes
from bapipe.errors import InvalidModel
from bapipe.formats.profile import LOSS
from bapipe.module_state.python_random import (
    GlobalGeneratorStates,
    generators_restored,
    global_generator_states,
    restore_global_generators,
)
from bapipe.torch_private.split_backward import stage_backward_input, stage_backward_weight
from bapipe.tracing.model import TracedModel
from bapipe.tracing.results import no_tensor
from bapipe.tracing.stages import StageTensors

CanSplit = Callable[[Sequence[Tensor], Sequence[Tensor], Iterable[nn.Parameter]], bool]
"""(outputs, inputs, parameters) -> whether the backward of a stage may run as I and W."""


class Recomputation(Protocol):
    """A stage's module that runs once without a graph, and once more in the backward."""

    def first(self, microbatch: int, run: Callable[[], Any]) -> Any:
        """Runs a micro-batch's first forward by calling `run`, and returns its result."""

    def recomputing(self, microbatch: int) -> AbstractContextManager[None]:
        """In this context the module runs as it did in a micro-batch's first forward."""


class LayersRecomputation(Protocol):
    """A stage's module of which some layers run once more before the backward, whose graph is that of the forward."""

    def enter(self, microbatch: int) -> None:
        """Says which micro-batch runs from now on."""

    def recompute(self) -> None:
        """Runs these layers of it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage and its module, which takes what it receives and what it loads by position.

    Attributes:
        recomputation: the module, if its forward runs again in the backward; None if not.
        of_layers: what runs some layers again, if only these are recomputed; None if not.
        needs_gradient: for each output whether the next stage sends a gradient back; empty if it does where the
            output has one.
        can_split: says of a backward whether it is run as I and W; None if the plan has whole backwards.
    """

    tensors: StageTensors
    module: nn.Module
    recomputation: Recomputation | None = None
    of_layers: LayersRecomputation | None = None
    needs_gradient: tuple[bool, ...] = ()
    can_split: CanSplit | None = None

    def check_gradients(self, outputs: Sequence[Tensor]) -> None:
        """Raises InvalidModel if an output has a gradient that the next stage does not send back."""
        if self.needs_gradient:
            check_gradients(self.tensors.outputs, outputs, self.needs_gradient)


class StageFailed(Exception):
    """A stage raised an error; `layer` is its first layer."""

    def __init__(self, layer: str, phase: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.layer, self.phase, self.cause = layer, phase, cause


class NoTensor(Exception):
    """A value that is no tensor would cross the cut after a layer."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGrads:
    """The W of a stage that is still to run."""

    stage: int
    run: Callable[[], object]


def run_weight_grads(stages: Sequence[Stage], waiting: Sequence[WeightGrads]) -> None:
    """Runs W of stages.

    Raises:
        StageFailed: one fails.
    """
    for one in waiting:
        try:
            one.run()
        except Exception as error:  # whatever a layer raises
            raise StageFailed(stages[one.stage].tensors.layers[-1], "backward", error) from error


@dataclass(slots=True, kw_only=True)
class StagesPass:
    """The forward of one micro-batch: what each stage received, loaded and gave, and the loss.

    Attributes:
        generators: of Python and numpy, before the forward of each stage.
        own_attributes: of the stages.
    """

    stages: Sequence[Stage]
    microbatch: int
    received: list[list[Tensor]]
    loaded: list[list[Tensor]]
    outputs: list[tuple[Tensor, ...]]
    generators: list[GlobalGeneratorStates]
    own_attributes: OwnAttributes
    loss: Tensor
    loss_of: Callable[[tuple[Tensor, ...]], Tensor]

    def backward(self) -> list[WeightGrads]:
        """Runs the backwards of all stages, last to first; returns each W that is left to run.

        Raises:
            StageFailed: a stage fails.
        """
        waiting: list[WeightGrads] = []
        for index in range(len(self.stages) - 1, -1, -1):
            try:
                with self.own_attributes.of(index):
                    roots, grads = self._roots(index)
                if not roots:  # nothing up to this stage is trained
                    break
                waiting += self._backward_of(index, roots, grads)
            except Exception as error:  # whatever a layer raises
                raise StageFailed(self.stages[index].tensors.layers[-1], "backward", error) from error
        return waiting

    def _roots(self, index: int) -> tuple[list[Tensor], list[Tensor] | None]:
        """Returns what a stage's backward starts from, with the gradients that the next stage sends back.

        A gradient that the next stage does not have is zeros.
        """
        is_last = index == len(self.stages) - 1
        outputs, loss = self.outputs[index], self.loss
        recomputation, of_layers = self.stages[index].recomputation, self.stages[index].of_layers
        if of_layers is not None:
            of_layers.enter(self.microbatch)
            of_layers.recompute()
        if recomputation is not None:
            with generators_restored(), recomputation.recomputing(self.microbatch):
                restore_global_generators(self.generators[index])
                outputs = run_stage(self.stages[index], self.received[index], self.loaded[index])
                loss = self.loss_of(outputs) if is_last else loss
            if not is_last:
                self.stages[index].check_gradients(outputs)
        if is_last:
            return [loss.clone()], None  # I detaches what it starts from
        pairs = [
            (output, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
            for output, tensor in zip(outputs, self.received[index + 1], strict=True)
            if output.requires_grad and tensor.requires_grad
        ]
        return [output for output, _ in pairs], [grad for _, grad in pairs]

    def _backward_of(self, index: int, roots: list[Tensor], grads: list[Tensor] | None) -> list[WeightGrads]:
        """Runs B, or I: of a stage that sends no gradient back that is nothing, and W the whole backward."""
        stage, inputs = self.stages[index], [tensor for tensor in self.received[index] if tensor.requires_grad]
        of_backward = partial(self.own_attributes.of_backward, index, self.microbatch)

        def whole() -> None:
            with of_backward(is_last=True):
                torch.autograd.backward(roots, grads)

        def weights() -> None:
            with of_backward(is_last=True):
                stage_backward_weight(stage.module.parameters(), groups)

        if stage.can_split is not None and not inputs:
            return [WeightGrads(stage=index, run=whole)]
        if stage.can_split is None or not stage.can_split(roots, inputs, stage.module.parameters()):
            whole()
            return []
        given = [torch.ones_like(roots[0])] if grads is None else grads
        with of_backward(is_last=False):
            _, groups = stage_backward_input(roots, given, inputs, stage.module.parameters())
        return [WeightGrads(stage=index, run=weights)]


def forward_of(
    model: TracedModel,
    stages: Sequence[Stage],
    loss: Loss,
    microbatch: Microbatch,
    index: int,
    own_attributes: OwnAttributes,
) -> StagesPass:
    """Returns the forward of a micro-batch: only the tensors of a cut are handed on, without their graph.

    Raises:
        StageFailed: a stage fails.
        NoTensor: a value that is no tensor would cross a cut.
        InvalidModel: the model returns a value that is neither a tensor nor a constant.
    """
    given = dict(zip(model.inputs, microbatch.inputs, strict=True))
    held: dict[str, Tensor] = {}
    all_received, all_loaded, all_outputs, all_generators = [], [], [], []
    for place, stage in enumerate(stages):
        names = stage.tensors
        received = [held[name].detach().clone().requires_grad_(held[name].requires_grad) for name in names.received]
        loaded = [given[name] for name in names.loaded]
        all_generators.append(global_generator_states())
        try:
            with own_attributes.of_forward(place, index):
                outputs = _first_forward(stage, received, loaded, index)
            if place + 1 < len(stages):
                stage.check_gradients(outputs)
        except InvalidModel as error:
            if place + 1 == len(stages):
                raise
            raise NoTensor(names.layers[-1]) from error
        except Exception as error:  # whatever a layer raises
            raise StageFailed(names.layers[0], "forward", error) from error
        held = dict(zip(names.outputs, outputs, strict=True))
        all_received.append(received)
        all_loaded.append(loaded)
        all_outputs.append(outputs)
    for name, value in held.items():
        if not isinstance(value, Tensor):
            raise no_tensor(name, value)

    def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
        try:
            value = loss(model.result.rebuild(outputs), microbatch.target)
            check_scalar(value)
            return value
        except Exception as error:  # whatever the loss raises
            raise StageFailed(LOSS, "forward", error) from error

    with own_attributes.of(len(stages) - 1):
        last = loss_of(all_outputs[-1])
    return StagesPass(
        stages=stages,
        microbatch=index,
        received=all_received,
        loaded=all_loaded,
        outputs=all_outputs,
        generators=all_generators,
        own_attributes=own_attributes,
        loss=last,
        loss_of=loss_of,
    )


def _first_forward(
    stage: Stage, received: Sequence[Tensor], loaded: Sequence[Tensor], microbatch: int
) -> tuple[Tensor, ...]:
    if stage.of_layers is not None:
        stage.of_layers.enter(microbatch)
    if stage.recomputation is None or not torch.is_grad_enabled():
        return run_stage(stage, received, loaded)
    outputs = stage.recomputation.first(microbatch, lambda: run_stage(stage, received, loaded))
    needs = stage.needs_gradient
    return tuple(output.detach().requires_grad_(need) for output, need in zip(outputs, needs, strict=True))


def run_stage(stage: Stage, received: Sequence[Tensor], loaded: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns what a stage's module gives."""
    outputs: tuple[Tensor, ...] = stage.module.forward(*received, *loaded)
    return outputs
