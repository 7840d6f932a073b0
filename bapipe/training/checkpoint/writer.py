"""Saves checkpoints from all ranks together, in a background thread, and loads them."""

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError, RunFailed, one_line
from bapipe.formats.files import write_bytes
from bapipe.job.groups import gathered, new_proven_group
from bapipe.printable import counted
from bapipe.runtime.copy_streams import HostCopy, copied_to_host, copy_stream
from bapipe.runtime.optimizer_state import Number, OptimizerState
from bapipe.training.checkpoint.folder import (
    UNFINISHED,
    checkpoint_folder,
    make_unfinished,
    remove,
    remove_old_checkpoints,
    unfinished_folder,
)
from bapipe.training.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    NON_PERSISTENT,
    OPTIMIZER,
    Manifest,
    encode_manifest,
    file_name,
    stored_tensors,
)
from bapipe.training.checkpoint.tensor_files import (
    FileDigest,
    TensorSpec,
    read_tensors,
    sync,
    tensor_specs,
    write_tensors,
)

AGAIN_S = 30.0
"""How long after a failure a checkpoint is written again: a network disk may be back, or a full one have space."""

_MEET_S = 0.25
"""Interval at which the ranks' threads meet, in a collective, while one of them still writes."""

_SLOW_S = 600.0
"""Time after which a warning names the ranks that still write."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of what a rank did for a checkpoint, or why it failed."""

    value: Any = None
    fault: str | None = None


