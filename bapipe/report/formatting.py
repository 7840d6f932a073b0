"""Numbers with units, and tables whose cells are plain text."""

from html import escape
from math import floor, log10

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bapipe.printable import printable


def number(value: float) -> str:
    """Returns a number with three significant digits: all digits before the point, at most three after it."""
    if value == 0:
        return "0"
    return f"{value:,.{min(max(0, 2 - floor(log10(abs(value)))), 3)}f}"


def ms(time_ns: float) -> str:
    """Returns a time in milliseconds."""
    return f"{number(time_ns / 1e6)} ms"


def mib(num_bytes: float) -> str:
    """Returns a size in MiB."""
    return f"{number(num_bytes / 2**20)} MiB"


def empty_table(title: str, *columns: str) -> Table:
    """Returns a table without rows; a column whose name ends in > holds numbers, aligned to the right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for column in columns:
        if column.endswith(">"):
            table.add_column(column[:-1], justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold", min_width=min(len(column), 6))
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Adds a row to a table; names in its cells are made printable."""
    table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in cells))


def html_text(text: str) -> str:
    """Returns a text for a page: on one line, printable, and escaped."""
    return escape(printable(text))
