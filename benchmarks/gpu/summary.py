"""The results of all parts as tables in Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def summary(results: Mapping[str, Sequence[Row]]) -> str:
    """Returns the tables, and the errors of what has failed."""
    sections = [
        _facts(_of(results, "facts")),
        _correct(results),
        _table("Two ranks on one device", _of(results, "two_ranks"), _TWO_RANKS),
        _table("Layers and memory of profiles, relative to the whole model", _of(results, "layers"), _LAYERS),
        _table("Steps of plans on one device, predicted and measured", _of(results, "steps"), _STEPS),
        _errors(results),
    ]
    return "\n".join(section for section in sections if section)


def _of(results: Mapping[str, Sequence[Row]], kind: str) -> list[Row]:
    """Returns the rows without errors of all parts of a kind."""
    parts = (rows for name, rows in results.items() if name.split(".")[0] == kind)
    return [row for rows in parts for row in rows if "error" not in row]


def _number(row: Row, name: str) -> str:
    value = row.get(name)
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


def _column(name: str) -> Callable[[Row], str]:
    return lambda row: _number(row, name)


def _megabytes(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name] / 1e6:,.1f}"


def _ratios(name: str) -> Callable[[Row], str]:
    return lambda row: ", ".join(f"{key} {ratio:.3f}" for key, ratio in row[name].items())


Columns = Mapping[str, Callable[[Row], str]]

_TWO_RANKS: Columns = {
    "transfers": _column("backend"),
    "schedule": _column("schedule"),
    "rank": _column("rank"),
    "right": _column("right"),
    "loss error": lambda row: f"{row['loss_error']:.1e}",
    "gradient error": lambda row: f"{row['gradient_error']:.1e}",
    "step ms": _column("step_ms"),
    "predicted MB": _megabytes("predicted_peak_bytes"),
    "measured MB": _megabytes("measured_peak_bytes"),
}

_LAYERS: Columns = {
    "model": _column("model"),
    "mode": _column("mode"),
    "size": _column("size"),
    "layers / whole": _column("layers_over_whole"),
    "whole ms": lambda row: _number(row, "wall_ms" if row["device_ms"] is None else "device_ms"),
    "wall / device": _column("wall_over_device"),
    "(I + W) / B": _column("split_over_backward"),
    "update ms": _column("update_ms"),
    "stash over": _ratios("stash_over"),
    "peak over": _ratios("peak_over"),
    "measured in s": _column("measured_in_s"),
}

_STEPS: Columns = {
    "model": _column("model"),
    "mode": _column("mode"),
    "size": _column("size"),
    "schedule": _column("schedule"),
    "stages": _column("stages"),
    "predicted ms": _column("predicted_ms"),
    "measured ms": _column("measured_ms"),
    "predicted / measured": _column("predicted_over_measured"),
    "of the device alone": lambda row: f"{row['device_alone_ms'] / row['measured_ms']:.3f}",
    "actions": _ratios("actions"),
    "updates": _ratios("updates"),
    "predicted MB": _megabytes("predicted_peak_bytes"),
    "measured MB": _megabytes("measured_peak_bytes"),
}


def _table(title: str, rows: Sequence[Row], columns: Columns) -> str:
    if not rows:
        return ""
    lines = [_line(columns), _line("---" for _ in columns)]
    lines += [_line(cell(row) for cell in columns.values()) for row in rows]
    return f"## {title}\n\n" + "".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _facts(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return "## Machine\n\n| fact | value |\n| --- | --- |\n" + "".join(
        _line((name, _number(rows[0], name))) for name in rows[0]
    )


def _correct(results: Mapping[str, Sequence[Row]]) -> str:
    rows = _of(results, "correct")
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row["gradient_error"])
    return (
        f"## Schedules with all stages on one device\n\n{sum(row['right'] for row in rows)} of {len(rows)} are right; "
        f"the largest gradient error is {worst['gradient_error']:.1e} ({worst['schedule']}).\n"
    )


def _errors(results: Mapping[str, Sequence[Row]]) -> str:
    lines = [f"- {name}: {row['error']}\n" for name, rows in results.items() for row in rows if "error" in row]
    return "## What failed\n\n" + "".join(lines) if lines else ""
