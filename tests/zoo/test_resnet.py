"""ResNet-50: torchvision's names and shapes, its starting values, and its sum of branches."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from bapipe.errors import InvalidModel
from bapipe.tracing.layers import trace
from bapipe.zoo.factory import build
from bapipe.zoo.resnet import Bottleneck
from tests.models.small_zoo import build_on_meta

RESNET = "bapipe.zoo.resnet:resnet50"


def published() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of torchvision's resnet50 state dict, in its order, by the paper's table 1."""

    def norm(name: str, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.{part}", (channels,)
        yield f"{name}.num_batches_tracked", ()

    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    channels = 64
    for group, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            path = f"layer{group}.{block}"
            for i, shape in enumerate(((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)), 1):
                yield f"{path}.conv{i}.weight", shape
                yield from norm(f"{path}.bn{i}", shape[0])
            if block == 0:
                yield f"{path}.downsample.0.weight", (4 * width, channels, 1, 1)
                yield from norm(f"{path}.downsample.1", 4 * width)
            channels = 4 * width
    yield "fc.weight", (1000, 2048)
    yield "fc.bias", (1000,)


def test_it_has_torchvision_s_names_and_parameters() -> None:
    module = build_on_meta(RESNET, {}).module
    assert [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()] == list(published())
    assert sum(p.numel() for p in module.parameters()) == 25_557_032
    assert len(module.state_dict()) == 320


def test_it_traces_to_the_published_layers() -> None:
    model = trace(build_on_meta(RESNET, {}).module)
    kinds = [layer.kind for layer in model.layers]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "Conv2d": 53, "BatchNorm2d": 53, "ReLU": 49, "MaxPool2d": 1, "AdaptiveAvgPool2d": 1, "Linear": 1,
    }  # fmt: skip
    strided = {n for n, m in model.module.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)}
    assert strided == {"conv1", *(f"layer{g}.0.{conv}" for g in (2, 3, 4) for conv in ("conv2", "downsample.0"))}


def test_a_block_adds_its_input() -> None:
    torch.manual_seed(0)
    block = Bottleneck(16, 4, 1).double().eval()
    assert block.downsample is None
    x = torch.randn(2, 16, 5, 5, dtype=torch.float64)
    y = functional.conv2d(x, block.conv1.weight).div((1 + 1e-5) ** 0.5).clamp(min=0)
    y = functional.conv2d(y, block.conv2.weight, padding=1).div((1 + 1e-5) ** 0.5).clamp(min=0)
    y = functional.conv2d(y, block.conv3.weight).div((1 + 1e-5) ** 0.5) + x
    torch.testing.assert_close(block(x), y.clamp(min=0), rtol=1e-12, atol=1e-12)
    assert Bottleneck(16, 8, 1).downsample is not None
    assert Bottleneck(16, 4, 2)(torch.zeros(1, 16, 6, 6)).shape == (1, 16, 3, 3)


def test_it_starts_as_torchvision_s() -> None:
    torch.manual_seed(0)
    module = build(RESNET, {"width": 16}).module
    conv = module.get_submodule("layer2.0.conv2")
    assert isinstance(conv, nn.Conv2d)
    assert conv.weight.std().item() == pytest.approx((2 / (32 * 9)) ** 0.5, rel=0.05)
    norm, linear = module.get_submodule("bn1"), module.get_submodule("fc")
    assert isinstance(norm, nn.BatchNorm2d)
    assert isinstance(linear, nn.Linear)
    assert torch.equal(norm.weight, torch.ones(16))
    assert linear.weight.abs().max().item() == pytest.approx(512**-0.5, rel=0.01)  # torch's own: uniform


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 32}, "image_size is 32; five halvings and a batch norm over the rest need at least 33"),
        ({"num_classes": 0}, "num_classes is 0; want an integer of at least 1"),
        ({"width": "wide"}, "width is 'wide'; want an integer of at least 1"),
        ({"width": True}, "width is True; want an integer of at least 1"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel) as error:
        build(RESNET, arguments)
    assert str(error.value) == f"factory '{RESNET}' failed: ValueError: {message}"
