"""A plan or a profile as one HTML page that loads nothing else: tables, timelines to scale, and memory over time.

The document and its style sheet are files in `templates/`; the drawings are in `timeline_svg` and `layer_diagram`.
"""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from rich.table import Table

from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.report import html_text, ms, render_plan, render_profile
from bapipe.report.layer_diagram import layer_svg
from bapipe.report.timeline_svg import gantt_legend, gantt_svg, memory_legend, memory_svg
from bapipe.simulator.timeline import Timeline


def plan_page(plan: Plan, timelines: Sequence[tuple[str, Timeline]]) -> bytes:
    """Returns the page of a plan, with named timelines; tables use the first of them."""
    body = [f"<h1>{html_text(plan.model)}</h1>"]
    body += [_block(block) for block in render_plan(plan, timelines[0][1] if timelines else None)]
    for title, timeline in timelines:
        body += [
            f"<h2>{html_text(title)}: {ms(timeline.step_ns)}</h2>",
            _legend(gantt_legend(timeline)) + "<p>Numbers are micro-batches; later stages of a device are paler.</p>",
            gantt_svg(timeline),
        ]
        if timeline.usage:
            capacity_bytes = {device.name: device.memory_bytes for device in plan.cluster.devices}
            body += [
                f"<h2>Memory over time, {html_text(title)}</h2>",
                _legend(memory_legend()),
                memory_svg(timeline, capacity_bytes),
            ]
    return _document(plan.model, body)


def profile_page(profile: ModelProfile) -> bytes:
    """Returns the page of a profile: the model drawn with the tensors that cross each cut, then its tables."""
    size = max(m.microbatch_size for m in profile.measurements)
    body = [f"<h1>{html_text(profile.model)}</h1>", f"<h2>Shape, at micro-batches of {size}</h2>", layer_svg(profile)]
    return _document(profile.model, [*body, *(_block(block) for block in render_profile(profile))])


def _document(title: str, body: Sequence[str]) -> bytes:
    templates = files("bapipe.report") / "templates"
    page = Template((templates / "page.html").read_text(encoding="utf-8"))
    style = (templates / "page.css").read_text(encoding="utf-8")
    return page.substitute(title=html_text(title), style=style, body="\n".join(body)).encode()


def _block(block: Table | str) -> str:
    """Returns a paragraph or a table of the text report as HTML."""
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    classes = [' class="n"' if column.justify == "right" else "" for column in block.columns]
    heads = "".join(
        f"<th{c}>{escape(str(column.header))}</th>" for c, column in zip(classes, block.columns, strict=True)
    )
    rows = zip(*(column.cells for column in block.columns), strict=True)
    lines = ["".join(f"<td{c}>{escape(str(cell))}</td>" for c, cell in zip(classes, row, strict=True)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(str(block.title))}</caption><tr>{heads}</tr>{body}</table>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """Returns a legend of (colour, name)."""
    spans = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in entries)
    return f'<div class="key">{spans}</div>'
