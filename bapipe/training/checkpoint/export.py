"""A trained model as one safetensors file, which needs no bapipe to read."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.formats.files import write_bytes
from bapipe.torch_device import CPU, dtype_name
from bapipe.training.checkpoint.folder import newest_checkpoint
from bapipe.training.checkpoint.manifest import MANIFEST
from bapipe.training.checkpoint.writer import full_state_dict


def export(checkpoint: Path, output: Path, write: Callable[[Path, bytes], None] = write_bytes) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest whole one in a folder; returns how many.

    Args:
        write: writes bytes to a file.

    Raises:
        BapipeError: there is no checkpoint, or a tensor has a dtype that safetensors cannot store.
    """
    path = checkpoint
    if not (checkpoint / MANIFEST).is_file():
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise BapipeError(f"{checkpoint}: no checkpoint here: give a folder in which a run has written checkpoints")
        path = newest.path
    state = full_state_dict(path)
    _check_dtypes(state)
    write(output, save({name: tensor.contiguous() for name, tensor in state.items()}))
    return len(state)


def _check_dtypes(state: Mapping[str, Tensor]) -> None:
    unknown = {dtype for dtype in {tensor.dtype for tensor in state.values()} if not _can_be_saved(dtype)}
    for name, tensor in state.items():
        if tensor.dtype in unknown:
            raise BapipeError(
                f"'{name}' is of dtype {dtype_name(tensor.dtype)}, which safetensors files do not have: a buffer that "
                "the module computes needs no place in them (register it with persistent=False); keep others in "
                "another dtype"
            )


def _can_be_saved(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(1, dtype=dtype, device=CPU)})
    except (KeyError, SafetensorError):  # newer versions of safetensors store more dtypes, and none lists them
        return False
    return True
