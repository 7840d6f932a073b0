"""The inputs that a module changes in place, as they were before."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bapipe.runtime.tensor_changes import TensorVersions, are_equal


class ChangedInputs:
    """Finds the inputs that a forward changes in place, and copies them before.

    The very first forward copies all inputs that do not require gradients (autograd forbids to change the others), and
    later ones those that it has changed.
    """

    def __init__(self) -> None:
        self._changing: frozenset[int] | None = None  # by place among the inputs; None before the very first forward
        self._given: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._versions = TensorVersions({})

    def begin(self, inputs: Sequence[Any]) -> None:
        """Copies inputs before a forward changes them."""
        self._given = {i: t for i, t in enumerate(inputs) if isinstance(t, Tensor) and not t.requires_grad}
        copied = self._given.keys() if self._changing is None else self._changing & self._given.keys()
        self._before = {i: self._given[i].clone() for i in copied}
        self._versions = TensorVersions({str(i): tensor for i, tensor in self._given.items()})

    def finish(self) -> dict[int, Tensor] | None:
        """Returns what the forward has changed, as it was before, by place; None if that is lost."""
        given, before = self._given, self._before
        changed = {int(i) for i in self._versions.written()}
        if self._changing is None:
            changed |= {i for i, value in before.items() if not are_equal(value, given[i])}
            self._changing = frozenset(changed)
        self._given, self._before, self._versions = {}, {}, TensorVersions({})
        return {i: before[i] for i in changed} if changed <= before.keys() else None
