"""Assignments to `data` in a forward are no call, so a graph would lose them: nobody sees it while they change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.tracing.aliasing import writes_to_state
from bapipe.tracing.layers import trace


class Bounded(nn.Module):
    """Bounds a scale, as models like CLIP do; it is within the bound at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data = torch.clamp(self.scale.data, max=4.6)
        y: Tensor = self.linear(x) * self.scale.exp()
        return y


class BoundedByOther(nn.Module):
    def __init__(self, bound: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.first, self.second, self.bound = nn.Linear(4, 4), nn.Linear(4, 4), bound

    def forward(self, x: Tensor) -> Tensor:
        self.bound(self)
        y: Tensor = self.second(self.first(x))
        return y


def momentum(model: Any) -> None:
    """As the authors of MoCo wrote it."""
    for own, other in zip(model.second.parameters(), model.first.parameters(), strict=True):
        own.data = own.data * 0.9 + other.data * 0.1


def momentum_of_lists(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(model.second.parameters()), list(model.first.parameters()), 0.5)


def of_a_result(model: Any) -> None:
    (model.first.weight * 2).data = model.second.weight.data


class Recorded(nn.Module):
    """Around a model, code that torch.fx cannot follow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.last = model, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.model(x)
        if y.dim() != 2:
            raise ValueError("want rows")
        z: Tensor = self.last(y)
        return z


@pytest.mark.parametrize("around", [lambda model: nn.Sequential(model, nn.Linear(4, 2)), Recorded])
def test_a_module_that_assigns_data_is_one_layer(around: Callable[[nn.Module], nn.Module]) -> None:
    model = trace(around(Bounded()), [torch.randn(3, 4)])
    assert len(model.layers) == 2
    (reason,) = model.leaf_reasons.values()
    assert "its forward assigns `data` of a tensor, which no graph can hold: write to it in place" in reason.with_advice
    assert not reason.to_cut


@pytest.mark.parametrize("around", [lambda model: model, Recorded])
@pytest.mark.parametrize("bound", [momentum, of_a_result])
def test_a_model_whose_own_forward_assigns_data_is_refused_or_one_layer(
    around: Callable[[nn.Module], nn.Module], bound: Callable[[nn.Module], None]
) -> None:
    made = around(BoundedByOther(bound))
    if isinstance(made, Recorded):
        assert [layer.name for layer in trace(made, [torch.randn(3, 4)]).layers] == ["model", "last"]
        return
    with pytest.raises(InvalidModel, match="its forward assigns `data` of a tensor, which no graph can hold"):
        trace(made, [torch.randn(3, 4)])


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = y.sin()
        torch._foreach_mul_([z], 2.0)
        out: Tensor = self.second(z)
        return out


def test_results_that_are_written_to_in_lists_are_used_afterwards() -> None:
    made, x = Doubled(), torch.randn(3, 4)
    model = trace(made, [x])
    assert torch.equal(model.module(x)[0], made(x))


@pytest.mark.parametrize("around", [lambda model: model, Recorded])
def test_writes_to_lists_of_tensors_are_seen(around: Callable[[nn.Module], nn.Module]) -> None:
    model = trace(around(BoundedByOther(momentum_of_lists)), [torch.randn(3, 4)])
    written = {name for _, names in writes_to_state(model.module) for name in names}
    assert [layer.name for layer in model.layers] == ["model", "last"] or written == {"second.weight", "second.bias"}
