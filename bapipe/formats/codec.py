"""Reads and writes the three kinds of files: version header, errors with the path inside the file, atomic writes."""

import hashlib
import inspect
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.strict_json import decode_fields, decode_json, naming_file, read_limited

File = ModelProfile | Cluster | Plan
T = TypeVar("T", ModelProfile, Cluster, Plan)

KINDS: dict[str, type[ModelProfile] | type[Cluster] | type[Plan]] = {
    "profile/1": ModelProfile,
    "cluster/1": Cluster,
    "plan/1": Plan,
}


HOW_TO_MAKE = {
    "profile/1": "make one with `bapipe profile MODEL`, or from another tool's file with `bapipe import`",
    "cluster/1": "make one with `bapipe cluster`",
    "plan/1": "make one with `bapipe plan PROFILE`",
}

TRACE = "a trace"
"""What files of `bapipe.report.chrome_trace` are; they have no header of ours."""


class _Header(msgspec.Struct):
    bapipe: str


class _TraceHeader(msgspec.Struct):
    events: msgspec.Raw = msgspec.field(name="traceEvents")


def encode(value: File) -> bytes:
    """Returns the file's text: indented JSON, the same bytes for the same value."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def decode(text: bytes) -> File:
    """Returns the profile, cluster or plan in `text`.

    Raises:
        InvalidFile: not JSON, another header, an unknown or missing key, a wrong type, or a value out of range.
    """
    kind = _kind(text)
    if kind == TRACE:
        raise InvalidFile(f"this is {TRACE}: name its plan, and this file with `trace`", "$")
    value: File = decode_json(text, KINDS[kind])
    return value


def decode_as(text: bytes, want: type[T]) -> T:
    """Returns the value in `text`, which must be of type `want`; raises InvalidFile as `decode` does."""
    kind = _kind(text)
    if KINDS.get(kind) is not want:
        wanted = next(name for name, cls in KINDS.items() if cls is want)
        message = f"this is {_in_words(kind)}, and {_in_words(wanted)} is wanted: {HOW_TO_MAKE[wanted]}"
        raise InvalidFile(message, "$" if kind == TRACE else "$.bapipe")
    value: T = decode_json(text, want)
    return value


def _kind(text: bytes) -> str:
    """Returns the kind of a file, `TRACE` for a trace; raises InvalidFile for any other."""
    try:
        header: _Header = decode_fields(text, _Header)
    except InvalidFile:
        with suppress(InvalidFile):
            decode_fields(text, _TraceHeader)
            return TRACE
        raise
    if (own := _older_version(header.bapipe)) is not None:
        message = f"'{header.bapipe}' is of a newer version of bapipe: this one reads {own}; update bapipe"
        raise InvalidFile(message, "$.bapipe")
    if header.bapipe not in KINDS:
        raise InvalidFile(f"unknown file kind '{header.bapipe}'; want one of {', '.join(KINDS)}", "$.bapipe")
    return header.bapipe


def _older_version(kind: str) -> str | None:
    """Returns the version that is read of a kind of file, if the file is of a later one."""
    noun, _, version = kind.partition("/")
    own = {name.partition("/")[0]: name for name in KINDS}.get(noun)
    if own is None or not (version.isascii() and version.isdecimal() and len(version) < 10):
        return None
    return own if int(version) > int(own.partition("/")[2]) else None


def _in_words(kind: str) -> str:
    return kind if kind == TRACE else f"a {kind.partition('/')[0]} ({kind})"


def kind_in_words(text: bytes) -> str | None:
    """Returns what a file is, such as `a plan (plan/1)`; None if it is none of ours."""
    with suppress(InvalidFile):
        return _in_words(_kind(text))
    return None


def read_any(path: Path) -> File:
    """Returns the profile, cluster or plan in the file at `path`; errors begin with the path."""
    with naming_file(path):
        return decode(read_limited(path))


def read(path: Path | str, want: type[T]) -> T:
    """Returns the value of type `want` in the file at `path`; errors begin with the path.

    Args:
        want: ModelProfile, Cluster or Plan.
    """
    if want not in KINDS.values():
        raise BapipeError(f"{want!r} is no kind of file: want ModelProfile, Cluster or Plan")
    path = Path(path)
    with naming_file(path):
        return decode_as(read_limited(path), want)


def read_text(path: Path) -> str:
    """Returns the text of a file of another kind, without a byte-order mark; raises BapipeError if it is no text."""
    try:
        return read_limited(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BapipeError(f"{path}: not a text file") from None


def write(path: Path | str, value: File) -> None:
    """Writes `value` to `path`; if that fails, leaves the old file unchanged.

    Raises:
        InvalidFile, BapipeError: as `encode_for` and `write_bytes`.
    """
    write_bytes(Path(path), encode_for(path, value))


def encode_for(path: Path | str, value: File) -> bytes:
    """Returns the text of a file that is to be written to `path`.

    Raises:
        InvalidFile: the file could not be read again: a value is of another type or out of range, or it is too large.
        BapipeError: `value` is of another type.
    """
    if not isinstance(value, File):
        raise BapipeError(f"{path}: not written: {type(value).__name__} is no ModelProfile, Cluster or Plan")
    text = encode(value)
    try:
        decode_json(text, type(value))
    except InvalidFile as error:
        why = f"not written, as it could not be read again: {error.message}"
        raise InvalidFile(f"{path}: {why}", error.where) from None
    return text


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
    if not os.access(target.parent, os.W_OK):
        raise BapipeError(f"{path}: cannot be written: the folder {target.parent} is not writable")


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
    try:
        target = written_file(path)
        if target is None:
            _write_in_place(path, text)
        else:
            _replace(target, text, _status(path))
    except OSError as error:
        raise BapipeError(f"{path}: cannot be written: {error.strerror}") from None


def copy_file(path: Path, copy: Path) -> None:
    """Writes the bytes of a file to `copy`, with its group and mode; what has that name is replaced, a link as well.

    Raises:
        BapipeError: the copy cannot be written.
    """
    try:
        _replace(copy, path.read_bytes(), path.stat())
    except OSError as error:
        raise BapipeError(f"{copy}: cannot be written: {error.strerror}") from None


def _replace(path: Path, text: bytes, before: os.stat_result | None) -> None:
    """Puts a new file in the place of what is at `path`; until it is complete only its owner can read it.

    Args:
        before: the file that the new one is to be as accessible as; None for the access that new files have.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            if before is None:
                os.fchmod(handle, 0o666 & ~_umask())
            else:
                _keep_access(handle, before)
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


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


