"""Values of small tensors that depend on constants alone, so that a forward may branch on them while it is recorded."""

from typing import Any

import torch
from torch import Tensor

from bapipe.torch_private import storage_key, without_fake_tensors
from bapipe.tracing.randomness import draws_random_numbers

_READS = ("__bool__", "__float__", "__index__", "__int__", "item", "tolist")
_MOST_ELEMENTS = 1024


class ConstantValues:
    """The values of tensors made from constants, each as a pair: with random numbers as small as can be, and as large.

    A forward that skips a layer if `torch.rand([]) < p` takes the same branch for both if p is 0 or 1; only then does
    the recording hold for every draw.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id of the tensor; with the id of its storage

    def read(self, func: Any, args: Any) -> tuple[Any] | None:
        """Returns the result of a function that reads a tensor's value, in a tuple; None if it is not known."""
        if getattr(func, "__name__", "") not in _READS or not args or id(args[0]) not in self._known:
            return None
        low, high, _ = self._known[id(args[0])]
        with without_fake_tensors():
            first, second = func(low, *args[1:]), func(high, *args[1:])
        return (first,) if first == second else None

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Computes the values of a function's result, if it depends on constants alone."""
        name = getattr(func, "__name__", "")
        if not isinstance(result, Tensor) or result.numel() > _MOST_ELEMENTS or name in ("__set__", "__get__"):
            return
        if name == "rand":
            with without_fake_tensors():
                low, high = (torch.full(result.shape, value, dtype=result.dtype) for value in (0.0, 1.0 - 2.0**-24))
        elif draws_random_numbers(func) or "empty" in name or not all(map(self._is_known, (*args, *kwargs.values()))):
            return
        else:
            with without_fake_tensors(), torch.no_grad():
                low, high = (
                    func(*self._at(args, end), **{key: self._at((value,), end)[0] for key, value in kwargs.items()})
                    for end in (0, 1)
                )
        self._known[id(result)] = (low, high, storage_key(result))

    def forget(self, written: Tensor) -> None:
        """Drops the values of all tensors that share memory with one that is written to."""
        storage = storage_key(written)
        self._known = {key: known for key, known in self._known.items() if known[2] != storage}

    def _is_known(self, argument: Any) -> bool:
        if isinstance(argument, list | tuple):
            return all(map(self._is_known, argument))
        return not isinstance(argument, Tensor) or id(argument) in self._known

    def _at(self, arguments: Any, end: int) -> Any:
        def value(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                return type(argument)(map(value, argument))
            return self._known[id(argument)][end] if isinstance(argument, Tensor) else argument

        return tuple(map(value, arguments))
