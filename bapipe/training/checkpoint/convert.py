"""Converts checkpoints of the format checkpoint/1, whose index of tensors is a pickle, without running its code.

The index is read by `old_index`, the tensors by torch's loader for weights alone.
"""

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from bapipe.errors import BapipeError, InvalidFile, first_line
from bapipe.formats.files import read_limited
from bapipe.formats.strict_json import decode_fields
from bapipe.runtime.grad_scaler import GradScalerState
from bapipe.torch_device import environment
from bapipe.training.checkpoint.folder import (
    checkpoint_folder,
    list_checkpoints,
    make_unfinished,
    only_writer,
    unfinished_folder,
)
from bapipe.training.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MODEL,
    OPTIMIZER,
    Manifest,
    MinibatchSize,
    Position,
    file_name,
    is_old,
    position_after,
)
from bapipe.training.checkpoint.old_index import read_index
from bapipe.training.checkpoint.tensor_files import TensorSpec, tensor_specs, write_tensors
from bapipe.training.checkpoint.writer import finish_checkpoint
from bapipe.units import NonNegative, Positive

_BLOCK_BYTES = 2**22


class _Checksum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_bytes: NonNegative
    crc32: NonNegative


class _OldManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of checkpoint/1."""

    bapipe: Literal["checkpoint/1"]
    model: str
    optimizer: str
    seed: int
    num_samples: Positive
    position: Position
    tensors: dict[str, TensorSpec]
    optimizer_tensors: dict[str, TensorSpec]
    files: dict[str, _Checksum]
    grad_scaler: GradScalerState | None = msgspec.field(default=None, name="scaling")


def convert(folder: Path) -> tuple[Path, ...]:
    """Converts the old checkpoints of a folder, or one of them; returns their paths.

    Each keeps its name, and the old one is kept beside it as `old-step-...`.

    Raises:
        BapipeError: there is no such folder or checkpoint, one is damaged or names what no checkpoint has, or a run
            writes to the folder.
    """
    if not folder.is_dir():
        raise BapipeError(f"{folder}: no such folder")
    one = (folder / MANIFEST).is_file()
    with only_writer(folder.parent if one else folder):
        old = [path for path in ((folder,) if one else list_checkpoints(folder)) if is_old(path)]
        if not old:
            raise BapipeError(f"{folder}: no checkpoint of an older version here")
        for path in old:
            _convert(path)
        return tuple(old)


def _convert(path: Path) -> None:
    try:
        manifest: _OldManifest = decode_fields(read_limited(path / MANIFEST, MAX_MANIFEST_BYTES), _OldManifest)
    except InvalidFile as error:
        raise BapipeError(f"{path / MANIFEST} is damaged: {error}") from None
    if path.name != checkpoint_folder(path.parent, manifest.position.step).name:
        raise BapipeError(f"{path} is damaged: it holds the checkpoint of {manifest.position.step} steps")
    sizes = _minibatch_sizes(path, manifest)
    _check_files(path, manifest)
    tensors = dict(_tensors(path, manifest))
    expected = {MODEL + name: spec for name, spec in manifest.tensors.items()}
    expected |= {OPTIMIZER + name: spec for name, spec in manifest.optimizer_tensors.items()}
    if tensor_specs(tensors) != expected:
        raise BapipeError(f"{path} is damaged: its files hold other tensors than {MANIFEST} says")
    unfinished = unfinished_folder(path.parent, manifest.position.step)
    try:
        make_unfinished(path.parent, manifest.position.step)
        digest = write_tensors(unfinished / file_name(0), tensors)
        converted = Manifest(
            model=manifest.model,
            optimizer=manifest.optimizer,
            seed=manifest.seed,
            num_samples=manifest.num_samples,
            minibatch_sizes=sizes,
            position=manifest.position,
            plan=None,
            versions={name: str(value) for name, value in environment().items()},
            tensors=manifest.tensors,
            optimizer_tensors=manifest.optimizer_tensors,
            optimizer_numbers={},
            files={file_name(0): digest},
            grad_scaler=manifest.grad_scaler,
        )
        with _set_aside(path):
            finish_checkpoint(path.parent, converted)
    except OSError as error:
        raise BapipeError(f"{path}: cannot be converted: {error.strerror}") from None


@contextmanager
def _set_aside(path: Path) -> Iterator[None]:
    """In this context another checkpoint may take the place of the one at `path`, which is beside it afterwards.

    If none does, because of an error, it is again where it was, so that it can be converted later.
    """
    old = path.rename(path.with_name(f"old-{path.name}"))
    try:
        yield
    finally:
        if not path.exists():
            old.rename(path)


def _minibatch_sizes(path: Path, manifest: _OldManifest) -> tuple[MinibatchSize, ...]:
    """Returns the size of the mini-batches, computed from the position: checkpoint/1 does not store it."""
    position, num_samples = manifest.position, manifest.num_samples
    if position.step > 0 and 0 < position.offset <= num_samples:
        for size in range(1, position.offset + 1):
            sizes = (MinibatchSize(from_step=0, num_samples=size),)
            if position.offset % size == 0 and position_after(position.step, sizes, num_samples) == position:
                return sizes
    raise BapipeError(
        f"{path} cannot be converted: mini-batches of no one size end at sample {position.offset} of epoch "
        f"{position.epoch} after {position.step} steps"
    )


def _check_files(path: Path, manifest: _OldManifest) -> None:
    for name, expected in manifest.files.items():
        file = path / name
        # A name that is a path would lead out of the folder.
        if Path(name).name != name or not file.is_file():
            raise BapipeError(f"{path} is no whole checkpoint: '{name}' is missing")
        crc32 = num_bytes = 0
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                crc32, num_bytes = zlib.crc32(block, crc32), num_bytes + len(block)
        if (num_bytes, crc32) != (expected.num_bytes, expected.crc32):
            raise BapipeError(f"{path} is damaged: '{name}' does not hold what was written")


def _tensors(path: Path, manifest: _OldManifest) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors by their names in the index."""
    content = read_limited(path / ".metadata", MAX_MANIFEST_BYTES)
    try:
        for place in read_index(content):
            if place.file not in manifest.files:
                raise ValueError(f"'{place.file}' is none of its files")
            with (path / place.file).open("rb") as opened:
                opened.seek(place.offset)
                part = opened.read(place.num_bytes)
            tensor = torch.load(io.BytesIO(part), map_location="cpu", weights_only=True)
            if not isinstance(tensor, Tensor):
                raise ValueError(f"'{place.name}' is a {type(tensor).__name__}")
            yield place.name, tensor.detach()
    except BapipeError as error:
        raise BapipeError(f"{path} cannot be converted: {error}") from None
    except Exception as error:  # whatever a pickle can make its reader raise
        raise BapipeError(f"{path} is damaged: its index cannot be read: {first_line(error)}") from None
