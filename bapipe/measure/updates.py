"""What an optimizer's step costs, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from bapipe.measure.clocks import now_ns, synchronize

_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An optimizer's step on the parameters of a layer.

    Attributes:
        state_bytes: what the optimizer keeps of them between steps.
    """

    ns: int
    state_bytes: int


def time_updates(
    groups: Sequence[Sequence[nn.Parameter]], make: Callable[..., torch.optim.Optimizer]
) -> tuple[Update, ...]:
    """Returns what an optimizer's step costs on each group of parameters, setting their gradients to None included.

    The parameters keep their values: the learning rate is 0.
    """
    optimizers = [make(group) if group else None for group in groups]
    rounds = [[_update_ns(optimizer) for optimizer in optimizers] for _ in range(_NUM_ROUNDS + 1)]
    times = zip(*rounds[1:], strict=True)  # the first one makes the optimizer's state
    return tuple(
        Update(ns=round(median(own)), state_bytes=_state_bytes(optimizer))
        for own, optimizer in zip(times, optimizers, strict=True)
    )


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _update_ns(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    synchronize(parameters[0].device)
    start = now_ns(parameters[0].device)
    optimizer.step()
    optimizer.zero_grad()
    synchronize(parameters[0].device)
    return now_ns(parameters[0].device) - start
