"""Volumes generated from four parameters, which a model learns to estimate."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.zoo.data.dataset import NUM_SYNTHETIC

NUM_PARAMETERS = 4


def synthetic_volumes(spec: str, *, volume_size: int) -> Dataset[tuple[Tensor, Tensor]]:
    """Returns pairs of a volume [4, size, size, size] and its 4 parameters in ±1; `spec` is `synthetic`.

    Raises:
        BapipeError: other data.
    """
    if spec != "synthetic":
        raise BapipeError(
            f"data '{spec}' is unknown to this model: want synthetic, or write a factory of your own whose Example "
            "opens it"
        )
    return _Synthetic(volume_size=volume_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Synthetic(Dataset[tuple[Tensor, Tensor]]):
    """Normal noise; in channel k its mean is the k-th parameter, and its deviation grows with the parameter.

    Item i depends on i alone.
    """

    volume_size: int

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    @property
    def is_slow_for_gpu(self) -> bool:
        return True

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < NUM_SYNTHETIC:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        parameters = 2 * torch.rand(NUM_PARAMETERS, generator=generator) - 1
        noise = torch.randn(NUM_PARAMETERS, *(self.volume_size,) * 3, generator=generator)
        each = parameters[:, None, None, None]
        return each + (1 + each / 2) * noise, parameters
