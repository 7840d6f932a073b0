"""The HTML document of the page: its style sheet and scripts are in it, so that it loads nothing."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

import msgspec

from bapipe.explorer.state import State

if TYPE_CHECKING:
    from bapipe.explorer.session import Session

SCRIPTS = "format.js", "axis.js", "layers.js", "timeline.js", "memory.js", "tables.js", "explorer.js"
"""In the order in which they run; each adds to the one global name `explorer`."""


def live_page(model: str) -> bytes:
    """Returns the page that asks its server for everything."""
    return _document(model, {"live": True})


def standalone_page(session: "Session", state: State, tried: Sequence[tuple[str, State]]) -> bytes:
    """Returns a page without a server: it shows the plans that were tried, the given one first."""
    shown = [(name, one) for name, one in tried if one != state]
    title = next((name for name, one in tried if one == state), "plan")
    states = [(title, state), *shown]
    data = {
        "live": False,
        "model": session.model(),
        "tried": [
            {"name": name, "state": msgspec.to_builtins(one), "answer": session.judge(one)} for name, one in states
        ],
        "layers": {str(one.microbatch_size): session.layers(one.microbatch_size) for _, one in states},
    }
    return _document(session.profile.model, data)


def _document(title: str, data: dict[str, object]) -> bytes:
    folder = files("bapipe.explorer") / "page"

    def text(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    # No text of a file may end the script element: < cannot occur in JSON but inside of a string.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    scripts = "\n".join(text(name) for name in SCRIPTS)
    page = Template(text("page.html"))
    return page.substitute(title=escape(title), style=text("page.css"), data=encoded, scripts=scripts).encode()
