"""Losses that keep something from call to call are compared, and keep afterwards what they kept before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.equivalence.check import Equivalence, Unchecked, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.equivalence.loss_state import state_of_loss
from bapipe.equivalence.losses import loss_over_parts
from bapipe.equivalence.outcome import Microbatch
from bapipe.errors import InvalidModel
from bapipe.torch_device import CPU

INPUTS, TARGET = (torch.randn(4, 6),), torch.randn(4, 3)
MICROBATCHES = example_microbatches(INPUTS, TARGET, (2, 2, 3), CPU)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


class Centered(nn.Module):
    """A loss with an average of the targets in a buffer, as DINO's center, and a number of its calls."""

    center: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3))
        self.in_place, self.num_calls = in_place, 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.num_calls += 1
        loss = (
            -(torch.softmax((target - self.center) * 10 / self.num_calls, -1) * output.log_softmax(-1)).sum(-1).mean()
        )
        center = 0.9 * self.center + 0.1 * target.mean(0, keepdim=True)
        if self.in_place:
            self.center.copy_(center)
        else:
            self.center = center
        return loss


class Held:
    """Calls a loss that it has, and is no module."""

    def __init__(self, loss: Centered) -> None:
        self.loss = loss

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.loss(output, target)
        return value


class Around(nn.Module):
    """Has a loss among its parts."""

    def __init__(self, loss: Centered) -> None:
        super().__init__()
        self.inner = nn.ModuleList([loss])

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.inner[0](output, target)
        return value


def _called(centered: Centered) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: centered(output, target)


WAYS: list[Callable[[Centered], Any]] = [lambda centered: centered, Held, Around, _called]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_keeps_an_average_is_compared_and_put_back(way: Callable[[Centered], Any], in_place: bool) -> None:
    centered = Centered(in_place=in_place)
    center = centered.center
    _, result = trace_checked(network(), INPUTS, way(centered), MICROBATCHES)
    assert isinstance(result, Equivalence)
    assert centered.num_calls == 0
    assert centered.center is center
    assert not center.any()


def test_a_check_whether_a_loss_is_a_mean_leaves_what_it_keeps() -> None:
    centered = Centered(in_place=False)
    loss_over_parts(network(), centered, MICROBATCHES[0])
    assert centered.num_calls == 0
    assert not centered.center.any()


class Teacher(Centered):
    """Compares with the target less the average, as DINO does with the outputs of its teacher."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - target + self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * target.mean(0, keepdim=True)
        return loss


def test_values_that_a_loss_keeps_are_the_reason_why_it_depends_on_how_a_batch_is_cut() -> None:
    batch = Microbatch(inputs=(torch.randn(4, 6),), target=torch.randn(4, 3))
    teacher = Teacher(in_place=False)
    fault = loss_over_parts(network(), teacher, batch)
    assert fault is not None
    assert fault.startswith("the loss keeps values from one call to the next")
    assert not teacher.center.any()


class Averages(nn.Module):
    """Its own code keeps an average between calls, which no stage can."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(6, 6), nn.Linear(6, 3), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.last
        self.last = y.detach().mean(0)
        z: Tensor = self.b(y)
        return z


def test_a_model_that_cannot_be_split_is_refused_with_such_a_loss_too() -> None:
    with pytest.raises(InvalidModel, match="the split model would not train as the original does"):
        trace_checked(Averages(), INPUTS, Centered(in_place=False), MICROBATCHES)


def test_what_a_loss_changes_that_cannot_be_put_back_is_named() -> None:
    calls = (number for number in range(1, 1000))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean() * next(calls)

    _, result = trace_checked(network(), INPUTS, loss, MICROBATCHES)
    assert isinstance(result, Unchecked)
    assert result.reason == (
        "its loss on the same samples differs from run to run, and its code reaches an object of type generator, which "
        "cannot be put back between runs"
    )


def test_what_a_loss_keeps_does_not_include_the_model_that_it_reads() -> None:
    model = network()
    state = state_of_loss(lambda output, target: model(output), model)
    with torch.no_grad():
        next(model.parameters()).fill_(7.0)
    state.put_back()
    assert next(model.parameters()).eq(7.0).all()
