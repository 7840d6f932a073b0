"""A forecaster whose norm is undone at its end, as models of time series have it: statistics are kept in attributes."""

import torch
from torch import Tensor, nn

NUM_CHANNELS, LENGTH, HORIZON = 3, 8, 4


class ReversibleNorm(nn.Module):
    """Normalizes series, and takes that back in a second call (Kim et al. 2022, RevIN); it has no children.

    The first call leaves the statistics of its samples in attributes, which the second one reads.
    """

    def __init__(self, *, affine: bool, subtract_last: bool, detached: bool = True) -> None:
        super().__init__()
        self.subtract_last, self.detached = subtract_last, detached
        self.weight = nn.Parameter(torch.ones(NUM_CHANNELS)) if affine else None
        self.bias = nn.Parameter(torch.zeros(NUM_CHANNELS)) if affine else None

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self._keep_statistics(x)
            y = (x - self.center) / self.deviation
            return y if self.weight is None else y * self.weight + self.bias
        y = x if self.weight is None else (x - self.bias) / (self.weight + 1e-5)
        return y * self.deviation + self.center

    def _keep_statistics(self, x: Tensor) -> None:
        center = x[:, -1:, :] if self.subtract_last else x.mean(1, keepdim=True)
        deviation = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        self.center = center.detach() if self.detached else center
        self.deviation = deviation.detach() if self.detached else deviation


class Forecaster(nn.Module):
    """Maps series to their continuation: [samples, LENGTH, channels] to [samples, HORIZON, channels].

    Args:
        follows_sizes: whether its code computes with sizes in a way that torch.fx cannot follow, so that it is recorded.
    """

    def __init__(self, norm: nn.Module, *, follows_sizes: bool = False) -> None:
        super().__init__()
        self.inputs, self.norm, self.follows_sizes = nn.Linear(NUM_CHANNELS, NUM_CHANNELS), norm, follows_sizes
        self.body = nn.Sequential(nn.Linear(LENGTH, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, HORIZON))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inputs(x), "norm")
        for _ in range(y.shape[-1] if self.follows_sizes else 1):
            y = y + 0.5
        y = self.body(y.transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.norm(y, "denorm")
        return result


LAYERS = ["inputs", "body.0", "body.1", "body.2", "body.3"]
"""The layers of a `Forecaster`, in whose midst the norm's operators are."""
