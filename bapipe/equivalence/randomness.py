"""The same random numbers for the same operators, in whatever order and however often these run."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bapipe.module_state.python_random import seed_all_generators
from bapipe.torch_private.tensors import DispatchMode, OpOverload


class SeededOperators(DispatchMode):  # type: ignore[no-untyped-call]
    """Every operator that draws random numbers starts from a seed of its name, its shape and the micro-batch.

    So two passes draw the same numbers even if they run operators in another order, or one of them more than once.
    One that draws from a generator of its own starts from that one's seed, too, and draws nothing from it.

    Attributes:
        microbatch: what runs; the caller sets it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.microbatch = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        if generator is None:
            torch.manual_seed(self._seed(func, args))
        else:
            seed = _hash(f"{generator.initial_seed()}:{self._seed(func, args)}")
            kwargs = {**(kwargs or {}), "generator": torch.Generator(generator.device).manual_seed(seed)}
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.is_contiguous():
            return func(*args, **(kwargs or {}))
        # Numbers are drawn in the order of memory, which may differ in a stage: it receives contiguous tensors.
        result = func(first.contiguous(), *args[1:], **(kwargs or {}))
        return first.copy_(result) if func.overloadpacket.__name__.endswith("_") else result

    def _seed(self, func: OpOverload, args: Sequence[Any]) -> int:
        """Returns the seed of an operator; `dropout_` and `dropout` have the same."""
        first = args[0] if args else ()
        shape = tuple(first.shape) if isinstance(first, Tensor) else first
        return _hash(f"{self.microbatch}:{func.overloadpacket.__name__.rstrip('_')}:{shape}")


def seed_generators(microbatch: int) -> None:
    """Sets the global generators to what they are before a micro-batch."""
    seed_all_generators(_hash(f"{microbatch}"))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
