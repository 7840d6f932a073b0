"""Channels and planes of traced layers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from msgspec import UNSET
from torch import Tensor, nn

from bapipe.formats.layer_shape import LayerShape
from bapipe.tracing.layer_shapes import layer_shapes
from bapipe.tracing.layers import trace
from bapipe.zoo.gpt2 import gpt2


def shapes(module: nn.Module, inputs: Tensor) -> dict[str, LayerShape]:
    return layer_shapes(trace(module, [inputs]), [inputs])


@pytest.mark.parametrize(
    ("convolution", "norm", "pool", "axes"),
    [
        (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, 1),
        (nn.Conv2d, nn.BatchNorm2d, nn.AvgPool2d, 2),
        (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, 3),
    ],
)
def test_shapes_of_a_convolutional_network(
    convolution: type[nn.Module], norm: type[nn.Module], pool: type[nn.Module], axes: int
) -> None:
    module = nn.Sequential(
        convolution(3, 6, 3, padding=2, dilation=2),
        norm(6),
        nn.ReLU(),
        pool(2),
        nn.Flatten(),
        nn.Linear(6 * 4**axes, 5),
    )
    found = shapes(module, torch.zeros(2, 3, *[8] * axes))
    planes = LayerShape(in_channels=6, out_channels=6, mixes_channels=False, in_planes=8, out_planes=8)
    assert found["0"] == LayerShape(in_channels=3, out_channels=6, in_planes=8, out_planes=8, window=5, padding=2)
    assert (found["1"].sums_samples, found["2"]) == (True, planes)
    assert (found["3"].window, found["3"].stride, found["3"].out_planes) == (2, 2, 4)
    assert found["5"] == LayerShape(in_channels=6 * 4**axes, out_channels=5)


def test_a_width_that_numpy_has_computed_is_a_number_of_python() -> None:
    width = np.array((2, 2)).prod()
    found = shapes(nn.Sequential(nn.Linear(width, 3), nn.MaxPool1d(width - 3)), torch.zeros(2, 4))
    assert [type(found["0"].in_channels), type(found["1"].window)] == [int, int]


def test_layers_whose_split_is_not_known_have_no_shape() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm = nn.Linear(4, 4), nn.LayerNorm((3, 4))

        def forward(self, x: Tensor) -> Tensor:
            mixed = torch.softmax(self.mix(x), dim=1)  # reads all places
            result: Tensor = self.norm(mixed)  # and so does this norm
            return result

    assert shapes(Attention(), torch.zeros(2, 3, 4)) == {}


def test_embeddings_and_layer_norms_have_shapes() -> None:
    module = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    tokens = torch.zeros(2, 6, dtype=torch.long)
    places = LayerShape(in_planes=6, out_planes=6)
    found = shapes(module, tokens)
    assert found["0"] == LayerShape(in_channels=50, out_channels=8, in_planes=6, out_planes=6)
    assert found["1"] == places
    assert (found["2"].in_channels, found["2"].out_channels, found["2"].in_planes) == (8, 32, 6)


def test_heads_of_attention_in_one_layer_and_in_three() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.long)
    small = gpt2(num_layers=1, hidden_size=24, num_heads=3, vocabulary_size=20, num_positions=8, length=6)
    found = shapes(small.module, tokens)
    assert found["blocks.0.attention.qkv"] == LayerShape(in_channels=24, out_channels=24, heads=3, attends=True)
    projection = found["blocks.0.attention.projection"]
    assert (projection.in_channels, projection.out_channels, projection.heads) == (24, 24, UNSET)
    assert found["blocks.0.dense_dropout"].elementwise_inputs == ("blocks.0.attention_dropout",)
    assert (found["blocks.0.gelu"].in_channels, found["blocks.0.gelu"].in_planes) == (96, 6)

    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=20, max_position_embeddings=8, use_cache=False,
    )  # fmt: skip
    found = shapes(transformers.LlamaForCausalLM(config), tokens)
    heads = {
        name.rpartition(".")[2]: (shape.out_channels, shape.heads, shape.attends)
        for name, shape in found.items()
        if shape.heads is not UNSET
    }
    assert heads == {"q_proj": (32, 2, False), "k_proj": (16, 2, False), "v_proj": (32, 2, True)}
    assert found["model.layers.0.mlp.up_proj"].elementwise_inputs == ("model.layers.0.mlp.act_fn",)


@pytest.mark.parametrize(
    ("arranged", "heads"),
    [
        (lambda x: x.unflatten(2, (4, 2)).transpose(1, 2), 4),
        (lambda x: x.unflatten(2, (4, 2)).transpose(1, 2).cumsum(1), None),  # sums over heads
        (lambda x: x.unflatten(2, (4, 2)), None),  # attends to heads, at each place by itself
        (lambda x: x.reshape(2, 4, 6, 2), None),  # its second axis has parts of places
    ],
)
def test_heads_that_are_not_apart_are_not_shared(arranged: Callable[[Tensor], Tensor], heads: int | None) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, 2)
            mixed: Tensor = nn.functional.scaled_dot_product_attention(arranged(q), arranged(k), arranged(v))
            return mixed.transpose(1, 2).flatten(2)

    found = shapes(Attention(), torch.zeros(2, 6, 8))
    assert (found["qkv"].heads if found else None) == heads


@pytest.mark.parametrize(
    ("module", "is_elementwise"),
    [
        (nn.Softplus(), True),
        (nn.ReLU(inplace=True), True),
        (nn.Softmax(2), False),
        (nn.GLU(), False),
        (nn.RReLU(), False),
    ],
    ids=lambda x: type(x).__name__,
)
def test_elementwise_modules_are_found_by_trying(module: nn.Module, is_elementwise: bool) -> None:
    assert ("1" in shapes(nn.Sequential(nn.Linear(4, 4), module), torch.zeros(2, 4, 4))) is is_elementwise
