"""A stage that this process runs, as the executor needs it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from bapipe.equivalence.cut_gradients import check_gradients
from bapipe.errors import InvalidModel
from bapipe.torch_device import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStage:
    """A stage that this process runs.

    Attributes:
        module: takes the received tensors by position and `arguments` by name, and returns a tuple.
        received, outputs: meta tensors with the shapes and types of one micro-batch. Of the first stage, `received` are
            the model inputs that it loads, which it takes by position.
        output_names: names of the tensors that go to the next stage; empty for the last stage, whose outputs may have
            any size.
        arguments: names of the keyword arguments by which a later stage takes the model inputs that it loads.
        recompute: the whole stage is recomputed: F keeps only its inputs, and runs again before B or I.
        before_backward: called before B or I to recompute, if only some of the stage's layers are recomputed.
        last_backward: returns the context for the backward after which the stage's gradients on this rank are final.
    """

    index: int
    module: nn.Module
    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    output_names: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    recompute: bool = False
    before_backward: Callable[[], None] | None = None
    last_backward: Callable[[], AbstractContextManager[None]] = nullcontext


def check_outputs(stage: LocalStage, outputs: Sequence[Tensor]) -> None:
    """Raises InvalidModel unless a stage returned tensors of the shapes and types that the next one expects.

    One that needs a gradient, for which the next stage sends none back, is an error too.
    """
    for name, output, example in zip(stage.output_names, outputs, stage.outputs, strict=False):
        if output.shape != example.shape or output.dtype != example.dtype:
            raise InvalidModel(
                f"'{name}' in stage {stage.index} has shape {tuple(output.shape)} and type {dtype_name(output.dtype)}, "
                f"but {tuple(example.shape)} and {dtype_name(example.dtype)} were expected: a tensor whose size "
                "depends on the data cannot cross a cut; plan another cut, or make the module around it one layer "
                "(`leaf_modules`)"
            )
    check_gradients_of_outputs(stage, outputs)


def check_gradients_of_outputs(stage: LocalStage, outputs: Sequence[Tensor]) -> None:
    """Raises InvalidModel if an output needs a gradient that the next stage does not send back."""
    if stage.output_names:
        check_gradients(stage.output_names, outputs, [example.requires_grad for example in stage.outputs])
