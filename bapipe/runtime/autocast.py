"""Autocast: that of a stage, and one around the calls of a pipeline."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError


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


def enter_any_autocast(device: torch.device, own: torch.dtype | None) -> None:
    """Drops the casts of parameters that an autocast around this call keeps, also over updates until it ends.

    `own` is the dtype of the pipeline's own autocast; None without.

    Raises:
        BapipeError: there is one, and stages that were cut without would compute otherwise in it.
    """
    torch.clear_autocast_cache()
    if own is None and torch.is_autocast_enabled(device.type):
        raise BapipeError(
            "torch.autocast is on around this call, but the Pipeline was made without it: make it with `autocast`, "
            "and a plan from a profile that was measured so (`Settings(autocast=...)`), or leave the context"
        )
