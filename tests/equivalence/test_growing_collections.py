"""Lists that layers add to and that code around them empties, which no stage runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.equivalence.check import Equivalence, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.errors import InvalidModel
from bapipe.tracing.model import TracedModel


class Features(nn.Module):
    """Hooks on its layers keep what these give."""

    def __init__(self, *, empties: bool = True, anew: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.kept: list[Tensor] = []
        self.empties, self.anew = empties, anew
        for layer in self.layers:
            layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.kept.append(result)

    def forward(self, x: Tensor) -> Tensor:
        if self.empties and self.anew:
            self.kept = []
        elif self.empties:
            self.kept.clear()
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class TwoFeatures(nn.Module):
    """Two of them, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = Features(), nn.Linear(4, 4), Features()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.between(self.first(x)))
        return y


class Adds(nn.Module):
    """Its forward adds to a list that it shares with others."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.rand(4, 4)), kept

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.kept.append(y)
        return y


class Shared(nn.Module):
    """Empties the list that its layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.a, self.b = Adds(self.kept), Adds(self.kept)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        y: Tensor = self.b(self.a(x))
        return y


class Stack(nn.Module):
    """The hook of a layer takes away what that of another has added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(4, 4), nn.Linear(4, 4), list[int]()
        self.a.register_forward_hook(lambda *_: self.kept.append(1))
        self.b.register_forward_hook(lambda *_: self.kept.clear())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


def traced(module: nn.Module) -> TracedModel:
    x, target = torch.rand(4, 4), torch.rand(4, 4)
    microbatches = example_microbatches((x,), target, (2, 2, 3), torch.device("cpu"))
    model, found = trace_checked(module, [x], mse_loss, microbatches)
    assert isinstance(found, Equivalence)
    return model


@pytest.mark.parametrize("make", [Features, lambda: Features(anew=True), Shared])
def test_a_list_that_only_the_model_empties_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(InvalidModel, match="the list 'kept' would grow with each micro-batch, first in '"):
        traced(make())


def test_the_module_that_empties_a_list_is_one_layer() -> None:
    model = traced(TwoFeatures())
    assert [layer.name for layer in model.layers] == ["first", "between", "second"]
    assert "'first.kept' would grow" in str(model.leaf_reasons["first"])


def test_a_list_that_grows_in_the_model_itself_may_grow() -> None:
    module = Features(empties=False)
    assert [layer.name for layer in traced(module).layers] == ["layers.0", "layers.1"]
    assert module.kept == []


def test_layers_may_add_to_a_list_that_another_layer_empties() -> None:
    assert [layer.name for layer in traced(Stack()).layers] == ["a", "b"]
