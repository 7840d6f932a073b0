"""A trained model as one safetensors file, which needs no bapipe to read."""

from pathlib import Path

from safetensors.torch import save

from bapipe.errors import BapipeError
from bapipe.formats.codec import write_bytes
from bapipe.runtime.checkpoint.manifest import MANIFEST, list_checkpoints
from bapipe.runtime.checkpoint.writer import full_state_dict


def export(checkpoint: Path, output: Path) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest in a folder; returns how many there are."""
    candidates = (checkpoint,) if (checkpoint / MANIFEST).is_file() else list_checkpoints(checkpoint)
    if not candidates:
        raise BapipeError(f"{checkpoint}: no checkpoint here: give a folder in which a run has written checkpoints")
    state = full_state_dict(candidates[-1])
    write_bytes(output, save({name: tensor.contiguous() for name, tensor in state.items()}))
    return len(state)
