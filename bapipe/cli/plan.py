"""Commands that plan, predict and show: plan, compare, simulate, show."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UNSET

import bapipe
from bapipe import report
from bapipe.cli.flags import with_flags
from bapipe.cli.goal import Largest, Least, MinThroughput, Within, goal_of
from bapipe.cli.inputs import (
    all_profiles,
    check_one_source_of_devices,
    profiles_by_kind,
    read_or_assume_cluster,
    thread_counts,
)
from bapipe.cli.options import (
    Arguments,
    AsJson,
    ClusterFile,
    Devices,
    MemoryLimit,
    Microbatch,
    Minibatch,
    ModelDevice,
    Output,
    Recompute,
    Replicas,
    Sources,
    TimeLimit,
)
from bapipe.cli.outputs import write_output
from bapipe.cli.progress import (
    note,
    planning_status,
    show_json,
    show_line,
    show_parts,
    show_timeline,
    show_written,
    status,
    stops_on_interrupt,
)
from bapipe.cli.strategies import show_strategies
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import check_writable, fingerprint, read, write_bytes
from bapipe.formats.plan import Objective, Plan
from bapipe.formats.profile import ESTIMATE, ModelProfile, is_estimate
from bapipe.planner.analysis.near_ties import near_ties
from bapipe.planner.compare import compare as compare_schedules
from bapipe.planner.deadline import UNLIMITED, Deadline, deadline_of
from bapipe.planner.device_grouping import profiles_used_by, profiles_with_fewest_threads
from bapipe.planner.inputs import by_kind
from bapipe.planner.make import judge
from bapipe.planner.options import EVERY_SCHEDULE, PlanOptions
from bapipe.planner.plan import evaluate_pinned, plan_cached
from bapipe.planner.plan import explain as explain_plan
from bapipe.planner.plan import pareto as pareto_front
from bapipe.planner.repeat_block import profiles_of_copies
from bapipe.planner.validation import named_schedules
from bapipe.report.remarks import plan_remarks
from bapipe.schedules import ALL

if TYPE_CHECKING:
    from bapipe.planner.analysis.pareto import ParetoPoint

REMARKS_S = 0.5
"""How long near-ties of a plan are looked for after a time limit, or after a search that was ended."""


def plan(
    sources: Sources,
    cluster: ClusterFile = None,
    devices: Devices = None,
    minibatch_size: Minibatch = 32,
    microbatch_size: Microbatch = None,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule", help=f"Schedules to try: {', '.join(ALL)}, or all; 'search' also searches an order."
        ),
    ] = "1f1b,gpipe",
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Fix the number of stages.")] = None,
    memory_limit: MemoryLimit = None,
    objective: Annotated[
        Objective,
        typer.Option(
            "--objective", help="Minimize the time of one step, or the work of the most loaded device (throughput)."
        ),
    ] = "step",
    memory_margin: Annotated[
        float,
        typer.Option("--memory-margin", min=0.0, max=0.99, help="Fraction of each device's memory to leave free."),
    ] = 0.0,
    replicas: Replicas = True,
    recompute: Recompute = True,
    group: Annotated[
        int | None,
        typer.Option("--group", min=1, help="Fix how many devices run a micro-batch together, of the profiles given."),
    ] = None,
    least: Least = None,
    largest: Largest = None,
    within: Within = None,
    min_throughput: MinThroughput = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            "--constraint",
            help="'LAYER with LAYER', 'LAYER without LAYER', 'LAYER on DEVICE,DEVICE'. May be repeated.",
        ),
    ] = None,
    time_limit: TimeLimit = None,
    pin: Annotated[
        Path | None,
        typer.Option("--pin", help="Evaluate this hand-made plan, and bound how much faster any other plan can be."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain what limits the plan, and what would make it faster.")
    ] = False,
    pareto: Annotated[
        bool,
        typer.Option("--pareto", help="Also list the Pareto front of step time, peak memory and number of devices."),
    ] = False,
    as_json: AsJson = False,
    arg: Arguments = None,
    device: ModelDevice = "cpu",
    output: Output = Path("plan.json"),
) -> None:
    """Find the fastest plan, and prove how good it is.

    With --least or --largest: the plan that needs least among the fast ones, or the largest model that fits.
    """
    goal = goal_of(least, largest, within, min_throughput)
    check_one_source_of_devices(cluster, devices)
    if pin is not None and (cluster is not None or devices is not None):
        raise BapipeError("a pinned plan contains its cluster: leave out --cluster and --devices")
    if objective != "step" and (pin is not None or explain or pareto):
        raise BapipeError("--pin, --explain and --pareto need --objective step: leave out either them or --objective")
    if goal is not None and (pin is not None or explain or pareto):
        raise BapipeError("--least and --largest do not go with --pin, --explain and --pareto: leave out either")
    check_writable(output)
    if pin is not None and output.resolve() == pin.resolve():
        raise BapipeError(f"{output} would be overwritten, and is the pinned plan: name another file with --output")
    measured = all_profiles(sources, arg, thread_counts() if cluster is None and devices is None else (1,), device)
    options = PlanOptions(
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        schedules=_names(schedule),
        num_stages=stages,
        memory_limit_bytes=memory_limit,
        memory_margin=memory_margin,
        replicas=replicas,
        recompute=recompute,
        constraints=constraint or (),
        objective=objective,
        time_limit_s=time_limit,
        group=group,
        goal=goal,
    )
    pinned = None if pin is None else read(pin, Plan)
    devices_to_use = (
        read_or_assume_cluster(profiles_with_fewest_threads(measured), cluster, devices) if pinned is None else None
    )
    deadline = deadline_of(time_limit)
    with stops_on_interrupt(deadline):
        first = deadline.share(1 + explain + pareto)
        if pinned is not None:
            made, profiles, options = _evaluate(pinned, measured, options, first)
        else:
            assert devices_to_use is not None
            with planning_status() as progress:
                made = plan_cached(measured, devices_to_use, options, deadline=first, progress=progress)
            profiles = profiles_used_by(made, profiles_of_copies(made, measured))
        write_output(output, made)
        sentences = _explain(made, profiles, options, deadline.share(1 + pareto)) if explain else ()
        front = _pareto_front(profiles, made.cluster, options, deadline) if pareto else ()
    _say_what_more_time_could_do(made, first)
    for profile in profiles.values():
        if is_estimate(profile):
            note(f"the profile of {profile.device.kind} is {profile.environment[ESTIMATE]}")
    remarks = () if objective != "step" or pinned is not None else _remarks(made, profiles, options, first)
    if as_json:
        show_json(report.plan_json(made, sentences, front, remarks))
        return
    timeline = bapipe.simulate(made, profiles)
    show_parts(report.render_plan(made, timeline))
    show_timeline(timeline)
    for sentence in (*remarks, *sentences):
        show_line(sentence)
    if front:
        show_parts([report.pareto_table(front)])
    show_written(output)


def _remarks(
    made: Plan, profiles: dict[str, ModelProfile], options: PlanOptions, searched_until: Deadline
) -> tuple[str, ...]:
    """Returns what a reader of the plan should know besides its figures."""
    deadline = Deadline(REMARKS_S) if searched_until.is_given or searched_until.is_over else UNLIMITED
    ties = near_ties(made, profiles, options.schedules, deadline) if options.goal is None else ()
    told = plan_remarks(made, profiles, named_schedules(options), ties, options.num_stages)
    return tuple(map(with_flags, told))


def _names(schedules: str) -> tuple[str, ...]:
    """Returns the names in a list such as 1f1b,gpipe."""
    return tuple(name.strip() for name in schedules.split(","))


def _say_what_more_time_could_do(made: Plan, deadline: Deadline) -> None:
    """Prints whether a search that a deadline ended leaves something open."""
    gap, goal = made.certificate.gap, made.certificate.goal
    is_reached = goal is UNSET or goal.value == goal.bound
    if deadline.is_over and gap > 0:
        note(
            f"the search was ended: no plan is more than {gap / (1 + gap):.1%} faster; with a longer --time-limit it "
            "may find such a plan, or prove that there is none"
        )
    elif deadline.is_stopped and made.certificate.proven_optimal and is_reached:
        note("the search was not cut short: its proof was complete before")


def _evaluate(
    pinned: Plan, measured: tuple[ModelProfile, ...], options: PlanOptions, deadline: Deadline
) -> tuple[Plan, dict[str, ModelProfile], PlanOptions]:
    """Returns the pinned plan with its prediction, the profiles by kind, and the options with the plan's mini-batch."""
    profiles = by_kind(measured)
    same_minibatch = replace(options, minibatch_size=pinned.minibatch_size)
    with planning_status() as progress:
        evaluated = evaluate_pinned(pinned, profiles, same_minibatch, deadline=deadline, progress=progress)
        return evaluated, profiles, same_minibatch


