"""A trained model as one safetensors file, without bapipe."""

from pathlib import Path

from safetensors.torch import save

from bapipe.errors import BapipeError
from bapipe.formats.codec import write_bytes
from bapipe.runtime.checkpoint.manifest import MANIFEST, checkpoints
from bapipe.runtime.checkpoint.writer import whole_state


def export(checkpoint: Path, output: Path) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest in a folder; returns how many there are."""
    found = (checkpoint,) if (checkpoint / MANIFEST).is_file() else checkpoints(checkpoint)
    if not found:
        raise BapipeError(f"{checkpoint}: no checkpoint here: give a folder that `bapipe run --checkpoint` has filled")
    state = whole_state(found[-1])
    write_bytes(output, save({name: tensor.contiguous() for name, tensor in state.items()}))
    return len(state)
