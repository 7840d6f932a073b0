"""Printing, and progress bars."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bapipe import report
from bapipe.progress import PartsProgress, SearchProgress

_columns = os.environ.get("COLUMNS", "")
_width = int(_columns) if _columns.isdigit() and int(_columns) >= 40 else None
out = Console(width=_width or (None if sys.stdout.isatty() else 120), markup=False)
err = Console(stderr=True, markup=False)


def show_parts(parts: Iterable[Any]) -> None:
    """Prints tables and texts, each followed by an empty line."""
    for part in parts:
        out.print(part, "", highlight=False, sep="\n")


def note(text: str) -> None:
    """Prints a remark to stderr, apart from the command's result."""
    err.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def parts_bar(verb: str = "profiling") -> Iterator[PartsProgress]:
    """Shows a progress bar for work that consists of named parts."""
    columns = TextColumn(verb + " {task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


@contextmanager
def planning_status() -> Iterator[SearchProgress]:
    """Shows the state of a search: as a status line on a terminal, else as a line every two seconds."""
    printed_s = time.monotonic()
    with err.status("planning") as status:

        def progress(num_simulated: int, best_ns: int, bound_ns: int) -> None:
            nonlocal printed_s
            gap = best_ns / bound_ns - 1 if bound_ns else 0.0
            text = f"planning: {num_simulated} plans simulated, best {report.ms(best_ns)}, gap at most {gap:.2%}"
            status.update(text)
            if not err.is_terminal and time.monotonic() - printed_s > 2:
                printed_s = time.monotonic()
                note(text)

        yield progress
