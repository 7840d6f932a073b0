"""VGG-16 (Simonyan, Zisserman 2014, arXiv:1409.1556, configuration D), named and shaped as torchvision's."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.example import Example
from bapipe.zoo.images import images

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions in each block; a block ends with a pooling layer that halves the image."""


class VGG(nn.Module):
    """Maps images [n, 3, height, width], at least 32 x 32, to class scores [n, num_classes]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = _features()
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        x: Tensor = self.avgpool(self.features(image))
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores


def vgg16(image_size: int = 64, num_classes: int = 1000) -> Example:
    """Returns VGG-16 with batches of one square image as its example inputs.

    Raises:
        ValueError: an image under 32 pixels, which five poolings would leave nothing of, or no class.
    """
    if image_size < 32:
        raise ValueError(f"image_size is {image_size}; five poolings need at least 32")
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; want at least 1")
    device = torch.get_default_device()
    with torch.device("meta"):  # torch would fill 138 M parameters with values that are then replaced
        module = VGG(num_classes)
    if device.type != "meta":
        module = module.to_empty(device=device)
        for layer in module.modules():
            initialize(layer)
    return Example(
        module=module,
        inputs=(torch.randn(1, 3, image_size, image_size),),
        target=torch.zeros(1, dtype=torch.int64),
        loss=functional.cross_entropy,
        data=partial(images, image_size=image_size, num_classes=num_classes),
        initialize=initialize,
        learning_rate=0.002,
    )


def initialize(layer: nn.Module) -> None:
    """Sets the parameters of one layer as torchvision does: He et al. 2015 over the outputs, or normal(0.01)."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.01)
    else:
        return
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _features() -> nn.Sequential:
    layers: list[nn.Module] = []
    width = 3
    for block in _WIDTHS:
        for out in block:
            layers += [nn.Conv2d(width, out, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
            width = out
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)
