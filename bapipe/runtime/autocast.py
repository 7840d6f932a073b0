"""A stage that runs under `torch.autocast`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class AutocastStage(nn.Module):
    """A stage's module under `torch.autocast`, whose outputs are cast to the types that the next stage expects."""

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, outputs: Sequence[torch.dtype]
    ) -> None:
        super().__init__()
        self.module = module
        self._device, self._dtype, self._outputs = device, dtype, tuple(outputs)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        with torch.autocast(self._device.type, self._dtype):
            outputs = self.module(*args, **kwargs)
        return tuple(tensor.to(dtype) for tensor, dtype in zip(outputs, self._outputs, strict=True))
