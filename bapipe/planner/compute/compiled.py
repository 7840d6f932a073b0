"""Functions over arrays that numba compiles to machine code when they are first called.

Modules with such functions are imported where they are used, as numba takes half a second to import. Compiled code is
kept in bapipe's cache, in one folder for each version of the sources: numba itself notices changes in a function's own
module only, not in what the function calls, and cannot read its cache if a type no longer exists. The folders of a few
versions are kept. Files end with a checksum, because numba would run the code of a damaged one, or fail; with it, the
function is compiled anew.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from numba import njit
from numba.core import config
from numba.core.caching import IndexDataCacheFile
from numba.core.event import Event, Listener, register

from bapipe.formats.cache import cache_folder
from bapipe.planner.compute.deadline import COMPILING

SOURCES = tuple(Path(__file__).parents[1] / name for name in ("compute", "device_line", "fixed_placements"))
"""The folders of all compiled functions and of the modules that they need."""

MAX_VERSIONS = 3
"""How many versions of the sources keep their compiled code: that of one takes 5 MB."""

_CHECKSUM_BYTES = 32

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "_nrt": False}
"""`_nrt` is numba's runtime, which counts references to arrays."""

Compiled = TypeVar("Compiled", bound=Callable[..., object])


def compiled(function: Compiled) -> Compiled:
    """Compiles a function that Python calls, and caches its code.

    It takes numbers, arrays and named tuples of those, and creates no arrays: so numba need not count references to
    arrays, which takes longer than most of these functions. Division by zero is not checked, and the GIL is released.
    Each combination of argument types and array layouts is compiled separately, which takes seconds: an argument must
    be an integer always or never, and arrays must be in C order.
    """
    usual_folder = config.CACHE_DIR  # type: ignore[attr-defined]  # numba sets its attributes by name
    config.CACHE_DIR = _code_folder()  # type: ignore[attr-defined]
    try:
        made: Any = njit(cache=True, **_OPTIONS)(function)
        made._cache._cache_file = _CheckedFile(made._cache._cache_file)
        return cast(Compiled, made)
    except RuntimeError:  # no folder can be written to
        return cast(Compiled, njit(**_OPTIONS)(function))
    finally:
        config.CACHE_DIR = usual_folder  # type: ignore[attr-defined]


def inlined(function: Compiled) -> Compiled:
    """Inlines a function into the compiled ones that call it.

    A real call would pass each array of a named tuple as seven numbers, which takes longer than many of these
    functions. It is not cached itself, as later callers could not be linked with the cached code.
    """
    return cast(Compiled, njit(forceinline=True, **_OPTIONS)(function))


@inlined
def least(ns: float, known_ns: float) -> float:
    """Returns the minimum of `ns` and `known_ns`, to be stored in the place of `known_ns`.

    Without the addition LLVM skips stores of unchanged numbers by masked vector stores, which on AMD's processors take
    several times as long as the rest of such a loop. LLVM cannot remove the addition of 0, as -0 + 0 is 0.
    """
    return (ns if ns < known_ns else known_ns) + 0.0


class _CompileTimes(Listener):
    """Adds up how long each thread compiles. Events nest: the functions that one calls are compiled within its own."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def on_start(self, event: Event) -> None:
        begun = vars(self._of_thread).setdefault("begun", [])
        if not begun:
            COMPILING.begin()
        begun.append(time.thread_time())

    def on_end(self, event: Event) -> None:
        started_s = self._of_thread.begun.pop()
        if not self._of_thread.begun:
            COMPILING.end(time.thread_time() - started_s)


register("numba:compile", _CompileTimes())  # type: ignore[no-untyped-call]


class _CheckedFile(IndexDataCacheFile):
    """numba's cache of a function, an index and a file for each signature; a damaged cache counts as empty."""

    def __init__(self, usual: Any) -> None:
        vars(self).update(vars(usual))

    def load(self, key: object) -> object:
        try:
            found: object = super().load(key)  # type: ignore[no-untyped-call]
            return found
        except Exception:  # whatever unpickling damaged bytes raises
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save(self, key: object, data: object) -> None:
        try:
            super().save(key, data)  # type: ignore[no-untyped-call]
        except (
            OSError,
            ValueError,
        ) as error:  # a full disk, also one on which a damaged index stays
            _warn_that_nothing_is_kept(getattr(error, "strerror", None) or str(error))

    def _load_index(self) -> Any:
        with suppress(FileNotFoundError):
            _check(Path(self._index_path).read_bytes())
        return super()._load_index()  # type: ignore[no-untyped-call]

    def _load_data(self, name: str) -> object:
        path: str = self._data_path(name)  # type: ignore[no-untyped-call]
        _check(Path(path).read_bytes())
        found: object = super()._load_data(name)  # type: ignore[no-untyped-call]
        return found

    @contextmanager
    def _open_for_write(self, path: str) -> Iterator[IO[bytes]]:
        """Opens a temporary file, to which the checksum is added, and which then takes the name `path`."""
        with super()._open_for_write(path) as file:
            yield file
            file.flush()
            file.write(sha256(Path(file.name).read_bytes()).digest())


@cache  # once for each reason
def _warn_that_nothing_is_kept(reason: str) -> None:
    logging.getLogger(__name__).warning(
        "compiled code is not kept, so the next search compiles it again, for up to a minute: %s: %s; free some space, "
        "or set XDG_CACHE_HOME to another folder",
        _code_folder(),
        reason,
    )


def _check(content: bytes) -> None:
    if sha256(content[:-_CHECKSUM_BYTES]).digest() != content[-_CHECKSUM_BYTES:]:
        raise ValueError("damaged")


@cache
def _code_folder() -> str:
    """Returns the folder of the compiled code of these sources; removes the folders of old versions beside it."""
    digest = sha256()
    for path in (each for folder in SOURCES for each in sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    folder = cache_folder() / "compiled" / digest.hexdigest()[:16]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # used now
        _remove_old(folder)
    return str(folder)


def _remove_old(own: Path) -> None:
    """Removes the oldest folders beside one, which stays whatever the clocks say that wrote the others."""
    others = [each for each in own.parent.iterdir() if each != own]
    others.sort(key=lambda each: each.stat().st_mtime_ns, reverse=True)
    for old in others[MAX_VERSIONS - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
