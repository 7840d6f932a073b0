"""Tables by the names of their columns, and as narrow as a terminal."""

from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bapipe.cli import printing
from bapipe.report.formatting import add_row, empty_table, fit_table
from bapipe.units import number, number_down


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


def test_a_sum_is_left_out_after_its_parts() -> None:
    table = empty_table("memory", "device", "params>", "stash>", "work>", "total>", "has>", "at")
    add_row(table, "gpu0", "415", "2,802", "52.0", "4,512", "16,384", "1F6")
    lines = printed(table, 46)
    assert lines[1].split() == ["device", "params", "stash", "total", "has", "at"]
    assert lines[-1].rstrip() == "left out at this width: work"


def test_two_columns_of_numbers_always_stay() -> None:
    lines = printed(layers(), 40)
    assert "left out at this width: W, stash" in " ".join(lines)
    assert "encoder.…on.query   Linear   1.23   2.34" in lines[3]


def stages() -> Table:
    table = empty_table("stages", "stage", "layers", "first", "last", "device", "busy>", "sync>", "idle>")
    add_row(table, "0", "3", "l0", "l2", "gpu0", "99.1", "0", "17.2")
    return table


@pytest.mark.parametrize(
    ("width", "kept", "left_out"),
    [
        (52, "stage layers first last device busy sync", "idle"),
        (45, "stage layers first last busy sync", "device, idle"),
        (35, "stage layers busy sync", "first, last, device, idle"),
        (25, "stage layers busy", "first, last, device, sync, idle"),
    ],
)
def test_a_narrower_terminal_shows_fewer_texts_and_cuts_off_no_number(width: int, kept: str, left_out: str) -> None:
    lines = printed(stages(), width)
    assert lines[1].split() == kept.split()
    shown = {str(column.header): str(next(iter(column.cells))) for column in stages().columns}
    assert lines[3].split() == [shown[name] for name in kept.split()]
    assert " ".join(" ".join(lines[4:]).split()) == f"left out at this width: {left_out}"
    assert max(map(len, lines)) <= width


def test_a_drawing_is_whole_or_left_out() -> None:
    table = empty_table("shape", "layer", "MiB>", "")
    add_row(table, "conv1", "12.5", Text("█" * 16, no_wrap=True))
    assert "█" * 16 in printed(table, 31)[3]
    assert [line.rstrip() for line in printed(table, 30)] == ["shape", "layer    MiB", "─" * 12, "conv1   12.5"]


def test_texts_are_folded_where_the_table_is_just_as_wide_as_the_terminal() -> None:
    table = empty_table("alternatives", "strategy", "ms>", "against this plan")
    add_row(table, "data-parallel", "98.5", "2.1 times as long")
    assert [line.rstrip() for line in printed(table, 30)[1:]] == [
        " " * 23 + "against",
        " " * 23 + "this",
        "strategy          ms   plan",
        "─" * 30,
        "data-parallel   98.5   2.1",
        " " * 23 + "times",
        " " * 23 + "as long",
    ]


@pytest.mark.parametrize("width", [40, 60, 120])
def test_long_tables_look_as_rich_prints_them(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"encoder.block{i}.{'注意' * (i % 3)}conv" for i in range(9)]
    found = []
    for many_rows in (1, 1000):
        table = empty_table("times of the layers, which are many", "layer", "", *(f"figure {n}>" for n in range(6)))
        for i, name in enumerate(names):
            add_row(table, name, Text("│" * (i % 4), no_wrap=True), *(str(10**n * i) for n in range(6)))
        console = Console(file=StringIO(), width=width)
        monkeypatch.setattr(printing, "out", console)
        monkeypatch.setattr(printing, "MANY_ROWS", many_rows)
        printing.show_parts([table])
        assert isinstance(console.file, StringIO)
        found.append(console.file.getvalue())
    assert found[0] == found[1]
    assert ("left out at this width" in found[0]) == (width < 120)


@pytest.mark.parametrize(
    ("value", "nearest", "below"),
    [
        (0, "0", "0"),
        (181.6, "182", "181"),
        (18.16, "18.2", "18.1"),
        (0.29, "0.290", "0.290"),
        (1999.9, "2,000", "1,999"),
    ],
)
def test_what_something_is_at_least_is_rounded_down(value: float, nearest: str, below: str) -> None:
    assert (number(value), number_down(value)) == (nearest, below)
