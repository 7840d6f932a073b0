"""A small model in float64 whose data ends the second rank once, in the middle of training."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from bapipe.zoo.example import Example

NUM_SAMPLES, BATCH = 50, 12


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points and their squares; asked for the first sample of the sixth step, rank 1 of two is killed, but only once."""

    def __init__(self, marker: Path | None) -> None:
        self._x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self._marker, self._asked = marker, 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        is_rank = dist.is_initialized()  # the process that starts the ranks looks at the first sample, too
        self._asked += is_rank
        last = is_rank and dist.get_world_size() == 2 and dist.get_rank() == 1
        if self._marker is not None and last and self._asked > 5 * BATCH and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._x[place], self._x[place] ** 2


def points(spec: str) -> Points:
    """Opens the points; `spec` names the file that says that a rank was killed, or `quiet`."""
    return Points(None if spec == "quiet" else Path(spec))


def small() -> Example:
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    module.double()
    inputs = torch.zeros(1, 4, dtype=torch.float64)
    return Example(module=module, inputs=(inputs,), target=inputs, loss=nn.functional.mse_loss, data=points)
