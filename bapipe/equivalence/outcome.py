"""What training passes on some micro-batches leave behind, of the original model and of its stages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.equivalence.communication import ForwardCommunicates
from bapipe.equivalence.loss_state import state_of_loss
from bapipe.equivalence.randomness import SeededOperators, seed_generators
from bapipe.errors import InvalidModel
from bapipe.module_state.left_outside import left_outside
from bapipe.module_state.python_random import all_generators_restored
from bapipe.module_state.python_state import numbers_kept, same_tensor, state_restored, tensors_kept
from bapipe.module_state.reached_state import KeptState
from bapipe.torch_device import CPU

Loss = Callable[[Any, Tensor], Tensor]
"""(what the model returns, target) -> mean loss over the micro-batch, a scalar."""


class LossFailed(Exception):
    """A loss that raised an error, its `__cause__`, of what the model's own code gives it."""


def check_scalar(loss: object) -> None:
    """Raises InvalidModel unless what a loss returned is a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r} ({type(loss).__name__})"
        raise InvalidModel(f"the loss must be a scalar tensor, the mean over the batch; it gives {found}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Samples to compare on: the model's inputs in order, and the target."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def copy(self) -> "Microbatch":
        """Returns the same values in other memory, because a forward may change its inputs."""
        return Microbatch(inputs=tuple(tensor.clone() for tensor in self.inputs), target=self.target.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which conditions the original and the stages run.

    Attributes:
        autocast: the type that forwards compute in, as `torch.autocast` decides; None without it.
        trains: whether there are backwards.
    """

    autocast: torch.dtype | None = None
    trains: bool = True

    def forward(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns the context of the original's forward; stages enter autocast themselves."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)


TRAINING = Conditions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What passes on some micro-batches, one after another, leave behind.

    Attributes:
        losses: of each micro-batch.
        gradients: of the parameters that have one, summed over the micro-batches, by name.
        state: the buffers, and the parameters whose values changed, by name.
        counters: numbers among the attributes of the model's modules that grew, or fell, with every micro-batch.
    """

    losses: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A module that may be trained, and will be as it was before.

    Attributes:
        seeded: seeds its operators that draw random numbers.
        before: values of its parameters and buffers, by their ids.
    """

    module: nn.Module
    seeded: SeededOperators
    before: Mapping[int, Tensor]

    def begin_forward(self, microbatch: int) -> None:
        """Sets all generators to what they are before the forward of a micro-batch."""
        self.seeded.microbatch = microbatch
        seed_generators(microbatch)

    def begin_backward(self, microbatch: int) -> None:
        """Sets what operators draw that a backward runs, such as those of recomputed layers."""
        self.seeded.microbatch = microbatch

    def outcome(self, losses: Sequence[Tensor], counters: Mapping[str, float]) -> Outcome:
        """Returns what passes have left behind."""
        parameters = dict(self.module.named_parameters())
        changed = {name: value for name, value in parameters.items() if self._is_changed(value)}
        return Outcome(
            losses=tuple(losses),
            gradients={name: value.grad for name, value in parameters.items() if value.grad is not None},
            state={name: value.detach().clone() for name, value in (*self.module.named_buffers(), *changed.items())},
            counters=counters,
        )

    def _is_changed(self, tensor: Tensor) -> bool:
        before = self.before.get(id(tensor))
        return before is None or before.shape != tensor.shape or not torch.equal(before, tensor)


@contextmanager
def trial(module: nn.Module, conditions: Conditions = TRAINING, loss: Loss | None = None) -> Iterator[Trial]:
    """The module may be trained in this context, with gradients of its own; afterwards it is as it was.

    So is what a loss keeps that is called in it.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    loss_restored = nullcontext() if loss is None else state_of_loss(loss, module).restored()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with (
            loss_restored,
            state_restored(module, parameters=True) as before,
            all_generators_restored(),
            torch.set_grad_enabled(conditions.trains),
            SeededOperators() as seeded,
        ):
            yield Trial(module=module, seeded=seeded, before=before)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's parameters."""
    return next((parameter.device for parameter in module.parameters()), CPU)


def run_original(
    module: nn.Module, loss: Loss, microbatches: Sequence[Microbatch], conditions: Conditions = TRAINING
) -> Outcome:
    """Returns the outcome of the model's own code, one micro-batch after another.

    Raises:
        LossFailed: the loss raised an error, or gave no scalar tensor.
    """
    with trial(module, conditions, loss) as one:
        numbers, losses = [numbers_kept(module)], []
        for index, microbatch in enumerate(microbatches):
            own = microbatch.copy()
            one.begin_forward(index)
            with conditions.forward(device_of(module)):
                output = module(*own.inputs)
            value = _loss_of(loss, output, own.target)
            numbers.append(numbers_kept(module))
            losses.append(value.detach())
            if conditions.trains:
                value.backward()  # type: ignore[no-untyped-call]
        return one.outcome(losses, counters_in(numbers))


def _loss_of(loss: Loss, output: Any, target: Tensor) -> Tensor:
    try:
        value = loss(output, target)
        check_scalar(value)
    except ForwardCommunicates:  # as `forwards_checked` says it
        raise
    except Exception as error:  # whatever a loss raises
        raise LossFailed from error
    return value


def reads_what_forwards_leave(loss: Loss, module: nn.Module, batch: Microbatch, conditions: Conditions) -> bool:
    """Returns whether a loss reaches the module, or something outside of it in which forwards leave tensors."""
    reached = KeptState(loss).followed.values()
    ids = {id(one) for one in reached} | {id(one.__globals__) for one in reached if isinstance(one, FunctionType)}
    if any(id(part) in ids for part in module.modules()):
        return True
    with trial(module, conditions) as one, left_outside(module) as left:
        one.begin_forward(0)
        with conditions.forward(device_of(module)):
            module(*batch.copy().inputs)
        return any(id(owner) in ids for owner in left())


def set_up_at_first(module: nn.Module, first: Microbatch, second: Microbatch) -> dict[str, Tensor]:
    """Returns the tensors of the module's that a forward changes, or makes, and a second one leaves alone, by path."""
    with trial(module) as one, torch.no_grad():
        seen = [_copied(tensors_kept(module))]
        for number, batch in enumerate((first, second)):
            one.begin_forward(number)
            module(*batch.copy().inputs)
            seen.append(_copied(tensors_kept(module)))
    before, set_up, after = seen
    return {
        name: value
        for name, value in set_up.items()
        if not (name in before and same_tensor(before[name], value))
        and name in after
        and same_tensor(value, after[name])
    }


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def counters_in(numbers: Sequence[Mapping[str, int | float]]) -> dict[str, float]:
    """Returns the last value of the numbers that changed in one direction with every micro-batch."""
    counters = {}
    for name, last in numbers[-1].items():
        values = [held.get(name) for held in numbers]
        steps = [b - a for a, b in pairwise(values) if a is not None and b is not None]
        if len(steps) == len(numbers) - 1 and (min(steps) > 0 or max(steps) < 0):
            counters[name] = last
    return counters
