"""Reads and writes files of users: with a limit on size, through pipes and links, and never half of one.

Errors say what the system says, and name the path.
"""

import os
import select
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from bapipe.errors import BapipeError, InvalidFile, UnreadableFile, did_you_mean

MAX_BYTES = 24 * 2**20
"""Largest file that is read. A plan for 4,096 devices and 64 micro-batches has 8 MiB."""


PIPE_S = 5.0
"""How long a pipe with a name is read before anything is written to it."""


def read_limited(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the bytes of a file.

    Raises:
        UnreadableFile: the system does not let us read it.
        BapipeError: there is none, it has more than `max_bytes`, perhaps because it never ends, or is a pipe with a
            name to which nothing is written.
    """
    try:
        with _opened(path) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise BapipeError(f"{path}: no such file{_similar_name(path)}") from None
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in the path
        raise BapipeError(f"{path}: cannot be read: {error}") from None
    if len(content) > max_bytes:
        raise BapipeError(f"{path}: larger than {max_bytes // 2**20} MiB, the most that is read")
    return content


def _opened(path: Path) -> BinaryIO:
    """Returns an open file; to open a pipe with a name to which nobody writes would otherwise wait without end."""
    if not path.is_fifo() or not os.path.exists(os.path.realpath(path)):  # to that of the shell's `<(...)` one writes
        return path.open("rb")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not select.select([handle], [], [], PIPE_S)[0]:
        os.close(handle)
        raise BapipeError(f"{path}: nothing was written to this pipe for {PIPE_S:g} s: start first what writes to it")
    os.set_blocking(handle, True)
    return os.fdopen(handle, "rb")


def _similar_name(path: Path) -> str:
    """Returns a question for a file of nearly the same name beside the one that is missing."""
    try:
        return did_you_mean(path.name, [other.name for other in path.parent.iterdir()], cutoff=0.85)
    except OSError:
        return ""


def read_text(path: Path) -> str:
    """Returns the text of a file of another kind, without a byte-order mark; raises BapipeError if it is no text."""
    try:
        return read_limited(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BapipeError(f"{path}: not a text file") from None


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Raises an InvalidFile of its body again with the path of the file before the message."""
    try:
        yield
    except InvalidFile as error:
        raise InvalidFile(f"{path}: {error.message}", error.where) from None


def check_writable(path: Path) -> None:
    """Raises BapipeError if `path` could not be written, before hours of work are lost."""
    if path.is_dir():
        raise BapipeError(f"{path}: cannot be written: it is a folder")
    target = written_file(path)
    if target is None:
        if not os.access(path, os.W_OK):
            raise BapipeError(f"{path}: cannot be written: no right to write there")
        return
    if not target.parent.is_dir():
        raise BapipeError(f"{path}: cannot be written: no folder {target.parent}")
    try:
        before = _status(path)
        handle, temporary = _temporary_beside(target)
    except OSError as error:
        raise BapipeError(f"{path}: cannot be written: {error.strerror}") from None
    os.close(handle)
    os.unlink(temporary)
    if before is not None and not _may_replace(before, target.parent.stat()):
        raise BapipeError(
            f"{path}: cannot be written: it is another user's, and in the folder {target.parent} only the owner of a "
            "file may replace it: name another file"
        )


def _may_replace(file: os.stat_result, folder: os.stat_result) -> bool:
    """Returns whether this user may replace a file in a folder where it may make files; see unlink(2) on EPERM."""
    return not folder.st_mode & stat.S_ISVTX or os.geteuid() in (0, file.st_uid, folder.st_uid)


def written_file(path: Path) -> Path | None:
    """Returns the file that `write_bytes` makes or replaces: of a symbolic link, the file that it points to.

    None for a device, a pipe or a socket, or an open file, as /dev/stdout is: a rename would replace it.
    """
    if open_descriptor(path) is not None:
        return None
    if path.exists() and not path.is_file() and not path.is_dir():
        return None
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def open_descriptor(path: Path) -> int | None:
    """Returns the descriptor of the open file that a path names, as /dev/stdout and /dev/fd/1 do; else None."""
    descriptors = os.path.realpath("/proc/self/fd")
    while path.exists() and path.is_symlink():
        if os.path.realpath(path.parent) == descriptors:
            return int(path.name)
        path = path.parent / os.readlink(path)
    return None


def write_bytes(path: Path, text: bytes) -> None:
    """Writes `text` to `path` atomically, by renaming a finished file in the same folder; straight to a device or pipe.

    A file that is replaced keeps its group and mode. A symbolic link stays: the file that it points to is replaced.

    Raises:
        BapipeError: the folder does not exist, or cannot be written to, or nobody reads the pipe.
    """
    if written_file(path) is None:
        _write_in_place(path, BytesIO(text))
        return
    with temporary_for(path) as temporary:
        temporary.write_bytes(text)
        place_file(path, temporary)


@contextmanager
def temporary_for(path: Path) -> Iterator[Path]:
    """Yields a new file for a writer that needs its name; `place_file` then moves it to `path`, else it is removed.

    It is in the folder of the file that `path` names, or, for a device or a pipe, in the system's for such files.

    Raises:
        BapipeError: the system does not let us write the file.
    """
    target, temporary = written_file(path), None
    try:
        handle, temporary = tempfile.mkstemp() if target is None else _temporary_beside(target)
        os.close(handle)
        yield Path(temporary)
    except OSError as error:
        raise BapipeError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def place_file(path: Path, finished: Path) -> None:
    """Moves a finished file of `temporary_for` to `path`, as `write_bytes` writes one; raises as that does."""
    target = written_file(path)
    if target is None:
        with finished.open("rb") as source:
            _write_in_place(path, source)
        return
    try:
        _put(finished, target, _status(path))
    except OSError as error:
        raise BapipeError(f"{path}: cannot be written: {error.strerror}") from None


def copy_file(path: Path, copy: Path) -> None:
    """Writes the bytes of a file to `copy`, with its group and mode; what has that name is replaced, a link as well.

    Raises:
        BapipeError: the copy cannot be written.
    """
    with temporary_for(copy) as temporary:
        shutil.copyfile(path, temporary)
        _put(temporary, copy, path.stat())


def _put(finished: Path, path: Path, before: os.stat_result | None) -> None:
    """Puts a finished file, which only its owner can read, in the place of what is at `path`.

    Args:
        before: the file that the new one is to be as accessible as; None for the access that new files have.
    """
    handle = os.open(finished, os.O_RDONLY)
    try:
        if before is None:
            os.fchmod(handle, 0o666 & ~_umask())
        else:
            _keep_access(handle, before)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(finished, path)


def _temporary_beside(path: Path) -> tuple[int, str]:
    """Returns the descriptor and the name of a new file that is to take the place of `path`."""
    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")


def _keep_access(handle: int, before: os.stat_result) -> None:
    """Gives an open file the group and the mode of another, less the group's rights if it cannot have that group."""
    mode = stat.S_IMODE(before.st_mode)
    try:
        os.fchown(handle, -1, before.st_gid)
    except PermissionError:
        mode &= ~stat.S_IRWXG
    os.fchmod(handle, mode)


def _status(path: Path) -> os.stat_result | None:
    """Returns the status of the file at `path`, None if there is none.

    The kernel follows a link here, and refuses one of another user's in a folder where everybody may write.
    """
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _write_in_place(path: Path, source: BinaryIO) -> None:
    try:
        with os.fdopen(_opened_in_place(path), "wb") as file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise BapipeError(f"{path}: cannot be written: {error.strerror}") from None


def _opened_in_place(path: Path) -> int:
    """Returns a new descriptor: of an open file one with its position, so that nothing of it is written over."""
    if (descriptor := open_descriptor(path)) is not None:
        return os.dup(descriptor)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)  # to a pipe that nobody reads it does not wait
    os.set_blocking(handle, True)
    return handle


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
