"""A trained model as one safetensors file, which needs no bapipe to read."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from bapipe.errors import BapipeError
from bapipe.formats.files import place_file, temporary_for
from bapipe.torch_device import CPU
from bapipe.training.checkpoint.folder import Checkpoint, newest_checkpoint
from bapipe.training.checkpoint.manifest import MANIFEST, read_manifest
from bapipe.training.checkpoint.tensor_files import DTYPES, TensorSpec, save_tensors
from bapipe.training.checkpoint.writer import full_state_dict


def export(checkpoint: Path, output: Path, place: Callable[[Path, Path], None] = place_file) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest whole one in a folder; returns how many.

    Args:
        place: moves a finished file, its second argument, to where the first one says.

    Raises:
        BapipeError: there is no checkpoint, or a tensor has a dtype that safetensors cannot store.
    """
    is_one = (checkpoint / MANIFEST).is_file()
    found = Checkpoint(checkpoint, read_manifest(checkpoint)) if is_one else newest_checkpoint(checkpoint)
    if found is None:
        raise BapipeError(f"{checkpoint}: no checkpoint here: give a folder in which a run has written checkpoints")
    _check_dtypes(found.manifest.tensors)  # before they are read: torch copies none of 4 bits
    state = full_state_dict(found.path, found.manifest)
    with temporary_for(output) as temporary:
        save_tensors(temporary, state)
        place(output, temporary)
    return len(state)


def _check_dtypes(specs: Mapping[str, TensorSpec]) -> None:
    unknown = {dtype for dtype in {spec.dtype for spec in specs.values()} if not _can_be_saved(DTYPES[dtype])}
    for name, spec in specs.items():
        if spec.dtype in unknown:
            raise BapipeError(
                f"'{name}' is of dtype {spec.dtype}, which safetensors files do not have: a buffer that "
                "the module computes needs no place in them (register it with persistent=False); keep others in "
                "another dtype"
            )


def _can_be_saved(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(1, dtype=dtype, device=CPU)})
    except (KeyError, SafetensorError):  # newer versions of safetensors store more dtypes, and none lists them
        return False
    return True
