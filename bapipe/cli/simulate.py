"""The command `bapipe simulate`."""

from pathlib import Path
from typing import Annotated

import typer

import bapipe
from bapipe import report
from bapipe.cli.inputs import note_other_profiles, profiles_of_plan, read_profiles
from bapipe.cli.options import AsJson
from bapipe.cli.outputs import check_output, write_output_bytes
from bapipe.cli.printing import show_json, show_parts, show_timeline
from bapipe.formats.codec import read
from bapipe.formats.plan import Plan
from bapipe.planner.inputs.profiles import by_kind
from bapipe.planner.make import judge


def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    profiles: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PROFILE...",
            help="One profile per kind of device. Default: those of the plan, if the cache has them.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the predicted timeline to this file, as a Chrome trace.")
    ] = None,
) -> None:
    """Predict the time and memory of one step of a plan."""
    if trace is not None:
        check_output(trace, plan, *(profiles or []))
    to_simulate = read(plan, Plan)
    if profiles:
        of_kind = by_kind(read_profiles(profiles))
    else:
        of_kind = profiles_of_plan(to_simulate, [], named="behind the plan's")
    timeline = bapipe.simulate(to_simulate, of_kind)
    note_other_profiles(to_simulate, of_kind)
    judged = judge(to_simulate, of_kind, timeline)
    if trace is not None:
        write_output_bytes(trace, report.encode_trace([("predicted", timeline)]))
    if as_json:
        show_json(judged.prediction)
        return
    show_parts(report.render_plan(judged, timeline))
    show_timeline(timeline)
