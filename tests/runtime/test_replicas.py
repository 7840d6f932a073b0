"""The sum of the replicas' gradients, in a group of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bapipe.runtime.clock import CpuClock
from bapipe.runtime.replicas import GradientSum

CLOCK = CpuClock()


def sum_of(*parameters: nn.Parameter) -> GradientSum:
    """The sum of the gradients of one layer, when it is done."""
    group = dist.group.WORLD
    assert group is not None
    gradients = GradientSum([parameters], group, CLOCK)
    gradients.begin()
    gradients.start()
    gradients.finish()
    return gradients


@pytest.mark.usefixtures("alone")
def test_a_parameter_for_which_no_replica_has_a_gradient_keeps_none() -> None:
    """An optimizer skips it, as in one process: by zeros, momentum and weight decay would move it."""
    without, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    other.grad = torch.tensor([1.0, 2.0, 3.0])
    sum_of(without, other)
    assert without.grad is None
    assert other.grad.tolist() == [1, 2, 3]


@pytest.mark.usefixtures("alone")
def test_an_all_reduce_takes_time() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    ((bucket, num_bytes, start, end),) = sum_of(parameter).syncs()
    assert (bucket, num_bytes) == (0, 4 * 3)  # in float32, and whether there is a gradient
    assert CLOCK.ns(end) > CLOCK.ns(start)
