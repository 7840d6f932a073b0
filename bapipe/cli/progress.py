"""Printing, and progress bars."""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bapipe import report
from bapipe.planner.compute.deadline import Compiling, Deadline
from bapipe.printable import MAX_LINE, printable
from bapipe.progress import PartsProgress, SearchProgress
from bapipe.simulator.timeline import Timeline
from bapipe.units import percent_up

_columns = os.environ.get("COLUMNS", "")
_width = int(_columns) if _columns.isdigit() and int(_columns) >= 40 else None
out = Console(width=_width or (None if sys.stdout.isatty() else 120), markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)


MANY_ROWS = 40
"""A table with more rows is not drawn by rich."""

SILENT_S = 10.0
"""After which work that says nothing of itself is named again."""

COMPILING_TOO = " (compiling its code, once after an installation)"
"""What is added while a search waits for that, up to a minute and a half."""

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


class _Lines:
    """What is being done, as lines on stderr if that is no terminal, on which one line would change."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._printed_s = every_s, time.monotonic()

    def show(self, text: str) -> None:
        """Prints a text if the last one was printed some seconds ago."""
        if not err.is_terminal and time.monotonic() - self._printed_s > self._every_s:
            self._printed_s = time.monotonic()
            note(text)

    @contextmanager
    def shown_while_silent(self, text: Callable[[], str]) -> Iterator[None]:
        """Shows what is being done also while nobody says so: soon, and then every `SILENT_S`."""
        if err.is_terminal:
            yield
            return
        is_done = threading.Event()

        def show() -> None:
            wait_s = self._every_s
            while not is_done.wait(max(self._printed_s + wait_s - time.monotonic(), 0.01)):
                if time.monotonic() - self._printed_s > wait_s:
                    self.show(text())
                    wait_s = SILENT_S

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()


@contextmanager
def parts_bar(verb: str = "profiling") -> Iterator[PartsProgress]:
    """Shows how much is done of work in named parts: a bar on a terminal, else a line every ten seconds at most."""
    part, lines = TextColumn(verb + " {task.fields[what]}", markup=False), _Lines(10)
    columns = part, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None, what="")

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, what=printable(what))
            lines.show(f"{verb} {what}: {done} of {total}")

        yield progress


class _Now:
    """What is being done now: a text, and whether code is being compiled for it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text + (COMPILING_TOO if Compiling.num_threads else "")

    def __rich__(self) -> Text:
        return Text(str(self))


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done: a line that changes on a terminal, else a line every two seconds at most."""
    lines, now = _Lines(2), _Now(text)
    with err.status(now), lines.shown_while_silent(lambda: str(now)):

        def update(text: str) -> None:
            now.text = text
            lines.show(str(now))

        yield update


@contextmanager
def planning_status() -> Iterator[SearchProgress]:
    """Shows the state of a search; see `status`."""
    with status("planning") as update:

        def progress(num_simulated: int, best_ns: int, bound_ns: int) -> None:
            gap = best_ns / bound_ns - 1 if bound_ns else 0.0
            plans = "1 plan" if num_simulated == 1 else f"{num_simulated} plans"
            update(
                f"planning: {plans} simulated, best {report.ms(best_ns)}, "
                f"lower bound {report.number_down(bound_ns / 1e6)} ms, gap {percent_up(gap)}"
            )

        yield progress


@contextmanager
def stops_on_interrupt(deadline: Deadline) -> Iterator[None]:
    """Lets the first Ctrl-C end searches with the best plan so far; a second one ends the command."""
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return

    def stop(signal_number: int, frame: FrameType | None) -> None:
        deadline.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        note("ending with the best plan found; press Ctrl-C again to end without one")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
