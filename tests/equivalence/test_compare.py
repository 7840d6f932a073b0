"""Which differences are rounding."""

from dataclasses import replace
from itertools import combinations
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn

from bapipe.equivalence.check import Equivalence, compare_split, example_microbatches
from bapipe.equivalence.compare import _shaken, mismatches, perturbed
from bapipe.equivalence.outcome import TRAINING, Microbatch, Outcome, counters_in, run_original
from bapipe.tracing.layers import trace


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
    noise = perturbed(module, nn.functional.mse_loss, batches, TRAINING)
    bias, weight = original.gradients["0.bias"], original.gradients["0.weight"]
    assert 0 < float(bias.abs().max()) < 1e-4 * float(weight.abs().max())
    other_bias = replace(original, gradients={**original.gradients, "0.bias": -bias})
    assert mismatches(original, other_bias, TRAINING, noise) == []
    other_weight = replace(original, gradients={**original.gradients, "0.weight": -weight})
    assert [found.name for found in mismatches(original, other_weight, TRAINING, noise)] == ["0.weight"]


class Single(nn.Module):
    """Norms in float32, as models in float64 may do that are written for lower types."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))).to(x.dtype)


class InMemoryOrder(nn.Module):
    """Norms what is not contiguous, so that its sums have another order in a stage, which receives contiguous values."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), norm, nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).transpose(1, 2).contiguous().transpose(1, 2)
        z: Tensor = self.b(self.norm(y).mean(1))
        return z


@pytest.mark.parametrize("seed", range(4))
def test_a_part_in_float32_of_a_model_in_float64_rounds_as_float32_does(seed: int) -> None:
    torch.manual_seed(seed)
    module, inputs = InMemoryOrder(Single()).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    microbatches = example_microbatches([inputs], torch.zeros(2, dtype=torch.long), (2, 2, 3), torch.device("cpu"))
    found = compare_split(trace(module, [inputs]), nn.functional.cross_entropy, microbatches)
    assert isinstance(found, Equivalence)


class Branches(nn.Module):
    """Two layers that have nothing in common; one computes from float32."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.double_ = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.norm = Single()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.single(self.norm(x)), self.double_(x)], 1)


def test_only_gradients_that_come_through_float32_may_differ_by_its_rounding() -> None:
    torch.manual_seed(0)
    module, x, target = Branches(), *(torch.randn(5, n, dtype=torch.float64) for n in (8, 16))
    batches = [Microbatch(inputs=(x,), target=target)]
    original = run_original(module, nn.functional.mse_loss, batches)
    noise = perturbed(module, nn.functional.mse_loss, batches, TRAINING)
    single, double = "single.weight", "double_.weight"
    for size, names in ((1e-15, []), (1e-8, [double]), (1e-3, [single, double])):
        other = {name: value * (1 + size) for name, value in original.gradients.items() if name in (single, double)}
        split = replace(original, gradients={**original.gradients, **other})
        assert [one.name for one in mismatches(original, split, TRAINING, noise)] == names


def of_gradient(*values: complex, dtype: torch.dtype = torch.float64) -> Outcome:
    return Outcome(losses=(), gradients={"w": torch.tensor(values, dtype=dtype)}, state={})


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_values_that_are_not_finite_in_one_model_only_differ(bad: float) -> None:
    other = of_gradient(bad, 1.0)
    assert mismatches(other, of_gradient(bad, 1.0), TRAINING) == []
    for value in {0.0, nan, inf, -inf} - {bad}:
        another = of_gradient(value, 1.0)
        for original, split in ((other, another), (another, other)):
            assert [(found.name, found.size) for found in mismatches(original, split, TRAINING)] == [("w", inf)]


def test_imaginary_parts_are_compared() -> None:
    number, conjugate = (of_gradient(1 + sign * 2j, dtype=torch.complex128) for sign in (1, -1))
    assert [(found.name, found.size) for found in mismatches(number, conjugate, TRAINING)] == [
        ("w", 2.0)
    ]  # |2 - -2| / 2
    lazily = replace(number, gradients={"w": conjugate.gradients["w"].conj()})
    assert mismatches(number, lazily, TRAINING) == []


def test_a_gradient_of_another_type_differs() -> None:
    found = mismatches(of_gradient(1.0), of_gradient(1.0, dtype=torch.float32), TRAINING)
    assert [(one.name, one.size) for one in found] == [("w", inf)]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_micro_batches_of_the_check_have_unlike_rows(value: float) -> None:
    """Of one sample, so that a stage that mixes up samples or micro-batches is seen."""
    batches = example_microbatches([torch.full((1, 3), value)], torch.zeros(1), (2, 2), torch.device("cpu"))
    rows = [row for batch in batches for row in batch.inputs[0]]
    assert not any(torch.equal(a, b) for a, b in combinations(rows, 2))


@pytest.mark.parametrize("seed", range(4))
def test_an_example_of_zeros_does_not_make_rounding_errors_of_a_batch_norm_count(seed: int) -> None:
    """The original's batch norm runs in channels-last memory, the stage's does not."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs, target = torch.zeros(1, 3, 16, 16), torch.zeros(1, dtype=torch.long)
    microbatches = example_microbatches([inputs], target, (2, 2, 3), torch.device("cpu"))
    found = compare_split(trace(module, [inputs]), nn.functional.cross_entropy, microbatches)
    assert isinstance(found, Equivalence)


def test_numbers_that_grow_or_fall_with_every_micro_batch_are_counters() -> None:
    assert counters_in([{"up": 1, "down": 3, "once": 3}, {"up": 2, "down": 2, "once": 2}]) == {
        "up": 2,
        "down": 2,
        "once": 2,
    }
    assert counters_in([{"down": 3, "once": 3}, {"down": 2, "once": 2}, {"down": 1, "once": 2}]) == {"down": 1}


@pytest.mark.parametrize("trains", [True, False])
def test_the_original_runs_with_gradients_only_if_it_trains(trains: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return 0 * output.sum() + float(output.requires_grad)

    batches = [Microbatch(inputs=(torch.ones(3, 2),), target=torch.zeros(3, 1))]
    outcome = run_original(nn.Linear(2, 1), loss, batches, replace(TRAINING, trains=trains))
    assert [float(loss) for loss in outcome.losses] == [float(trains)]


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
