"""The names that functions written in Python use."""

from collections.abc import Iterator
from types import CodeType
from typing import Any


def names_in(function: Any) -> list[str]:
    """Returns the names of functions and attributes in a function written in Python."""
    return [name for code in _codes(getattr(function, "__code__", None)) for name in code.co_names]


def _codes(code: Any) -> Iterator[CodeType]:
    """Yields the code of a function and of the functions inside it."""
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            yield from _codes(constant)
