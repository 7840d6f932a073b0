"""What a forward called, with numbers as they were at one batch size."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bapipe.errors import first_line
from bapipe.torch_private.tensors import TreeSpec, needs_values
from bapipe.tracing.captured import Autocast
from bapipe.tracing.code_position import CodeLine, failed_line
from bapipe.tracing.reasons import CHOOSE_WITHOUT_VALUES, TAKE_ANY_NUMBER, Reason


class NotRecorded(Exception):
    """A forward does what cannot be recorded. Not a TypeError: operators of Python take that for "try the other"."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class ExamplesFail(NotRecorded):
    """A forward on rows of the example inputs fails, so nothing shows what a layer returns that needs values."""


def why_not_recorded(error: Exception) -> Reason:
    """Says why a forward cannot be recorded that raised an error while it was, and at which line."""
    line = failed_line(error) or ""
    if needs_values(error):
        return Reason(f"it uses values of tensors, which are not known while it is traced{line}", CHOOSE_WITHOUT_VALUES)
    if isinstance(error, NotRecorded):
        return Reason(f"{first_line(error)}{line}", error.reason.to_cut)
    return Reason(f"it fails on tensors without values: {in_words(error)}{line}", TAKE_ANY_NUMBER)


def in_words(error: Exception) -> str:
    """Returns the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True, slots=True)
class Ref:
    """The result of an earlier call, in place of a tensor."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that the forward made, or a tensor that it read.

    Attributes:
        op, target, args, kwargs: as in a node of torch.fx; tensors are `Ref`s.
        path: the module in whose forward it was.
        layer: the path of the layer's module, and which call of this module it is, counted from 1.
        no_grad: gradients were off.
        autocast: the mode of autocast, if that was not the mode of the whole recording.
        shape: of its result, if that is a tensor.
        structure: of a layer's result, if that is nested.
        shares: earlier results whose memory its result shares.
        writes: earlier results that it wrote to.
        returns_written: it returned a tensor that it wrote to.
        line: of the model's code.
    """

    op: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    layer: tuple[str, int] | None = None
    no_grad: bool = False
    autocast: Autocast | None = None
    shape: tuple[int, ...] | None = None
    structure: Any = None
    shares: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    returns_written: bool = False
    line: CodeLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a forward called and returned.

    Attributes:
        returned: leaves of the result; tensors are `Ref`s.
        spec: how the forward nests them.
        constants: tensors that belong to no module, by the name of the call that reads them.
        leaf_reasons: why modules had to become leaf modules, by path.
    """

    calls: tuple[Call, ...]
    returned: tuple[Any, ...]
    spec: TreeSpec
    constants: dict[str, Any]
    leaf_reasons: Mapping[str, Reason]
