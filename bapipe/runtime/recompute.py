"""A stage that keeps only its inputs and runs its forward again before its backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a micro-batch's first F found: the state of random numbers, and buffers that an F changes."""

    random: Tensor
    device_random: Tensor | None
    buffers: dict[str, Tensor]


class RecomputedStage(nn.Module):
    """A stage's module, run once without a graph and once more, exactly alike, with one.

    The second run draws the random numbers of the first, reads the buffers as the first found them, and writes to
    copies: dropout is the same, and batch norm counts a micro-batch once. (torch.utils.checkpoint would recompute
    again for every group of weights in a W.) A buffer that the very first F leaves alone is taken for a constant.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._device = device
        self._kept: dict[int, _Kept] = {}
        self._changing: frozenset[str] | None = None
        self._copies: dict[str, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._copies:
            return torch.func.functional_call(self.module, self._copies, args, kwargs)
        return self.module(*args, **kwargs)

    def first(self, microbatch: int, run: Callable[[], Result]) -> Result:
        """Returns what `run`, which runs the module, returns; no graph is made."""
        buffers = dict(self.module.named_buffers())
        if self._changing is not None:
            buffers = {name: buffer for name, buffer in buffers.items() if name in self._changing}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        on_cuda = self._device.type == "cuda"
        kept = _Kept(torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if on_cuda else None, before)
        with torch.no_grad():
            result = run()
        if self._changing is None:
            self._changing = frozenset(name for name in before if not torch.equal(before[name], buffers[name]))
            kept = _Kept(kept.random, kept.device_random, {name: before[name] for name in self._changing})
        self._kept[microbatch] = kept
        return result

    @contextmanager
    def again(self, microbatch: int) -> Iterator[None]:
        """Running the module within is running a micro-batch's F once more."""
        kept = self._kept.pop(microbatch)
        with torch.random.fork_rng(devices=[self._device] if kept.device_random is not None else []):
            torch.set_rng_state(kept.random)
            if kept.device_random is not None:
                torch.cuda.set_rng_state(kept.device_random, self._device)
            self._copies = kept.buffers
            try:
                yield
            finally:
                self._copies = {}
