"""How this process computes, as far as profiles record it: TF32 on CUDA, and the memory format of images."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bapipe.formats.settings import Settings


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows CUDA devices to compute float32 matrix products, convolutions and recurrent layers in TF32, or does not.

    Restores what was there before. torch has an old and a new name for each of these settings, and reading the old ones
    raises an error after the new ones were set, so only the new ones are used here. By default torch computes matrix
    products in float32 and the other two in TF32.
    """
    backends: Any = torch.backends  # some of these names are made when they are read
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    for part in parts:
        part.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


def in_memory_format(tensor: Tensor, settings: Settings) -> Tensor:
    """Returns a tensor in the memory format of the settings: images channels-last if these ask for it."""
    if settings.channels_last and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
