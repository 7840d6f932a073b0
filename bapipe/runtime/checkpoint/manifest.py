"""The checkpoint/1 manifest: what a checkpoint holds besides its tensors, and whether its files are intact."""

import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.runtime.grad_scaler import GradScalerState
from bapipe.units import NonNegative

MANIFEST = "bapipe.json"
_UNFINISHED = ".unfinished-"
_BLOCK_BYTES = 2**22


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far training is: steps done, the epoch, and how many samples of that epoch are done."""

    step: NonNegative = 0
    epoch: NonNegative = 0
    offset: NonNegative = 0


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class FileChecksum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and CRC-32 of a file."""

    num_bytes: NonNegative
    crc32: NonNegative


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint; nothing in it depends on the plan, its tensors have the names of the original module.

    Attributes:
        tensors: of the model.
        optimizer_tensors: by `name of the parameter:key`.
        files: the other files in its folder.
        grad_scaler: loss scaling of the next step, if losses are scaled; stored as `scaling`.
    """

    bapipe: Literal["checkpoint/1"] = "checkpoint/1"
    model: str
    optimizer: str
    seed: int
    num_samples: NonNegative
    position: Position
    tensors: dict[str, TensorSpec]
    optimizer_tensors: dict[str, TensorSpec]
    files: dict[str, FileChecksum]
    grad_scaler: GradScalerState | None = msgspec.field(default=None, name="scaling")


def list_checkpoints(folder: Path) -> tuple[Path, ...]:
    """Returns the finished checkpoints of a folder, the oldest first."""
    return tuple(sorted(path for path in folder.glob("step-*") if path.is_dir()))


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after some steps."""
    return folder / f"step-{step:09d}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint after some steps is written, before it is renamed."""
    return folder / f"{_UNFINISHED}{step}"


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Removes all finished checkpoints but the newest `keep`, and unfinished ones of earlier runs."""
    for path in (*list_checkpoints(folder)[:-keep], *folder.glob(f"{_UNFINISHED}*")):
        shutil.rmtree(path, ignore_errors=True)


def file_checksums(path: Path) -> dict[str, FileChecksum]:
    """Returns the checksums of the files in a checkpoint's folder, without the manifest."""
    return {file.name: _checksum(file) for file in sorted(path.iterdir()) if file.name != MANIFEST}


def _checksum(file: Path) -> FileChecksum:
    crc32 = num_bytes = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            crc32, num_bytes = zlib.crc32(block, crc32), num_bytes + len(block)
    return FileChecksum(num_bytes=num_bytes, crc32=crc32)


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after verifying size and CRC-32 of every file.

    Raises:
        BapipeError: something is missing or damaged.
    """
    advice = "; remove the folder to go on from an older checkpoint"
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise BapipeError(f"{path} is no whole checkpoint: {MANIFEST}: {error.strerror}{advice}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path / MANIFEST} is damaged: {error}{advice}") from None
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise BapipeError(f"{path} is no whole checkpoint: '{name}' is missing{advice}")
        if file.stat().st_size != expected.num_bytes:
            raise BapipeError(
                f"{path} is damaged: '{name}' has {file.stat().st_size} bytes, not {expected.num_bytes}{advice}"
            )
        if _checksum(file) != expected:
            raise BapipeError(f"{path} is damaged: '{name}' does not hold what was written{advice}")
    return manifest


def check_model(manifest: Manifest, path: Path, model: Mapping[str, TensorSpec]) -> None:
    """Raises BapipeError with the first difference, unless a checkpoint has the tensors of a model."""
    for name in (*model, *manifest.tensors):
        there, here = manifest.tensors.get(name), model.get(name)
        if there != here:
            raise BapipeError(
                f"{path} is of another model: '{name}' is {_describe(there)} there and {_describe(here)} here"
            )


def _describe(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}" if tensor else "missing"
