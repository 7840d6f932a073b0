"""Operators that draw random numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from bapipe.tracing import trace
from bapipe.tracing.randomness import has_random_name, is_random
from bapipe.tracing.stages import cut_into_stages


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
        (nn.FractionalMaxPool2d(2, output_size=1), True),
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
            y = torch.relu(x) + torch.rand_like(x) + torch.normal(x, 1.0) + torch.poisson(x)
            y = nn.functional.normalize(y) + nn.functional.gumbel_softmax(y) + torch.lgamma(y)
            y, _ = nn.functional.fractional_max_pool2d_with_indices(y, [2, 2], output_size=[1, 1])
            return y

    traced = fx.symbolic_trace(Functions())
    found = [n.name for n in traced.graph.nodes if is_random(traced, n)]
    assert found == ["rand_like", "normal", "poisson", "gumbel_softmax", "fractional_max_pool2d_with_indices"]


def test_every_operator_of_torch_that_draws_random_numbers_has_such_a_name() -> None:
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
    found = set()
    for name in (name.removeprefix("aten::") for name in names):
        packet = getattr(torch.ops.aten, name, None)  # TorchScript knows some that are no operators
        for overload in packet.overloads() if packet is not None else ():
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags:
                found.add(name)
    drawing_none = {"_fused_sdp_choice", "_nested_tensor_softmax_with_shape"}  # tagged all the same
    assert len(found) > 50
    assert {name for name in found if not has_random_name(name)} <= drawing_none


class SharedNoise(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.first, self.last = draw, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = self.draw(x)
        y: Tensor = self.last(self.first(x + noise)) - noise
        return y


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.normal(torch.zeros_like(x), 1.0),
        lambda x: torch.poisson(x * 0 + 3),
        lambda x: torch.zeros_like(x).cauchy_(),
    ],
)
def test_what_is_drawn_for_several_stages_is_drawn_once(draw: Callable[[Tensor], Tensor]) -> None:
    """Else each stage draws its own numbers."""
    parts = cut_into_stages(
        trace(SharedNoise(draw), [torch.ones(2, 4)]), {"first": 0, "last": 1}, [torch.ones(2, 4)], 2
    )
    assert len(parts.stages[0].outputs) == 2
