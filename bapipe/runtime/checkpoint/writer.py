"""Saves checkpoints from all ranks together, in a background thread, and loads them."""

import os
import warnings
from collections.abc import Mapping
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
    TensorSpec,
    checkpoint_folder,
    file_checksums,
    read_manifest,
    remove_old_checkpoints,
    unfinished_folder,
)
from bapipe.torch_device import dtype_name

_MODEL, _OPTIMIZER = "model/", "optimizer/"


class CheckpointWriter:
    """Writes checkpoints while training continues, one at a time; every rank calls it together.

    `save` copies the tensors and returns; a thread writes them. The thread has a gloo group of its own, because the
    training thread uses the other groups meanwhile, and NCCL cannot send from the CPU. A checkpoint is written to an
    unfinished folder, which is renamed when all of it is on the disk: a crash leaves no half checkpoint. (Not
    `async_save` of torch.distributed.checkpoint: that one gives no manifest, and no rename in the end.)
    """

    def __init__(self, folder: Path, keep: int, timeout: timedelta, names: tuple[str, ...]) -> None:
        """`keep` is the number of checkpoints to keep; `names` are the names of the ranks' devices."""
        self._folder, self._keep, self._names = folder, keep, names
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread: Thread | None = None
        self._error: Exception | None = None
        if dist.get_rank() == 0:
            remove_old_checkpoints(folder, keep)
        dist.barrier()

    def save(self, manifest: Manifest, tensors: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor]) -> None:
        """Starts to write a checkpoint when the one before is done; `manifest` lacks tensors and files."""
        self.wait()
        named = [(_MODEL + name, tensor) for name, tensor in tensors.items()]
        named += [(_OPTIMIZER + name, tensor) for name, tensor in optimizer_tensors.items()]
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
        self._thread = Thread(target=self._write, args=(manifest, state), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint that was started is on the disk.

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
        path = unfinished_folder(self._folder, step)
        try:
            save_sharded(state, checkpoint_id=path, process_group=self._group)
            fault: list[str | None] = [None]
            if dist.get_rank() == 0:
                fault = [self._finish(manifest, path, checkpoint_folder(self._folder, step))]
            dist.broadcast_object_list(fault, src=0, group=self._group)
            if fault[0] is not None:
                self._error = self._failed(0, step, fault[0])
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            self._error = self._failed(rank, step, _one_line(cause))
        except Exception as error:  # a thread's exceptions would be lost
            self._error = RunFailed(f"the checkpoint of {step} steps could not be written: {_one_line(error)}")

    def _failed(self, rank: int, step: int, cause: str) -> RunFailed:
        return RunFailed(f"rank {rank} ({self._names[rank]}) could not write the checkpoint of {step} steps: {cause}")

    def _finish(self, manifest: Manifest, path: Path, final: Path) -> str | None:
        """Finishes a checkpoint on rank 0; returns why it failed, if it did."""
        try:
            self._write_manifest_and_rename(manifest, path, final)
        except (OSError, BapipeError) as error:
            return _one_line(error)
        return None

    def _write_manifest_and_rename(self, manifest: Manifest, path: Path, final: Path) -> None:
        specs = _stored_specs(path)
        complete = msgspec.structs.replace(
            manifest,
            tensors={name.removeprefix(_MODEL): spec for name, spec in specs.items() if name.startswith(_MODEL)},
            optimizer_tensors={
                name.removeprefix(_OPTIMIZER): spec for name, spec in specs.items() if name.startswith(_OPTIMIZER)
            },
            files=file_checksums(path),
        )
        write_bytes(path / MANIFEST, msgspec.json.encode(complete))
        _sync_folder(path)
        os.rename(path, final)
        _sync_folder(final.parent)
        remove_old_checkpoints(final.parent, self._keep)


def _one_line(error: BaseException) -> str:
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


def _stored_specs(path: Path) -> dict[str, TensorSpec]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: TensorSpec(shape=tuple(stored.size), dtype=dtype_name(stored.properties.dtype))
        for name, stored in sorted(metadata.items())
        if isinstance(stored, TensorStorageMetadata)
    }


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Returns shape and dtype of tensors, by name."""
    return {name: TensorSpec(shape=tuple(t.shape), dtype=dtype_name(t.dtype)) for name, t in tensors.items()}


def load_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Loads some of a model's tensors in place; returns the optimizer's tensors of the same names, on the CPU."""
    optimizer_tensors = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in manifest.optimizer_tensors.items()
        if name.rpartition(":")[0] in tensors
    }
    state = {_MODEL + name: tensor.detach() for name, tensor in tensors.items()}
    state |= {_OPTIMIZER + name: tensor for name, tensor in optimizer_tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "loading in a single process": that is intended
        load_sharded(state, checkpoint_id=path, no_dist=True)
    return optimizer_tensors


def full_state_dict(path: Path) -> dict[str, Tensor]:
    """Returns the model's tensors of a checkpoint, by their names in the original module.

    Raises:
        BapipeError: a file is missing or damaged.
    """
    manifest = read_manifest(path)
    tensors = {n: torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for n, s in manifest.tensors.items()}
    load_tensors(path, manifest, tensors)
    return {name: tensors[name] for name in manifest.tensors}
