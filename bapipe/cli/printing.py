"""Printing to stdout and stderr: the only place that does."""

import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from bapipe import report
from bapipe.printable import MAX_LINE, printable
from bapipe.simulator.timeline import Timeline

_columns = os.environ.get("COLUMNS", "")
_width = int(_columns) if _columns.isdigit() and int(_columns) >= 40 else None
out = Console(width=_width or (None if sys.stdout.isatty() else 120), markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)


MANY_ROWS = 40
"""A table with more rows is not drawn by rich."""

IN_ASCII = str.maketrans("░▓▒█", ".#-%")
"""What stands for the shades of a Gantt chart where they cannot be printed."""


def print_to_stderr() -> None:
    """Prints everything to stderr from now on: stdout is the file that a command makes."""
    out.stderr = True


def show_parts(parts: Iterable[Any]) -> None:
    """Prints tables and texts, each followed by an empty line."""
    for part in parts:
        if isinstance(part, Table):
            part = report.fit_table(part, out.width)
            _show_table(part)
        else:
            out.print(part, "", highlight=False, sep="\n")


def _show_table(table: Table) -> None:
    """Prints a table and an empty line; rich takes milliseconds for a row, so it draws only the first one of many."""
    rows = report.rows_below(table, out.width) if table.row_count >= MANY_ROWS else None
    if rows is None:
        out.print(table, "", highlight=False, sep="\n")
        return
    first, lines = rows
    out.print(first, highlight=False)
    out.file.write("".join(f"{line}\n" for line in lines))
    if table.caption:
        width = max(map(cell_len, lines))
        out.print(table.caption, style="table.caption", justify="left", highlight=False, width=width)
    out.print("")


def show_line(text: str) -> None:
    """Prints a sentence to stdout; names in it are made printable."""
    out.print(printable(text, MAX_LINE), highlight=False)


def show_written(path: Path) -> None:
    """Says which file was written."""
    show_line(f"wrote {path}")


def show_timeline(timeline: Timeline) -> None:
    """Prints a timeline as a Gantt chart as wide as the terminal."""
    chart = report.gantt(timeline, out.width)
    if not out.encoding.startswith("utf"):
        chart = chart.translate(IN_ASCII)
    out.print(chart, highlight=False, no_wrap=True)


def note(text: str) -> None:
    """Prints a remark to stderr, apart from the command's result."""
    err.print(printable(text, MAX_LINE), style="dim", highlight=False, soft_wrap=True)


def show_error(text: str) -> None:
    """Prints an error on one line of stderr."""
    err.print(f"error: {printable(text, MAX_LINE)}", style="bold red", highlight=False, soft_wrap=True)


def show_json(value: object) -> None:
    """Prints a value as JSON in ASCII: data for programs that a terminal shows safely too.

    JSON has no numbers that are not finite, such as a mean over nothing: they are null.
    """
    out.file.write(json.dumps(_with_nulls(msgspec.to_builtins(value)), allow_nan=False) + "\n")


def _with_nulls(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _with_nulls(one) for key, one in value.items()}
    return [_with_nulls(one) for one in value] if isinstance(value, list | tuple) else value
