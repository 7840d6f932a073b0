"""Channels and planes of traced layers."""

import pytest
import torch
from torch import Tensor, nn

from bapipe.formats.layer_shape import LayerShape
from bapipe.profiler.instrument import TrainingPass
from bapipe.profiler.layer_shapes import layer_shapes
from bapipe.tracing import trace


def shapes(module: nn.Module, inputs: Tensor) -> dict[str, LayerShape]:
    model = trace(module, [inputs])
    return layer_shapes(
        TrainingPass(model=model, loss=nn.functional.mse_loss, inputs=(inputs,), target=inputs, autocast=None)
    )


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