def _explain(
    made: Plan, profiles: dict[str, ModelProfile], options: PlanOptions, deadline: Deadline
) -> tuple[str, ...]:
    with status("planning again with 10 % more memory"):
        return explain_plan(made, profiles, options, deadline=deadline)


def _pareto_front(
    profiles: dict[str, ModelProfile], cluster: Cluster, options: PlanOptions, deadline: Deadline
) -> "tuple[ParetoPoint, ...]":
    with status("searching the Pareto front") as update:

        def show_next(num_devices: int, limit_bytes: int) -> None:
            update(f"searching the Pareto front: {num_devices} devices, {report.mib(limit_bytes)} each")

        return pareto_front(profiles, cluster, options, deadline=deadline, progress=show_next)


def compare(
    sources: Sources,
    cluster: ClusterFile = None,
    devices: Devices = None,
    minibatch_size: Minibatch = 32,
    microbatch_size: Microbatch = None,
    schedule: Annotated[
        str, typer.Option("--schedule", help=f"Schedules to compare: {', '.join(ALL)}, or all.")
    ] = EVERY_SCHEDULE,
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
            "--strategies", help="Compare data, spatial, filter, channel and pipeline parallelism and their mixes."
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
    """Compare the best plan of each schedule with the usual strategies.

    The usual strategies: one device alone, data parallelism over all devices, stages with equal numbers of layers.
    With --strategies, those of the Oracle instead (arXiv:2104.09075): what their steps consist of, and how far they go.
    """
    check_one_source_of_devices(cluster, devices)
    if not strategies and (whole or as_markdown):
        raise BapipeError("--whole and --markdown go with --strategies")
    options = PlanOptions(
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        schedules=_names(schedule),
        memory_limit_bytes=memory_limit,
        replicas=replicas,
        recompute=recompute,
        time_limit_s=time_limit,
    )
    if html is not None:
        check_writable(html)
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
        write_bytes(html, plans_page(fastest_first, profiles))
    if as_json:
        show_json(report.comparison_json(compared.plans, compared.others, failed))
        return
    show_parts(report.render_comparison(compared.plans, compared.others, failed))
    if html is not None:
        show_written(html)


def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    profiles: Annotated[list[Path], typer.Argument(help="Profile files, one per kind of device.")],
    as_json: AsJson = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the predicted timeline to this file, as a Chrome trace.")
    ] = None,
) -> None:
    """Predict the time and memory of one step of a plan."""
    to_simulate = read(plan, Plan)
    of_kind = by_kind([read(path, ModelProfile) for path in profiles])
    timeline = bapipe.simulate(to_simulate, of_kind)
    for kind, profile in of_kind.items():
        if to_simulate.profiles.get(kind) not in (None, fingerprint(profile)):
            note(f"the plan was made from another {kind} profile of {to_simulate.model}")
    judged = judge(to_simulate, of_kind, timeline)
    if trace is not None:
        write_bytes(trace, report.encode_trace([("predicted", timeline)]))
    if as_json:
        show_json(judged.prediction)
        return
    show_parts(report.render_plan(judged, timeline))
    show_timeline(timeline)
