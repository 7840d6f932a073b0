"""The folder of a run's checkpoints: lists them, finds the newest that is whole, and locks it for a run."""

import fcntl
import logging
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bapipe.errors import BapipeError, UnreadableFile
from bapipe.training.checkpoint.manifest import DamagedCheckpoint, Manifest, checkpoint_name, read_manifest

UNFINISHED = ".unfinished-"
"""Prefix of the names of folders that are not yet, or will never be, a checkpoint."""

_LOCK = ".lock"
_DAMAGED = "damaged-"
_NAME = re.compile(r"step-\d{9,18}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was verified: nothing is missing or damaged, as far as was looked at."""

    path: Path
    manifest: Manifest


def list_checkpoints(folder: Path) -> tuple[Path, ...]:
    """Returns the finished checkpoints of a folder, the oldest first."""
    paths = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return tuple(sorted(paths, key=_step))


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2])


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after some steps."""
    return folder / checkpoint_name(step)


def unfinished_folder(folder: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint after some steps is written, before it is renamed."""
    return folder / f"{UNFINISHED}{step}"


def newest_checkpoint(
    folder: Path, *, read: Callable[[Path], Manifest] = read_manifest, tell: bool = True
) -> Checkpoint | None:
    """Returns the newest checkpoint that is whole, None if the folder has no checkpoint.

    `read` returns the manifest of one that is whole. If newer ones are damaged, `tell` logs a line that says so.

    Raises:
        BapipeError: all are damaged, or one that is newer than any whole one cannot be read or is of an older version
            of bapipe.
    """
    damages: list[DamagedCheckpoint] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            found = Checkpoint(path, read(path))
        except DamagedCheckpoint as damage:
            damages.append(damage)
            continue
        except UnreadableFile as error:
            raise BapipeError(
                f"{error}, so {path.name} may be whole: make it readable and try again, or move it elsewhere to take "
                "the one before"
            ) from None
        if damages and tell:
            more = f" ({len(damages) - 1} more are damaged)" if len(damages) > 1 else ""
            _log.warning("%s%s; taking %s, the one before", damages[0], more, path.name)
        return found
    if damages:
        raise BapipeError(f"{damages[0]}; {folder} has no other checkpoint that is whole")
    return None


def set_damaged_aside(folder: Path, step: int) -> None:
    """Renames the checkpoints after more than `step` steps, which were found damaged: they no longer count."""
    for path in list_checkpoints(folder):
        if _step(path) > step:
            aside = folder / f"{_DAMAGED}{path.name}"
            remove(aside)
            path.rename(aside)


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Removes all finished checkpoints but the newest `keep`, and unfinished ones of earlier runs."""
    for path in (*list_checkpoints(folder)[:-keep], *folder.glob(f"{UNFINISHED}*")):
        remove(path)


def make_unfinished(folder: Path, step: int) -> None:
    """Makes the empty folder in which the checkpoint after some steps is written, in place of what has its name.

    Raises:
        OSError: it cannot be made, or what has its name cannot be removed.
    """
    path = unfinished_folder(folder, step)
    remove(path)
    path.mkdir()  # fails for what is left there: a link in it could lead what is written elsewhere


def remove(path: Path) -> None:
    """Removes a folder as far as possible; of a link to one only the link."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Makes a folder and holds its lock, so that no other run writes there; the kernel frees a killed process's lock.

    Raises:
        BapipeError: the folder cannot be made, or another process holds its lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _locked(folder / _LOCK)
    except BlockingIOError:
        raise BapipeError(
            f"{folder}: {_holder(folder / _LOCK)} writes its checkpoints here: wait until it has ended, or name "
            "another folder"
        ) from None
    except OSError as error:
        raise BapipeError(f"{folder}: cannot hold checkpoints: {error.strerror}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # such as a folder that has gone meanwhile
            (folder / _LOCK).unlink()
        os.close(handle)


def _locked(path: Path) -> int:
    """Returns the descriptor of the locked file, which names this process to others that find it locked.

    The folder may be a stranger's, with a link in place of the file: what it points to would be overwritten.
    """
    while True:
        if path.is_symlink():
            raise BapipeError(f"{path} is a link, where bapipe makes a file: remove it if you trust the folder")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise BapipeError(f"{path} is no regular file: remove it if you trust the folder")
            if status.st_nlink > 1:
                raise BapipeError(
                    f"{path} is another name of a file elsewhere (a hard link), which would be overwritten: remove it "
                    "if you trust the folder"
                )
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run before may have removed the file between the two calls: then its lock protects nothing.
            if _is_file(path, handle):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_file(path: Path, handle: int) -> bool:
    """Returns whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Says which run holds a lock."""
    with suppress(OSError):
        text = path.read_bytes()[:200].decode(errors="replace")
        if re.fullmatch(r"process \d+ on [\w.-]+", text):
            return f"the run of {text}"
    return "another run"
