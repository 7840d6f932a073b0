"""Rows of data as a table for notebooks: HTML that shows itself, and a data frame of pandas."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bapipe.errors import BapipeError
from bapipe.printable import MAX_LINE, counted, printable

MAX_ROWS = 40
"""Rows that a notebook shows: more would flood it."""

Row = Mapping[str, object]

_UNITS = {"_ns": (" (ms)", 1e6), "_bytes": (" (MiB)", 2.0**20)}
"""What the last part of a column's name says of its values: how they are shown, and what they are divided by."""


def rows_html(summary: Sequence[str], rows: Sequence[Row]) -> str:
    """Returns some sentences and a table as HTML; every text in it is escaped, and long tables lose their end."""
    lines = [f"<div>{escape(printable(text, MAX_LINE))}</div>" for text in summary]
    if not rows:
        return "".join(lines)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    heads = "".join(f'<th scope="col">{escape(_head(name))}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(_cell(name, row.get(name, '')) for name in columns)}</tr>" for row in rows[:MAX_ROWS])
    more = (
        f"<div>and {counted(len(rows) - MAX_ROWS, 'more row')}: to_pandas() has all</div>"
        if len(rows) > MAX_ROWS
        else ""
    )
    return f"{''.join(lines)}<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{more}"


def _head(name: str) -> str:
    for ending, (unit, _) in _UNITS.items():
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " ") + unit
    return name.replace("_", " ")


def _cell(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{escape(printable(str(value)))}</td>"
    divisor = next((divisor for ending, (_, divisor) in _UNITS.items() if name.endswith(ending)), None)
    text = f"{value:,}" if divisor is None else f"{value / divisor:,.3f}"
    return f'<td style="text-align: right">{text}</td>'


def data_frame(rows: Sequence[Row]) -> Any:
    """Returns rows as a `pandas.DataFrame`.

    Raises:
        BapipeError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise BapipeError("to_pandas() needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame([dict(row) for row in rows])
