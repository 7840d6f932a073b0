"""Copies of the inputs that a module changes in place, from before it changed them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bapipe.module_state.python_state import same_tensor
from bapipe.runtime.tensor_changes import TensorWrites
from bapipe.torch_private.tensors import version


class ChangedInputs:
    """Finds the inputs that forwards change in place, and copies them before each forward.

    Before the first forward all inputs that do not require gradients are copied, later only those that the first one
    has changed. Autograd does not let a forward change the other inputs, except by writes that it does not see, such as
    to `tensor.data`.
    """

    def __init__(self) -> None:
        self._changing: set[int] | None = None  # positions among the inputs; None before the first forward
        self._given: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._writes = TensorWrites()
        self._seen_by_autograd: dict[int, int] = {}  # torch's counts of writes to inputs that require gradients

    def begin(self, inputs: Sequence[Any]) -> None:
        """Copies inputs, before a forward that may change them."""
        self._given = {i: value for i, value in enumerate(inputs) if isinstance(value, Tensor)}
        without_gradients = {i for i, tensor in self._given.items() if not tensor.requires_grad}
        self._seen_by_autograd = {i: version(self._given[i]) for i in self._given.keys() - without_gradients}
        copied = without_gradients if self._changing is None else self._changing & without_gradients
        self._before = {i: self._given[i].clone() for i in copied}
        self._writes.begin({str(i): tensor for i, tensor in self._given.items()})

    def finish(self) -> dict[int, Tensor] | None:
        """Returns copies of the changed inputs from before the forward, by position; None if one was not copied."""
        given, before, written = self._given, self._before, set(map(int, self._writes.finish()))
        # Autograd itself refuses those writes that it sees.
        written -= {i for i, count in self._seen_by_autograd.items() if version(given[i]) != count}
        self._given, self._before = {}, {}
        self._writes.begin({})  # releases the inputs
        if self._changing is None:
            self._changing = written | {i for i, value in before.items() if not same_tensor(value, given[i])}
        return {i: before[i] for i in self._changing & before.keys()} if written <= before.keys() else None
