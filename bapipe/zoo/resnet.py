"""ResNet-50 (He et al. 2015, arXiv:1512.03385), with the names and shapes of torchvision, whose weights it can load."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.images import images
from bapipe.zoo.example import Example
from bapipe.zoo.metrics import top_1

_NUM_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4
"""Output channels of a block per channel of its 3 x 3 convolution."""


class Bottleneck(nn.Module):
    """Convolutions 1 x 1, 3 x 3, 1 x 1 with a shortcut; the 3 x 3 one strides, as in torchvision (ResNet v1.5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * _EXPANSION
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1 or channels != out
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(self.bn3(self.conv3(x)) + shortcut)
        return out


class ResNet(nn.Module):
    """Maps images [n, 3, height, width] to class scores [n, num_classes]."""

    def __init__(self, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _group(width, width, _NUM_BLOCKS[0], stride=1)
        self.layer2 = _group(width * _EXPANSION, 2 * width, _NUM_BLOCKS[1], stride=2)
        self.layer3 = _group(2 * width * _EXPANSION, 4 * width, _NUM_BLOCKS[2], stride=2)
        self.layer4 = _group(4 * width * _EXPANSION, 8 * width, _NUM_BLOCKS[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width * _EXPANSION, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return scores


def resnet50(image_size: int = 64, num_classes: int = 1000, width: int = 64) -> Example:
    """Returns ResNet-50 with batches of one square image as its example inputs; `width` is that of the first layer.

    Batch norm sees one micro-batch at a time, as in every pipeline. At 32 pixels and less the input of the last
    blocks is a single pixel, which has no variance in a micro-batch of one image.

    Raises:
        ValueError: an image under 33 pixels, or a size below 1.
    """
    check_sizes(image_size=image_size, num_classes=num_classes, width=width)
    if image_size < 33:
        raise ValueError(f"image_size is {image_size}; five halvings and a batch norm over the rest need at least 33")
    return Example(
        module=ResNet(num_classes, width).apply(initialize),
        inputs=(torch.randn(1, 3, image_size, image_size),),
        target=torch.zeros(1, dtype=torch.int64),
        loss=functional.cross_entropy,
        data=partial(images, image_size=image_size, num_classes=num_classes),
        initialize=initialize,
        metrics={"top-1": top_1},
        learning_rate=0.02,
    )


def initialize(layer: nn.Module) -> None:
    """Sets a convolution as torchvision does, by He et al. 2015 over the outputs; others keep torch's values."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _group(channels: int, width: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(width * _EXPANSION, width, 1) for _ in range(num_blocks - 1)))
