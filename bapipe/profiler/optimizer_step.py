"""What an optimizer's step costs, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from bapipe.profiler.layer_timers import now_ns, synchronize

_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """An optimizer's step on the parameters of a layer.

    Attributes:
        state_bytes: what the optimizer keeps of them between steps.
    """

    ns: int
    state_bytes: int


def time_optimizer_step(
    parameters: Sequence[nn.Parameter], make: Callable[..., torch.optim.Optimizer], device: torch.device
) -> OptimizerStep:
    """Returns what an optimizer's step costs on some parameters, setting their gradients to None included.

    The parameters keep their values: the learning rate is 0. Those that live elsewhere are on the device meanwhile.
    """
    if not parameters:
        return OptimizerStep(ns=0, state_bytes=0)
    homes = [parameter.device for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
    optimizer = make(parameters)
    _update_ns(optimizer)  # makes the optimizer's state
    times = [_update_ns(optimizer) for _ in range(_NUM_ROUNDS)]
    for parameter, home in zip(parameters, homes, strict=True):
        parameter.data = parameter.data.to(home)
    return OptimizerStep(ns=round(median(times)), state_bytes=_state_bytes(optimizer))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )


def _update_ns(optimizer: torch.optim.Optimizer) -> int:
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    synchronize(parameters[0].device)
    start = now_ns(parameters[0].device)
    optimizer.step()
    optimizer.zero_grad()
    synchronize(parameters[0].device)
    return now_ns(parameters[0].device) - start
