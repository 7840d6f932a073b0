"""A stage that runs some of its layers again before its backward, and keeps what the others save."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bapipe.errors import InvalidModel
from bapipe.runtime.recompute import RecomputedStage, not_exactly
from bapipe.torch_private.tensors import version
from bapipe.torch_settings import autocast_on
from bapipe.tracing.stage_module import seal
from bapipe.tracing.stage_parts import StagePart


class Running(Protocol):
    """Knows which micro-batch runs."""

    microbatch: int


@dataclass(slots=True)
class _Saved:
    """The tensors that autograd saves in the layers of a part for one micro-batch.

    In F the graph saves the `number` of each tensor in its place. When the layers run again, their operators save in
    the same order, and `append` keeps the tensors. B, or I and then again W, asks for a `tensor` by its number.

    Attributes:
        inputs: of the part, as they were before F.
        written: positions of those with gradients that F changed in place.
    """

    inputs: tuple[Any, ...]
    written: frozenset[int] = frozenset()
    num_tensors: int = 0
    tensors: list[Tensor] = field(default_factory=list)

    def number(self, _: Tensor) -> int:
        self.num_tensors += 1
        return self.num_tensors - 1

    def append(self, tensor: Tensor) -> None:
        self.tensors.append(tensor.detach())

    def tensor(self, number: int) -> Tensor:
        return self.tensors[number]


class PartlyRecomputedStage(nn.Module):
    """A stage's module, run in parts, some of which keep only their inputs until `recompute` runs them again.

    Backwards use the graph of F, so B, I and W are as without recomputation. The second run of a part gives exactly
    what the first gave, see `RecomputedStage`; but here gradients are enabled in both.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[StagePart],
        *,
        received: Sequence[str],
        arguments: Mapping[str, str],
        outputs: Sequence[str],
        is_sealed: bool,
        device: torch.device,
        autocast: torch.dtype | None,
        rng: Running,
    ) -> None:
        """Splits a stage's module.

        Args:
            received: names of the tensors that the module takes by position.
            arguments: names of the tensors that it takes by name, by argument.
            outputs: names of the tensors that it returns.
            is_sealed: whether the outputs pass through `seal`.
            rng: knows the micro-batch that runs.
        """
        super().__init__()
        self.module = module  # registered first: `model_errors` looks for layers in it; the parts share them
        self._parts = tuple(parts)
        self._received, self._arguments, self._outputs = tuple(received), dict(arguments), tuple(outputs)
        self._is_sealed, self._device, self._autocast, self._rng = is_sealed, device, autocast, rng
        self._again = {i: RecomputedStage(part.module, device) for i, part in enumerate(parts) if part.recomputed}
        self._saved: dict[tuple[int, int], _Saved] = {}  # by part and micro-batch
        self._writes_to = {i: _WritesToInputs() for i in self._again}

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            found: tuple[Tensor, ...] = self.module(*args, **kwargs)
            return found
        tensors = dict(zip(self._received, args, strict=True))
        tensors |= {self._arguments[argument]: value for argument, value in kwargs.items()}
        for i, part in enumerate(self._parts):
            inputs = tuple(tensors[name] for name in part.inputs)
            outputs = self._first(i, inputs) if part.recomputed else part.module(*inputs)
            tensors |= zip(part.outputs, outputs, strict=True)
            for name in part.last_used:
                del tensors[name]
            del inputs, outputs
        results = tuple(tensors[name] for name in self._outputs)
        return seal(*results) if self._is_sealed else results

    def _first(self, i: int, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Runs a recomputed part in F, and keeps its inputs instead of the tensors that autograd saves."""
        writes = self._writes_to[i]
        saved = self._saved[i, self._rng.microbatch] = _Saved(writes.kept(inputs))

        def run() -> tuple[Tensor, ...]:
            with saved_tensors_hooks(saved.number, saved.tensor):
                found: tuple[Tensor, ...] = self._again[i](*inputs)
            return found

        outputs = self._again[i].remembering(self._rng.microbatch, run)
        saved.inputs, saved.written = writes.finish(inputs, saved.inputs)
        return outputs

    def recompute(self) -> None:
        """Runs the recomputed layers of the current micro-batch again.

        Raises:
            InvalidModel: they save another number of tensors than the first time.
        """
        for i, again in self._again.items():
            saved = self._saved.pop((i, self._rng.microbatch))
            with ExitStack() as contexts:
                contexts.enter_context(again.recomputing(self._rng.microbatch))
                contexts.enter_context(torch.enable_grad())
                contexts.enter_context(autocast_on(self._device, self._autocast))
                contexts.enter_context(saved_tensors_hooks(saved.append, _never))
                # A leaf that requires gradients may not be changed in place, and the copy of another may.
                again(*(x.clone() if n in saved.written else x for n, x in enumerate(saved.inputs)))
            saved.inputs = ()
            if len(saved.tensors) != saved.num_tensors:
                first, last = self._parts[i].layers[0], self._parts[i].layers[-1]
                raise InvalidModel(
                    f"the forward of layers '{first}' to '{last}' keeps {saved.num_tensors} tensors for its backward, "
                    f"and {len(saved.tensors)} when it runs again: plan without recomputation of these layers"
                )


class _WritesToInputs:
    """Keeps the inputs of a part for when it runs again: those with gradients that it changes in place are copied.

    `RecomputedStage` copies those without, and refuses writes that autograd does not see. Before the first F all inputs
    that the part may change are copied, later those only that the first one has changed.
    """

    def __init__(self) -> None:
        self._changing: frozenset[int] | None = None  # positions; None before the first F
        self._versions: dict[int, int] = {}  # torch's counts of writes, by position

    def kept(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what to keep of inputs before F."""
        with_gradients = (isinstance(x, Tensor) and x.requires_grad and not x.is_leaf for x in inputs)
        self._versions = {n: version(inputs[n]) for n, is_so in enumerate(with_gradients) if is_so}
        copied = self._versions.keys() if self._changing is None else self._changing
        return tuple(_detached(x.detach().clone() if n in copied else x, x) for n, x in enumerate(inputs))

    def finish(self, inputs: Sequence[Any], kept: Sequence[Any]) -> tuple[tuple[Any, ...], frozenset[int]]:
        """Returns what to keep after F, and the positions of those inputs that it has changed.

        Raises:
            InvalidModel: F has changed an input that the first F did not.
        """
        written = frozenset(n for n, count in self._versions.items() if version(inputs[n]) != count)
        if self._changing is None:
            self._changing = written
            return tuple(kept[n] if n in written else _detached(x, x) for n, x in enumerate(inputs)), written
        if not written <= self._changing:
            raise InvalidModel(not_exactly("an input in place that the first forward did not", ""))
        return tuple(kept), written


def _detached(value: Any, like: Any) -> Any:
    return value.detach().requires_grad_(like.requires_grad) if isinstance(value, Tensor) else value


def _never(_: object) -> Tensor:
    raise AssertionError("no backward uses the graph of a second forward")
