"""The names and numbers that functions written in Python use."""

import dis
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import CodeType
from typing import Any

_READS_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})


def names_in(function: Any) -> list[str]:
    """Returns the names of functions and attributes in a function written in Python."""
    return [name for code in _codes(getattr(function, "__code__", None)) for name in code.co_names]


def globals_in(function: Any) -> list[str]:
    """Returns the names of global variables that a function written in Python reads."""
    codes = _codes(getattr(function, "__code__", None))
    return [one.argval for code in codes for one in dis.get_instructions(code) if one.opname in _READS_GLOBALS]


def numbers_in(function: Any) -> list[int]:
    """Returns the whole numbers that are written in a function written in Python."""
    return [one.argval for one, _ in _steps(function) if _is_number(one)]


def numbers_compared_in(function: Any, operators: Sequence[str] = ("==", "!=")) -> list[int]:
    """Returns those of them that it compares by some operators, as in `labels != 255`."""
    return [
        one.argval
        for one, after in _steps(function)
        if _is_number(one) and after.opname == "COMPARE_OP" and any(by in after.argrepr for by in operators)
    ]


def _steps(function: Any) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Yields each instruction of a function, with the one behind it."""
    for code in _codes(getattr(function, "__code__", None)):
        yield from pairwise(dis.get_instructions(code))


def _is_number(one: dis.Instruction) -> bool:
    return one.opname.startswith("LOAD") and type(one.argval) is int


def _codes(code: Any) -> Iterator[CodeType]:
    """Yields the code of a function and of the functions inside it."""
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            yield from _codes(constant)
