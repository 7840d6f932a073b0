"""Functions over arrays that numba compiles to machine code when they are first called.

Modules with such functions are imported where they are used, as numba takes half a second to import. Compiled code is
kept on disk, beside the module or in the user's cache. Numba looks only at a function's own module to tell whether that
code is old: what a compiled function calls belongs into the same module.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Compiled = TypeVar("Compiled", bound=Callable[..., object])


def compiled(function: Compiled) -> Compiled:
    """Marks a function as one to compile. It takes numbers, arrays and named tuples of those.

    Divisions by zero are not looked for.
    """
    try:
        return cast(Compiled, njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder can be written to
        return cast(Compiled, njit(error_model="numpy")(function))


def inlined(function: Compiled) -> Compiled:
    """Marks a function as a part of the compiled ones that call it, which takes less time than to compile it alone."""
    return cast(Compiled, njit(inline="always", error_model="numpy")(function))
