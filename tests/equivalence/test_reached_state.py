"""What code keeps is put back after a call, where all of it can be found."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.equivalence.reached_state import KeptState

CLASSES = 4
NOTED: list[float] = []
calls = 0


def plain(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.view(-1, CLASSES), target)


def noting(scores: Tensor, target: Tensor) -> Tensor:
    NOTED.append(0.0)
    return plain(scores, target)


def through_another(scores: Tensor, target: Tensor) -> Tensor:
    return noting(scores, target)


class Trainer:
    def loss(self, scores: Tensor, target: Tensor) -> Tensor:
        return plain(scores, target)


class Own(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.other(scores, target)

    def other(self, scores: Tensor, target: Tensor) -> Tensor:
        return plain(scores, target)


class Noting(Own):
    def other(self, scores: Tensor, target: Tensor) -> Tensor:
        return noting(scores, target)


@pytest.mark.parametrize(
    ("code", "is_known"),
    [
        (functional.cross_entropy, True),
        (nn.CrossEntropyLoss(torch.ones(4)), True),
        (plain, True),
        (partial(plain, target=torch.zeros(2)), True),
        (lambda scores, target: nn.CrossEntropyLoss()(scores, target), True),
        (noting, False),
        (through_another, False),
        (Trainer().loss, False),
        (Own([1, 2]), True),
        (Own([1, 2]).other, True),
        (Own(torch.ones(())), True),
        (Own(torch.ones(50_000)), True),
        (Own(dict.fromkeys(range(2000))), False),
        (nn.Sequential(Own(None), nn.Linear(4096, 4096)), False),
        (Noting(None), False),
    ],
)
def test_code_that_reaches_other_objects_is_not_known(code: Callable[..., Tensor], is_known: bool) -> None:
    assert KeptState(code).is_known == is_known


def test_numbers_and_modules_are_put_back() -> None:
    inner, own = 0, Own([])

    def counting() -> None:
        nonlocal inner
        global calls
        inner += 1
        calls += 1
        own.kept.append(1)

    state = KeptState(counting)
    assert state.is_known
    with state.restored():
        counting()
        assert (inner, calls, own.kept) == (1, 1, [1])
    assert (inner, calls, own.kept) == (0, 0, [])
