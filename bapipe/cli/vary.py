"""The axes of `bapipe explore --vary` as texts, and the tables of its points."""

import csv
import re
import sys
from collections.abc import Sequence

from bapipe import report
from bapipe.cli.markdown import write_markdown
from bapipe.cli.options import num_bytes
from bapipe.cli.progress import err, show_json, show_line, show_parts
from bapipe.errors import BapipeError
from bapipe.explorer.session import Session
from bapipe.explorer.state import MAX_DEVICES
from bapipe.explorer.vary import FIELDS, Axis, Point, vary

INTEGERS = {"devices", "minibatch"}
MAX_POINTS = 10_000


def parse_axis(text: str) -> Axis:
    """Returns the axis in a text such as link=0.5,1,2, devices=2..8 or memory=8GB,16GB.

    Raises:
        BapipeError: an unknown name, or values that it cannot have.
    """
    name, equals, values = text.partition("=")
    if not equals or name not in FIELDS:
        raise BapipeError(f"--vary {text}: want {', '.join(FIELDS)}, such as link=0.5,1,2 or devices=2..8")
    try:
        found = tuple(value for part in values.split(",") for value in _values(name, part.strip()))
    except ValueError:
        found = ()
    limit = MAX_DEVICES if name == "devices" else 10**18
    if not found or min(found) <= 0 or max(found) > limit:
        example = {"memory": "memory=8GB,16GB", "devices": "devices=2..8"}.get(name, f"{name}=1,2,4")
        raise BapipeError(f"--vary {text}: want positive values, such as {example}")
    return Axis(name=name, values=found)


def _values(name: str, text: str) -> Sequence[float]:
    if name == "memory":
        return (num_bytes(text),)
    if name not in INTEGERS:
        return (float(text),)
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low, high = int(match[1]), int(match[2])
        return range(low, min(high, low + MAX_POINTS) + 1)
    return (int(text),)


def show_points(
    session: Session, texts: Sequence[str], schedules: Sequence[str], layout: str, *, exact: bool = False
) -> None:
    """Plans at every point, and prints the points as a table, or as csv, json or markdown.

    Args:
        exact: search every point in full.
    """
    axes = [parse_axis(text) for text in texts]
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise BapipeError(f"--vary names '{max(names, key=names.count)}' twice: give all its values at once")
    with err.status("planning") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"planning: {done} of {total} points")

        points = vary(session, axes, schedules, progress, exact=exact)
    if layout == "json":
        show_json([point.row for point in points])
    elif layout == "table":
        rows = [point.row for point in points]
        show_parts([report.variations_table(names, rows), "worth the most, each by itself:"])
        for words in report.worth_words(names, rows):
            show_line(words)
        if not exact and any(point.plan is not None and point.plan.certificate.gap for point in points):
            show_line("the searches were short: each plan is at most its gap above the bound; --exact searches in full")
    else:
        _write_cells(names, points, layout)


def _write_cells(names: Sequence[str], points: Sequence[Point], layout: str) -> None:
    """Prints the points as CSV, or as a table in Markdown, with the units of the columns' names."""
    rows = [point.row for point in points]
    columns = [*names, *dict.fromkeys(column for row in rows for column in row if column not in names)]
    if layout == "csv":
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
        return
    write_markdown(columns, rows)


def csv_cell(value: object) -> object:
    """Returns a value for a cell of CSV; text that a spreadsheet would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
