"""Checks of what Python code builds: every field of its annotated type and within its limits, as in files."""

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from numbers import Integral, Real
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from bapipe.errors import BapipeError, did_you_mean

_LIMITS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def check_fields(value: Any) -> None:
    """Checks the fields of a struct or a dataclass; called where it is built, in its `__post_init__`.

    Whole numbers of another type, such as 16e9 or those of numpy, become an `int` where one is wanted, and lists become
    tuples. What msgspec does not know, as unions with functions, is not checked.

    Raises:
        BapipeError: a field is of another type, or out of range.
    """
    for name, want in _types(value.__class__).items():
        given = getattr(value, name)
        if given is msgspec.UNSET:
            continue
        found = _converted(name, given, want)
        if is_dataclass(value):
            object.__setattr__(value, name, found)
        else:
            msgspec.structs.force_setattr(value, name, found)


@cache
def _types(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _converted(name: str, given: object, want: Any) -> object:
    try:
        found = msgspec.convert(_plain(given), want)
    except TypeError:
        return given
    except msgspec.ValidationError as error:
        limit = re.match(r"Expected `\w+` ([<>]=?) (\S+)", str(error))
        wanted = f"{_LIMITS[limit[1]]} {limit[2].removesuffix('.0')}" if limit else _in_words(want)
        raise BapipeError(f"`{name}` is {_described(given)}: want {wanted}{_hint(given, want)}") from None
    return tuple(found) if isinstance(found, list) else found


def _plain(value: object) -> object:
    """Returns a number as an `int` if it is whole, else as a `float`, also in a list; any other value as it is."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    return int(number) if number.is_integer() else number


def _described(given: object) -> str:
    """Returns a value in one line."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    text = shortened(given)
    return f"an object of type {type(given).__name__}" if "\n" in text else text


def _hint(given: object, want: Any) -> str:
    """Returns what was probably meant: the name of a class or of a data type, or a number or flag given as text."""
    if names := _names(want):
        text = given.__name__ if isinstance(given, type) else str(given).rpartition(".")[2]
        return did_you_mean(text.lower(), names)
    try:
        return f"; did you mean {msgspec.convert(given, want, strict=False)!r}?"
    except (TypeError, msgspec.ValidationError):
        return ""


def _names(want: Any) -> tuple[str, ...]:
    """Returns the texts that a type has, or of which its field has examples."""
    origin, inner = get_origin(want), get_args(want)
    if origin is Literal:
        return tuple(map(str, inner))
    if origin is Annotated:
        return tuple(example for meta in inner[1:] for example in meta.examples or () if isinstance(example, str))
    return tuple(name for one in inner for name in _names(one)) if origin in (Union, UnionType) else ()


def _in_words(want: Any) -> str:
    origin, inner = get_origin(want), get_args(want)
    if origin is Annotated:
        examples = f", such as {', '.join(map(repr, names))}" if (names := _names(want)) else ""
        return f"{_in_words(inner[0])}{examples}"
    if origin in (Union, UnionType):
        return " or ".join(_in_words(one) for one in inner if one is not msgspec.UnsetType)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is not None:
        num = f"{len(inner)} " if origin is tuple and inner[-1] is not Ellipsis else ""
        return f"a list of {num}{_in_words(inner[0])}"
    if want is bool:
        return "True or False"
    return "None" if want is NoneType else want.__name__
