"""A model of four layers for the tests of the command line: `tiny:tiny`."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from bapipe.zoo.example import Example


def points(spec: str) -> Dataset[tuple[Tensor, Tensor]]:
    """64 points, and their norms."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.norm(dim=1, keepdim=True))  # type: ignore[return-value]


def own() -> Dataset[tuple[Tensor, Tensor]]:
    return points("")


def tiny(width: int = 16) -> Example:
    return Example(
        module=nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)),
        inputs=(torch.zeros(1, 8),),
        target=torch.zeros(1, 1),
        loss=nn.functional.mse_loss,
        data=points,
        metrics={"near": lambda output, target: ((output - target).abs() < 1).float().flatten()},
    )
