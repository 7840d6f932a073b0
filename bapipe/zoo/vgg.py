"""VGG-16 (Simonyan, Zisserman 2014, arXiv:1409.1556, configuration D), with the names and shapes of torchvision."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.images import images
from bapipe.zoo.example import Example
from bapipe.zoo.metrics import top_1

_BLOCKS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Channels of the convolutions in each block, in units of `width`; a pooling after each block halves the image."""


class VGG(nn.Module):
    """Maps images [n, 3, height, width], at least 32 x 32, to class scores [n, num_classes]."""

    def __init__(self, num_classes: int, width: int = 64, batch_norm: bool = False) -> None:
        super().__init__()
        self.features = _features(width, batch_norm)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(8 * width * 7 * 7, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(64 * width, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(64 * width, num_classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        x: Tensor = self.avgpool(self.features(image))
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores


def vgg16(image_size: int = 64, num_classes: int = 1000, width: int = 64) -> Example:
    """Returns VGG-16 with batches of one square image as its example inputs; `width` is that of the first layer.

    Raises:
        ValueError: an image under 32 pixels, too small for five poolings, or no class.
    """
    return _example(image_size, num_classes, width, batch_norm=False)


def vgg16_bn(image_size: int = 64, num_classes: int = 1000, width: int = 64) -> Example:
    """Returns VGG-16 as `vgg16` does, with batch normalisation after each convolution."""
    return _example(image_size, num_classes, width, batch_norm=True)


def _example(image_size: int, num_classes: int, width: int, batch_norm: bool) -> Example:
    check_sizes(image_size=image_size, num_classes=num_classes, width=width)
    if image_size < 32:
        raise ValueError(f"image_size is {image_size}; five poolings need at least 32")
    return Example(
        module=VGG(num_classes, width, batch_norm).apply(initialize),
        inputs=(torch.randn(1, 3, image_size, image_size),),
        target=torch.zeros(1, dtype=torch.int64),
        loss=functional.cross_entropy,
        data=partial(images, image_size=image_size, num_classes=num_classes),
        initialize=initialize,
        metrics={"top-1": top_1},
        learning_rate=0.002,
    )


def initialize(layer: nn.Module) -> None:
    """Sets the parameters of one layer as torchvision does: He et al. 2015 over the outputs, or normal(0.01)."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.01)
    elif isinstance(layer, nn.BatchNorm2d):
        layer.reset_parameters()
        return
    else:
        return
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _features(width: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for block in _BLOCKS:
        for widths in block:
            out = widths * width
            layers.append(nn.Conv2d(channels, out, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(out))
            layers.append(nn.ReLU(inplace=True))
            channels = out
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)
