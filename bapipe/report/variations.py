"""The best plans at the points of a grid, as a table."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from bapipe.report.formatting import add_row, empty_table, number


def variations_table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with a row for each point; an asterisk marks a plan of another kind than the one before.

    Args:
        names: of the axes, which are the first columns.
    """
    columns = "step ms>", "change>", "samples/s>", "peak MiB>", "gap>", "plan", "micro-batch>"
    table = empty_table("the best plan at each point; *: of another kind", *(f"{name}>" for name in names), *columns)
    first = next((row["step_ns"] for row in rows if "step_ns" in row), 0)
    for row in rows:
        values = [_axis_value(name, row[name]) for name in names]
        if "step_ns" not in row:
            reason = re.split("[;:]", str(row["why_not"]))[0]  # the rest is in the other formats
            add_row(table, *values, "", "", "", "", "", reason, "")
            continue
        change = f"{row['step_ns'] / first - 1:+.1%}" if first and row["step_ns"] != first else ""
        figures = number(row["step_ns"] / 1e6), change, number(row["samples_per_s"]), number(row["peak_bytes"] / 2**20)
        kind = f"{'* ' if row['is_new_kind'] else ''}{row['plan']}"
        add_row(table, *values, *figures, f"{row['gap']:.2%}", kind, str(row["microbatch_size"]))
    return table


def _axis_value(name: str, value: float) -> str:
    return f"{number(value / 2**20)} MiB" if name == "memory" else f"{value:g}"
