"""Writing the file that a command makes, without losing another one of the same name."""

import filecmp
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from bapipe.cli.printing import note, print_to_stderr, show_json, show_parts, show_written
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import encode_for
from bapipe.formats.files import check_writable, copy_file, open_descriptor, place_file, write_bytes, written_file
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile

_STDOUT = 1

Measured = TypeVar("Measured", ModelProfile, Cluster)


def check_output(path: Path, *inputs: Path) -> None:
    """Raises BapipeError, before hours of work are lost, if `path` cannot be written, or is a file that is read.

    If it is stdout, nothing else is printed there from now on.
    """
    if str(path) == "-":
        raise BapipeError("-: nothing is written to stdout by this name: name a file, or /dev/stdout")
    check_writable(path)
    if path.is_file() and any(each.is_file() and path.samefile(each) for each in inputs):
        raise BapipeError(f"{path} would be overwritten, and is an input of this command: name another file to write")
    check_kept_copy(path, *inputs)
    descriptor = open_descriptor(path)
    if descriptor is not None and os.path.sameopenfile(descriptor, _STDOUT):
        print_to_stderr()


def check_kept_copy(path: Path, *inputs: Path) -> None:
    """Raises BapipeError if the copy that is kept of `path` would take the place of a file that is read."""
    file = written_file(path)
    if file is None or not file.is_file():
        return
    kept = _kept_copy(file)
    if kept.is_file() and any(each.is_file() and kept.samefile(each) for each in inputs):
        raise BapipeError(
            f"{kept} would be overwritten by a copy of {path}, and is an input of this command: name another file to "
            f"write, or rename {kept}"
        )


def _kept_copy(file: Path) -> Path:
    """Returns where a file is kept that is written anew."""
    return file.with_name(f"{file.name}~")


def write_output(path: Path, value: ModelProfile | Cluster | Plan) -> None:
    """Writes a file; one with another content that was there is kept beside it, as `NAME~`, and a remark says so."""
    write_output_bytes(path, encode_for(path, value))


def write_output_bytes(path: Path, content: bytes) -> None:
    """Writes a file of another kind, such as a page or a trace, as `write_output` does."""
    _keep_older(path, lambda older: older.read_bytes() == content)
    write_bytes(path, content)


def write_output_file(path: Path, finished: Path) -> None:
    """Moves a finished file of `temporary_for`, which may be larger than memory, to `path` as `write_output` does."""
    _keep_older(path, lambda older: filecmp.cmp(older, finished, shallow=False))
    place_file(path, finished)


def _keep_older(path: Path, is_same: Callable[[Path], bool]) -> None:
    file = written_file(path)
    if file is not None and file.is_file() and not is_same(file):
        kept = _kept_copy(file)
        instead = ", in place of the older file of that name" if os.path.lexists(kept) else ""
        copy_file(file, kept)
        note(f"{path} was there already, with another content: it is kept as {kept}{instead}")


def write_and_show(
    path: Path, value: Measured, render: Callable[[Measured], Iterable[Table | str]], *, as_json: bool
) -> None:
    """Writes a file as `write_output` does, and prints it as `show_output` does."""
    write_output(path, value)
    show_output(path, value, render, as_json=as_json)


def show_output(
    path: Path, value: Measured, render: Callable[[Measured], Iterable[Table | str]], *, as_json: bool
) -> None:
    """Prints what was written to a file: as JSON, or as tables with the file's name."""
    if as_json:
        show_json(value)
        return
    show_parts(render(value))
    show_written(path)
