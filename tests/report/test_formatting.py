"""Tables by the names of their columns."""

from bapipe.report.formatting import empty_table


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    table = empty_table("sizes", "layer", "MiB>")
    assert [(column.header, column.justify) for column in table.columns] == [("layer", "left"), ("MiB", "right")]
    assert table.title == "sizes"
    assert table.row_count == 0
