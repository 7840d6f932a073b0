"""Tables in Markdown."""

from collections.abc import Mapping, Sequence

from bapipe.cli.progress import out
from bapipe.printable import MAX_LINE, printable


def write_markdown(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Prints rows as a table in Markdown; a value that a row lacks is an empty cell, and names are made printable."""
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    out.file.writelines(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else printable(str(value), MAX_LINE)
