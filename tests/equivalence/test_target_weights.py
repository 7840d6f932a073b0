"""Losses that run ahead of the model leave nothing that grows from step to step."""

import pytest
import torch
from torch import Tensor

from bapipe.equivalence.sample_dims import BY_ROWS
from bapipe.equivalence.target_weights import WeightsAhead
from bapipe.torch_device import CPU
from bapipe.torch_private import tensors
from bapipe.torch_private.tensors import FakeTensorMode


def test_a_loss_with_another_number_in_each_step_does_not_fill_a_cache_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensors, "_MAX_CACHED_OPERATORS", 20)
    factor = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (factor * output - target).pow(2).mean()

    ahead = WeightsAhead(loss, lambda outputs, target: loss(outputs[0], target), [torch.zeros(2, 4)], [BY_ROWS], CPU)
    sizes = []
    for step in range(40):
        factor = 1 + step / 100
        with ahead.running():
            ahead.of(torch.zeros(2, 4))
        sizes.append(FakeTensorMode.cache_info().size)
    assert ahead.obstacle is None
    assert max(sizes) <= 20
