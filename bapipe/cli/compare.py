"""The command `bapipe compare`."""

from pathlib import Path
from typing import Annotated

import typer

from bapipe import report
from bapipe.cli.flags import with_flags
from bapipe.cli.inputs import all_profiles, check_one_source_of_devices, profiles_by_kind, read_or_assume_cluster
from bapipe.cli.options import (
    SCHEDULES,
    Arguments,
    AsJson,
    ClusterFile,
    Devices,
    MemoryLimit,
    Microbatch,
    Minibatch,
    ModelDevice,
    Recompute,
    Replicas,
    Sources,
    TimeLimit,
    schedule_names,
)
from bapipe.cli.outputs import check_output, write_output_bytes
from bapipe.cli.printing import show_json, show_line, show_parts, show_written
from bapipe.cli.progress import status, stops_on_interrupt
from bapipe.cli.strategies import show_strategies
from bapipe.errors import BapipeError
from bapipe.planner.compare import compare as compare_schedules
from bapipe.planner.compute.deadline import deadline_of
from bapipe.planner.inputs.options import EVERY_SCHEDULE, PlanOptions
from bapipe.planner.inputs.validation import check_schedules
from bapipe.report.remarks import halved_words


def compare(
    sources: Sources,
    cluster: ClusterFile = None,
    devices: Devices = None,
    minibatch_size: Minibatch = 32,
    microbatch_size: Microbatch = None,
    schedule: Annotated[str, typer.Option("--schedule", help=f"Schedules to compare: {SCHEDULES}.")] = EVERY_SCHEDULE,
    memory_limit: MemoryLimit = None,
    replicas: Replicas = True,
    recompute: Recompute = True,
    time_limit: TimeLimit = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write the plans to this file, as an HTML page.")
    ] = None,
    strategies: Annotated[
        bool,
        typer.Option(
            "--strategies",
            help="Compare data, spatial, filter, channel and pipeline parallelism, data with spatial or filter, "
            "sharded data (ZeRO-3, FSDP), and the best plan of all.",
        ),
    ] = False,
    whole: Annotated[
        list[str] | None,
        typer.Option("--whole", metavar="LAYER", help="With --strategies: a layer that every member computes whole."),
    ] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="With --strategies: print it in Markdown.")] = False,
    arg: Arguments = None,
    device: ModelDevice = "cpu",
) -> None:
    """Compare the best plan of each schedule with the baselines.

    Plans may have replicas unless --no-replicas says otherwise: each row is what `bapipe plan --schedule` finds.

    The baselines: one device alone, data parallelism over all devices, stages with equal numbers of layers.
    With --strategies, those of ParaDL instead (arXiv:2104.09075): what their steps consist of, and how many devices
    each can use. --schedule is then for the pipeline and the best plan: the others have one stage.
    """
    check_one_source_of_devices(cluster, devices)
    if not strategies and (whole or as_markdown):
        raise BapipeError("--whole and --markdown go with --strategies")
    if as_json and as_markdown:
        raise BapipeError("--json and --markdown are two formats: give one of them")
    options = PlanOptions(
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        schedules=schedule_names(schedule),
        memory_limit_bytes=memory_limit,
        replicas=replicas,
        recompute=recompute,
        time_limit_s=time_limit,
    )
    check_schedules(options)  # before a model is measured
    if html is not None:
        check_output(html, *map(Path, sources), *([cluster] if cluster else []))
    if strategies:
        measured = all_profiles(sources, arg, (1,), device)
        layout = "json" if as_json else "markdown" if as_markdown else "table"
        show_strategies(measured, cluster, devices, options, whole or (), html, layout)
        return
    profiles = profiles_by_kind(sources, arg, device)
    devices_to_use = read_or_assume_cluster(profiles, cluster, devices)
    deadline = deadline_of(time_limit)
    with status("planning") as update, stops_on_interrupt(deadline):
        compared = compare_schedules(
            profiles,
            devices_to_use,
            options,
            deadline=deadline,
            progress=lambda name: update(f"planning: {name}"),
        )
    failed = {name: with_flags(why) for name, why in compared.failed.items()}
    if html is not None:
        from bapipe.explorer.pages import plans_page

        fastest_first = sorted(compared.plans.items(), key=lambda named: named[1].prediction.step_ns)
        write_output_bytes(html, plans_page([(name, plan, profiles) for name, plan in fastest_first]))
    if as_json:
        show_json(report.comparison_json(compared.plans, compared.others, failed))
        return
    show_parts(report.render_comparison(compared.plans, compared.others, failed, replicas=options.replicas))
    for sentence in halved_words(compared.plans.values(), profiles):
        show_line(sentence)
    if html is not None:
        show_written(html)
