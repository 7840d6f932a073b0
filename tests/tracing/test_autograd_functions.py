"""Autograd functions are kept whole by torch.fx, however code calls them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.torch_private.autograd_functions import applies_intercepted, apply_function
from bapipe.tracing.fx_capture import capture_with_fx
from bapipe.tracing.layer_choice import LayerChoice


class Scaled(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -5 * ctx.scale * grads[0], None


class ScaledTwice(Scaled):
    """Applies another function in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        ctx.scale = scale
        y: Tensor = taken(x * scale)
        return y


taken = Scaled.apply


class Applies(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(2, 2, bias=False), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), 3.0)


@pytest.mark.parametrize("function", [Scaled.apply, taken, lambda *args: Scaled.apply(*args)])
def test_the_backward_is_the_functions_own(function: Callable[..., Tensor]) -> None:
    captured = capture_with_fx(Applies(function), 1, LayerChoice())
    x = torch.tensor([[1.0, 2.0]])
    captured.module(x)[0].sum().backward()
    weight = captured.module.get_parameter("linear.weight")
    assert weight.grad is not None
    assert torch.equal(weight.grad, -15 * x.expand(2, 2))


def test_a_call_that_is_let_through_is_one_only() -> None:
    intercepted = []

    def apply(cls: Any, *args: Any) -> Any:
        intercepted.append(cls)
        return apply_function(cls, args, {})

    x = torch.ones(2, requires_grad=True)
    with applies_intercepted(apply):
        for function in (ScaledTwice.apply, ScaledTwice.apply, taken):
            function(x)
        assert intercepted == [ScaledTwice, Scaled, ScaledTwice, Scaled, Scaled]
        intercepted.clear()
        y = apply_function(ScaledTwice, (x, 3.0), {})
    assert intercepted == [Scaled]
    assert torch.equal(y, torch.full((2,), 6.0))
    taken(x)
    assert intercepted == [Scaled]
