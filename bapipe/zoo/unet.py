"""U-Net (Ronneberger et al. 2015, arXiv:1505.04597): a class for each pixel, with skips across the whole network."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.segmentation import segmentation_pairs
from bapipe.zoo.example import Example

_NUM_HALVINGS = 4


class UNet(nn.Module):
    """Maps images [n, channels, height, width], sides multiples of 16, to class scores [n, num_classes, height, width].

    Convolutions are padded, so that the scores are as large as the image; in the paper they are not, and the tensors of
    skip connections are cropped.
    """

    def __init__(self, channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(_NUM_HALVINGS + 1)]
        self.down = nn.ModuleList(
            _convolutions(before, after) for before, after in zip((channels, *widths[:-2]), widths[:-1], strict=True)
        )
        self.pools = nn.ModuleList(nn.MaxPool2d(kernel_size=2) for _ in widths[:-1])
        self.bottom = _convolutions(widths[-2], widths[-1])
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * after, after, kernel_size=2, stride=2) for after in widths[-2::-1]
        )
        self.up = nn.ModuleList(_convolutions(2 * after, after) for after in widths[-2::-1])
        self.classes = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = image, []
        for convolutions, pool in zip(self.down, self.pools, strict=True):
            skips.append(convolutions(x))
            x = pool(skips[-1])
        x = self.bottom(x)
        for grow, convolutions in zip(self.grow, self.up, strict=True):
            x = convolutions(torch.cat((skips.pop(), grow(x)), dim=1))
        scores: Tensor = self.classes(x)
        return scores


def unet(image_size: int = 64, channels: int = 1, num_classes: int = 2, width: int = 64) -> Example:
    """Returns U-Net with batches of one square image as its example inputs; `width` is that of the first layer.

    Raises:
        ValueError: an image that cannot be halved four times, or fewer than 2 classes.
    """
    check_sizes(image_size=image_size, channels=channels, num_classes=num_classes, width=width)
    if image_size % 2**_NUM_HALVINGS:
        raise ValueError(f"image_size is {image_size}; it is halved four times, so want a multiple of 16")
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; one is the background, so want at least 2")
    return Example(
        module=UNet(channels, num_classes, width).apply(initialize),
        inputs=(torch.randn(1, channels, image_size, image_size),),
        target=torch.zeros(1, image_size, image_size, dtype=torch.int64),
        loss=functional.cross_entropy,
        data=partial(segmentation_pairs, shape=(image_size, image_size), channels=channels, num_classes=num_classes),
        initialize=initialize,
        learning_rate=0.01,
    )


def initialize(layer: nn.Module) -> None:
    """Sets the parameters of one layer as the paper does: normal, of variance 2 / (inputs that an output sees).

    An output of a deconvolution depends on one position of the input, because of its stride. Biases are 0.
    """
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    elif isinstance(layer, nn.ConvTranspose2d):
        nn.init.normal_(layer.weight, std=(2 / layer.in_channels) ** 0.5)
    else:
        return
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
    )
