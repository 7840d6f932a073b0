"""The best plans at the points of a grid, as a table."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from rich.table import Table

from bapipe.report.formatting import add_row, empty_table
from bapipe.units import number, percent_change, percent_up


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
            reason = str(row["why_not"]).split("; ")[0]  # the rest is in the other formats
            add_row(table, *values, "", "", "", "", "", reason, "")
            continue
        change = percent_change(row["step_ns"] / first - 1) if first and row["step_ns"] != first else ""
        figures = number(row["step_ns"] / 1e6), change, _rate_in_words(row), number(row["peak_bytes"] / 2**20)
        kind = f"{'* ' if row['is_new_kind'] else ''}{row['plan']}"
        add_row(table, *values, *figures, percent_up(row["gap"]), kind, str(row["microbatch_size"]))
    return table


def worth_words(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns for each axis what its best value is worth with the first values of the others, the most first."""
    if "step_ns" not in rows[0]:
        return ["the first point, with which the others would be compared, has no plan"]
    found = []
    for name in names:
        others = {other: rows[0][other] for other in names if other != name}
        line = [row for row in rows if "step_ns" in row and others.items() <= row.items()]
        first, best = line[0], max(line, key=_rate)
        factor = _rate(best) / _rate(first)  # not a number if both are unlimited
        if factor > 1.005:
            values = f"{_axis_value(name, best[name])} instead of {_axis_value(name, first[name])}"
            found.append((factor, f"{name} {values}: {factor:.2f} times the samples/s"))
    found.sort(key=lambda each: -each[0])
    return [words for _, words in found] or ["no other value is worth more than 0.5 %, by itself"]


def _rate(row: Mapping[str, Any]) -> float:
    """Returns the samples per second; those of a step that takes no time are unlimited."""
    return float(row["samples_per_s"]) if row["step_ns"] else inf


def _rate_in_words(row: Mapping[str, Any]) -> str:
    return number(row["samples_per_s"]) if row["step_ns"] else "unlimited"


def _axis_value(name: str, value: float) -> str:
    return f"{number(value / 2**20)} MiB" if name == "memory" else f"{value:g}"
