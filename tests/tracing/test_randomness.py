"""Operators that draw random numbers."""

import pytest
import torch
from torch import Tensor, fx, nn

from bapipe.tracing.randomness import is_random


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Leaf(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("module", "random"),
    [
        (nn.Linear(2, 2), False),
        (nn.Dropout(0.5), True),
        (nn.LSTM(2, 2), False),
        (nn.LSTM(2, 2, 2, dropout=0.1), True),
        (Own(), True),
    ],
)
def test_modules_are_random_by_their_dropout_unless_they_are_from_outside_torch(
    module: nn.Module, random: bool
) -> None:
    root = nn.Sequential(module)
    traced = fx.GraphModule(root, Leaf().trace(root))
    call = next(node for node in traced.graph.nodes if node.op == "call_module")
    assert is_random(traced, call) is random


def test_functions_are_random_by_their_names() -> None:
    class Functions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + torch.rand_like(x)

    traced = fx.symbolic_trace(Functions())
    assert [n.name for n in traced.graph.nodes if is_random(traced, n)] == ["rand_like"]
