"""Functions over arrays that numba compiles to machine code when they are first called.

Modules with such functions are imported where they are used, as numba takes half a second to import. Compiled code is
kept in bapipe's cache, apart for every version of the sources: numba itself sees changes in the module of a function
alone, not in what that calls, and cannot read what it kept if a type is gone since. The code of a few versions is kept.
Files have a checksum at their end, because numba would run what a damaged one holds, or fail; it compiles anew instead.
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

SOURCES = Path(__file__).parents[1] / "device_line"
"""All compiled functions, and what they are made of, but for this file."""

MAX_VERSIONS = 3
"""Of the sources, whose compiled code is kept: that of one takes 5 MB."""

_CHECKSUM_BYTES = 32

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "_nrt": False}
"""`_nrt` is what counts references."""

Compiled = TypeVar("Compiled", bound=Callable[..., object])


def compiled(function: Compiled) -> Compiled:
    """Marks a function that Python calls as one to compile, and to keep.

    It takes numbers, arrays and named tuples of those, and makes no arrays. So numba need not count references to
    arrays, which takes longer than most of these functions do themselves. Divisions by zero are not looked for. Other
    threads run meanwhile. Each combination of types of arguments and layouts of arrays is compiled by itself, for
    seconds: an argument is an integer always or never, and arrays are in C order.
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
    """Marks a function as a part of the compiled ones that call it.

    A call of its own would pass each array of a named tuple as seven numbers, which takes longer than many of these
    functions do. Parts are not kept by themselves, as what calls them later could not be joined with what was kept.
    """
    return cast(Compiled, njit(forceinline=True, **_OPTIONS)(function))


@inlined
def least(ns: float, known_ns: float) -> float:
    """The lesser of two numbers, to be noted in the place of the second one.

    Without an addition LLVM leaves out stores of numbers that stay as they are, and stores vectors by masks: on AMD's
    processors that takes several times as long as all else in such a loop. Adding 0 may not be left out: -0 + 0 is 0.
    """
    return (ns if ns < known_ns else known_ns) + 0.0


class _CompileTimes(Listener):
    """Adds up how long each thread compiles; functions that others call are compiled meanwhile."""

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
    """What numba keeps of a function, an index and a file for each signature; nothing if that was damaged."""

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
        except OSError as error:  # such as a full disk: the function is compiled all the same
            _warn_that_nothing_is_kept(error.strerror or str(error))

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
        """Opens another file, which takes the name when it is written."""
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
    """Where compiled code is kept; that of old versions is removed from around it."""
    digest = sha256(Path(__file__).read_bytes())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.read_bytes())
    folder = cache_folder() / "compiled" / digest.hexdigest()[:16]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # used now
        _remove_old(folder.parent)
    return str(folder)


def _remove_old(parent: Path) -> None:
    folders = sorted(parent.iterdir(), key=lambda each: each.stat().st_mtime_ns, reverse=True)
    for old in folders[MAX_VERSIONS:]:
        shutil.rmtree(old, ignore_errors=True)
