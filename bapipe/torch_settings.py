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

    Restores what was there before. By default torch computes matrix products in float32 and the other two in TF32. It
    has old and new names for these settings, and an error for who reads an old name after a new one was set: so the
    old ones are set, which the new ones follow, because code in this context may read them, as torch.export does.
    """
    backends: Any = torch.backends  # some of these names are made when they are read
    cuda, cudnn = backends.cuda.matmul, backends.cudnn
    precise = (backends, cudnn, cuda, cudnn.conv, cudnn.rnn)  # general ones first: the later ones may follow them
    before = [part.fp32_precision for part in precise]
    flags = [(part, _old_flag(part)) for part in (cuda, cudnn)]
    backends.fp32_precision = cudnn.fp32_precision = "none"
    cuda.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        for part, flag in flags:
            if flag is not None:
                part.allow_tf32 = flag
        for part, precision in zip(precise, before, strict=True):
            part.fp32_precision = precision


def _old_flag(part: Any) -> bool | None:
    """Returns the setting's value by its old name; None if torch refuses to read it."""
    try:
        return bool(part.allow_tf32)
    except RuntimeError:
        return None


def autocast_dtype(settings: Settings) -> torch.dtype | None:
    """Returns the type of `torch.autocast` in settings; None without autocast."""
    found: torch.dtype | None = getattr(torch, settings.autocast) if settings.autocast else None
    return found


def autocast_on(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Returns the context of `torch.autocast` to a type on a device; without autocast for None, whatever is around."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def in_memory_format(tensor: Tensor, settings: Settings) -> Tensor:
    """Returns a tensor in the memory format of the settings: images channels-last if these ask for it."""
    if settings.channels_last and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
