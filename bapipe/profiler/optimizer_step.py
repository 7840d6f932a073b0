"""Times of the optimizer's step: layer by layer, or of all layers in one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from bapipe.profiler.timers import LayerTimer, get_host_ahead, make_layer_timer, timed
from bapipe.torch_device import tensors_on

_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """An optimizer's step on the parameters of a layer.

    Attributes:
        state_bytes: state that the optimizer keeps for them between steps.
    """

    ns: int
    state_bytes: int


def time_optimizer_step(
    parameters: Sequence[nn.Parameter], make: Callable[..., torch.optim.Optimizer], device: torch.device
) -> OptimizerStep:
    """Returns the time of an optimizer's step on some parameters, with setting their gradients to None.

    Args:
        make: makes the optimizer of parameters, with a learning rate of 0, so that the parameters keep their values.
        device: where the step runs; parameters that are elsewhere are moved there and back.
    """
    if not parameters:
        return OptimizerStep(ns=0, state_bytes=0)
    with tensors_on(nn.ParameterList(parameters), device):
        optimizer, timer = make(parameters), make_layer_timer(device)
        _step_ns(optimizer, timer)  # makes the optimizer's state
        times = [_step_ns(optimizer, timer) for _ in range(_NUM_ROUNDS)]
    return OptimizerStep(ns=round(median(times)), state_bytes=_state_bytes(optimizer, parameters))


def time_one_step_of_all(
    layers: Sequence[Sequence[nn.Parameter]], make: Callable[..., torch.optim.Optimizer], device: torch.device
) -> list[OptimizerStep]:
    """Returns each layer's share of one optimizer's step on the parameters of all layers, in proportion to their bytes.

    On CUDA torch updates all parameters of an optimizer with a few kernels, as a stage does: the steps of single layers
    would be launches mostly, and add up to many times as much. The parameters are on the device.
    """
    optimizer, timer = make([parameter for layer in layers for parameter in layer]), make_layer_timer(device)
    _step_ns(optimizer, timer)  # makes the optimizer's state
    whole_ns = median(_step_ns(optimizer, timer) for _ in range(_NUM_ROUNDS))
    num_bytes = [sum(parameter.nbytes for parameter in layer) for layer in layers]
    return [
        OptimizerStep(ns=round(whole_ns * share / sum(num_bytes)), state_bytes=_state_bytes(optimizer, layer))
        for share, layer in zip(num_bytes, layers, strict=True)
    ]


def _state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _step_ns(optimizer: torch.optim.Optimizer, timer: LayerTimer) -> int:
    """Returns the time of a step; of a GPU's own work, as the host is ahead of it in training."""
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return timed(timer, lambda: get_host_ahead(parameters[0].device), step)[1]
