"""Commands that plan, judge and draw: plan, simulate, show."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import bapipe
from bapipe import report
from bapipe.cli.options import (
    Arguments,
    AsJson,
    ClusterFile,
    Devices,
    MemoryLimit,
    Microbatch,
    Minibatch,
    Output,
    Recompute,
    Replicas,
    Sources,
    all_profiles_of,
    check_said_once,
    cluster_of,
    profiles_of,
    threads_here,
)
from bapipe.cli.progress import err, note, out, pareto_front, planning_status, show_parts
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import check_writable, fingerprint, read, read_any, write, write_bytes
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.compare import compare as compare_strategies
from bapipe.planner.device_grouping import profiles_used_by, profiles_with_fewest_threads
from bapipe.planner.inputs import by_kind
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan import evaluate_pinned, plan_cached, unit_cost_timeline
from bapipe.planner.plan import explain as explain_plan
from bapipe.report.chrome_trace import read_trace
from bapipe.report.html import plan_page, profile_page
from bapipe.report.profile_diff import render_profile_diff
from bapipe.schedules import ALL, SIDE_BY_SIDE

RUNNABLE = ",".join(name for name in ALL if name not in SIDE_BY_SIDE)
"""The schedules that torch can run."""


class Objective(StrEnum):
    """What a plan is to be best at."""

    STEP = "step"
    THROUGHPUT = "throughput"


def plan(
    sources: Sources,
    cluster: ClusterFile = None,
    devices: Devices = None,
    minibatch_size: Minibatch = 32,
    microbatch_size: Microbatch = None,
    schedule: Annotated[str, typer.Option("--schedule", help=f"From: {', '.join(ALL)}; search looks for an order.")] = (
        "1f1b,gpipe"
    ),
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Fix the number of stages.")] = None,
    memory_limit: MemoryLimit = None,
    objective: Annotated[
        Objective, typer.Option("--objective", help="The time of one step, or the work of the most loaded device.")
    ] = Objective.STEP,
    memory_margin: Annotated[
        float, typer.Option("--memory-margin", min=0.0, max=0.99, help="Share of each device's memory to leave free.")
    ] = 0.0,
    replicas: Replicas = True,
    recompute: Recompute = True,
    constraint: Annotated[
        list[str] | None,
        typer.Option("--constraint", help="'LAYER with|without LAYER' or 'LAYER on DEVICE,DEVICE'; may be repeated."),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0.0, help="Seconds to search; else as long as takes some.")
    ] = None,
    pin: Annotated[
        Path | None, typer.Option("--pin", help="Judge this plan, made by hand, and bound it by all other plans.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what limits the plan, and what would help.")] = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Also list the front of step time, peak memory and number of devices.")
    ] = False,
    as_json: AsJson = False,
    arg: Arguments = None,
    output: Output = Path("plan.json"),
) -> None:
    """Find the fastest plan and prove how good it is."""
    check_said_once(cluster, devices)
    if pin is not None and (cluster is not None or devices is not None):
        raise BapipeError("a pinned plan holds its cluster: leave --cluster and --devices out")
    if objective is not Objective.STEP and (pin is not None or explain or pareto):
        raise BapipeError("--pin, --explain and --pareto are for --objective step: leave them or --objective out")
    check_writable(output)
    measured = all_profiles_of(sources, arg, threads_here() if cluster is None and devices is None else (1,))
    pinned = read(pin, Plan) if pin is not None else None
    where = (
        pinned.cluster if pinned is not None else cluster_of(profiles_with_fewest_threads(measured), cluster, devices)
    )
    options = PlanOptions(
        minibatch_size=minibatch_size if pinned is None else pinned.minibatch_size,
        microbatch_size=microbatch_size,
        schedules=[name.strip() for name in schedule.split(",")],
        num_stages=stages,
        memory_limit_bytes=memory_limit,
        memory_margin=memory_margin,
        replicas=replicas,
        recompute=recompute,
        constraints=constraint or (),
        objective=objective.value,
    )
    with planning_status() as progress:
        if pinned is not None:
            profiles = by_kind(measured)
            decided = evaluate_pinned(pinned, profiles, options, time_limit_s=time_limit, progress=progress)
        else:
            decided = plan_cached(measured, where, options, time_limit_s=time_limit, progress=progress)
            profiles = profiles_used_by(decided, measured)
    write(output, decided)
    words: tuple[str, ...] = ()
    if explain:
        with err.status("planning again with 10 % more memory"):
            words = explain_plan(decided, profiles, options, time_limit_s=time_limit)
    front = pareto_front(profiles, decided.cluster, options) if pareto else ()
    if as_json:
        sys.stdout.write(json.dumps(report.plan_json(decided, words, front)) + "\n")
        return
    timeline = bapipe.simulate(decided, profiles)
    show_parts(report.render_plan(decided, timeline))
    out.print(report.gantt(timeline, out.width), highlight=False, no_wrap=True)
    for sentence in words:
        out.print(sentence, highlight=False, markup=False)
    if front:
        show_parts([report.pareto_table(front)])
    out.print(f"wrote {output}", highlight=False)


def compare(
    sources: Sources,
    cluster: ClusterFile = None,
    devices: Devices = None,
    minibatch_size: Minibatch = 32,
    microbatch_size: Microbatch = None,
    schedule: Annotated[str, typer.Option("--schedule", help=f"From: {', '.join(ALL)}.")] = RUNNABLE,
    memory_limit: MemoryLimit = None,
    replicas: Replicas = True,
    recompute: Recompute = True,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0.0, help="Seconds for each search; else as long as takes some.")
    ] = None,
    as_json: AsJson = False,
    arg: Arguments = None,
) -> None:
    """Set every strategy side by side: the best plan of each schedule, one device, data parallelism, equal layers."""
    check_said_once(cluster, devices)
    profiles = profiles_of(sources, arg)
    where = cluster_of(profiles, cluster, devices)
    options = PlanOptions(
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        schedules=[name.strip() for name in schedule.split(",")],
        memory_limit_bytes=memory_limit,
        replicas=replicas,
        recompute=recompute,
    )
    with err.status("planning") as status:
        found = compare_strategies(
            profiles, where, options, time_limit_s=time_limit, tell=lambda name: status.update(f"planning: {name}")
        )
    if as_json:
        sys.stdout.write(json.dumps(report.comparison_json(found.plans, found.others, found.failed)) + "\n")
        return
    show_parts(report.render_comparison(found.plans, found.others, found.failed))


def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    profiles: Annotated[list[Path], typer.Argument(help="Profiles, one a device kind.")],
    as_json: AsJson = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the timeline as a Chrome trace.")] = None,
) -> None:
    """Predict one step of a plan: its timeline, its memory."""
    given = read(plan, Plan)
    known = by_kind([read(path, ModelProfile) for path in profiles])
    timeline = bapipe.simulate(given, known)
    for kind, found in known.items():
        if given.profiles.get(kind) not in (None, fingerprint(found)):
            note(f"the plan was made from another {kind} profile of {given.model}")
    prediction = timeline.prediction(given.minibatch_size)
    if trace is not None:
        write_bytes(trace, report.encode_trace([("predicted", timeline)]))
    if as_json:
        sys.stdout.write(msgspec.json.encode(prediction).decode() + "\n")
        return
    show_parts(report.render_plan(msgspec.structs.replace(given, prediction=prediction), timeline))
    out.print(report.gantt(timeline, out.width), highlight=False, no_wrap=True)


def show(
    file: Annotated[Path, typer.Argument(help="Profile, cluster or plan file.")],
    other: Annotated[Path | None, typer.Argument(help="A second profile, to see what changed.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a plan or a profile as an HTML page.")] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="With a plan: draw a trace of simulate or run; may be repeated."),
    ] = None,
) -> None:
    """Draw a file: a profile's layers, a cluster's links, a plan's stages and order; or what two profiles differ in."""
    if other is not None:
        if html is not None or trace:
            raise BapipeError("--html and --trace go with a plan, not with two profiles")
        show_parts(render_profile_diff(read(file, ModelProfile), read(other, ModelProfile)))
        return
    found = read_any(file)
    if not isinstance(found, Plan) and trace:
        raise BapipeError(f"--trace goes with a plan; {file} is none")
    if html is not None:
        if isinstance(found, Cluster):
            raise BapipeError(f"--html goes with a plan or a profile; {file} is neither")
        check_writable(html)
    if isinstance(found, ModelProfile):
        show_parts(report.render_profile(found))
        if html is not None:
            write_bytes(html, profile_page(found))
            out.print(f"wrote {html}", highlight=False)
    elif isinstance(found, Cluster):
        show_parts(report.render_cluster(found))
    else:
        timelines = [named for path in trace or () for named in read_trace(path)]
        if not timelines:
            timelines = [
                ("order, not to scale (F, I and W take 1 ms, B 2 ms, transfers nothing)", unit_cost_timeline(found))
            ]
        show_parts(report.render_plan(found))
        for title, timeline in timelines:
            out.print(f"{title}:", highlight=False)
            out.print(report.gantt(timeline, out.width), highlight=False, no_wrap=True)
        if html is not None:
            write_bytes(html, plan_page(found, timelines))
            out.print(f"wrote {html}", highlight=False)
