"""Reads and writes tensors by name in safetensors files, which hold only numbers: reading them cannot run code."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bapipe.errors import InvalidFile, UnreadableFile
from bapipe.torch_device import dtype_name
from bapipe.units import NonNegative

DTYPES: dict[str, torch.dtype] = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Torch's dtypes by name."""

_STORED_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
"""Dtypes that every version of safetensors stores, by its names; tensors of others are stored as their bytes."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and dtype of a tensor."""

    shape: tuple[NonNegative, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"'{self.dtype}' is no dtype of torch")

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPES[self.dtype].itemsize

    @property
    def stored(self) -> "TensorSpec":
        """Shape and dtype of the tensor in a file."""
        if self.dtype in _STORED_NAMES.values():
            return self
        return TensorSpec(shape=(self.num_bytes,), dtype="uint8")


class FileDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and SHA-256 of a file."""

    num_bytes: NonNegative
    sha256: str


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Returns shape and dtype of tensors, by name."""
    return {name: TensorSpec(shape=tuple(t.shape), dtype=dtype_name(t.dtype)) for name, t in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Writes CPU tensors to a file, and waits until it is on the disk; returns its digest.

    Raises:
        OSError: it cannot be written.
    """
    path.touch()
    save_tensors(path, {name: _to_stored(tensor) for name, tensor in tensors.items()})
    sync(path)
    return file_digest(path)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous CPU tensors of dtypes that safetensors has to a file that is there, which keeps its mode.

    Raises:
        OSError: it cannot be written.
    """
    mode = path.stat().st_mode  # safetensors makes a file that only the user can read
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        # For a full disk safetensors raises no other error than this one, with the system's error number in its text.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
    path.chmod(mode)


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> FileDigest:
    """Returns size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(num_bytes=file.tell(), sha256=digest.hexdigest())


def stored_specs(path: Path) -> dict[str, TensorSpec]:
    """Returns shape and dtype of the tensors in a file, as they are stored; reads its header only.

    Raises:
        InvalidFile: it is no safetensors file, or has a dtype that checkpoints do not use.
    """
    specs = {}
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            part = file.get_slice(name)
            dtype = _STORED_NAMES.get(part.get_dtype())
            if dtype is None:
                raise InvalidFile(f"{path}: '{name}' is of dtype {part.get_dtype()}")
            specs[name] = TensorSpec(shape=tuple(part.get_shape()), dtype=dtype)
    return specs


def read_tensors(paths: Iterable[Path], specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of some files for the names in `specs`, one at a time; tensors may be memory-mapped."""
    for path in paths:
        with opened(path) as file:
            for name in sorted(specs.keys() & set(file.keys())):
                yield name, _from_stored(file.get_tensor(name), specs[name])


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, which checks its header against its size.

    Raises:
        InvalidFile: it is no safetensors file.
        UnreadableFile: the system does not let us read it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise InvalidFile(f"{path} is no safetensors file: {error}") from None
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror or error}") from None


def _to_stored(tensor: Tensor) -> Tensor:
    plain = tensor.contiguous()
    return plain if dtype_name(tensor.dtype) in _STORED_NAMES.values() else plain.reshape(-1).view(torch.uint8)


def _from_stored(tensor: Tensor, spec: TensorSpec) -> Tensor:
    # The copy is aligned for every dtype; the bytes in the file may not be.
    return tensor if spec.stored == spec else tensor.clone().view(DTYPES[spec.dtype]).reshape(spec.shape)
