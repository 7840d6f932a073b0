"""Decodes JSON that others wrote: with limits on size, nesting and numbers, without keys that occur twice.

The limits hold before anything is built of the text, so a small file cannot take much time or memory.
"""

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from bapipe.errors import InvalidFile
from bapipe.formats.files import MAX_BYTES

MAX_VALUES = 2**21
"""Largest number of values in a file: a value takes up to 100 bytes of memory, and two bytes of a file."""

MAX_DEPTH = 64
"""Deepest nesting of lists and objects; a plan has 7 levels."""

MAX_DIGITS = 100
"""Most digits in a row in a number; a double has 17."""


# Strings, with what is neither structure nor number around them. Possessive, so that no match has to be remembered;
# `.` includes line breaks, which JSON refuses later.
_STRINGS = re.compile(rb'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^][{},"0-9]*+)++', re.DOTALL)
_OPENING, _CLOSING = b"[{", b"]}"
_STEP = dict.fromkeys(_OPENING, 1) | dict.fromkeys(_CLOSING, -1)
_NOT_BRACKETS = bytes(set(range(256)) - set(_STEP))
# What msgspec says of a field. Backticks are left to the arguments of functions, which may have the same name.
_FIELD = re.compile(r"field `([^`]*)`")
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))

T = TypeVar("T")


def decode_json(text: bytes, want: type[T] | Any) -> T:
    """Returns the value of type `want` in `text`.

    Raises:
        InvalidFile: not JSON in UTF-8, beyond a limit, a key that occurs twice in an object, or not of the type.
    """
    _check_limits(text)
    value: T = decode_fields(text, want)
    _check_keys(text)
    return value


def json_or_text(text: str) -> object:
    """Returns the value of JSON, or a text that is not JSON as it is; raises InvalidFile for JSON beyond a limit."""
    try:
        encoded = text.encode()
        _check_limits(encoded)
        value: object = msgspec.json.decode(encoded)
    except UnicodeEncodeError:
        raise InvalidFile("not text in UTF-8") from None
    except msgspec.ValidationError as error:  # a number that no double can hold
        raise _with_path(error) from None
    except msgspec.DecodeError:
        return text
    _check_keys(encoded)
    return value


def decode_fields(text: bytes, want: type[T] | Any) -> T:
    """Returns the value of type `want`, without a look at what the type leaves out; raises InvalidFile."""
    try:
        value: T = msgspec.json.decode(text, type=want)
    except msgspec.ValidationError as error:
        raise _with_path(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(text, error) from None
    except RecursionError:
        raise InvalidFile("nested too deeply") from None
    return value


def _check_limits(text: bytes) -> None:
    if text.startswith(BOM_UTF8):
        raise InvalidFile("begins with a byte-order mark: save it as UTF-8 without one")
    if len(text) > MAX_BYTES:
        raise InvalidFile(f"{len(text):,} bytes; want at most {MAX_BYTES:,}")
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise InvalidFile(f"more than {MAX_VALUES:,} values")
    bare = _STRINGS.sub(b"", text)
    if (digits := _LONG_NUMBER.search(bare)) is not None:
        start = digits[0][:20].decode()
        raise InvalidFile(f"the number {start}... has more than {MAX_DIGITS} digits")
    brackets = bare.translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise InvalidFile(f"lists and objects are nested more than {MAX_DEPTH} deep")


def _check_keys(text: bytes) -> None:
    """Raises InvalidFile if an object of a text that is JSON has a key twice: readers differ in which one they take."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise InvalidFile(f"the key '{key}' occurs twice in one object")

    try:
        json.loads(text.decode(), object_pairs_hook=check)
    except ValueError as error:  # where msgspec skips what it does not decode, it accepts some text that is not JSON
        raise error if isinstance(error, InvalidFile) else _not_json(text, error) from None


def _not_json(text: bytes, error: ValueError | msgspec.DecodeError) -> InvalidFile:
    """Returns the error for a text that could not be decoded; msgspec counts bytes from the begin of a string."""
    if isinstance(error, UnicodeDecodeError):
        try:
            text.decode()
        except UnicodeDecodeError as found:
            at, line = found.start, text.count(b"\n", 0, found.start) + 1
            return InvalidFile(f"not text in UTF-8: byte 0x{text[at]:02x} at position {at}, line {line}")
    return InvalidFile(f"not JSON: {error}")


def _with_path(error: msgspec.ValidationError) -> InvalidFile:
    """Returns the error of msgspec with its path inside the file apart."""
    cause = error.__cause__
    text = str(error).removeprefix(str(cause)) if isinstance(cause, InvalidFile) else str(error)
    message, found, where = text.rpartition(" - at `")
    outer = where.rstrip("`") if found else "$"
    if isinstance(cause, InvalidFile):  # raised by a nested type: its path continues the outer one
        return InvalidFile(cause.message, outer + cause.where.removeprefix("$"))
    message = message if found else text
    if message == "Expected `int`, got `float`":
        message = "want a whole number, written without a point and an exponent"
    return InvalidFile(_FIELD.sub(r"field '\1'", message), outer)
