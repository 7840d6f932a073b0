"""Of which losses it is known that they compute no mean over targets, by the code that they reach."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy as mean_of_scores

import bapipe
from bapipe.equivalence.reached_means import computes_no_means
from bapipe.tracing.python_state import state_restored
from bapipe.tracing.reached_state import KeptState
from bapipe.zoo.gpt2 import next_word_loss

SETTINGS = Namespace(scale=0.1, function=functional.mse_loss)


def huber(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().clamp(max=1).pow(2).mean() + SETTINGS.scale * output.square().mean()


def focal(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="none").pow(2).mean()


def by_name(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = getattr(functional, "cross" + "_entropy")(output, target)
    return loss


def importing(output: Tensor, target: Tensor) -> Tensor:
    from tests.equivalence.test_reached_means import focal as other

    return other(output, target)


def of_an_object(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = SETTINGS.function(output, target)
    return loss


class Own(nn.Module):
    def __init__(self, other: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.other, self.scale = other, 2.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return huber(output, target) * self.scale if self.other is None else self.other(output, target)


def made_anew(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = Own(mean_of_scores)(output, target)
    return loss


class Trainer:
    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.criterion(output, target)
        return loss


def around(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda output, target: loss(output, target) * 2


@pytest.mark.parametrize(
    ("loss", "none"),
    [
        (huber, True),
        (partial(huber), True),
        (around(huber), True),
        (of_an_object, True),
        (Own(), True),
        (Trainer(huber).loss, True),
        (Trainer(nn.HuberLoss()).loss, True),
        (torch.no_grad()(huber), True),
        (focal, False),
        (mean_of_scores, False),
        (around(mean_of_scores), False),
        (partial(mean_of_scores, reduction="none"), False),
        (lambda output, target: bapipe.weighted_mean(output, target > 0), False),
        (lambda output, target: nn.NLLLoss()(output, target), False),
        (around(nn.CrossEntropyLoss()), False),
        (Trainer(nn.Sequential(nn.CrossEntropyLoss())).loss, False),
        (Trainer(mean_of_scores).loss, False),
        (Own(mean_of_scores), False),
        (torch.no_grad()(focal), False),
        (by_name, False),
        (importing, False),
        (made_anew, False),
        (next_word_loss, False),
    ],
)
def test_losses_whose_code_computes_no_means(loss: Callable[..., Tensor], none: bool) -> None:
    assert computes_no_means(KeptState(loss, state_restored)) == none


def test_what_is_reached_now_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computes_no_means(KeptState(of_an_object))
    monkeypatch.setattr(SETTINGS, "function", focal)
    assert not computes_no_means(KeptState(of_an_object))
