"""Weights to start training from: a safetensors file with a model's tensors by their names."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.runtime.plan_digest import NUM_DIGITS
from bapipe.tracing.model import persistent_state
from bapipe.training.checkpoint.tensor_files import file_digest, opened

_NUM_SHOWN = 3
"""Most names that an error lists."""


def check_weights(path: Path, module: nn.Module) -> None:
    """Raises BapipeError unless a file has the parameters and buffers of a module's state dict, and no others.

    Of tied weights one name is enough. Only names and shapes are read.
    """
    state = persistent_state(module)
    names: dict[int, set[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), set()).add(name)
    if path.is_dir():
        raise BapipeError(
            f"{path} is a folder; want a safetensors file, such as `bapipe export` makes of a folder of checkpoints"
        )
    with opened(path) as file:
        there = set(file.keys())
        missing = [name for name, tensor in state.items() if not names[id(tensor)] & there]
        unexpected = sorted(there - set(state))
        if missing or unexpected:
            found = [_shown(*what) for what in (("lacks", missing), ("has besides", unexpected)) if what[1]]
            raise BapipeError(f"{path} has other weights than the model: it {' and '.join(found)}")
        for name in sorted(there):
            stored = file.get_slice(name)
            shape = list(stored.get_shape())
            if stored.get_dtype().startswith("C") and not state[name].is_complex():
                raise BapipeError(f"{path} has other weights than the model: '{name}' is complex there")
            if shape != list(state[name].shape):
                raise BapipeError(
                    f"{path} has other weights than the model: '{name}' has shape {shape} there and "
                    f"{list(state[name].shape)} here"
                )


def weights_digest(path: Path) -> str:
    """Returns a digest of the content of a file.

    Raises:
        BapipeError: it cannot be read.
    """
    try:
        return file_digest(path).sha256[:NUM_DIGITS]
    except OSError as error:
        raise BapipeError(f"{path}: cannot be read: {error.strerror}") from None


def load_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Sets the given tensors, in place, to those of the same names in a file; reads no others."""
    with opened(path) as file, torch.no_grad():
        there = set(file.keys())
        for name, tensor in tensors.items():
            if name in there:
                tensor.copy_(file.get_tensor(name))


def _shown(verb: str, names: list[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{verb} {', '.join(repr(name) for name in names[:_NUM_SHOWN])}{more}"
