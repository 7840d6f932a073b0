"""Layers measured one at a time, against bytes computed by hand."""

import torch
from torch import nn

from bapipe.profiler.instrument import TrainingPass
from bapipe.profiler.isolated import measure_isolated
from bapipe.tracing.layers import trace


def test_equal_layers_are_measured_once_and_stashes_are_counted_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    measured = TrainingPass(
        model=trace(module, (x,)), loss=nn.functional.mse_loss, inputs=(x,), target=torch.zeros(2, 4)
    )
    times, memory = measure_isolated(measured, seconds=0.0, target_spread=0.0, exhaustive=False)
    # The first layer needs no gradient of its input, the second and the third are equal, and the loss is the third.
    assert times.num_groups == 3
    assert times.forward_ns[1] == times.forward_ns[2]
    assert times.input_grad_ns[0] == 0
    assert all(time_ns > 0 for time_ns in times.forward_ns)
    assert times.sum_over_whole is None
    # Each linear layer saves its input of 32 bytes; the loss saves its input and its target.
    assert memory.stash_bytes == (32, 32, 32, 64)
    assert memory.tensors["1"].num_bytes == 32
