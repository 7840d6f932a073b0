"""An optimizer's step on a few parameters."""

from functools import partial

import torch
from torch import nn

from bapipe.profiler.optimizer_step import OptimizerStep, time_optimizer_step

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
