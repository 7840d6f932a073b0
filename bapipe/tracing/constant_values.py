"""Values of small tensors that depend on constants alone, so that a forward may branch on them while it is recorded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bapipe.torch_private.tensors import storage_key, tree_map, tree_tensors, without_fake_tensors
from bapipe.tracing.randomness import draws_random_numbers

_READS = ("__bool__", "__float__", "__index__", "__int__", "item", "tolist")
_COMPARISONS = frozenset(
    ("lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__", "less", "less_equal", "greater", "greater_equal")
)
_MOST_ELEMENTS = 1024


class ConstantValues:
    """The values of tensors made from constants.

    A comparison of `torch.rand` with a constant is one if it has the same result for the smallest and the largest
    number: then it has that for every draw, as `torch.rand([]) < p` if p is 0 or 1. Nothing else that depends on a
    draw is: what two draws, or a function of one, give at the ends says nothing of what they give between.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int]] = {}  # by id of the tensor; with the id of its storage
        self._drawn: dict[int, int] = {}  # the storages of what `torch.rand` drew, by id of the tensor

    def read(self, func: Any, args: Any) -> tuple[Any] | None:
        """Returns the result of a function that reads a tensor's value, in a tuple; None if it is not known."""
        if getattr(func, "__name__", "") not in _READS or not args or id(args[0]) not in self._known:
            return None
        value, _ = self._known[id(args[0])]
        with without_fake_tensors():
            return (func(value, *args[1:]),)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Computes the value of a function's result, if it depends on constants alone."""
        name = getattr(func, "__name__", "")
        if not isinstance(result, Tensor) or result.numel() > _MOST_ELEMENTS or name in ("__set__", "__get__"):
            return
        if name == "rand":
            self._drawn[id(result)] = storage_key(result)
            return
        if draws_random_numbers(func) or "empty" in name:
            return
        tensors = set(map(id, tree_tensors((args, kwargs))))
        drawn = tensors & self._drawn.keys()
        if not tensors <= self._known.keys() | drawn or (drawn and (len(drawn) > 1 or name not in _COMPARISONS)):
            return
        with without_fake_tensors(), torch.no_grad():
            low, high = (self._result(func, args, kwargs, end) for end in (_smallest, _largest))
            is_constant = not drawn or torch.equal(low, high)
        if is_constant:
            self._known[id(result)] = low, storage_key(result)

    def forget(self, written: Tensor) -> None:
        """Drops the values of all tensors that share memory with one that is written to."""
        storage = storage_key(written)
        self._known = {key: known for key, known in self._known.items() if known[1] != storage}
        self._drawn = {key: drawn for key, drawn in self._drawn.items() if drawn != storage}

    def _result(self, func: Any, args: Any, kwargs: Any, drawn: Callable[[Tensor], Tensor]) -> Any:
        """Returns the result of a function of known values, and of what `drawn` gives for a tensor that was drawn."""

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return drawn(leaf) if id(leaf) in self._drawn else self._known[id(leaf)][0]

        values, named = tree_map(value, (args, kwargs))
        return func(*values, **named)


def _smallest(drawn: Tensor) -> Tensor:
    return torch.zeros(drawn.shape, dtype=drawn.dtype)


def _largest(drawn: Tensor) -> Tensor:
    return torch.full(drawn.shape, 1 - torch.finfo(drawn.dtype).eps / 2, dtype=drawn.dtype)
