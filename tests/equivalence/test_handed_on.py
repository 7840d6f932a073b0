"""Layers that hand each other what is no tensor are one layer with what is around them; advice fits the value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.equivalence.check import Equivalence, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.torch_device import CPU
from bapipe.tracing.layers import granularity, trace
from bapipe.tracing.reasons import not_handed_on

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Scale(nn.Module):
    """Reads a number of one layer, and uses it behind the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        largest = x.abs().max().item()
        y: Tensor = self.b(torch.tanh(x)) / largest
        return y


class Gives(nn.Module):
    def __init__(self, more: Any) -> None:
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.ones(4)), more

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x * self.weight, {"twice": 2 * x} if self.more == "dict" else self.more


class Takes(nn.Module):
    def forward(self, x: Tensor, more: Any) -> Tensor:
        return x if more is None else x + more["twice"] if isinstance(more, dict) else x * len(str(more))


class Pair(nn.Module):
    def __init__(self, more: Any) -> None:
        super().__init__()
        self.gives, self.between, self.takes = Gives(more), nn.Linear(4, 4), Takes()

    def forward(self, x: Tensor) -> Tensor:
        x, more = self.gives(x)
        y: Tensor = self.takes(self.between(x), more)
        return y


@pytest.mark.parametrize("inner", [Scale(), *map(Pair, (None, 0.5, True, "text", "dict"))])
def test_the_module_around_is_one_layer(inner: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner), nn.Linear(4, 4))
    microbatches = example_microbatches([X], X, (2, 2, 3), CPU)
    model, result = trace_checked(module, [X], mse_loss, microbatches, max_size=3)
    assert isinstance(result, Equivalence)
    assert [layer.name for layer in model.layers] == ["0", "1.0", "2"]
    assert result.num_stages == 3
    assert "only tensors can cross between layers" in str(model.leaf_reasons["1.0"])
    leaf_modules, inlined, _ = granularity(module, ["0", "1.0", "2"])
    planned = trace(module, [X], leaf_modules=leaf_modules, inlined=inlined, called_leaves=True)
    assert [layer.name for layer in planned.layers] == ["0", "1.0", "2"]


@pytest.mark.parametrize(
    ("value", "said", "advice"),
    [
        (16, "16 (int)", "compute it from a tensor"),
        (0.5, "0.5 (float)", "compute it from a tensor"),
        (True, "True (bool)", "compute what it chooses"),
        ("b", "'b' (str)", "compute what it chooses"),
        (None, "None (NoneType)", "a tensor in any case"),
        ({"y": X}, "a dict", "its tensors as arguments of their own"),
    ],
)
def test_advice_fits_the_value(value: object, said: str, advice: str) -> None:
    reason = not_handed_on("a", value)
    assert reason.text == f"layer 'a' gives other layers {said}; only tensors can cross between layers"
    assert advice in reason.to_cut
