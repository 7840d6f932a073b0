"""Reads and writes the three kinds of files: version header, and errors with the path inside the file."""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.cluster import Cluster
from bapipe.formats.files import naming_file, read_limited, write_bytes
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.strict_json import decode_fields, decode_json
from bapipe.printable import printable

_log = logging.getLogger(__name__)

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
        value = decode(read_limited(path))
    _warn_of_other_order(path, value)
    return value


def read(path: Path | str, want: type[T]) -> T:
    """Returns the value of type `want` in the file at `path`; errors begin with the path.

    Args:
        want: ModelProfile, Cluster or Plan.
    """
    if want not in KINDS.values():
        raise BapipeError(f"{want!r} is no kind of file: want ModelProfile, Cluster or Plan")
    path = Path(path)
    with naming_file(path):
        value = decode_as(read_limited(path), want)
    _warn_of_other_order(path, value)
    return value


def _warn_of_other_order(path: Path, value: object) -> None:
    """Warns of a plan, as one that was edited by hand, whose actions are not in the order of the schedule it names."""
    if isinstance(value, Plan) and not value.follows_its_schedule:
        _log.warning(
            "%s: its `order` is not that of the schedule '%s' that it names: ranks run the order",
            path,
            printable(value.schedule),
        )


def write(path: Path | str, value: File) -> None:
    """Writes `value` to `path`; if that fails, leaves the old file unchanged.

    Raises:
        InvalidFile, BapipeError: as `encode_for` and `write_bytes`.
    """
    text = encode_for(path, value)
    write_bytes(Path(path), text)


def encode_for(path: Path | str, value: File) -> bytes:
    """Returns the text of a file that is to be written to `path`.

    Raises:
        InvalidFile: the file could not be read again: a value is of another type or out of range, or it is too large.
        BapipeError: `value` is of another type, or `path` is.
    """
    if not isinstance(path, str | os.PathLike):
        raise BapipeError(
            f"the path to write to is of type {type(path).__name__}: want the path first, then a ModelProfile, Cluster "
            "or Plan, as in `bapipe.write(path, plan)`"
        )
    if not isinstance(value, File):
        raise BapipeError(f"{path}: not written: {type(value).__name__} is no ModelProfile, Cluster or Plan")
    text = encode(value)
    try:
        decode_json(text, type(value))
    except InvalidFile as error:
        why = f"not written, as it could not be read again: {error.message}"
        raise InvalidFile(f"{path}: {why}", error.where) from None
    return text


def fingerprint(value: File) -> str:
    """Returns the SHA-256 of an encoded file, by which plans name profiles."""
    return hashlib.sha256(encode(value)).hexdigest()
