"""Functions over arrays that numba compiles to machine code when they are first called.

Modules with such functions are imported where they are used, as numba takes half a second to import. Compiled code is
kept in bapipe's cache, apart for every version of the sources: numba itself sees changes in the module of a function
alone, not in what that calls, and cannot read what it kept if a type is gone since.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeVar, cast

from numba import njit
from numba.core import config

from bapipe.formats.cache import cache_folder

SOURCES = Path(__file__).parent / "device_line"

Compiled = TypeVar("Compiled", bound=Callable[..., object])


def compiled(function: Compiled) -> Compiled:
    """Marks a function as one to compile. It takes numbers, arrays and named tuples of those.

    Divisions by zero are not looked for.
    """
    usual_folder = config.CACHE_DIR  # type: ignore[attr-defined]  # numba sets its attributes by name
    config.CACHE_DIR = _code_folder()  # type: ignore[attr-defined]
    try:
        return cast(Compiled, njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder can be written to
        return cast(Compiled, njit(error_model="numpy")(function))
    finally:
        config.CACHE_DIR = usual_folder  # type: ignore[attr-defined]


def inlined(function: Compiled) -> Compiled:
    """Marks a function as a part of the compiled ones that call it, which takes less time than to compile it alone."""
    return cast(Compiled, njit(inline="always", error_model="numpy")(function))


@cache
def _code_folder() -> str:
    """Where compiled code is kept."""
    digest = sha256(Path(__file__).read_bytes())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.read_bytes())
    return str(cache_folder() / "compiled" / digest.hexdigest()[:16])
