"""Small modules whose bytes can be counted by hand, and their profiles."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.progress import PartsProgress


def profile(
    module: nn.Module,
    *shape: int,
    sizes: tuple[int, ...] = (4,),
    save: Callable[[ModelProfile], None] | None = None,
    progress: PartsProgress | None = None,
    **options: Any,
) -> ModelProfile:
    """Returns the profile of a classifier of samples of some shape, as few passes as there may be.

    `options` are those of `ProfileOptions`.
    """
    return measure_model(
        module,
        (torch.randn(1, *shape),),
        torch.tensor([4]),
        functional.cross_entropy,
        ProfileOptions(microbatch_sizes=sizes, seconds_per_size=0.0, **options),
        name="small",
        save=save,
        progress=progress,
    )


def layers(made: ModelProfile) -> dict[str, tuple[LayerProfile, LayerMeasurement]]:
    return {layer.name: (layer, m) for layer, m in zip(made.layers, made.measurements[0].layers, strict=True)}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(3, 3), nn.LSTM(3, 7, batch_first=True), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.embed(x))[0][:, -1])
        return y


class Branches(nn.Module):
    """b and c read one storage, and one gradient reaches both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.head(self.b(y) + self.c(y[:, :]))
        return z


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        y: Tensor = self.head(self.b(self.a(x)) * mask)
        return y


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.b(y) * (y[:, :5] > 0)
        return z


class Blocks(nn.Module):
    """Three equal blocks, two of which have equal layers with other weights; the third gives another type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.relus = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(3))
        self.pool, self.flatten, self.head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for convolution, norm, relu in zip(self.convolutions, self.norms, self.relus, strict=True):
            x = x + relu(norm(convolution(x)))
        scores: Tensor = self.head(self.flatten(self.pool(x)))
        return scores
