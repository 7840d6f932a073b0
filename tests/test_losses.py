"""The mean by weights."""

import pytest
import torch

import bapipe
from bapipe.errors import BapipeError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_weighted_mean_is_the_sum_over_the_weights(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=dtype, requires_grad=True)
    mean = bapipe.weighted_mean(values, torch.tensor([[3], [1]]))
    assert mean.item() == (3 * 1 + 3 * 2 + 4 + 8) / 8
    assert mean.dtype == dtype
    mean.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[3 / 8, 3 / 8], [1 / 8, 1 / 8]]


def test_without_weights_mean_and_gradients_are_zero() -> None:
    values = torch.ones(3, requires_grad=True)
    mean = bapipe.weighted_mean(values, torch.zeros(3, dtype=torch.bool))
    mean.backward()
    assert mean.item() == 0
    assert values.grad is not None
    assert not values.grad.any()


def test_values_without_weight_do_not_count_whatever_they_are() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    mean = bapipe.weighted_mean(values, torch.tensor([2, 0, 0]))
    mean.backward()
    assert mean.item() == 1
    assert values.grad is not None
    assert values.grad.tolist() == [1, 0, 0]
    assert bapipe.weighted_mean(values, torch.zeros(3)).item() == 0


def test_weights_that_are_zero_have_gradients() -> None:
    weights = torch.tensor([2.0, 0.0], requires_grad=True)
    bapipe.weighted_mean(torch.tensor([3.0, 5.0]), weights).backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [3 / 2, 5 / 2]


def test_types_without_a_mean_are_refused() -> None:
    with pytest.raises(
        BapipeError, match=r"^`values` are of type torch\.int64: want the losses, of a floating-point type$"
    ):
        bapipe.weighted_mean(torch.ones(2, dtype=torch.int64), torch.ones(2))
    with pytest.raises(BapipeError, match=r"^`weights` are of type torch\.complex64: want real numbers, not negative$"):
        bapipe.weighted_mean(torch.ones(2), torch.ones(2, dtype=torch.complex64))


def test_sums_of_float16_may_be_larger_than_its_numbers() -> None:
    values = torch.full((70_001,), 8.0, dtype=torch.float16)
    for weights in (torch.ones(70_001, dtype=torch.bool), torch.full((70_001,), 2.0), torch.ones_like(values)):
        assert bapipe.weighted_mean(values, weights).item() == 8.0
