"""CosmoFlow (Mathuriya et al. 2018, arXiv:1808.04728) as Oyama et al. 2020 train it, for cubes of any power of two."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.synthetic_volumes import NUM_PARAMETERS, synthetic_volumes
from bapipe.zoo.example import Example

_CHANNELS = 4
_WIDTHS = (1, 2, 4, 8, 16, 16, 16)
"""Channels of each convolution, in units of `width`."""

_STRIDES = (1, 1, 1, 2, 1, 1, 1)
_DROPOUT = 0.2
_LAST_SIZE = 2
"""Side of the input volume of the dense layers."""


class CosmoFlow(nn.Module):
    """Maps volumes [n, 4, size, size, size] to the 4 parameters of their universe.

    Poolings that halve the volume follow the first convolutions until its side is 2. So the number of parameters is the
    same for every volume, and with a larger volume the first layers take most of the time.
    """

    def __init__(self, volume_size: int, width: int) -> None:
        super().__init__()
        num_pools = volume_size.bit_length() - 3  # the stride halves once more, to 2
        layers: list[nn.Module] = []
        before = _CHANNELS
        for index, (widths, stride) in enumerate(zip(_WIDTHS, _STRIDES, strict=True)):
            after = widths * width
            layers += [nn.Conv3d(before, after, kernel_size=3, stride=stride, padding=1), nn.LeakyReLU(inplace=True)]
            if index < num_pools:
                layers.append(nn.AvgPool3d(kernel_size=3, stride=2, padding=1))
            before = after
        self.features = nn.Sequential(*layers)
        self.dense = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(_DROPOUT),
            nn.Linear(before * _LAST_SIZE**3, 128 * width),
            nn.LeakyReLU(inplace=True),
            nn.Dropout(_DROPOUT),
            nn.Linear(128 * width, 16 * width),
            nn.LeakyReLU(inplace=True),
            nn.Dropout(_DROPOUT),
            nn.Linear(16 * width, NUM_PARAMETERS),
        )

    def forward(self, volume: Tensor) -> Tensor:
        parameters: Tensor = self.dense(self.features(volume))
        return parameters


def cosmoflow(volume_size: int = 64, width: int = 16) -> Example:
    """Returns CosmoFlow with batches of one cube as its example inputs; `width` is that of the first layer.

    Raises:
        ValueError: a volume that is no power of two from 4 to 512.
    """
    check_sizes(volume_size=volume_size, width=width)
    if volume_size not in (4, 8, 16, 32, 64, 128, 256, 512):
        raise ValueError(f"volume_size is {volume_size}; want a power of two from 4 to 512")
    column = torch.randn(1, _CHANNELS, volume_size, 1, 1)
    return Example(
        module=CosmoFlow(volume_size, width).apply(initialize),
        inputs=(column.expand(-1, -1, -1, volume_size, volume_size),),  # a whole cube has up to 2 GiB
        target=torch.zeros(1, NUM_PARAMETERS),
        loss=functional.mse_loss,
        data=partial(synthetic_volumes, volume_size=volume_size),
        initialize=initialize,
        learning_rate=0.01,
    )


def initialize(layer: nn.Module) -> None:
    """Sets the parameters of one layer as LBANN's CosmoFlow does: He et al. 2015, normal; biases 0."""
    if isinstance(layer, nn.Conv3d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
