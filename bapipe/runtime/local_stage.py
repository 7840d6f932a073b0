"""A stage that this process runs, and what torch's pipeline runtime requires of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.torch_device import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStage:
    """A stage that this process runs.

    Attributes:
        module: takes the received tensors by position and `arguments` by name, and returns a tuple.
        received, outputs: shapes of one micro-batch on the meta device; of the first stage, `received` are the model
            inputs that it loads, which it takes by position.
        output_names: of the tensors that go to the next stage; none of the last stage, whose outputs may have any size.
        arguments: names of the model inputs that a later stage loads.
        recompute: F keeps only its inputs, and B or I runs it again.
        before_backward: what a stage of which some layers are recomputed does before B or I.
        last_backward: a context to enter for the backward after which the stage's gradients on this rank are final.
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
    """Raises InvalidModel unless a stage returned tensors of the shapes and types that the next one expects."""
    for name, output, example in zip(stage.output_names, outputs, stage.outputs, strict=False):
        if output.shape != example.shape or output.dtype != example.dtype:
            raise InvalidModel(
                f"'{name}' in stage {stage.index} has shape {tuple(output.shape)} and type {dtype_name(output.dtype)}, "
                f"but {tuple(example.shape)} and {dtype_name(example.dtype)} were expected: a tensor whose size "
                "depends on the data cannot cross a cut; plan another cut, or take the module around it as one layer "
                "(`leaf_modules`)"
            )
