"""Makes unpickling a file impossible in a Python process; Python imports a module of this name when it starts.

Pickles in pipes and in memory are left alone, as ranks and workers send them, but not those that bapipe's own modules or
the loaders of torch and numpy read: they got theirs from a file.
"""

import os
import pickle
import stat
import sys
from types import FrameType
from typing import Any

READERS_OF_FILES = ("/bapipe/", "/numpy/lib/", "/torch/distributed/checkpoint/", "/torch/serialization.py")

NOT_FROM_FILES = ("/bapipe/processes.py", "/bapipe/training/checkpoint/old_index.py")
"""The first reads pipes and an unnamed file of its parent; the second imports nothing that a pickle names."""


CODE_KEPT_BY_NUMBA = "/numba/core/caching.py"
"""Reads what numba compiled and kept in the cache, as Python does with `.pyc` files."""


class UnpickledFile(BaseException):
    """A file was about to be unpickled; not an Exception, so that nothing takes it for a damaged file."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuses that a name of a pickle is looked up for a reader of files."""
    if event != "pickle.find_class":
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith("/pickle.py"):
        frame = frame.f_back
    reader = "" if frame is None else frame.f_code.co_filename
    if any(part in reader for part in READERS_OF_FILES) and not reader.endswith(NOT_FROM_FILES):
        raise UnpickledFile(f"{reader} unpickles '{arguments[0]}.{arguments[1]}'")


_load = pickle.load


def _not_a_file(source: Any) -> Any:
    try:
        is_file = stat.S_ISREG(os.fstat(source.fileno()).st_mode)
    except (AttributeError, OSError):  # in memory
        return source
    if is_file:
        raise UnpickledFile(f"unpickling {source!r}")
    return source


def _load_no_file(file: Any, **options: Any) -> Any:
    if sys._getframe(1).f_code.co_filename.endswith(CODE_KEPT_BY_NUMBA):
        return _load(file, **options)
    return _load(_not_a_file(file), **options)


class _NoFileUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(_not_a_file(file), **options)


def install() -> None:
    """Takes effect for the rest of this process."""
    if pickle.load.__name__ != _load_no_file.__name__:
        sys.addaudithook(_watch)
        pickle.load, pickle.Unpickler = _load_no_file, _NoFileUnpickler  # type: ignore[misc]


if __name__ == "sitecustomize":
    install()
