"""What forwards and losses of replicas change is made equal on all of them, or refused, in whichever step it begins."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from bapipe.errors import InvalidModel
from bapipe.runtime.replica_state import BufferAverage, LossOfReplicas
from bapipe.training.launch.processes import launch
from tests.multiprocess.replica_state_cases import refused

X, Y = torch.randn(4, 3), torch.randn(4, 3)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-reduces as with a second replica that computes the same."""

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: object = None) -> None:
        if op == dist.ReduceOp.SUM:
            tensor *= 2

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def average_of(module: nn.Module, share: float = 0.5) -> Callable[[], None]:
    """Returns what runs a step: a forward of the module on a replica."""
    average = BufferAverage(1, module, None, share)  # type: ignore[arg-type]

    def step() -> None:
        average.begin()
        module(X)
        average.finish()

    return step


@pytest.mark.usefixtures("doubled")
def test_batch_norm_that_trains_later_follows_all_replicas() -> None:
    norm = nn.BatchNorm1d(3).eval()
    step = average_of(norm)
    step()
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 0
    norm.train()
    step()
    assert norm.num_batches_tracked.item() == 2
    torch.testing.assert_close(norm.running_mean, 0.1 * X.mean(0))


@pytest.mark.usefixtures("doubled")
def test_running_statistics_that_do_not_change_stay_what_they_are() -> None:
    norm = nn.BatchNorm1d(3).eval()
    assert norm.running_mean is not None
    norm.running_mean.copy_(torch.tensor([0.1, 1 / 3, 1e-9]))
    before = norm.running_mean.clone()
    average_of(norm, share=1 / 3)()  # of which twice is not 1
    assert torch.equal(norm.running_mean, before)


class Late(nn.Module):
    """Changes a buffer or a frozen parameter when it is told to."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))
        self.register_buffer("mask", torch.ones(3, 3))
        self.mask: Tensor
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.changes = ""

    def forward(self, x: Tensor) -> Tensor:
        self.mask.fill_diagonal_(1.0)  # which changes nothing
        if self.changes == "codes":
            self.codes = self.codes + 1
        if self.changes == "teacher":
            with torch.no_grad():
                self.teacher += 1
        if self.changes == "teacher through data":
            self.teacher.data += 1
        return x @ self.mask + self.codes + self.teacher


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize("changes", ["codes", "teacher", "teacher through data"])
def test_other_state_that_changes_later_is_refused(changes: str) -> None:
    module = Late()
    step = average_of(module)
    for _ in range(3):
        step()
    module.changes = changes
    name = changes.split()[0]
    with pytest.raises(InvalidModel, match=rf"^'{name}' in stage 1 changes in forwards, and the stage has replicas"):
        step()


class Keeping(nn.Module):
    """A loss that keeps something, and begins in its second call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.called = what, False
        self.inner = nn.Module()
        self.inner.register_buffer("centre", torch.zeros(3))
        self.total, self.mean, self.generator = 0.0, torch.zeros(()), random.Random(0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        if self.called and self.what == "inner.centre":
            self.inner.centre += output.mean(0)
        if self.called and self.what == "total":
            self.total += loss.item()
        if self.called and self.what == "mean":
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        if self.called and self.what == "generator":
            self.generator.random()
        self.called = True
        return loss


@pytest.mark.parametrize("what", ["inner.centre", "total", "mean", "generator", ""])
def test_a_loss_that_keeps_values_is_refused(what: str) -> None:
    loss = Keeping(what)
    kept = LossOfReplicas(loss)
    kept.begin()
    loss(X, Y)
    kept.finish()
    kept.begin()
    loss(X, Y)
    if not what:
        kept.finish()
        return
    with pytest.raises(InvalidModel, match=rf"^'{what}' of the loss changes in forwards, and the stage has replicas"):
        kept.finish()


def test_what_is_nan_and_stays_so_does_not_change() -> None:
    loss = nn.MSELoss()
    loss.nothing = float("nan")  # type: ignore[assignment]
    loss.register_buffer("unset", torch.full((2,), torch.nan))
    kept = LossOfReplicas(loss)
    for _ in range(2):
        kept.begin()
        loss(X, Y)
        kept.finish()


def test_losses_that_are_no_modules_are_looked_at() -> None:
    for loss in (functional.mse_loss, partial(functional.cross_entropy, weight=torch.ones(3)), nn.MSELoss()):
        kept = LossOfReplicas(loss)
        kept.begin()
        kept.finish()
    counting = SimpleNamespace(calls=0)
    kept = LossOfReplicas(counting)
    kept.begin()
    counting.calls += 1
    with pytest.raises(InvalidModel, match=r"^'calls' of the loss"):
        kept.finish()


def test_a_last_stage_with_replicas_looks_at_its_loss() -> None:
    for said in launch(refused, ["cpu0", "cpu1"], timeout_s=60):
        assert said is not None
        assert said.startswith("'mean' of the loss changes in forwards, and the stage has replicas, each of which")
