"""3D U-Net (Çiçek et al. 2016, arXiv:1606.06650): a class for each voxel of a volume."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.segmentation import segmentation_pairs
from bapipe.zoo.example import Example

_NUM_HALVINGS = 3


class UNet3D(nn.Module):
    """Maps volumes [n, channels, depth, height, width], sides multiples of 8, to class scores of the same sides.

    Convolutions are padded, so that the scores are as large as the volume; in the paper they are not, and the tensors
    of skip connections are cropped. The number of channels doubles within a level before its pooling, not between
    levels, to avoid bottlenecks.
    """

    def __init__(self, channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(_NUM_HALVINGS + 1)]
        self.down = nn.ModuleList(
            _convolutions(before, half, 2 * half)
            for before, half in zip((channels, *(2 * w for w in widths[:-2])), widths[:-1], strict=True)
        )
        self.pools = nn.ModuleList(nn.MaxPool3d(kernel_size=2) for _ in widths[:-1])
        self.bottom = _convolutions(widths[-1], widths[-1], 2 * widths[-1])
        self.grow = nn.ModuleList(
            nn.ConvTranspose3d(2 * below, 2 * below, kernel_size=2, stride=2, bias=False) for below in widths[:0:-1]
        )
        self.up = nn.ModuleList(_convolutions(3 * below, below, below) for below in widths[:0:-1])
        self.classes = nn.Conv3d(2 * width, num_classes, kernel_size=1)

    def forward(self, volume: Tensor) -> Tensor:
        x, skips = volume, []
        for convolutions, pool in zip(self.down, self.pools, strict=True):
            skips.append(convolutions(x))
            x = pool(skips[-1])
        x = self.bottom(x)
        for grow, convolutions in zip(self.grow, self.up, strict=True):
            x = convolutions(torch.cat((skips.pop(), grow(x)), dim=1))
        scores: Tensor = self.classes(x)
        return scores


def unet3d(volume_size: int = 32, channels: int = 3, num_classes: int = 3, width: int = 32) -> Example:
    """Returns 3D U-Net with batches of one cube as its example inputs; `width` is that of the first layer.

    Layers keep torch's initial values: the paper specifies none, and batch norm removes their scale.

    Raises:
        ValueError: a volume that cannot be halved three times, or that is then too small to normalise; fewer than 2
            classes.
    """
    check_sizes(volume_size=volume_size, channels=channels, num_classes=num_classes, width=width)
    if volume_size % 2**_NUM_HALVINGS or volume_size < 16:
        raise ValueError(
            f"volume_size is {volume_size}; it is halved three times and then normalised, so want a multiple of 8 from "
            "16 on"
        )
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; one is the background, so want at least 2")
    shape = (volume_size,) * 3
    return Example(
        module=UNet3D(channels, num_classes, width),
        inputs=(torch.randn(1, channels, *shape),),
        target=torch.zeros(1, *shape, dtype=torch.int64),
        loss=functional.cross_entropy,
        data=partial(segmentation_pairs, shape=shape, channels=channels, num_classes=num_classes),
        learning_rate=0.02,
    )


def _convolutions(before: int, between: int, after: int) -> nn.Sequential:
    """Two convolutions, each normalised; their biases would vanish in the batch norm."""
    return nn.Sequential(
        nn.Conv3d(before, between, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm3d(between),
        nn.ReLU(inplace=True),
        nn.Conv3d(between, after, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm3d(after),
        nn.ReLU(inplace=True),
    )
