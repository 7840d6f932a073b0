"""Writing the file that a command makes, without losing another one of the same name."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from bapipe.cli.progress import note, show_json, show_parts, show_written
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import copy_file, encode, write, written_file
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile

Measured = TypeVar("Measured", ModelProfile, Cluster)


def write_output(path: Path, value: ModelProfile | Cluster | Plan) -> None:
    """Writes a file; one with another content that was there is kept beside it, as `NAME~`, and a remark says so."""
    file = written_file(path)
    if file is not None and file.is_file() and file.read_bytes() != encode(value):
        kept = file.with_name(f"{file.name}~")
        copy_file(file, kept)
        note(f"{path} was there already, with another content: it is kept as {kept}")
    write(path, value)


def write_and_show(
    path: Path, value: Measured, render: Callable[[Measured], Iterable[Table | str]], *, as_json: bool
) -> None:
    """Writes a file as `write_output` does, and prints it: as JSON, or as tables with the file's name."""
    write_output(path, value)
    if as_json:
        show_json(value)
        return
    show_parts(render(value))
    show_written(path)
