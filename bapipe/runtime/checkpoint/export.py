"""A trained model as one safetensors file, which needs no bapipe to read."""

from pathlib import Path

from safetensors.torch import save

from bapipe.errors import BapipeError
from bapipe.formats.codec import write_bytes
from bapipe.runtime.checkpoint.folder import newest_checkpoint
from bapipe.runtime.checkpoint.manifest import MANIFEST
from bapipe.runtime.checkpoint.writer import full_state_dict


def export(checkpoint: Path, output: Path) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest whole one in a folder; returns how many."""
    path = checkpoint
    if not (checkpoint / MANIFEST).is_file():
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise BapipeError(f"{checkpoint}: no checkpoint here: give a folder in which a run has written checkpoints")
        path = newest.path
    state = full_state_dict(path)
    write_bytes(output, save({name: tensor.contiguous() for name, tensor in state.items()}))
    return len(state)
