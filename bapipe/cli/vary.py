"""The axes of `bapipe explore --vary` as texts, and the tables of its points."""

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from bapipe import report
from bapipe.cli.flags import with_flags
from bapipe.cli.markdown import write_markdown
from bapipe.cli.options import num_bytes
from bapipe.cli.printing import note, show_json, show_line, show_parts
from bapipe.cli.progress import status
from bapipe.errors import BapipeError
from bapipe.explorer.session import Session
from bapipe.explorer.state import MAX_FACTOR, MAX_SHOWN_DEVICES
from bapipe.explorer.vary import FIELDS, Axis, Point, SweepInterrupted, vary
from bapipe.planner.analysis.exchange import fixed_exchange_words
from bapipe.report.remarks import halved_words, scaled_words

INTEGERS = {"devices", "minibatch"}

MAX_POINTS = 10_000
"""Most values of a range."""

MAX_VALUE = 10**18
"""Largest number of bytes or samples."""

MIN_BYTES = 1000
"""Smallest memory of a device: less was meant in another unit."""

MAXIMA = {"link": MAX_FACTOR, "latency": MAX_FACTOR, "devices": MAX_SHOWN_DEVICES}
"""Largest value of each axis, if that is not `MAX_VALUE`."""


def parse_axis(text: str) -> Axis:
    """Returns the axis in a text such as link=0.5,1,2, devices=2..8 or memory=8GB,16GB.

    Raises:
        BapipeError: an unknown name, or values that it cannot have.
    """
    name, equals, values = text.partition("=")
    if not equals or name not in FIELDS:
        raise BapipeError(f"--vary {text}: want {', '.join(FIELDS)}, such as link=0.5,1,2 or devices=2..8")
    found = tuple(value for part in values.split(",") for value in _values(text, name, part.strip()))
    return Axis(name=name, values=found)


def _values(axis: str, name: str, text: str) -> Sequence[float]:
    """Returns the value in a text, or the values of a range; `axis` is the text that it is part of."""
    first, dots, last = text.partition("..") if name in INTEGERS else (text, "", "")
    low, high = _number(name, first), _number(name, last if dots else first)
    most = MAXIMA.get(name, MAX_VALUE)
    if low is None or high is None:
        fault = "is not a whole number" if name in INTEGERS else "is not a number"
    elif high < low:
        fault = "ends before it begins"
    elif low <= 0:
        fault = "has values that are not positive" if dots else "is not positive"
    elif name == "memory" and low < MIN_BYTES:
        fault = f"is {low:g} bytes"
    elif high > most:
        fault = f"goes beyond {most:,}" if dots else f"is more than {most:,}"
    elif high - low >= MAX_POINTS and dots:
        fault = f"has more than {MAX_POINTS:,} values"
    else:
        return range(int(low), int(high) + 1) if dots else (low,)
    example = {"memory": "memory=8GB,16GB", "devices": "devices=2..8"}.get(name, f"{name}=1,2,4")
    raise BapipeError(f"--vary {axis}: '{text}' {fault}: want values such as {example}")


def _number(name: str, text: str) -> float | None:
    """Returns the number in a text, whole for an axis that has such values only; None if there is none."""
    if name == "memory":
        return num_bytes(text)
    try:
        number = int(text) if name in INTEGERS else float(text)
    except ValueError:
        return None
    return number if number == number else None  # a NaN is not equal to itself


def show_points(
    session: Session,
    texts: Sequence[str],
    schedules: Sequence[str],
    layout: str,
    *,
    microbatch_size: int | None = None,
    exact: bool = False,
) -> None:
    """Plans at every point, and prints the points as a table, or as csv, json or markdown.

    Args:
        microbatch_size: that of all plans; None to search it.
        exact: search every point in full.

    Raises:
        SweepInterrupted: Ctrl-C came first; the points that were done by then are printed.
    """
    axes = [parse_axis(text) for text in texts]
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise BapipeError(f"--vary names '{max(names, key=names.count)}' twice: give all its values at once")
    interruption: SweepInterrupted | None = None
    with status("planning") as update:

        def progress(done: int, total: int) -> None:
            update(f"planning: {done} of {total} points")

        try:
            points = vary(session, axes, schedules, progress, microbatch_size=microbatch_size, exact=exact)
        except SweepInterrupted as stop:
            interruption, points = stop, stop.points
    points = [replace(point, why_not=with_flags(point.why_not)) for point in points]
    if points:
        _show(names, points, layout)
        if interruption is None and layout == "table":
            _show_worth(names, points, exact=exact)
        _show_remarks(names, points, session, show_line if layout == "table" else note)
    if interruption is not None:
        raise interruption


def _show(names: Sequence[str], points: Sequence[Point], layout: str) -> None:
    if layout == "json":
        show_json([point.row for point in points])
    elif layout == "table":
        show_parts([report.variations_table(names, [point.row for point in points])])
    else:
        _write_cells(names, points, layout)


def _show_worth(names: Sequence[str], points: Sequence[Point], *, exact: bool) -> None:
    """Prints what the values of each axis are worth, which only all points together tell."""
    if points[0].plan is not None:
        show_parts(["worth the most, each by itself:"])
    for words in report.worth_words(names, [point.row for point in points]):
        show_line(words)
    if not exact and any(point.plan is not None and point.plan.certificate.gap for point in points):
        show_line("the searches were short: each plan is at most its gap above the bound; --exact searches in full")


def _show_remarks(names: Sequence[str], points: Sequence[Point], session: Session, show: Callable[[str], None]) -> None:
    """Shows what a reader should know of the figures that the plans of all points rest on."""
    plans = [point.plan for point in points if point.plan is not None]
    fixed = fixed_exchange_words(session.cluster.devices) if {"link", "latency"} & set(names) else ""
    remarks = *scaled_words(plans, session.profiles), *halved_words(plans, session.profiles), fixed
    for words in filter(None, remarks):
        show(with_flags(words))


def _write_cells(names: Sequence[str], points: Sequence[Point], layout: str) -> None:
    """Prints the points as CSV, or as a table in Markdown, with the units of the columns' names."""
    rows = [point.row for point in points]
    # The figures of plans first, whichever point has none.
    rows_of_plans_first = sorted(rows, key=lambda row: "why_not" in row)
    columns = list(dict.fromkeys([*names, *(column for row in rows_of_plans_first for column in row)]))
    if layout == "csv":
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
        return
    write_markdown(columns, rows)


def csv_cell(value: object) -> object:
    """Returns a value for a cell of CSV; text that a spreadsheet would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
