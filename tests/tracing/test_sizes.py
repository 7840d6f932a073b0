"""Sizes found from two batch sizes."""

import torch
from torch import Tensor, fx, nn

from bapipe.tracing.sizes import TensorShape, is_size, meta_values, observe_sizes, repeat_to_batch


class Reshape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.size(0) * 2, x.size(1) // 2)


def test_a_size_is_affine_in_the_batch_size() -> None:
    module = fx.symbolic_trace(Reshape())
    node = {n.name: n for n in module.graph.nodes}
    known = observe_sizes(module, (torch.zeros(3, 6),), lambda node: True)
    assert known[node["size"]] == (5, 7)
    assert known[node["mul"]] == (10, 14)
    assert known[node["floordiv"]] == (3, 3)
    assert known[node["x"]] == (TensorShape((5, 6)), TensorShape((7, 6)))
    assert [name for name, n in node.items() if is_size(known, n)] == ["size", "mul", "size_1", "floordiv"]


def test_values_on_the_meta_device_have_shapes_only() -> None:
    module = fx.symbolic_trace(Reshape())
    reshape = next(n for n in module.graph.nodes if n.name == "reshape")
    (value,) = meta_values(module, (torch.zeros(3, 6),), 4, [reshape])
    assert value.is_meta
    assert value.shape == (8, 3)


def test_rows_are_repeated_and_zeros_stand_for_meta_tensors() -> None:
    cpu = torch.device("cpu")
    assert repeat_to_batch(torch.tensor([1, 2]), 3, cpu).tolist() == [1, 2, 1]
    assert repeat_to_batch(torch.empty(2, 2, device="meta"), 1, cpu).tolist() == [[0.0, 0.0]]
