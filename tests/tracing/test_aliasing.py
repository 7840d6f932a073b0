"""Views and in-place changes in small graphs."""

import torch
from torch import Tensor, fx, nn

from bapipe.tracing.aliasing import alias_set, rewire_inplace_uses, writers


class Changes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        view = y.view(-1)
        y.add_(1)
        return view.sum() + y.sum()


def traced() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    module = fx.symbolic_trace(Changes())
    return module, {node.name: node for node in module.graph.nodes}


def test_a_view_and_an_in_place_result_are_aliases() -> None:
    module, node = traced()
    assert alias_set(module, node["mul"]) == {node["mul"], node["view"], node["add_"]}
    assert alias_set(module, node["x"]) == {node["x"]}


def test_writers_are_found_with_their_tensor() -> None:
    module, node = traced()
    assert list(writers(module)) == [(node["add_"], node["mul"])]


def test_uses_after_an_in_place_change_take_its_result() -> None:
    module, node = traced()
    assert set(node["mul"].users) == {node["view"], node["add_"], node["sum_2"]}
    rewire_inplace_uses(module)
    assert set(node["mul"].users) == {node["view"], node["add_"]}
    assert set(node["add_"].users) == {node["sum_2"]}
    module.recompile()
    x = torch.ones(2, 3)
    assert torch.equal(module(x), Changes()(x))
