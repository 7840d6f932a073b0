"""What `bapipe compare --strategies` prints and writes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bapipe.cli.flags import with_flags
from bapipe.cli.inputs import read_or_assume_cluster
from bapipe.cli.markdown import write_markdown
from bapipe.cli.outputs import write_output_bytes
from bapipe.cli.printing import show_json, show_parts, show_written
from bapipe.cli.progress import status, stops_on_interrupt
from bapipe.explorer.pages import strategies_page
from bapipe.formats.profile import ModelProfile
from bapipe.planner.analysis.strategies import compare_strategies
from bapipe.planner.compute.deadline import deadline_of
from bapipe.planner.inputs.device_grouping import profiles_with_fewest_threads
from bapipe.planner.inputs.options import PlanOptions
from bapipe.report.strategies import StrategyTable, render_strategies


def show_strategies(
    profiles: Sequence[ModelProfile],
    cluster: Path | None,
    num_devices: int | None,
    options: PlanOptions,
    whole: Sequence[str],
    html: Path | None,
    layout: str,
) -> None:
    """Compares the strategies, and prints them as a table, as `json` or as `markdown`."""
    devices = read_or_assume_cluster(profiles_with_fewest_threads(profiles), cluster, num_devices)
    deadline = deadline_of(options.time_limit_s)
    with status("planning") as update, stops_on_interrupt(deadline):
        found = compare_strategies(
            profiles,
            devices,
            options,
            whole=whole,
            deadline=deadline,
            progress=lambda name: update(f"planning: {name}"),
        )
    table = StrategyTable(
        strategies={name: replace(each, why_not=with_flags(each.why_not)) for name, each in found.items()},
        cluster=devices,
        minibatch_size=options.minibatch_size,
    )
    if html is not None:
        write_output_bytes(html, strategies_page(table))
    rows = table.rows()
    if layout == "json":
        show_json(rows)
    elif layout == "markdown":
        write_markdown(list(rows[0]), rows)
    else:
        show_parts(render_strategies(table))
        if html is not None:
            show_written(html)
