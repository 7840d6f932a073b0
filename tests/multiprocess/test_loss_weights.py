"""Micro-batches count by their targets that are not ignored, so that they train as the whole mini-batch does."""

import copy

import pytest
import torch
from torch import nn

from bapipe.runtime.loss_weights import LossWeights
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from tests.multiprocess.runtime_cases import make_plan

IGNORED = 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (1,)])
def test_a_mean_over_targets_that_are_not_ignored_is_that_of_the_mini_batch(recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double()
    part, loss = copy.deepcopy(whole), nn.CrossEntropyLoss(ignore_index=IGNORED)
    x = torch.randn(6, 6, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, IGNORED, IGNORED, IGNORED])  # the last micro-batch has nothing to learn
    order = [["0F0", "1F0", "0F1", "1F1", "0F2", "1F2", "1B0", "0B0", "1B1", "0B1", "1B2", "0B2"]]
    plan = make_plan(["0", "1"], (1,), (0, 0), order, 2, 3, recompute)
    pipeline = Pipeline(part, plan, loss=loss, inputs=[x], optimizer=sgd(0.1))
    got = pipeline.step(x, target=target)
    want = loss(whole(x), target)
    want.backward()
    assert got == pytest.approx(want.item(), abs=1e-6)  # the pipeline adds losses up in float32
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-12, rtol=0)


def test_replicas_count_together() -> None:
    target = torch.tensor([0, IGNORED, 1, 2])
    first, second = (LossWeights(IGNORED, [m], lambda part: torch.tensor(3.0, dtype=torch.float64)) for m in (0, 1))
    for weights in (first, second):
        weights.begin(target, 2)
    one = torch.tensor(1.0)
    assert first.weighted(one, target[:2]).item() == pytest.approx(2 / 3)
    assert second.weighted(one, target[2:]).item() == pytest.approx(4 / 3)


def test_losses_that_ignore_nothing_keep_their_value() -> None:
    weights = LossWeights(None, [0], lambda part: part)
    weights.begin(torch.tensor([0, 1]), 1)
    loss = torch.tensor(0.7)
    assert weights.weighted(loss, torch.tensor([0, 1])) is loss
