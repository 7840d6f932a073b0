"""Parameters and buffers that a rank holds."""

import torch
from torch import nn

from bapipe.runtime.stage_state import StageState


def test_a_rank_holds_parameters_gradients_buffers_and_what_no_layer_uses() -> None:
    norm, unused = nn.BatchNorm1d(3), torch.ones(5)
    norm.weight.grad = torch.ones(3)
    state = StageState(modules={0: norm, 1: nn.Sequential(norm)}, unused=(unused,), names={}, keys=frozenset())
    memory = state.memory(optimizer_bytes=7)
    # Weight, bias, mean and variance of three values, and a counter of 8 bytes.
    assert (memory.params, memory.gradients, memory.optimizer) == (4 * 4 * 3 + 8 + 4 * 5, 4 * 3, 7)
    assert memory.total == memory.params + memory.gradients + memory.optimizer
