"""An optimizer's step on a few parameters."""

from functools import partial

import torch
from torch import nn

from bapipe.profiler.optimizer_step import OptimizerStep, time_one_step_of_all, time_optimizer_step

CPU = torch.device("cpu")


def test_adam_keeps_two_values_per_parameter_and_a_step_per_tensor() -> None:
    parameter = nn.Parameter(torch.ones(10))
    step = time_optimizer_step([parameter], partial(torch.optim.Adam, lr=0.0), CPU)
    assert step.state_bytes == 2 * 40 + 4
    assert step.ns > 0
    assert torch.equal(parameter, torch.ones(10))
    assert parameter.grad is None


def test_a_layer_without_parameters_takes_no_time() -> None:
    assert time_optimizer_step([], partial(torch.optim.SGD, lr=0.0), CPU) == OptimizerStep(ns=0, state_bytes=0)


def test_layers_share_one_step_by_their_bytes() -> None:
    layers = [[nn.Parameter(torch.ones(n)) for n in sizes] for sizes in ((1000, 2000), (), (6000,))]
    first, none, third = time_one_step_of_all(layers, partial(torch.optim.Adam, lr=0.0), CPU)
    assert abs(third.ns - 2 * first.ns) <= 2
    assert none == OptimizerStep(ns=0, state_bytes=0)
    assert (first.state_bytes, third.state_bytes) == (2 * 12000 + 2 * 4, 2 * 24000 + 4)
