"""Plans profiles on a cluster: the entry points of planning, and the step from options to a search."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bapipe.errors import BapipeError
from bapipe.formats.cache import load_plan, plan_path, store_plan, store_profile_by_fingerprint
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import THROUGHPUT, Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.options import options_from
from bapipe.planner.best_grouping import best_grouping, order_to_search
from bapipe.planner.compute.deadline import Deadline, deadline_of
from bapipe.planner.inputs.clusters import as_cluster
from bapipe.planner.inputs.device_grouping import Grouping, groupings, profiles_with_fewest_threads
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import Profiles, collected, listed
from bapipe.planner.inputs.repeat_block import profiles_of_copies
from bapipe.planner.inputs.validation import check_inputs
from bapipe.planner.least_memory import with_least_memory
from bapipe.planner.plan_step import add_baselines, solve_step_time, with_step_bound
from bapipe.planner.results.solution import Rival, Solution, make_plan
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.whole_progress import WholeProgress
from bapipe.progress import SearchProgress
from bapipe.units import MAX_INT


def plan(
    profiles: Profiles,
    cluster: Cluster | int,
    options: PlanOptions | None = None,
    *,
    progress: SearchProgress | None = None,
    deadline: Deadline | None = None,
    **keywords: Any,
) -> Plan:
    """Returns the fastest plan of the space that its certificate describes.

    Args:
        profiles: one per kind of device. Further profiles of a kind, measured with more threads, describe several of
            the cluster's devices merged into one, and those with members groups of them; the fastest grouping is
            chosen.
        cluster: the devices and links; or a number of devices like the profiled one, with assumed links.
        options: restrictions and preferences; its fields may be given as keyword arguments instead, for example
            `bapipe.plan(profile, 4, minibatch_size=32, schedules=["1f1b"])`.
        progress: called with (plans simulated, best step time, lower bound) while the search runs.
        deadline: when to end, in place of the one that `options.time_limit_s` says: from now on.

    Raises:
        Infeasible: no plan fits the memory of the devices, or is as fast as `options.goal` asks for.
        ConstraintsUnmet: no plan keeps the constraints, or has that number of stages.
        BapipeError: profiles, cluster and options do not match.
        TypeError: an unknown option.
    """
    options = options_from(PlanOptions, options, keywords)
    profiles = collected(profiles)
    cluster = as_cluster(cluster, profiles_with_fewest_threads(profiles))
    deadline = deadline or deadline_of(options.time_limit_s)
    if options.goal is not None:
        from bapipe.planner.goal_search import reach_goal

        goal, options = options.goal, replace(options, goal=None)
        # The least memory is asked for under lower and lower limits.
        orders_for = (options, replace(options, memory_limit_bytes=0)) if goal.least == "memory" else (options,)
        return reach_goal(
            profiles,
            cluster,
            options,
            goal,
            search=partial(_solve_groupings, orders_for=orders_for),
            deadline=deadline,
            progress=progress,
        )
    return make_plan(_solve_groupings(profiles, cluster, options, deadline, progress))


def _solve_groupings(
    profiles: Profiles,
    cluster: Cluster,
    options: PlanOptions,
    deadline: Deadline,
    progress: SearchProgress | None,
    orders_for: tuple[PlanOptions, ...] = (),
) -> Solution:
    """Returns the solution with the shortest step, or the least load, over the groupings of the devices."""

    possible = groupings(profiles, cluster, options.group)
    whole = None if progress is None else WholeProgress(progress)

    def solve(grouping: Grouping, left: Sequence[Grouping], until: Deadline, rival: Rival | None) -> Solution:
        if whole is not None:
            unsearched_ns = [_least_ns(other, options) for other in left]
            whole.others_ns = min(unsearched_ns + ([] if rival is None else [rival.lower_bound_ns]), default=MAX_INT)
        return _solve(
            SearchRequest(
                profiles=grouping.profiles,
                cluster=grouping.cluster.sequential,
                options=options,
                deadline=until,
                progress=whole,
                rival=rival,
                orders_for=orders_for,
            )
        )

    return best_grouping(possible, solve, deadline, order_to_search(possible, options))


def _least_ns(grouping: Grouping, options: PlanOptions) -> int:
    """Returns what no plan for a grouping can beat, without a search; no plan has no step."""
    if options.objective != "step":
        return 0
    try:
        return step_bound_ns(grouping.profiles, grouping.cluster.sequential, options)
    except BapipeError:
        return MAX_INT


def plan_once(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline | None = None,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the best plan for the devices as they are, not grouped in other ways; see `plan`."""
    deadline = deadline or deadline_of(options.time_limit_s)
    return make_plan(
        _solve(
            SearchRequest(
                profiles=profiles, cluster=cluster.sequential, options=options, deadline=deadline, progress=progress
            )
        )
    )


