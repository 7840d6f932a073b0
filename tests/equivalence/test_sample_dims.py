"""The samples of a batch are found and selected in whatever dimension of a tensor they are."""

import pytest
import torch
from torch import Tensor

from bapipe.equivalence.sample_dims import (
    BY_ROWS,
    CONSTANT,
    OF_BATCH,
    UNKNOWN,
    SampleDim,
    Samples,
    doubled,
    sample_dim,
    sample_dims,
)


@pytest.mark.parametrize(
    ("shape", "other", "found"),
    [
        ((4, 7), (2, 7), BY_ROWS),
        ((4, 4, 5), (4, 2, 5), SampleDim(dim=1)),  # as many words as samples
        ((7, 5, 4), (7, 5, 2), SampleDim(dim=2)),
        ((12, 5), (6, 5), SampleDim(dim=0, per_sample=3)),
        ((4, 9), (2, 6), BY_ROWS),  # padded to the longest of a batch
        ((), (), OF_BATCH),
        ((4, 3), (4, 3), OF_BATCH),  # as many experts as samples
        ((11, 5), (6, 5), UNKNOWN),
        ((4, 5), (5,), UNKNOWN),
    ],
)
def test_the_dimension_that_follows_the_number_of_samples_is_theirs(
    shape: tuple[int, ...], other: tuple[int, ...], found: SampleDim
) -> None:
    assert sample_dim(shape, other, 4, 2) == found


def test_what_is_equal_for_all_samples_is_constant() -> None:
    weight = torch.randn(4, 3)
    found = sample_dims([weight, torch.ones(4, 2), torch.ones(())], [weight, torch.ones(2, 2), torch.zeros(())], 4, 2)
    assert found == [CONSTANT, BY_ROWS, OF_BATCH]


def _samples(first: int, num: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Samples by rows, as (words, samples), and as words of all samples in one dimension; entries name both."""
    by_rows = torch.tensor([[10 * sample + word for word in range(3)] for sample in range(first, first + num)])
    flat = by_rows.T.flatten() if interleaved else by_rows.flatten()
    return by_rows, by_rows.T, flat


@pytest.mark.parametrize("interleaved", [False, True])
def test_samples_are_selected_and_joined_in_their_dimensions(interleaved: bool) -> None:
    weight = torch.randn(3)
    dims = [BY_ROWS, SampleDim(dim=1), SampleDim(dim=0, per_sample=3), CONSTANT]
    one, other = (
        Samples.of([*_samples(first, 4, interleaved), weight, "name"], dims, 4).ways()[interleaved] for first in (0, 4)
    )
    assert one.obstacle() is None
    for found, want in (
        (one.select(range(1, 3)), _samples(1, 2, interleaved)),
        (one.joined(other), _samples(0, 8, interleaved)),
        (one.joined(other).select(range(3, 7)), _samples(3, 4, interleaved)),
    ):
        *tensors, constant, name = found.output()
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
        assert constant.data_ptr() == weight.data_ptr()
        assert name == "name"


@pytest.mark.parametrize(("dims", "num"), [(UNKNOWN, 4), (BY_ROWS, 2), (SampleDim(dim=0, per_sample=2), 4)])
def test_samples_that_cannot_be_told_apart_are_named_by_their_shape(dims: SampleDim, num: int) -> None:
    assert "of shape (4, 5)" in (Samples.of(torch.zeros(4, 5), [dims], num).obstacle() or "")


def test_only_what_is_by_samples_is_doubled() -> None:
    tensor = torch.empty(3, 4)
    assert [doubled(tensor, where).shape for where in (BY_ROWS, SampleDim(dim=1), CONSTANT)] == [(6, 4), (3, 8), (3, 4)]
