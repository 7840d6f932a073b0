"""Micro-batches count by their targets that are not ignored, so that they train as the whole mini-batch does."""

import copy
from functools import partial
from math import isnan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.errors import BapipeError, LayerFailed
from bapipe.runtime.local_stage import Loss
from bapipe.runtime.loss_weights import LossWeights
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from tests.equivalence.test_losses import Focal
from tests.multiprocess.runtime_cases import make_plan

IGNORED = 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (1,)])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=IGNORED),
        nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 3.0, 9.0]).double(), ignore_index=IGNORED),
        nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 3.0, 0.0]).double()),  # nothing to learn, without being ignored
        nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 3.0, 0.1]).double(), label_smoothing=0.2),
        partial(functional.cross_entropy, weight=torch.tensor([0.5, 2.0, 3.0, 0.0]).double()),
        partial(functional.cross_entropy, ignore_index=IGNORED, reduction="mean"),
        Focal(torch.tensor([0.5, 2.0, 3.0, 9.0]).double(), ignore_index=IGNORED),  # a mean over samples
    ],
)
def test_a_mean_over_targets_is_that_of_the_mini_batch(loss: Loss, recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double()
    part = copy.deepcopy(whole)
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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("num_samples", [6, 5])
def test_evaluation_is_the_mean_over_all_targets(num_samples: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4))
    loss = nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 3.0, 9.0]), ignore_index=IGNORED)
    x, target = torch.randn(6, 6), torch.tensor([0, IGNORED, IGNORED, IGNORED, 2, 1])
    order = [["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]]
    pipeline = Pipeline(module, make_plan(["0"], (), (0,), order, 2, 3), loss=loss, inputs=[x], evaluates=True)
    x, target = x[:num_samples], target[:num_samples]
    got = pipeline.evaluate(x, target=target, num_samples=num_samples)
    assert got is not None
    assert got.loss == pytest.approx(loss(module(x), target).item(), rel=1e-6)
    assert got.loss_weight == {6: 5.5, 5: 3.5}[num_samples]
    nothing = pipeline.evaluate(x, target=torch.full_like(target, IGNORED), num_samples=num_samples)
    assert nothing is not None
    assert nothing.loss is not None
    assert isnan(nothing.loss)


@pytest.mark.usefixtures("alone")
def test_class_weights_may_be_others_in_every_step() -> None:
    torch.manual_seed(0)
    module, loss = nn.Sequential(nn.Linear(6, 4)), nn.CrossEntropyLoss(torch.ones(4))
    x, target = torch.randn(4, 6), torch.tensor([0, 0, 1, 2])
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), evaluates=True)
    for weight in (torch.tensor([1.0, 2.0, 3.0, 4.0]), None, torch.tensor([3.0, 1.0, 0.5, 1.0])):
        loss.weight = weight
        want = loss(module(x), target).item()
        assert pipeline.step(x, target=target) == pytest.approx(want, rel=1e-6)
        evaluated = pipeline.evaluate(x, target=target)
        assert evaluated is not None
        assert evaluated.loss == pytest.approx(want, rel=1e-6)


@pytest.mark.usefixtures("alone")
def test_labels_out_of_range_are_refused_by_the_loss() -> None:
    loss = nn.CrossEntropyLoss(torch.ones(4))
    plan, x = make_plan(["0"], (), (0,), [["0F0", "0B0"]], 2, 1), torch.randn(2, 6)
    pipeline = Pipeline(nn.Sequential(nn.Linear(6, 4)), plan, loss=loss, inputs=[x])
    with pytest.raises(LayerFailed, match="its targets are 1 to 7"):
        pipeline.step(x, target=torch.tensor([1, 7]))


def test_replicas_count_together() -> None:
    target, loss = torch.tensor([0, IGNORED, 1, 2]), nn.CrossEntropyLoss(ignore_index=IGNORED)
    first, second = (LossWeights(loss, [m], lambda part: torch.tensor(3.0, dtype=torch.float64)) for m in (0, 1))
    for weights in (first, second):
        weights.begin(target, 2)
    one = torch.tensor(1.0)
    assert first.weighted(one, target[:2]).item() == pytest.approx(2 / 3)
    assert second.weighted(one, target[2:]).item() == pytest.approx(4 / 3)


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_no_tensor_is_refused() -> None:
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0"]], 2, 1)
    x = torch.randn(2, 4)

    def loss(output: Tensor, target: Tensor) -> Any:
        return 0

    pipeline = Pipeline(nn.Sequential(nn.Linear(4, 4)), plan, loss=loss, inputs=[x], check=False)
    with pytest.raises(BapipeError, match=r"the loss must be a scalar tensor, .*; it gives 0 \(int\)"):
        pipeline.step(x, target=torch.tensor([0, 1]))


def test_losses_that_ignore_nothing_keep_their_value() -> None:
    weights = LossWeights(functional.mse_loss, [0], lambda part: part)
    weights.begin(torch.tensor([0, 1]), 1)
    loss = torch.tensor(0.7)
    assert weights.weighted(loss, torch.tensor([0, 1])) is loss
