"""Tables in Markdown."""

import html
import re
from collections.abc import Mapping, Sequence

from bapipe.cli.printing import out
from bapipe.printable import MAX_LINE, printable


def write_markdown(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Prints rows as a table in Markdown, whose cells show their values as they are, neither as HTML nor as Markdown.

    A value that a row lacks is an empty cell, and names are made printable.

    Args:
        columns: names of fields, ours.
    """
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    out.file.writelines(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    escaped = re.sub(r"[\\`*_\[\]~]", r"\\\g<0>", html.escape(printable(str(value), MAX_LINE), quote=False))
    return escaped.replace("|", "&#124;")  # a bar with a backslash would end the cell in some programs
