"""The sum of the replicas' gradients, in a group of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bapipe.runtime.clock import CpuClock
from bapipe.runtime.replicas import GradientSum


@pytest.mark.usefixtures("alone")
def test_a_parameter_for_which_no_replica_has_a_gradient_keeps_none() -> None:
    """An optimizer skips it, as in one process: zeros would be moved by momentum and weight decay."""
    without, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    other.grad = torch.tensor([1.0, 2.0, 3.0])
    gradients = GradientSum([[without, other]], dist.group.WORLD, CpuClock())
    gradients.begin()
    gradients.start()
    gradients.finish()
    assert without.grad is None
    assert other.grad.tolist() == [1, 2, 3]


@pytest.mark.usefixtures("alone")
def test_an_all_reduce_takes_time() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    gradients = GradientSum([[parameter]], dist.group.WORLD, clock := CpuClock())
    gradients.begin()
    gradients.start()
    gradients.finish()
    ((bucket, num_bytes, start, end),) = gradients.syncs()
    assert (bucket, num_bytes) == (0, 4 * 3)  # of float32, and whether there is a gradient
    assert clock.ns(end) > clock.ns(start)
