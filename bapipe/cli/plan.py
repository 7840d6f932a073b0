"""The command `bapipe plan`."""

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
    read_or_assume_cluster,
    thread_counts,
)
from bapipe.cli.options import (
    DEFAULT_MINIBATCH_SIZE,
    PLAN_HELP,
    SCHEDULES,
    Arguments,
    AsJson,
    ClusterFile,
    Devices,
    MemoryLimit,
    Microbatch,
    MinibatchIfGiven,
    ModelDevice,
    Output,
    Recompute,
    Replicas,
    Sources,
    TimeLimit,
    schedule_names,
)
from bapipe.cli.outputs import check_output, write_output
from bapipe.cli.printing import note, show_json, show_line, show_parts, show_timeline, show_written
from bapipe.cli.progress import planning_status, status, stops_on_interrupt
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read
from bapipe.formats.plan import Objective, Plan
from bapipe.formats.profile import ESTIMATE, ModelProfile, is_estimate
from bapipe.planner.analysis.near_ties import near_ties
from bapipe.planner.analysis.pinned import certify_pinned
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, deadline_of
from bapipe.planner.inputs.device_grouping import profiles_used_by, profiles_with_fewest_threads
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import Profiles, by_kind
from bapipe.planner.inputs.repeat_block import profiles_of_copies
from bapipe.planner.inputs.validation import check_schedules, named_schedules
from bapipe.planner.plan import plan_cached
from bapipe.report.remarks import plan_remarks
from bapipe.units import percent_up

if TYPE_CHECKING:
    from bapipe.planner.analysis.pareto import ParetoPoint

REMARKS_S = 0.5
"""How long near-ties of a plan are looked for after a time limit, or after a search that was ended."""


def plan(
    sources: Sources,
    cluster: ClusterFile = None,
    devices: Devices = None,
    minibatch_size: MinibatchIfGiven = None,
    microbatch_size: Microbatch = None,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            help=f"Schedules to try: {SCHEDULES}; 'search' also searches an order, without replicas.",
        ),
    ] = "1f1b,gpipe",
    stages: Annotated[int | None, typer.Option("--stages", min=1, help=PLAN_HELP["num_stages"])] = None,
    memory_limit: MemoryLimit = None,
    objective: Annotated[Objective, typer.Option("--objective", help=PLAN_HELP["objective"])] = "step",
    memory_margin: Annotated[
        float, typer.Option("--memory-margin", min=0.0, max=0.99, help=PLAN_HELP["memory_margin"])
    ] = 0.0,
    replicas: Replicas = True,
    recompute: Recompute = True,
    group: Annotated[int | None, typer.Option("--group", min=1, help=PLAN_HELP["group"])] = None,
    least: Least = None,
    largest: Largest = None,
    within: Within = None,
    min_throughput: MinThroughput = None,
    constraint: Annotated[
        list[str] | None, typer.Option("--constraint", help=f"{PLAN_HELP['constraints']} May be repeated.")
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
    if pin is not None and any(given is not None for given in (cluster, devices, minibatch_size)):
        raise BapipeError(
            "a pinned plan holds its cluster and its mini-batch: leave out --cluster, --devices and --minibatch-size"
        )
    if objective != "step" and (pin is not None or explain or pareto):
        raise BapipeError("--pin, --explain and --pareto need --objective step: leave out either them or --objective")
    if goal is not None and (pin is not None or explain or pareto):
        raise BapipeError("--least and --largest do not go with --pin, --explain and --pareto: leave out either")
    check_output(output, *map(Path, sources), *(path for path in (cluster, pin) if path is not None))
    options = PlanOptions(
        minibatch_size=minibatch_size or DEFAULT_MINIBATCH_SIZE,
        microbatch_size=microbatch_size,
        schedules=schedule_names(schedule),
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
    check_schedules(options)  # before a model is measured
    measured = all_profiles(sources, arg, thread_counts() if cluster is None and devices is None else (1,), device)
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
        if pareto:
            of_devices = profiles if devices_to_use is None else measured
            front = _pareto_front(made, of_devices, devices_to_use or made.cluster, options, deadline)
        else:
            front = ()
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
        from bapipe.planner.analysis.pareto import MEMORY_SHARE_PER_ROUND  # loads numpy

        show_parts([report.pareto_table(front)])
        show_line(
            "`bapipe explore` shows such plans, under Front, and saves them; memory was tried in steps of "
            f"{1 - MEMORY_SHARE_PER_ROUND:.0%}: --least memory finds the plan that needs least"
        )
    show_written(output)


def _remarks(
    made: Plan, profiles: dict[str, ModelProfile], options: PlanOptions, searched_until: Deadline
) -> tuple[str, ...]:
    """Returns what a reader of the plan should know besides its figures."""
    deadline = Deadline(REMARKS_S) if searched_until.is_given or searched_until.is_over else UNLIMITED
    ties = near_ties(made, profiles, options, deadline) if options.goal is None else ()
    told = plan_remarks(made, profiles, named_schedules(options), ties, options.num_stages)
    return tuple(map(with_flags, told))


def _say_what_more_time_could_do(made: Plan, deadline: Deadline) -> None:
    """Prints whether a search that a deadline ended leaves something open."""
    gap, goal = made.certificate.gap, made.certificate.goal
    is_reached = goal is UNSET or goal.value == goal.bound
    if deadline.is_over and gap > 0:
        ended = "interrupted" if deadline.is_stopped else "ended"
        longer = "in more time" if deadline.is_stopped else "with a longer --time-limit"
        note(
            f"the search was {ended}: the plan is at most {percent_up(gap)} slower than the fastest one of the space "
            f"searched; {longer} it may find a faster one, or prove that there is none"
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
        evaluated = certify_pinned(pinned, profiles, same_minibatch, deadline=deadline, progress=progress)
        return evaluated, profiles, same_minibatch


def _explain(
    made: Plan, profiles: dict[str, ModelProfile], options: PlanOptions, deadline: Deadline
) -> tuple[str, ...]:
    from bapipe.planner.analysis.explain import explain  # loads numpy

    with status("explaining: planning again with other cuts, links and memory"):
        return explain(made, profiles, options, deadline=deadline)


def _pareto_front(
    made: Plan, profiles: Profiles, cluster: Cluster, options: PlanOptions, deadline: Deadline
) -> "tuple[ParetoPoint, ...]":
    from bapipe.planner.analysis.pareto import pareto  # loads numpy

    with status("searching the Pareto front") as update:

        def show_next(num_devices: int, limit_bytes: int) -> None:
            update(f"searching the Pareto front: {num_devices} devices, {report.mib(limit_bytes)} each")

        return pareto(profiles, cluster, options, deadline=deadline, progress=show_next, known=made)
