"""Sparse tensors that a forward makes or has in an attribute."""

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.tracing.layers import trace


class Graph(nn.Module):
    def __init__(self, has_attribute: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.neighbours = torch.eye(3).to_sparse() if has_attribute else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        neighbours = torch.eye(3).to_sparse() if self.neighbours is None else self.neighbours
        output: Tensor = self.last(torch.sparse.mm(neighbours, x.t()).t())
        return output


@pytest.mark.parametrize("has_attribute", [False, True])
def test_a_sparse_constant_is_refused_in_words(has_attribute: bool) -> None:
    message = (
        r"^the operators of layer 'first' use a sparse tensor \(torch.sparse_coo\) of shape \(3, 3\) as a constant, and "
        r"stages hold dense ones only: use its to_dense\(\), or make it in the forward of a module that is one layer"
    )
    with pytest.raises(InvalidModel, match=message):
        trace(Graph(has_attribute), [torch.randn(4, 3)])


def test_a_layer_may_use_one_inside() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Graph(has_attribute=True), nn.Linear(3, 3))
    layers = trace(model, [torch.randn(4, 3)], leaf_modules=["1"]).layers
    assert [layer.name for layer in layers] == ["0", "1", "2"]
