"""Tables by the names of their columns, and as narrow as a terminal."""

from io import StringIO

from rich.console import Console
from rich.table import Table

from bapipe.report.formatting import add_row, empty_table, fit_table


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(fit_table(table, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    table = empty_table("sizes", "layer", "MiB>")
    assert [(column.header, column.justify) for column in table.columns] == [("layer", "left"), ("MiB", "right")]
    assert table.title == "sizes"
    assert table.row_count == 0


def layers() -> Table:
    table = empty_table("layers", "layer", "kind", "F>", "I>", "W>", "stash>")
    add_row(table, "encoder.layers.0.attention.query", "Linear", "1.23", "2.34", "3.45", "12,345")
    add_row(table, "encoder.layers.0.attention.self.output.dense.lora", "Linear", "1.23", "2.34", "3.45", "12,345")
    return table


def test_a_wide_terminal_shows_a_table_as_it_is() -> None:
    table = layers()
    assert fit_table(table, 100) is table


def test_a_narrow_terminal_shows_names_whole_and_fewer_numbers() -> None:
    lines = printed(layers(), 70)
    assert "encoder.layers.0.attention.query   Linear   1.23   2.34   3.45" in lines[3]
    assert lines[4].startswith("encoder.layers.…utput.dense.lora")  # a longer name loses its middle
    assert lines[-1].rstrip() == "left out at this width: stash"
    assert all(len(line) <= 70 for line in lines)


def test_two_columns_of_numbers_always_stay() -> None:
    lines = printed(layers(), 40)
    assert "left out at this width: W, stash" in " ".join(lines)
    assert "encoder.…on.query   Linear   1.23   2.34" in lines[3]
