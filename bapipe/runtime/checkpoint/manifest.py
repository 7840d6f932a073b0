"""What a checkpoint holds besides its tensors: the checkpoint/1 manifest, and whether its files are whole."""

import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.units import NonNegative

MANIFEST = "bapipe.json"
_UNFINISHED = ".unfinished-"
_BLOCK_BYTES = 2**22

GROW_AFTER = 2_000
"""Good steps after which losses are scaled by twice as much."""


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where training is: steps done, the pass over the data, and the samples of that pass that are done."""

    step: NonNegative = 0
    epoch: NonNegative = 0
    offset: NonNegative = 0


class Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By what losses are multiplied where float16 would lose small gradients, as by torch.amp.GradScaler.

    Attributes:
        good_steps: steps since the factor changed, in all of which every gradient was finite.
    """

    factor: float = 65_536.0
    good_steps: NonNegative = 0

    def after(self, finite: bool) -> "Scaling":
        """Returns it after a step: half of it where a gradient was not finite, twice after `GROW_AFTER` good ones."""
        if not finite:
            return Scaling(factor=self.factor / 2)
        if self.good_steps + 1 == GROW_AFTER:
            return Scaling(factor=self.factor * 2)
        return Scaling(factor=self.factor, good_steps=self.good_steps + 1)


class TensorKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and CRC-32 of a file."""

    num_bytes: NonNegative
    crc32: NonNegative


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint, of whatever plan; its tensors have the names of the original module.

    Attributes:
        tensors: of the model.
        optimizer_tensors: by `name of the parameter:key`.
        files: what else lies in its folder.
        scaling: of the next step's losses, where they are scaled.
    """

    bapipe: Literal["checkpoint/1"] = "checkpoint/1"
    model: str
    optimizer: str
    seed: int
    num_samples: NonNegative
    position: Position
    tensors: dict[str, TensorKind]
    optimizer_tensors: dict[str, TensorKind]
    files: dict[str, Part]
    scaling: Scaling | None = None


def checkpoints(folder: Path) -> tuple[Path, ...]:
    """Returns the finished checkpoints of a folder, the oldest first."""
    return tuple(sorted(path for path in folder.glob("step-*") if path.is_dir()))


def folder_of(folder: Path, step: int) -> Path:
    """Returns where the checkpoint after some steps lies."""
    return folder / f"step-{step:09d}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Returns where the checkpoint after some steps is written."""
    return folder / f"{_UNFINISHED}{step}"


def tidy(folder: Path, keep: int) -> None:
    """Removes all finished checkpoints but the newest `keep`, and what earlier runs left unfinished."""
    for path in (*checkpoints(folder)[:-keep], *folder.glob(f"{_UNFINISHED}*")):
        shutil.rmtree(path, ignore_errors=True)


def parts(path: Path) -> dict[str, Part]:
    """Returns the files in a checkpoint's folder but the manifest."""
    return {file.name: _part(file) for file in sorted(path.iterdir()) if file.name != MANIFEST}


def _part(file: Path) -> Part:
    crc32 = num_bytes = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            crc32, num_bytes = zlib.crc32(block, crc32), num_bytes + len(block)
    return Part(num_bytes=num_bytes, crc32=crc32)


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint whose files are all there, as they were written.

    Raises:
        BapipeError: something is missing or damaged.
    """
    older = "; remove the folder to go on from an older checkpoint"
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise BapipeError(f"{path} is no whole checkpoint: {MANIFEST}: {error.strerror}{older}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path / MANIFEST} is damaged: {error}{older}") from None
    for name, want in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise BapipeError(f"{path} is no whole checkpoint: '{name}' is missing{older}")
        if file.stat().st_size != want.num_bytes:
            raise BapipeError(
                f"{path} is damaged: '{name}' has {file.stat().st_size} bytes, not {want.num_bytes}{older}"
            )
        if _part(file) != want:
            raise BapipeError(f"{path} is damaged: '{name}' does not hold what was written{older}")
    return manifest


def check_model(manifest: Manifest, path: Path, own: Mapping[str, TensorKind]) -> None:
    """Raises BapipeError with the first difference, unless a checkpoint has the tensors of a model."""
    for name in (*own, *manifest.tensors):
        there, here = manifest.tensors.get(name), own.get(name)
        if there != here:
            raise BapipeError(
                f"{path} is of another model: '{name}' is {_describe(there)} there and {_describe(here)} here"
            )


def _describe(tensor: TensorKind | None) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}" if tensor else "missing"