class CheckpointWriter:
    """Writes checkpoints while training continues, one at a time; every rank calls it together.

    `save` copies the tensors that this rank owns and returns; a thread writes them, to a file of the rank's own. The
    thread has a gloo group of its own, because the training thread uses the other groups meanwhile, and NCCL cannot
    send from the CPU. A checkpoint is written to an unfinished folder, which is renamed when all of it is on the disk:
    a crash leaves no partial checkpoint. If writing fails, it is tried once more. While a slow disk is waited for, the
    ranks' threads meet in a collective again and again, so that no rank is taken for hung.
    (torch.distributed.checkpoint is not used, because its files are read by unpickling.)
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        timeout: timedelta,
        names: tuple[str, ...],
        device: torch.device,
        again_s: float = AGAIN_S,
        on_meeting: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep` is the number of checkpoints to keep; `names` are the names of the ranks' devices.

        `again_s` is how long after a failure a checkpoint is tried again. `on_meeting` is called in the thread, each
        time the ranks have met.

        Raises:
            BapipeError: the ranks do not see the same folder.
        """
        self._copy_stream = copy_stream(device)
        self._folder, self._keep, self._names, self._again_s = folder, keep, names, again_s
        self._on_meeting = on_meeting
        self._group = new_proven_group(None, timeout, backend="gloo")
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._check_common()
        if dist.get_rank() == 0:
            remove_old_checkpoints(folder, keep)
        dist.barrier(group=self._group)

    def _check_common(self) -> None:
        """Raises BapipeError unless every rank sees what rank 0 makes in the folder: a host may have its own folder."""
        is_first = dist.get_rank() == 0
        made = [Path(mkdtemp(prefix=UNFINISHED, dir=self._folder)).name if is_first else ""]
        dist.broadcast_object_list(made, src=0, group=self._group)
        everyone = gathered((socket.gethostname(), (self._folder / made[0]).is_dir()), self._group)
        if is_first:
            (self._folder / made[0]).rmdir()
        for rank, (host, sees) in enumerate(everyone):
            if not sees:
                raise BapipeError(
                    f"`checkpoint` {self._folder}: rank {rank} ({self._names[rank]}) on {host} does not see what rank "
                    f"0 ({self._names[0]}) on {everyone[0][0]} writes there: name a folder on a disk that all hosts "
                    "share"
                )

    def save(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        non_persistent: Mapping[str, Tensor],
        optimizer: OptimizerState,
        changed_by_forwards: Collection[str],
    ) -> torch.cuda.Event | None:
        """Starts to write a checkpoint when the one before is done; `manifest` lacks tensors, numbers and files.

        `non_persistent` are buffers that are not in the state dict. Returns an event, after which a GPU may change the
        tensors, except those in `changed_by_forwards` and `non_persistent`, which it copies first. None on a CPU, where
        all are copied before this returns.
        """
        self.wait()
        named = {MODEL + name: tensor for name, tensor in tensors.items()}
        named |= {OPTIMIZER + name: tensor for name, tensor in optimizer["tensors"].items()}
        buffers = {NON_PERSISTENT + name: tensor for name, tensor in non_persistent.items()}
        at_once = {MODEL + name for name in changed_by_forwards} | set(buffers)
        specs = gathered(tensor_specs(named | buffers), self._group)
        owners = owners_of(specs)
        own = {name: tensor for name, tensor in (named | buffers).items() if owners[name] == dist.get_rank()}
        copy = copied_to_host(own, at_once, self._copy_stream)
        self._thread = Thread(target=self._write, args=(manifest, specs, copy, dict(optimizer["numbers"])), daemon=True)
        self._thread.start()
        return copy.done

    def check(self) -> None:
        """Raises RunFailed if writing the last checkpoint has failed; does not wait for it."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint that was started is on the disk.

        Raises:
            RunFailed: it could not be written, not even at the second try.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise RunFailed(str(self._error)) from None

    def _write(
        self,
        manifest: Manifest,
        specs: Sequence[Mapping[str, TensorSpec]],
        copy: HostCopy,
        numbers: dict[str, Number],
    ) -> None:
        """Writes this rank's tensors, of which `copy` are copies; `specs` are the tensors that each rank has."""
        step, own = manifest.position.step, copy.tensors
        try:
            if self._copy_stream is not None:  # a thread starts with GPU 0, on which waiting would make a context
                torch.cuda.set_device(self._copy_stream.device)
            copy.wait()
            manifest = _completed(manifest, specs, gathered(numbers, self._group))
            fault = self._fault_of_try(manifest, own)
            if fault is not None:
                if dist.get_rank() == 0:
                    _log.warning("%s; it is tried again in %g s", fault, self._again_s)
                time.sleep(self._again_s)
                fault = self._fault_of_try(manifest, own)
            if fault is not None:
                self._error = RunFailed(fault)
        except Exception as error:  # a thread's exceptions would be lost
            self._error = RunFailed(
                f"the checkpoint of {counted(step, 'step')} could not be written: {one_line(error)}"
            )

    def _fault_of_try(self, manifest: Manifest, own: Mapping[str, Tensor]) -> str | None:
        """Tries to write a checkpoint, of which `manifest` lacks the files and `own` are the tensors of this rank.

        Returns, on all ranks, why it failed, None if it did not. After a failure all that was written is removed: on a
        full disk it takes the space that the next try needs.
        """
        step = manifest.position.step
        unfinished = unfinished_folder(self._folder, step)
        faults = _faults(self._on_first_rank(partial(make_unfinished, self._folder, step)))
        if not faults:
            written = self._on_every_rank(partial(self._write_own, unfinished, own))
            faults = _faults(written)
        if not faults:
            faults = _faults(self._on_first_rank(partial(self._finish, manifest, [each.value for each in written])))
        if not faults:
            return None
        self._on_first_rank(partial(remove, unfinished))
        rank, cause = faults[0]
        return f"{self._title(rank)} could not write the checkpoint of {counted(step, 'step')}: {cause}"

    def _on_first_rank(self, do: Callable[[], object]) -> list[_Outcome]:
        return self._on_every_rank(do if dist.get_rank() == 0 else lambda: None)

    def _on_every_rank(self, do: Callable[[], object]) -> list[_Outcome]:
        """Runs `do`; returns its outcome on each rank, which the ranks exchange again and again until all are done."""
        own: list[_Outcome] = []
        doing = Thread(target=lambda: own.append(_outcome_of(do)), daemon=True)
        doing.start()
        warn_s = time.monotonic() + _SLOW_S
        while True:
            doing.join(_MEET_S)
            everyone = gathered(tuple(own), self._group)
            self._on_meeting()
            if all(everyone):
                return [outcome for (outcome,) in everyone]
            if dist.get_rank() == 0 and time.monotonic() >= warn_s:
                slow = ", ".join(self._title(rank) for rank, outcome in enumerate(everyone) if not outcome)
                _log.warning("%s: still writing a checkpoint after %g s; see whether the disk answers", slow, _SLOW_S)
                warn_s = math.inf

    def _title(self, rank: int) -> str:
        return f"rank {rank} ({self._names[rank]})"

    def _write_own(self, path: Path, tensors: Mapping[str, Tensor]) -> FileDigest | None:
        """Returns the digest of this rank's file, None if it has no tensors."""
        path.mkdir(exist_ok=True)  # on a network disk rank 0's folder may not show here yet
        return write_tensors(path / file_name(dist.get_rank()), tensors) if tensors else None

    def _finish(self, manifest: Manifest, files: Sequence[FileDigest | None]) -> None:
        """Finishes a checkpoint; `files` are those of the ranks."""
        named = {file_name(rank): file for rank, file in enumerate(files) if file is not None}
        finish_checkpoint(self._folder, msgspec.structs.replace(manifest, files=named))
        remove_old_checkpoints(self._folder, self._keep)


