"""Which nodes the W of a group of parameters runs, beside their definition."""

from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bapipe.torch_private.split_backward import construct_reverse_graph, get_param_groups
from bapipe.tracing.weight_nodes import weight_nodes


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x)[0]
        return result


class _Twice(nn.Module):
    """Uses a layer twice, with another one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.twice(torch.tanh(self.between(self.twice(x))))
        return result


class _Made(nn.Module):
    """Makes a weight of two parameters, one of which has a path of its own that does not come from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.first * self.second.exp()) + (self.second * 2).sum()


def _detached(x: Tensor) -> Tensor:
    return x.detach()


class _Detached(nn.Module):
    """A first layer whose gradient comes through the second one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(torch.relu(self.first(_detached(x))))
        return result


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(4, 4), _Attention(), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(4, 4), _Twice(), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(4, 4), _Made(), nn.LayerNorm(4)),
        lambda: nn.Sequential(nn.Linear(4, 4), _Detached(), nn.Linear(4, 4)),
    ],
)
def test_they_are_those_between_where_w_begins_and_the_parameters(model: Any) -> None:
    torch.manual_seed(0)
    module, x = model(), torch.rand(2, 3, 4, requires_grad=True)
    loss = module(x).square().sum()
    graph = nx.DiGraph()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        for other, _ in node.next_functions:
            if other is not None:
                graph.add_edge(node, other)
                todo.append(other)
    reverse = construct_reverse_graph([loss.grad_fn])
    weights = [get_gradient_edge(parameter).node for parameter in module.parameters()]
    groups = get_param_groups([get_gradient_edge(x).node], weights, reverse)
    assert groups
    for group in groups:
        leading = set().union(*({node} | nx.ancestors(graph, node) for node in group["params"]))
        after = set().union(*({node} | nx.descendants(graph, node) for node in group["intermediates"]))
        assert weight_nodes(group, reverse) == leading & after