def plan_cached(
    profiles: Profiles,
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline | None = None,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the plan that was made from the same inputs before, or makes and stores it; see `plan`.

    With a time limit the result depends on the machine, so the plan is always made anew and never stored. Nor is one
    stored whose search a deadline ended.
    """
    profiles = collected(profiles)
    path, is_cached = cached_plan_path(profiles, cluster, options), options.time_limit_s is None
    deadline = deadline or deadline_of(options.time_limit_s)
    made = load_plan(path) if is_cached else None
    if made is None:
        made = plan(profiles, cluster, options, progress=progress, deadline=deadline)
        if is_cached and not deadline.is_over:
            store_plan(path, made)
    for profile in profiles_of_copies(made, listed(profiles)):
        store_profile_by_fingerprint(profile)  # to plan again if a device is lost
    return made


def cached_plan_path(profiles: Profiles, cluster: Cluster, options: PlanOptions, **search: float) -> Path:
    """Returns the file in the cache of the plan that is made from some inputs.

    Args:
        search: what the search was limited to, if it was not a full one.
    """
    return plan_path(
        {
            "profiles": [(profile.device.kind, fingerprint(profile)) for profile in listed(profiles)],
            "cluster": msgspec.to_builtins(cluster),
            "options": asdict(options)
            | {"schedules": list(options.schedules), "constraints": list(options.constraints)},
            **search,
        }
    )


def _solve(request: SearchRequest) -> Solution:
    """Returns the best solution, by the search for the objective."""
    return _solve_throughput(request) if request.options.objective == THROUGHPUT else _over_linearizations(request)


def _over_linearizations(request: SearchRequest) -> Solution:
    """Searches along the profile's order of the layers, and along other linearizations of a branching model."""
    options, cluster, rival = request.options, request.cluster, request.rival
    check_inputs(request.profiles, cluster, options)
    progress = None if request.progress is None else WholeProgress(request.progress)

    def solve(in_one_order: ProfilesByKind, until: Deadline) -> Solution:
        solution = solve_step_time(replace(request, profiles=in_one_order, deadline=until, progress=progress))
        if rival is not None and solution.objective_ns >= rival.objective_ns:
            return solution  # it will be an alternative itself, without any of its own
        return add_baselines(solution, options, request.deadline)

    if len(cluster.devices) == 1:
        return with_least_memory(solve(request.profiles, request.deadline), request)
    from bapipe.planner.linearizations import solve_over_linearizations

    orders_for = request.orders_for or (options,)
    found = solve_over_linearizations(request.profiles, cluster, orders_for, solve, request.deadline, progress)
    return with_least_memory(with_step_bound(found, request), request)


def _solve_throughput(request: SearchRequest) -> Solution:
    from bapipe.planner.throughput.search import solve_throughput

    options, progress = request.options, request.progress
    _check_throughput_options(options)
    num_reports = 0

    def count_and_report(load_ns: float, bound_ns: float) -> None:
        nonlocal num_reports
        num_reports += 1
        if progress:
            progress(num_reports, int(load_ns), int(bound_ns))

    return solve_throughput(
        request.profiles, request.cluster, options, deadline=request.deadline, progress=count_and_report
    )


def _check_throughput_options(options: PlanOptions) -> None:
    """Raises BapipeError for options that only the search for the step time knows."""
    defaults = PlanOptions(minibatch_size=options.minibatch_size)
    if "1f1b" not in options.schedules or not {*options.schedules} <= {*defaults.schedules}:
        others = ", ".join(name for name in options.schedules if name != "1f1b")
        raise BapipeError(f"`objective` throughput runs 1f1b, not {others}: leave `schedules` out")
    if options.num_stages is not None:
        raise BapipeError(f"`objective` throughput chooses the stages: leave `num_stages` {options.num_stages} out")
    given = {
        "search_effort": options.search_effort != defaults.search_effort,
        "constraints": options.constraints,
        "replicas": not options.replicas,
    }
    for name, value in given.items():
        if value:
            raise BapipeError(f"`objective` throughput does not know `{name}`: leave it out, or use `objective` step")