def _outcome_of(do: Callable[[], object]) -> _Outcome:
    try:
        return _Outcome(do())
    except Exception as error:  # any, because the other ranks wait for this one's answer
        return _Outcome(fault=one_line(error))


def _faults(outcomes: Sequence[_Outcome]) -> list[tuple[int, str]]:
    """Returns which ranks have failed, and why."""
    return [(rank, each.fault) for rank, each in enumerate(outcomes) if each.fault is not None]


def owners_of(specs: Sequence[Mapping[str, TensorSpec]]) -> dict[str, int]:
    """Returns the rank that writes each tensor: of several that have it, such as replicas, the one with least to write.

    `specs` are the tensors of each rank.
    """
    num_bytes, owners = [0] * len(specs), dict[str, int]()
    for name in sorted({name for of_rank in specs for name in of_rank}):
        having = [rank for rank, of_rank in enumerate(specs) if name in of_rank]
        owners[name] = min(having, key=num_bytes.__getitem__)
        num_bytes[owners[name]] += specs[owners[name]][name].num_bytes
    return owners


def _completed(
    manifest: Manifest,
    specs: Sequence[Mapping[str, TensorSpec]],
    numbers: Sequence[Mapping[str, Number]],
) -> Manifest:
    """Returns a manifest with the tensors and numbers that the ranks have."""
    named = {name: spec for of_rank in specs for name, spec in of_rank.items()}

    def beginning_with(prefix: str) -> dict[str, TensorSpec]:
        return {name.removeprefix(prefix): named[name] for name in sorted(named) if name.startswith(prefix)}

    return msgspec.structs.replace(
        manifest,
        tensors=beginning_with(MODEL),
        non_persistent=beginning_with(NON_PERSISTENT) or msgspec.UNSET,
        optimizer_tensors=beginning_with(OPTIMIZER),
        optimizer_numbers=dict(sorted((name, n) for of_rank in numbers for name, n in of_rank.items())),
    )


def finish_checkpoint(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a checkpoint whose tensors are in the unfinished folder of its step, and renames that.

    Raises:
        BapipeError: a file is not there, or not as long as what was written to it.
        OSError: the manifest cannot be written.
    """
    path, final = (place(folder, manifest.position.step) for place in (unfinished_folder, checkpoint_folder))
    for name, written in manifest.files.items():
        if not (path / name).is_file() or (path / name).stat().st_size != written.num_bytes:
            raise BapipeError(f"{path / name} is not there as it was written: all ranks need the same disk")
    write_bytes(path / MANIFEST, encode_manifest(manifest))
    sync(path)
    remove(final)  # there if the first try failed right after the rename, as the disk was lost
    os.rename(path, final)
    sync(folder)


def load_tensors(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], non_persistent: Mapping[str, Tensor] | None = None
) -> OptimizerState:
    """Loads some of a model's tensors in place; returns the optimizer's state of the same names, on the CPU.

    `non_persistent` buffers that the checkpoint does not have stay as they are; others may change their shapes.
    """
    buffers = {NON_PERSISTENT + name: tensor for name, tensor in (non_persistent or {}).items()}
    own = {name: spec for name, spec in manifest.optimizer_tensors.items() if name.rpartition(":")[0] in tensors}
    numbers = {name: n for name, n in manifest.optimizer_numbers.items() if name.rpartition(":")[0] in tensors}
    wanted = {MODEL + name for name in tensors} | {OPTIMIZER + name for name in own} | set(buffers)
    specs = {name: spec for name, spec in stored_tensors(manifest).items() if name in wanted}
    optimizer_tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in read_tensors([path / name for name in manifest.files], specs):
            if name.startswith(MODEL):
                tensors[name.removeprefix(MODEL)].copy_(tensor)
            elif name in buffers:
                _set(buffers[name], tensor)
            else:
                optimizer_tensors[name.removeprefix(OPTIMIZER)] = tensor.clone()  # else it may be a map of the file
    return OptimizerState(tensors=optimizer_tensors, numbers=numbers)


def _set(buffer: Tensor, value: Tensor) -> None:
    if buffer.shape == value.shape and buffer.dtype == value.dtype:
        buffer.copy_(value)
    else:  # forwards have assigned another one
        buffer.data = value.to(buffer.device, copy=True)


def full_state_dict(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Returns the model's tensors of a checkpoint that has been verified, by their names in the original module.

    They may be maps of the files, so that together they need no memory: nothing may be written to them.
    """
    specs = {MODEL + name: spec for name, spec in manifest.tensors.items()}
    found = dict(read_tensors([path / name for name in manifest.files], specs))
    return {name: found[MODEL + name] for name in manifest.tensors}
