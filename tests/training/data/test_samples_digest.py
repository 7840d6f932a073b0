"""The digest of samples tells data apart that give other samples, and none whose samples are drawn anew."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from bapipe.training.data.samples_digest import samples_digest
from bapipe.zoo.data.dataset import as_pipeline_dataset


class Scaled(Dataset[Any]):
    """Samples 0 to 3, each multiplied by what a function returns."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), index * self._factor()), index


def digest(factor: Callable[[], float]) -> str | None:
    return samples_digest(as_pipeline_dataset(Scaled(factor)))


def test_equal_samples_have_the_same_digest_and_others_another() -> None:
    assert digest(lambda: 2.0) == digest(lambda: 2.0) != digest(lambda: 3.0)
    assert len(digest(lambda: 2.0) or "") == 12


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random, lambda: float(np.random.rand())])
def test_samples_that_are_drawn_anew_have_none(draw: Callable[[], float]) -> None:
    random.seed(5)
    before = random.getstate()
    assert digest(draw) is None
    assert random.getstate() == before


def test_data_that_fail_have_none() -> None:
    assert digest(lambda: 1 / 0) is None
