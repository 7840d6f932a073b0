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


class Contrast(nn.Module):
    """Writes to a trained bias, a frozen teacher and a queue without gradients; its two layers share the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("queue", torch.ones(4, 3))
        self.queue: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.student.bias.clamp_(-0.1, 0.1)
        query = self.student(x)
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
            key = self.teacher(x)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        with torch.no_grad():
            self.queue[:, :2] = key[:2].T
        return scores


def test_what_is_handed_on_is_found_in_the_modes_of_the_model() -> None:
    """With gradients, torch would refuse to write to the bias, and the teacher would become a result of the student."""
    module = Contrast()
    before = [(one, one.detach().clone(), one.requires_grad) for one in module.parameters()]
    microbatches = example_microbatches([X], X, (2, 2, 3), CPU)
    model, result = trace_checked(module, [X], mse_loss, microbatches, max_size=3)
    assert isinstance(result, Equivalence)
    assert [layer.name for layer in model.layers] == ["student", "teacher"]
    assert result.num_stages == 1  # what writes to the queue and what reads it
    for one, value, needs_gradient in before:
        assert (one.is_leaf, one.requires_grad) == (True, needs_gradient)
        assert torch.equal(one, value)


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
