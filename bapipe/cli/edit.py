"""The command that changes a plan by hand: edit."""

from pathlib import Path
from typing import Annotated

import typer

import bapipe
from bapipe.cli.inputs import profiles_of_plan, read_profiles
from bapipe.cli.options import AsJson
from bapipe.cli.outputs import check_kept_copy, check_output, write_output
from bapipe.cli.printing import note, out, show_json, show_written
from bapipe.errors import BapipeError
from bapipe.formats.codec import read
from bapipe.formats.plan import Plan
from bapipe.planner.edit import Changes
from bapipe.planner.make import judge
from bapipe.report.plan_changes import changes_json, render_changes
from bapipe.schedules import ALL


def edit(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    move: Annotated[
        list[str] | None,
        typer.Option("--move", help="Move a cut: 'stage 1 +3 layers' or 'stage 1 -3 layers'. May be repeated."),
    ] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option("--cut", help="Replace all cuts: the first layer of a stage after the first. May be repeated."),
    ] = None,
    no_cuts: Annotated[bool, typer.Option("--no-cuts", help="Remove all cuts: one stage has all layers.")] = False,
    schedule: Annotated[str | None, typer.Option("--schedule", help=f"Use another schedule: {', '.join(ALL)}.")] = None,
    microbatch_size: Annotated[
        int | None, typer.Option("--microbatch-size", min=1, help="Use another micro-batch size, in samples.")
    ] = None,
    minibatch_size: Annotated[
        int | None, typer.Option("--minibatch-size", min=1, help="Use another number of samples per optimizer step.")
    ] = None,
    place: Annotated[
        list[str] | None,
        typer.Option("--place", help="Run a stage elsewhere: 'stage 1 on gpu2,gpu3'. May be repeated."),
    ] = None,
    swap: Annotated[
        tuple[str, str] | None,
        typer.Option("--swap", metavar="DEVICE DEVICE", help="Exchange the stages of two devices: --swap gpu0 gpu3."),
    ] = None,
    recompute: Annotated[
        list[int] | None,
        typer.Option("--recompute", min=0, help="The number of a stage that recomputes its forward. May be repeated."),
    ] = None,
    recompute_layer: Annotated[
        list[str] | None,
        typer.Option(
            "--recompute-layer", help="A layer to recompute; of its stage, the layers so named only. May be repeated."
        ),
    ] = None,
    keep: Annotated[
        list[int] | None,
        typer.Option("--keep", min=0, help="The number of a stage that keeps its activations. May be repeated."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="Profile of a kind of device. Default: the plan's, if it is in the cache."),
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write the changed plan to.", dir_okay=False)
    ] = None,
) -> None:
    """Change a plan by hand, and see what that changes."""
    if output is not None:
        check_output(output, *(profile or ()))  # the plan may be changed in its place
        check_kept_copy(output, plan)
    if cut and no_cuts:
        raise BapipeError(f"--cut {cut[0]} and --no-cuts: want one of them")
    before = read(plan, Plan)
    profiles = profiles_of_plan(before, read_profiles(profile))
    before = judge(before, profiles, bapipe.simulate(before, profiles))
    after = bapipe.edit(
        before,
        profiles,
        Changes(
            cuts=() if no_cuts else cut,
            schedule=schedule,
            minibatch_size=minibatch_size,
            microbatch_size=microbatch_size,
            place=place or (),
            swap=swap,
            moves=move or (),
            recompute=recompute or (),
            keep=keep or (),
            recompute_layers=recompute_layer or (),
        ),
    )
    if output is not None:
        write_output(output, after)
    if as_json:
        show_json(changes_json(before, after))
        return
    for line in render_changes(before, after):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        show_written(output)
    else:
        note("nothing was written: name a file with --output to keep the changed plan")
