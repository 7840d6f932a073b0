"""Finds the first layer in which the stages compute something else than the original model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.equivalence.outcome import Conditions, Loss, Microbatch, run_original
from bapipe.equivalence.stage_pass import Stage
from bapipe.equivalence.stages import run_stages
from bapipe.torch_private.tensors import DispatchMode, tree_leaves
from bapipe.tracing.model import TracedModel

_SAME = 1e-4
"""Two values with sums this close, relative to the sum of magnitudes, are taken for the same."""

_Sums = tuple[float, float]
_Shape = tuple[tuple[int, ...], torch.dtype]


class ComputedValues(DispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the shape and the sums of every tensor that operators compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums: dict[_Shape, list[_Sums]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            self.add(value)
        return result

    def add(self, value: object) -> None:
        """Remembers a value, if it is a tensor of floats."""
        if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided:
            self._sums.setdefault((tuple(value.shape), value.dtype), []).append(_sums(value))

    def has(self, one: "_Value") -> bool:
        """Returns whether a tensor like this was computed."""
        total, size = one.sums
        return any(
            abs(total - a) <= _SAME * size and abs(size - b) <= _SAME * size for a, b in self._sums.get(one.shape, ())
        )


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor, by its shape and sums."""

    shape: _Shape
    sums: _Sums


@dataclass(slots=True)
class ModuleCall:
    """A call of a module in the original: what enters and leaves it, forward and backward."""

    path: str
    inputs: list[_Value] = field(default_factory=list)
    outputs: list[_Value] = field(default_factory=list)
    output_grads: list[_Value] = field(default_factory=list)
    input_grads: list[_Value] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceAt:
    """Where the stages first differ from the original.

    Attributes:
        path: of the innermost module that holds the difference; empty for the model's own code.
        phase: "forward" or "backward".
        between: after and before which modules inside that one, in words; empty if that is not known.
    """

    path: str
    phase: str
    between: str = ""


def first_difference(
    model: TracedModel,
    stages: Sequence[Stage],
    loss: Loss,
    microbatches: Sequence[Microbatch],
    conditions: Conditions,
) -> DifferenceAt | None:
    """Returns where the stages first differ.

    A result of a module of the original, or a gradient, that no operator of the stages computes, is a difference.
    None if all of these are there.
    """
    forward, backward = ComputedValues(), ComputedValues()
    calls = _original_calls(model.root, loss, microbatches, conditions)
    for value in (*model.root.parameters(), *model.root.buffers(), *(x for one in microbatches for x in one.inputs)):
        forward.add(value)
    run_stages(model, stages, loss, microbatches, conditions, recording=(forward, backward))
    path = _in_forward(calls, forward)
    if path is not None:
        return DifferenceAt(path=path, phase="forward", between=_between(calls, path, forward))
    path = _in_backward(calls, backward)
    return None if path is None else DifferenceAt(path=path, phase="backward")


def _in_forward(calls: Sequence[ModuleCall], computed: ComputedValues) -> str | None:
    wrong = [call for call in calls if not all(map(computed.has, call.outputs))]
    # A call that gets the right values but gives wrong ones holds the difference, and so does the innermost of these.
    begun = _innermost([call for call in wrong if all(map(computed.has, call.inputs))])
    if begun:
        return begun[0].path
    return wrong[0].path.rpartition(".")[0] if wrong else None


def _between(calls: Sequence[ModuleCall], path: str, computed: ComputedValues) -> str:
    """Returns the modules in a module around the first value that differs there."""
    inside = [call for call in calls if _is_inside(call.path, path)]
    first = next((i for i, call in enumerate(inside) if not all(map(computed.has, call.inputs))), len(inside))
    after = f" after '{inside[first - 1].path}'" if inside and first else ""
    return f"{after}{' and' if after else ''} before '{inside[first].path}'" if first < len(inside) else after


def _in_backward(calls: Sequence[ModuleCall], computed: ComputedValues) -> str | None:
    wrong = [call for call in calls if not all(map(computed.has, (*call.output_grads, *call.input_grads)))]
    begun = _innermost([call for call in wrong if call.output_grads and all(map(computed.has, call.output_grads))])
    if begun:
        return begun[-1].path
    return wrong[-1].path.rpartition(".")[0] if wrong else None


def _innermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Returns the calls inside which there is no other."""
    return [call for call in calls if not any(_is_inside(other.path, call.path) for other in calls)]


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _original_calls(
    root: nn.Module, loss: Loss, microbatches: Sequence[Microbatch], conditions: Conditions
) -> list[ModuleCall]:
    """Returns the calls of all modules in a pass of the original, in the order in which they end."""
    calls: list[ModuleCall] = []
    with _recorded_calls(root, calls):
        run_original(root, loss, microbatches, conditions)
    return calls


@contextmanager
def _recorded_calls(root: nn.Module, calls: list[ModuleCall]) -> Iterator[None]:
    running: list[ModuleCall] = []

    def before(path: str, args: Any) -> None:
        running.append(ModuleCall(path, [_value(value) for value in _floats(args)]))

    def after(args: Any, output: Any) -> None:
        call = running.pop()
        for value in _floats(output):
            call.outputs.append(_value(value))
            _record_gradient(value, call.output_grads)
        for value in _floats(args):
            _record_gradient(value, call.input_grads)
        calls.append(call)

    handles = []
    for path, module in root.named_modules():
        # Before the module's own hooks, and after them.
        handles += [
            module.register_forward_pre_hook(lambda _, args, own_path=path: before(own_path, args), prepend=True),
            module.register_forward_hook(lambda _, args, output: after(args, output)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record_gradient(value: Tensor, grads: list[_Value]) -> None:
    if value.requires_grad:
        value.register_hook(lambda grad: grads.append(_value(grad)))  # type: ignore[no-untyped-call]


def _floats(nested: Any) -> Iterator[Tensor]:
    for value in tree_leaves(nested):
        if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided:
            yield value


def _value(tensor: Tensor) -> _Value:
    return _Value((tuple(tensor.shape), tensor.dtype), _sums(tensor))


def _sums(tensor: Tensor) -> _Sums:
    """Returns a sum of a tensor's finite values, weighted by their places, and the sum of their magnitudes."""
    values = tensor.detach().double().nan_to_num(0, 0, 0).reshape(-1)
    weights = torch.arange(len(values), dtype=torch.float64, device=values.device).cos_()
    return float(values @ weights), float(values.abs().sum())