def _write_in_place(path: Path, text: bytes) -> None:
    with os.fdopen(_opened_in_place(path), "wb") as file:
        file.write(text)


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


def fingerprint(value: File) -> str:
    """Returns the SHA-256 of an encoded file, by which plans name profiles."""
    return hashlib.sha256(encode(value)).hexdigest()


def _describe(definition: dict[str, Any]) -> None:
    """Replaces a docstring by its summary, and moves its descriptions of attributes to their properties, in place."""
    text = inspect.cleandoc(definition.get("description", ""))
    summary, _, sections = text.partition("\n\nAttributes:\n")
    attributes = sections.partition("\n\nRaises:\n")[0]
    definition["description"] = " ".join(summary.partition("\n\nRaises:\n")[0].split())
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", attributes, flags=re.MULTILINE)
    for names, description in entries:
        for name in names.split(", "):
            sentence = " ".join(description.split())
            definition["properties"][name]["description"] = sentence[:1].upper() + sentence[1:]


def schema(kind: str) -> bytes:
    """Returns the JSON Schema of a file kind, such as `plan/1`."""
    body = msgspec.json.schema(KINDS[kind])
    for definition in body["$defs"].values():
        _describe(definition)
    return (
        msgspec.json.format(
            msgspec.json.encode({"$schema": "https://json-schema.org/draft/2020-12/schema"} | body), indent=1
        )
        + b"\n"
    )
