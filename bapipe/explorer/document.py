"""The HTML document of the page: its style sheet, scripts and data are in it, so that it loads nothing."""

import base64
import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

import msgspec

from bapipe.explorer.state import State
from bapipe.report import html_text

if TYPE_CHECKING:
    from bapipe.explorer.answers import Json
    from bapipe.explorer.session import Session

SCRIPTS = (
    "format.js",
    "svg_context.js",
    "axis.js",
    "layers.js",
    "rows.js",
    "timeline.js",
    "memory.js",
    "tables.js",
    "charts.js",
    "analyses.js",
    "compare.js",
    "tabs.js",
    "controls.js",
    "explorer.js",
)
"""In the order in which they run; each adds to the one global name `explorer`."""

MAX_BYTES_OF_STEPS = 24 * 2**20
"""Maximum size of the steps in a file, before they are compressed to about a quarter; the first one is always there."""


def live_page(model: str) -> bytes:
    """Returns the page that asks its server for everything."""
    return document(model, {"live": True})


def standalone_page(
    session: "Session",
    state: State,
    tried: Sequence[tuple[str, State]],
    kept: "Mapping[str, Json] | None" = None,
) -> bytes:
    """Returns a page without a server: it shows the plans that were tried, the given one first.

    Args:
        kept: results of analyses, by name; the plans of a Pareto front and of curves can be opened on the page, too.
    """
    kept = kept or {}
    title = next((name for name, one in tried if one == state), "plan")
    named = [(title, state), *((name, one) for name, one in tried if one != state)]
    points: list[Any] = [point for found in kept.values() for point in _points(found)]
    named += [("", msgspec.convert(point["state"], State)) for point in points if "state" in point]
    entries = within_limit(
        {"name": name, "state": msgspec.to_builtins(one), "answer": session.judge(one)} for name, one in named
    )
    sizes = {one.microbatch_size for _, one in named}
    data = {
        "live": False,
        "model": session.model(),
        "tried": list(entries),
        "layers": {str(size): session.layers(size) for size in sorted(sizes)},
        "kept": kept,
    }
    return document(session.profile.model, data)


def _points(found: "Json") -> Any:
    """The points of a Pareto front or a curve; none of an explanation."""
    return found.get("points", ())


def within_limit(entries: "Iterable[Json]") -> "Iterator[Json]":
    """Yields entries as long as their sizes add up to at most `MAX_BYTES_OF_STEPS`, at least the first one."""
    used = 0
    for entry in entries:
        size = len(msgspec.json.encode(entry))
        if used and used + size > MAX_BYTES_OF_STEPS:
            return
        used += size
        yield entry


def document(title: str, data: "Json") -> bytes:
    """Returns the page with its data, compressed: a step of 64 devices would take megabytes."""
    encoded = base64.b64encode(gzip.compress(msgspec.json.encode(data), 6, mtime=0)).decode()
    scripts = "\n".join(_text(name) for name in SCRIPTS)
    page = Template(_text("page.html"))
    return page.substitute(title=html_text(title), style=_text("page.css"), data=encoded, scripts=scripts).encode()


def table_document(title: str, table: str) -> bytes:
    """Returns a page of a table, which is HTML already, in the same style; it has no scripts."""
    page = Template(_text("table.html"))
    return page.substitute(title=html_text(title), style=_text("page.css"), table=table).encode()


def _text(name: str) -> str:
    return (files("bapipe.explorer") / "page" / name).read_text(encoding="utf-8")
