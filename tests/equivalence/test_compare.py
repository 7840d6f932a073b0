"""Which differences are rounding."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bapipe.equivalence.check import compare_split
from bapipe.equivalence.compare import _shaken, mismatches, perturbed
from bapipe.equivalence.outcome import TRAINING, Microbatch, run_original
from bapipe.tracing import trace


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_units_change_values_of_every_type(dtype: torch.dtype) -> None:
    ones = torch.ones(8, dtype=dtype)
    shaken = _shaken(ones, torch.Generator().manual_seed(0), TRAINING)
    assert shaken.dtype == dtype
    assert bool((shaken != ones).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_rounding_alone_may_be_another_one(dtype: torch.dtype) -> None:
    """Batch norm subtracts the mean, so a bias before it has no gradient but what sums leave over."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    batches = [Microbatch(inputs=(torch.randn(7, 4, dtype=dtype),), target=torch.randn(7, 2, dtype=dtype))]
    original = run_original(module, nn.functional.mse_loss, batches)
    noise = perturbed(module, nn.functional.mse_loss, batches)
    bias, weight = original.gradients["0.bias"], original.gradients["0.weight"]
    assert 0 < float(bias.abs().max()) < 1e-4 * float(weight.abs().max())
    other_bias = replace(original, gradients={**original.gradients, "0.bias": -bias})
    assert mismatches(original, other_bias, noise) == []
    other_weight = replace(original, gradients={**original.gradients, "0.weight": -weight})
    assert [found.name for found in mismatches(original, other_weight, noise)] == ["0.weight"]


class Adversarial(nn.Module):
    """Trains a critic on one of two calls only, by switching the gradients of its parameters off in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.maker(x)
        self.critic.requires_grad_(False)
        loss = -self.critic(made)
        self.critic.requires_grad_(True)
        both: torch.Tensor = loss + self.critic(made.detach())
        return both


def test_a_forward_that_switches_gradients_of_parameters_is_named_as_the_cause() -> None:
    torch.manual_seed(0)
    module = Adversarial()
    batches = [Microbatch(inputs=(torch.randn(3, 2),), target=torch.randn(3, 1))]
    found = compare_split(trace(module, [batches[0].inputs[0]]), nn.functional.mse_loss, batches)
    assert "likely because the forward of the model changes which parameters have gradients" in str(found)
