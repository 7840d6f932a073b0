"""Numbers with units, and tables whose cells are plain text."""

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from html import escape
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

from bapipe.printable import printable
from bapipe.units import number

MAX_WORD = 32
"""Characters of a word that a narrow table shows in full."""

MIN_WORD = 8
"""Characters of a word that even the narrowest table shows."""

MIN_NUMBERS = 2
"""Columns of numbers that a table keeps whose words can be cut down instead."""

MIN_COLUMNS = 2
"""Columns, the first ones, that even the narrowest table keeps."""

LEFT_OUT_LAST = ("total", "has", "limit")
"""Columns of numbers that say more than those before them."""

COLUMN_GAP = 3
"""Characters between two columns."""

MAX_ROWS = 48
"""Rows of a table of stages or devices that are shown; two thirds of them are its first ones."""

Row = TypeVar("Row")


def rate(num_samples: int, time_ns: int) -> str:
    """Returns how many samples a second are done if some take a time."""
    return number(num_samples * 1e9 / time_ns) if time_ns else "unlimited"


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


def fit_table(table: Table, width: int) -> Table:
    """Returns a table that is at most `width` characters wide, without folding a name or cutting off a number.

    Columns of texts keep their longest word; one longer than `MAX_WORD` loses its middle. If that is too wide, the last
    columns of numbers are left out, sums after their parts, and the caption says which; then words are cut down. If
    even that is too wide, columns of texts are left out behind the first `MIN_COLUMNS`, then those of numbers. Only
    these first ones may be wider.
    """
    columns = list(table.columns)
    if _width([_longest(column, str.splitlines) for column in columns]) <= width:
        return table
    numbers = [column for column in columns if column.justify == "right"]
    numbers.sort(key=lambda column: column.header not in LEFT_OUT_LAST)
    while _min_table_width(columns, MAX_WORD) > width and len(numbers) > MIN_NUMBERS:
        columns.remove(numbers.pop())
    words = range(MAX_WORD, MIN_WORD, -1)
    max_word = next((word for word in words if _min_table_width(columns, word) <= width), MIN_WORD)
    others = sorted(columns[MIN_COLUMNS:], key=lambda column: column.justify != "right")
    while _min_table_width(columns, max_word) > width and others:
        columns.remove(others.pop())
    fitted = copy(table)
    cropped = [_cropped(column, index, max_word) for index, column in enumerate(columns)]
    fitted.columns = [
        replace(column, width=wide) for column, wide in zip(cropped, _fit_widths(cropped, width), strict=True)
    ]
    left_out = [str(column.header) for column in table.columns if column.header and column not in columns]
    if left_out:
        fitted.caption = f"left out at this width: {', '.join(left_out)}"
        fitted.caption_justify = "left"
    return fitted


def rows_below(table: Table, width: int) -> tuple[Table, list[str]] | None:
    """Returns a table with the first row alone, and the other rows as the lines that rich would print below it.

    None if a cell would be folded. The first table has no caption: it stands below all rows.
    """
    columns = [list(column.cells) for column in table.columns]
    widths = [
        max(cell_len(str(column.header)), *(cell_len(str(cell)) for cell in cells))
        for column, cells in zip(table.columns, columns, strict=True)
    ]
    is_folded = any("\n" in str(cell) for cells in columns for cell in cells)
    if is_folded or _width(widths) > width:
        return None
    first = copy(table)
    first.caption = None
    first.columns = [
        replace(column, min_width=wide, _cells=column._cells[:1])
        for column, wide in zip(table.columns, widths, strict=True)
    ]
    first.rows = table.rows[:1]
    aligned = [
        [_aligned(str(cell), wide, is_right=column.justify == "right") for cell in cells[1:]]
        for column, cells, wide in zip(table.columns, columns, widths, strict=True)
    ]
    gap = " " * COLUMN_GAP
    return first, [gap.join(cells) for cells in zip(*aligned, strict=True)]


def _aligned(text: str, width: int, *, is_right: bool) -> str:
    spaces = " " * (width - cell_len(text))
    return spaces + text if is_right else text + spaces


def _width(widths: Sequence[int]) -> int:
    """Returns the width of a table with columns of these widths."""
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


def _longest(column: Column, parts: Callable[[str], list[str]]) -> int:
    """Returns the width of the longest part of a column's cells."""
    texts = [str(column.header), *map(str, column.cells)]
    return max((cell_len(part) for text in texts for part in parts(text)), default=0)


def _fit_widths(columns: Sequence[Column], width: int) -> list[int]:
    """Returns the width of each column of a table: what it takes without folds, but for the widest ones of texts."""
    least = [_min_width(column, MAX_WORD) for column in columns]
    whole = [_longest(column, str.splitlines) for column in columns]
    limited = (
        [max(low, min(high, limit)) for low, high in zip(least, whole, strict=True)] for limit in range(width, 0, -1)
    )
    return next((widths for widths in limited if _width(widths) <= width), least)


def _min_table_width(columns: Sequence[Column], max_word: int) -> int:
    return _width([_min_width(column, max_word) for column in columns])


def _min_width(column: Column, max_word: int) -> int:
    if column.justify == "right":
        return _longest(column, str.splitlines)
    drawn = max((cell_len(str(cell)) for cell in column.cells if isinstance(cell, Text)), default=0)
    return max(drawn, min(_longest(column, str.split), max_word))


def _cropped(column: Column, index: int, max_word: int) -> Column:
    """Returns a column at another place of its table, without the middle of longer words; numbers and drawings stay."""
    has_words = column.justify != "right"
    cells = [_crop(cell, max_word) if has_words and isinstance(cell, str) else cell for cell in column.cells]
    return replace(column, _index=index, _cells=cells)


def _crop(text: str, max_word: int) -> str:
    """Returns a text whose words are cut down to some characters in their middle."""
    end = max_word // 2

    def crop(match: re.Match[str]) -> str:
        return f"{match[0][: max_word - end - 1]}…{match[0][-end:]}"

    return re.sub(rf"\S{{{max_word + 1},}}", crop, text)


def folded(rows: Sequence[Row]) -> tuple[Sequence[Row], int, Sequence[Row]]:
    """Returns the first rows, how many behind them are left out, and the last ones; none of up to `MAX_ROWS`."""
    num_left_out = len(rows) - MAX_ROWS
    if num_left_out <= 0:
        return rows, 0, ()
    end = MAX_ROWS * 2 // 3
    return rows[:end], num_left_out, rows[end + num_left_out :]


def add_rows(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Adds rows to a table; of very many a row in the middle says how many are left out."""
    first, num_left_out, last = folded(rows)
    for row in first:
        add_row(table, *row)
    if num_left_out:
        add_row(table, "…", f"{num_left_out:,} more")
    for row in last:
        add_row(table, *row)


def add_row(table: Table, *cells: str | Text) -> None:
    """Adds a row to a table; names in its cells are made printable."""
    table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in cells))


def html_text(text: str) -> str:
    """Returns a text for a page: on one line, printable, and escaped."""
    return escape(printable(text))
