"""A stage that keeps only its inputs and runs its forward again before its backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _StateBeforeForward:
    """The state that a micro-batch's first F started from: of the generators, and the buffers that an F changes."""

    cpu_rng: Tensor
    cuda_rng: Tensor | None
    buffers: dict[str, Tensor]


class RecomputedStage(nn.Module):
    """A stage's module, run once without an autograd graph, and once more with one, with exactly the same result.

    The second run draws the random numbers of the first, reads the buffers' values from before the first, and writes to
    copies of them: dropout is the same, and batch norm counts a micro-batch once. A buffer that the very first F does
    not change is taken for a constant.

    Not torch.utils.checkpoint: it recomputes when a backward first unpacks a saved tensor, and would do so again for
    every group of weights in a W.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._device = device
        self._before: dict[int, _StateBeforeForward] = {}  # by micro-batch
        self._changing: frozenset[str] | None = None  # names of the buffers that F changes; None before the first F
        self._copies: dict[str, Tensor] = {}  # of these buffers, while F is recomputed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._copies:
            return torch.func.functional_call(self.module, self._copies, args, kwargs)
        return self.module(*args, **kwargs)

    def first(self, microbatch: int, run: Callable[[], Result]) -> Result:
        """Runs a micro-batch's F by calling `run`, without a graph; returns its result."""
        buffers = dict(self.module.named_buffers())
        if self._changing is not None:
            buffers = {name: buffer for name, buffer in buffers.items() if name in self._changing}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        cuda_rng = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        state = _StateBeforeForward(torch.get_rng_state(), cuda_rng, before)
        with torch.no_grad():
            result = run()
        if self._changing is None:
            self._changing = frozenset(name for name in before if not torch.equal(before[name], buffers[name]))
            changing = {name: before[name] for name in self._changing}
            state = _StateBeforeForward(state.cpu_rng, state.cuda_rng, changing)
        self._before[microbatch] = state
        return result

    @contextmanager
    def recomputing(self, microbatch: int) -> Iterator[None]:
        """In this context the module runs as it did in a micro-batch's first F."""
        state = self._before.pop(microbatch)
        with torch.random.fork_rng(devices=[self._device] if state.cuda_rng is not None else []):
            torch.set_rng_state(state.cpu_rng)
            if state.cuda_rng is not None:
                torch.cuda.set_rng_state(state.cuda_rng, self._device)
            self._copies = state.buffers
            try:
                yield
            finally:
                self._copies = {}
