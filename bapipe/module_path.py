"""The current folder on the module search path: first while a module in it is looked for, else behind Python's own.

A file there may have the name of a module of Python, such as profile.py, that torch is going to import.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_added: list[str] = []
"""The folders that `current_folder_importable` has put first: one, or none."""


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Puts the current folder first on the module search path, unless it comes before Python's own modules already."""
    folder = os.getcwd()
    if folder in sys.path[: _end_of_python(sys.path)]:
        yield
        return
    sys.path.insert(0, folder)
    _added.append(folder)
    try:
        yield
    finally:
        _added.remove(folder)
        if folder in sys.path:
            sys.path.remove(folder)


def path_to_start_with() -> list[str]:
    """Returns the search path for a process that is to import bapipe: this one's, without what was added to it."""
    path = [folder or os.getcwd() for folder in sys.path]
    for folder in _added:
        with suppress(ValueError):  # the user's code may have removed it
            path.remove(folder)
    return path


def path_to_run_with() -> list[str]:
    """Returns the search path for a process that runs for this one: with what was added, behind Python's own modules.

    Installed packages come after it, as they do here.
    """
    path = path_to_start_with()
    end = _end_of_python(path)
    return [*path[:end], *_added, *path[end:]]


def _end_of_python(path: Sequence[str]) -> int:
    """Returns the place behind the folders with Python's own modules; 0 if there are none, as in an archive."""
    own = sysconfig.get_path("stdlib")
    return max((i + 1 for i, folder in enumerate(path) if folder in (own, f"{own}/lib-dynload")), default=0)
