"""Each reason why a module is one layer comes with what to change; reasons are those of real modules."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.equivalence.check import Equivalence, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.errors import InvalidModel
from bapipe.torch_device import CPU
from bapipe.tracing.layers import trace


class Part(nn.Module):
    """Two layers with code between them, which torch.fx cannot follow."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.between(self, self.a(x)) if x.ndim == 2 else x)
        return y


def _seeded(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x * torch.rand(6)


def _writes(self: Any, x: Tensor) -> Tensor:
    self.norm.running_mean.mul_(0.9)
    return x


def _of_numpy(self: Any, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.ones(6, dtype=np.float32)).numpy().sum()


def _complains(self: Any, x: Tensor) -> Tensor:
    try:
        return x.view(4, -1, 6).view(-1, 6)
    except RuntimeError as error:
        raise ValueError("what the cache keeps between calls depends on the values of tensors") from error


@pytest.mark.parametrize(
    ("between", "hint"),
    [
        (lambda self, x: x if x.sum() > 0 else -x, "choose by `torch.where`"),
        (lambda self, x: x.unique().sum() + x, "choose by `torch.where`"),
        (lambda self, x: x.view(4, -1, 6).view(-1, 6), "let the code take any number of samples"),
        (_complains, "let the code take any number of samples"),  # whatever its own error says
        (_of_numpy, "in `__init__` with `register_buffer`"),
        (lambda self, x: x * random.random(), "draw by torch"),
        (_seeded, "leave out the seeding"),
        (lambda self, x: x + torch.rand(6, generator=torch.Generator()), "make the generator in `__init__`"),
        (lambda self, x: x * (1 / len(x)), "as by `mean`"),
        (lambda self, x: x.tanh() if len(x) > 6 else x.sin(), "call the same functions for any number of samples"),
        (lambda self, x: torch.vmap(lambda row: row * 2)(x), "for the whole batch"),
        (_writes, "in the forward of a module without children that has it"),
    ],
)
def test_what_recording_meets_comes_with_what_to_change(between: Callable[[Any, Tensor], Any], hint: str) -> None:
    module = nn.Sequential(Part(between), nn.Linear(6, 6))
    reason = trace(module, [torch.randn(4, 6)], called_leaves=True).leaf_reasons["0"]
    assert hint in reason.to_cut
    assert reason.with_advice == f"{reason}; to cut it, {reason.to_cut}"


class SetByFirst(nn.Module):
    """Scales by what its first samples are: by a parameter, or in an attribute."""

    def __init__(self, *, is_parameter: bool) -> None:
        super().__init__()
        self.a, self.b, self.is_parameter = nn.Linear(6, 6), nn.Linear(6, 6), is_parameter
        self.scale = nn.Parameter(torch.ones(6)) if is_parameter else None
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.is_parameter and not self.is_set:
            assert self.scale is not None
            with torch.no_grad():
                self.scale.copy_(1 / y.std(0))
            self.is_set = True
        elif not self.is_parameter and self.scale is None:
            vars(self)["scale"] = 1 / y.detach().std(0)
        z: Tensor = self.b(y * vars(self).get("scale", self.scale))
        return z


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_model_that_the_first_samples_set_up_is_refused_until_that_is_done(is_parameter: bool) -> None:
    inputs = (torch.randn(4, 6),)
    microbatches = example_microbatches(inputs, inputs[0], (2, 2, 3), CPU)
    module = SetByFirst(is_parameter=is_parameter)
    with pytest.raises(InvalidModel, match=r"in its first call alone.*: call the model once on samples"):
        trace_checked(module, inputs, mse_loss, microbatches)
    module(*inputs)
    assert isinstance(trace_checked(module, inputs, mse_loss, microbatches)[1], Equivalence)


def test_a_hook_comes_with_what_to_change() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6))
    module[0].register_forward_hook(lambda *args: None)
    reason = trace(module, [torch.randn(4, 6)]).leaf_reasons["0"]
    assert reason.to_cut.startswith("register the hook on modules inside")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).tanh())
        return y


class DerivativeInside(nn.Module):
    """A network in physics: of the network's output the derivative by its inputs is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.last = Network(), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (derivative,) = torch.autograd.grad(self.network(x).sum(), x, create_graph=True)
        y: Tensor = self.last(derivative)
        return y


class ReturnsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        return self.network(x), x


def _loss_with_derivative(returned: Any, target: Tensor) -> Tensor:
    output, x = returned
    (derivative,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return mse_loss(output, target) + derivative.pow(2).mean()


INPUTS, TARGET = (torch.randn(4, 2),), torch.randn(4, 1)


def test_a_network_of_which_the_forward_takes_derivatives_is_one_layer_for_that() -> None:
    microbatches = example_microbatches(INPUTS, TARGET, (2, 2, 3), CPU)
    model, result = trace_checked(DerivativeInside(), INPUTS, mse_loss, microbatches)
    assert isinstance(result, Equivalence)
    assert [layer.name for layer in model.layers] == ["network", "last"]
    assert model.leaf_reasons["network"].text.endswith(
        "takes derivatives of outputs with respect to inputs, which cannot be taken across a cut"
    )
    assert model.leaf_reasons["network"].with_advice.endswith("; to cut it, take derivatives of a smaller part")


def test_a_loss_that_takes_derivatives_is_told_to_leave_them_to_the_forward() -> None:
    with pytest.raises(InvalidModel) as caught:
        trace_checked(
            ReturnsItsInput(), INPUTS, _loss_with_derivative, example_microbatches(INPUTS, TARGET, (2, 2, 3), CPU)
        )
    assert str(caught.value).endswith(
        "first in 'loss'; the loss takes derivatives of outputs with respect to inputs, which cannot be taken across "
        "stages: compute them in the model's forward, by `torch.autograd.grad` with `create_graph=True`, and return them"
    )
