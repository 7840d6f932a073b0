"""The module of a stage: its layers, with outputs that can be sent."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bapipe.errors import InvalidModel
from bapipe.tracing.extract import BeforeRandom, extract
from bapipe.tracing.stages import Split


def stage_module(
    parts: Split,
    index: int,
    device: torch.device | None = None,
    before_random: BeforeRandom | None = None,
) -> fx.GraphModule:
    """Returns a stage as a module that takes its `received`, then its `loaded` tensors, and returns its `outputs`.

    Parameters keep their names in the model and are shared with it. Tensors for another stage are contiguous and no
    views, and come from a single node of the autograd graph: see `_Seal`. For `device` and `before_random` see
    `bapipe.tracing.extract`.
    """
    stage = parts.stages[index]
    module = extract(
        parts.model,
        stage.layers,
        (*stage.received, *stage.loaded),
        stage.outputs,
        device=device,
        before_random=before_random,
    )
    if needs_seal(parts, index):
        output = next(node for node in module.graph.nodes if node.op == "output")
        with module.graph.inserting_before(output):
            sealed = module.graph.call_function(seal, tuple(output.all_input_nodes))
        output.args = (sealed,)
        module.recompile()
    return module


def needs_seal(parts: Split, index: int) -> bool:
    """Returns whether the outputs of a stage must pass through `seal`."""
    stage = parts.stages[index]
    # The last stage needs it only if it returns a tensor that it received: torch would detach its receive buffer.
    is_sent = index + 1 < len(parts.stages) or bool(set(stage.outputs) & set(stage.received))
    return bool(stage.outputs) and is_sent


def argument_names(parts: Split, tensors: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the arguments by which a stage's module takes some tensors."""
    return tuple(parts.model.node_of[name].name for name in tensors)


class _Seal(torch.autograd.Function):
    """Passes all outputs of a stage through one operator, because:

    - gloo sends contiguous tensors only.
    - torch's I detaches a stage's outputs in place, which is forbidden for views.
    - torch's I finds the groups of weights for W by walking from each parameter to an operator that the stage's inputs
      reach too. Parameters that lead only to an output that no input reaches would be forgotten without an error;
      through this operator all outputs are reached.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        sealed = tuple(tensor.detach() if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors)
        constants = [tensor for tensor, needed in zip(sealed, ctx.needs_input_grad, strict=True) if not needed]
        ctx.mark_non_differentiable(*constants)
        return sealed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def seal(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors, contiguous, as outputs of one autograd operator; copies only what is not contiguous.

    Raises:
        InvalidModel: one is not a tensor.
    """
    for value in tensors:
        if not isinstance(value, Tensor):
            raise InvalidModel(
                f"a stage hands on or returns a value of type {type(value).__name__}, which is no tensor: return "
                "tensors, and let each layer compute numbers from its own input"
            )
    sealed: tuple[Tensor, ...] = _Seal.apply(*tensors)  # type: ignore[no-untyped-call]
    return sealed
