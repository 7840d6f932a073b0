"""I and W of two micro-batches leave the gradients that whole backwards do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bapipe.torch_private.split_backward import stage_backward_input, stage_backward_weight


class Summed(nn.Module):
    """Autograd returns one tensor as the gradient of both weights."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = (nn.Parameter(torch.randn(4, 4, dtype=torch.double)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.shared + self.own)


class Placed(Summed):
    """Its gradients are those of its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.shared + self.own)


class Hooked(nn.Module):
    """A hook of the output changes the gradient at which W begins, as where a gradient is reversed."""

    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.hook = nn.Linear(4, 4, dtype=torch.double), hook

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y.register_hook(self.hook)
        return y


def gradients(module: nn.Module, *, is_split: bool) -> list[Tensor]:
    """Of the inputs of two micro-batches, then of the weights: both I come before both W."""
    torch.manual_seed(1)
    inputs = [torch.randn(4, 4, dtype=torch.double, requires_grad=True) for _ in range(2)]
    groups, received = [], []
    module.zero_grad()
    for x in inputs:
        # As behind another layer of the stage, whose gradient I hands on.
        y = module(x * 2).tanh()
        grad = torch.ones_like(y)
        if is_split:
            (into,), of_one = stage_backward_input([y], [grad], [x], module.parameters())
            received.append(into)
            groups.append(of_one)
        else:
            y.backward(grad)
            received.append(x.grad)
    for of_one in groups:
        stage_backward_weight(module.parameters(), of_one)
    return [grad for grad in (*received, *(each.grad for each in module.parameters())) if grad is not None]


@pytest.mark.parametrize(
    "module",
    [Summed(), Placed(), Hooked(torch.neg), Hooked(lambda grad: grad * 0.1), nn.Sequential(Placed(), Summed())],
)
def test_weights_that_share_a_gradient_and_hooks_where_w_begins(module: nn.Module) -> None:
    expected = [grad.clone() for grad in gradients(module, is_split=False)]
    assert len(expected) == 2 + len(list(module.parameters()))
    for grad, want in zip(gradients(module, is_split=True), expected, strict=True):
        assert torch.allclose(grad, want)


def test_no_two_weights_have_one_gradient() -> None:
    """What changes it in place, as clipping does, would change it twice."""
    module = Summed()
    gradients(module, is_split=True)
    assert module.shared.grad is not None
    assert module.own.grad is not None
    assert module.shared.grad.data_ptr() != module.own.grad.data_ptr()
