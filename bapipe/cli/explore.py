"""The command that shows a plan on a page and lets a user change it: explore."""

import gc
import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bapipe.cli.edit_command import command_lines
from bapipe.cli.inputs import (
    check_one_source_of_devices,
    is_file,
    profiles_by_kind,
    profiles_of_plan,
    read_or_assume_cluster,
    read_profiles,
    refuse_arguments,
)
from bapipe.cli.options import (
    DEFAULT_MINIBATCH_SIZE,
    SCHEDULES,
    Arguments,
    AsJson,
    ClusterFile,
    Devices,
    MinibatchIfGiven,
    schedule_names,
)
from bapipe.cli.printing import note, out
from bapipe.cli.vary import show_points
from bapipe.errors import BapipeError
from bapipe.explorer.server import Server, check_port
from bapipe.explorer.session import Session
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read_any
from bapipe.formats.plan import Plan
from bapipe.planner.inputs.profiles import by_kind
from bapipe.report.chrome_trace import recorded_timelines

DEFAULT_SOURCES = "plan.json", "profile.json"

DEFAULT_SCHEDULES = "1f1b,gpipe"


def explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN|PROFILE...|MODEL]",
            help="Default: plan.json, or else profile.json, in this folder.",
            show_default=False,
        ),
    ] = None,
    cluster: ClusterFile = None,
    devices: Devices = None,
    minibatch_size: MinibatchIfGiven = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="With a plan: a profile that it was made from, if the cache has it no more."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="With a plan: a trace that run wrote, to draw on the same axis. May be repeated."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the page. Default: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Whether to open the page.")] = True,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            help="Instead of the page, print the best plan at each of some values: link=0.5,1,2 or latency=1,10 "
            "(factors), devices=2..8, memory=8GB,16GB, minibatch=32,64. May be repeated.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            help=f"With --vary: schedules to try, of {SCHEDULES}. Default: {DEFAULT_SCHEDULES}.",
        ),
    ] = None,
    microbatch_size: Annotated[
        int | None,
        typer.Option("--microbatch-size", min=1, help="With --vary: fix the micro-batch size, in samples."),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="With --vary: search every point as plan does. Else short searches end within 0.5 % of the bound, or "
            "show a larger gap.",
        ),
    ] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="With --vary: print CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="With --vary: print a table in Markdown.")] = False,
    arg: Arguments = None,
) -> None:
    """Show a plan on a page of this machine, change it with the mouse, and see what happens."""
    check_one_source_of_devices(cluster, devices)
    sources = sources or _default_sources()
    layouts = [name for name, wanted in (("json", as_json), ("csv", as_csv), ("markdown", as_markdown)) if wanted]
    if len(layouts) > 1 or (layouts and not vary):
        raise BapipeError(f"--{layouts[-1]} goes with --vary, and with no other format")
    of_tables = ("exact", exact), ("schedule", schedule is not None), ("microbatch-size", microbatch_size is not None)
    for flag, is_given in of_tables:
        if is_given and not vary:
            raise BapipeError(f"--{flag} goes with --vary")
    for flag, is_given in (("port", port != 0), ("no-browser", not browser), ("trace", bool(trace))):
        if is_given and vary:
            raise BapipeError(f"--{flag} is for the page, which --vary does not open: leave out one of them")
    if not vary:
        check_port(port)  # before a model is measured
    session = _session(sources, cluster, devices, minibatch_size, profile or [], trace or [], arg)
    if vary:
        show_points(
            session,
            vary,
            schedule_names(schedule or DEFAULT_SCHEDULES),
            layouts[0] if layouts else "table",
            microbatch_size=microbatch_size,
            exact=exact,
        )
        return
    with Server(session, port) as server:
        out.print(server.address, highlight=False, soft_wrap=True)
        note("the page is for this machine alone; press Ctrl-C to end")
        if browser and not webbrowser.open(server.address):
            note("no browser could be opened: open the address above")
        gc.freeze()  # what lives as long as the page need not be looked at again while a cut moves
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("ended")


def _default_sources() -> list[str]:
    for name in DEFAULT_SOURCES:
        if Path(name).is_file():
            return [name]
    known = " or ".join(DEFAULT_SOURCES)
    raise BapipeError(f"nothing to explore: name a plan, a profile or a model; here is no {known}")


def _session(
    sources: list[str],
    cluster: Path | None,
    devices: int | None,
    minibatch_size: int | None,
    profiles: list[Path],
    traces: list[Path],
    arguments: list[str] | None,
) -> Session:
    """Returns the session of a plan, of profiles, or of a model that is profiled first."""
    given = read_any(Path(sources[0])) if len(sources) == 1 and is_file(sources[0]) else None
    if isinstance(given, Cluster):
        raise BapipeError(f"{sources[0]} is a cluster: name a plan, a profile or a model, and this file with --cluster")
    if isinstance(given, Plan):
        refuse_arguments(arguments, "plan")
        if cluster is not None or devices is not None or minibatch_size is not None:
            raise BapipeError(
                "a plan holds its cluster and its mini-batch: leave out --cluster, --devices and --minibatch-size, or "
                "name a profile"
            )
        source = (sources[0], *(word for path in profiles for word in ("--profile", str(path))))
        commands = partial(command_lines, given=given.cluster, source=source, start=given)
        recorded = recorded_timelines(given, traces)
        return Session(profiles_of_plan(given, read_profiles(profiles)), given.cluster, given, commands, recorded)
    if traces:
        raise BapipeError("--trace goes with a plan")
    if profiles:
        raise BapipeError("--profile goes with a plan; name the profiles without it")
    if given is None:
        of_kind = profiles_by_kind(sources, arguments)
    else:
        refuse_arguments(arguments, "profile")
        of_kind = by_kind([given])
    size = minibatch_size or DEFAULT_MINIBATCH_SIZE
    words = [word for pair in arguments or () for word in ("--arg", pair)]
    words += ["--cluster", str(cluster)] if cluster is not None else []
    words += ["--devices", str(devices)] if devices is not None else []
    source = (*sources, *words, "--minibatch-size", str(size))
    on = read_or_assume_cluster(of_kind, cluster, devices)
    return Session(of_kind, on, size, partial(command_lines, given=on, source=source, start=None))
