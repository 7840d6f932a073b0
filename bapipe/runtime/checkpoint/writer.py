"""Checkpoints of a run: written by all ranks together in the background, whole or not at all."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from bapipe.errors import BapipeError, RunFailed
from bapipe.formats.codec import write_bytes
from bapipe.runtime.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorKind,
    folder_of,
    parts,
    read_manifest,
    tidy,
    unfinished_folder,
)

_MODEL, _OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Where and how often checkpoints are written; the last step always is one.

    Attributes:
        every: steps between two.
        keep: how many of them stay.
        resume: whether to go on from the newest one, where there is one.
    """

    folder: Path
    every: int = 100
    keep: int = 3
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise BapipeError(f"a checkpoint every {self.every} steps, {self.keep} kept: want 1 or more of each")


class Writer:
    """Writes checkpoints beside training, one at a time; every rank makes one, and calls it, together.

    Tensors are copied when `save` is called. A folder gets its name when all of it is on the disk.
    """

    def __init__(self, keeping: Keeping, timeout: timedelta, names: tuple[str, ...]) -> None:
        """`names` are of the ranks' devices."""
        self._keeping, self._names = keeping, names
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread: Thread | None = None
        self._error: Exception | None = None
        if dist.get_rank() == 0:
            tidy(keeping.folder, keeping.keep)
        dist.barrier()

    def save(self, manifest: Manifest, tensors: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor]) -> None:
        """Begins to write a checkpoint when the one before is done; `manifest` lacks tensors and files."""
        self.wait()
        named = [(_MODEL + name, tensor) for name, tensor in tensors.items()]
        named += [(_OPTIMIZER + name, tensor) for name, tensor in optimizer_tensors.items()]
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
        self._thread = Thread(target=self._write, args=(manifest, state), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when what was begun is on the disk.

        Raises:
            RunFailed: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise RunFailed(str(self._error)) from None

    def _write(self, manifest: Manifest, state: dict[str, Tensor]) -> None:
        step = manifest.position.step
        path = unfinished_folder(self._keeping.folder, step)
        try:
            save_sharded(state, checkpoint_id=path, process_group=self._group)
            said: list[str | None] = [None]
            if dist.get_rank() == 0:
                said = [self._finish(manifest, path, folder_of(self._keeping.folder, step))]
            dist.broadcast_object_list(said, src=0, group=self._group)
            if said[0] is not None:
                self._error = self._failed(0, step, said[0])
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            self._error = self._failed(rank, step, _say(cause))
        except Exception as error:  # a thread's exceptions would be lost
            self._error = RunFailed(f"the checkpoint of {step} steps could not be written: {_say(error)}")

    def _failed(self, rank: int, step: int, cause: str) -> RunFailed:
        return RunFailed(f"rank {rank} ({self._names[rank]}) could not write the checkpoint of {step} steps: {cause}")

    def _finish(self, manifest: Manifest, path: Path, final: Path) -> str | None:
        """Gives a checkpoint its name; returns why it could not."""
        try:
            self._name(manifest, path, final)
        except (OSError, BapipeError) as error:
            return _say(error)
        return None

    def _name(self, manifest: Manifest, path: Path, final: Path) -> None:
        kinds = _kinds(path)
        whole = msgspec.structs.replace(
            manifest,
            tensors={name.removeprefix(_MODEL): k for name, k in kinds.items() if name.startswith(_MODEL)},
            optimizer_tensors={n.removeprefix(_OPTIMIZER): k for n, k in kinds.items() if n.startswith(_OPTIMIZER)},
            files=parts(path),
        )
        write_bytes(path / MANIFEST, msgspec.json.encode(whole))
        _sync_folder(path)
        os.rename(path, final)
        _sync_folder(final.parent)
        tidy(final.parent, self._keeping.keep)


def _say(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kinds(path: Path) -> dict[str, TensorKind]:
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: TensorKind(shape=tuple(kind.size), dtype=dtype_name(kind.properties.dtype))
        for name, kind in sorted(found.items())
        if isinstance(kind, TensorStorageMetadata)
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
    """Returns shape and type of tensors, by name."""
    return {name: TensorKind(shape=tuple(t.shape), dtype=dtype_name(t.dtype)) for name, t in tensors.items()}


def load(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fills a part of a model's tensors from a checkpoint; returns the optimizer's for the same names, on the CPU."""
    wanted = {
        name: torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
        for name, kind in manifest.optimizer_tensors.items()
        if name.rpartition(":")[0] in tensors
    }
    state = {_MODEL + name: tensor.detach() for name, tensor in tensors.items()}
    state |= {_OPTIMIZER + name: tensor for name, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it loads in this process alone, which is what is wanted
        load_sharded(state, checkpoint_id=path, no_dist=True)
    return wanted


def whole_state(path: Path) -> dict[str, Tensor]:
    """Returns the model's tensors of a checkpoint, by their names in the original module.

    Raises:
        BapipeError: something of it is missing or damaged.
    """
    manifest = read_manifest(path)
    tensors = {n: torch.empty(k.shape, dtype=getattr(torch, k.dtype)) for n, k in manifest.tensors.items()}
    load(path, manifest, tensors)
    return {name: tensors[name] for name in manifest.tensors}
