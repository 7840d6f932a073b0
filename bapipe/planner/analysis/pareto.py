"""The front of step time, peak memory and number of devices, over the groupings of a cluster's devices."""

from contextlib import suppress
from dataclasses import dataclass, replace

from bapipe.errors import BapipeError, ConstraintsUnmet
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.planner.branch_and_bound.space import search_space
from bapipe.planner.compute.deadline import Deadline, NothingFoundError, OutOfTime, deadline_of
from bapipe.planner.exact_search import solution_of, space_of_problems
from bapipe.planner.inputs.device_grouping import Grouping, groupings
from bapipe.planner.inputs.options import PlanOptions, limit_that_leaves
from bapipe.planner.inputs.profiles import Profiles
from bapipe.planner.inputs.validation import check_inputs
from bapipe.planner.results.searched_space import ParetoSpace
from bapipe.planner.results.solution import make_plan
from bapipe.progress import ParetoProgress

NODES_PER_POINT = 3_000
"""Node budget of the branch and bound for one point."""

MEMORY_SHARE_PER_ROUND = 0.7
"""Each round limits memory to this share of the largest peak of the round before."""

MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """A plan on the front: no other plan found beats it in step time, peak memory and number of devices at once.

    The members of a group count as a device each. `gap` bounds how much faster a plan on as many devices, or groups,
    within the memory it was searched for can be.
    """

    step_ns: int
    peak_bytes: int
    num_devices: int
    gap: float
    plan: Plan


def pareto(
    profiles: Profiles,
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline | None = None,
    progress: ParetoProgress | None = None,
    known: Plan | None = None,
) -> tuple[ParetoPoint, ...]:
    """Returns the front of step time, peak memory and number of devices, the fastest plan first.

    There is a search for each number of devices under less and less memory. They are along the profile's order of the
    layers, for the named schedules, and for each grouping of the devices that `profiles` allow, as in `plan`. A plan
    that is `known`, which other searches may have found, is compared with what they find.

    Points between the memory limits of two rounds are not searched, nor below the first limit under which nothing is
    found: the goal of least memory finds less. The deadline, which is as `options.time_limit_s`
    says if none is given, ends it with the points found so far.

    Raises:
        ConstraintsUnmet: no plan keeps the constraints.
        BapipeError: as the search for the shortest step; and another objective than the step.
    """
    if options.objective != "step":
        raise BapipeError(f"the Pareto front is of steps: leave `objective` {options.objective} out")
    deadline = deadline or deadline_of(options.time_limit_s)
    possible = groupings(profiles, cluster.sequential, options.group)
    found = [] if known is None else [_point(known)]
    unmet: list[ConstraintsUnmet] = []
    for number, grouping in enumerate(possible):
        share = deadline if number == len(possible) - 1 else deadline.share(len(possible) - number)
        try:
            found += _points_of(grouping, options, share, progress)
        except ConstraintsUnmet as error:
            unmet.append(error)
    # A known plan may have another order of the layers, which alone keeps the constraints.
    if unmet and not found:
        raise unmet[0]
    return tuple(sorted(_front(found), key=lambda p: (p.step_ns, p.peak_bytes, p.num_devices)))


def _points_of(
    grouping: Grouping, options: PlanOptions, deadline: Deadline, progress: ParetoProgress | None
) -> list[ParetoPoint]:
    """Returns what is found for one grouping of the devices until a deadline."""
    from bapipe.planner.branch_and_bound.search import best_first  # loads numpy

    profiles, cluster = grouping.profiles, grouping.cluster
    check_inputs(profiles, cluster, options)
    found: list[ParetoPoint] = []
    limit = max(options.limits(cluster))
    for _ in range(MAX_ROUNDS):
        # The limits have the margin in them already, so it must not be taken of them again.
        given = replace(options, memory_limit_bytes=limit_that_leaves(limit, options.memory_margin))
        best: list[ParetoPoint] = []
        with suppress(OutOfTime):
            searched = search_space(profiles, cluster, given, deadline)
            problems, all_counts = searched.problems, space_of_problems(searched, profiles, cluster, given)
            for count in sorted({root.num_devices for problem in problems for root in problem.roots}):
                deadline.check()
                if progress:
                    progress(count, limit)
                on_count = [problem.with_num_devices(count) for problem in problems]
                answer = None
                with suppress(NothingFoundError):
                    answer = best_first(on_count, max_nodes=NODES_PER_POINT, deadline=deadline)
                if answer is not None:
                    space = ParetoSpace(num_devices=count, limit_bytes=limit, all_counts=all_counts)
                    best.append(_point(make_plan(solution_of(profiles, answer, options.minibatch_size, space))))
        if not best:
            break
        found += best
        # The largest peak of this round does not fit in the next one, so each round excludes a plan of the one before.
        limit = int(min(limit, max(point.peak_bytes for point in best)) * MEMORY_SHARE_PER_ROUND)
        if limit <= 0:
            break
    return found


def _point(plan: Plan) -> ParetoPoint:
    cluster = plan.cluster
    return ParetoPoint(
        step_ns=plan.prediction.step_ns,
        peak_bytes=plan.prediction.peak_bytes,
        num_devices=sum(cluster.devices[cluster.index[name]].num_members for name in plan.used_devices),
        gap=plan.certificate.gap,
        plan=plan,
    )


def _front(points: list[ParetoPoint]) -> list[ParetoPoint]:
    # Of equal points, the first one stays.
    kept: dict[tuple[int, int, int], ParetoPoint] = {}
    for point in points:
        kept.setdefault((point.step_ns, point.peak_bytes, point.num_devices), point)
    return [
        point
        for key, point in kept.items()
        if not any(other != key and all(a <= b for a, b in zip(other, key, strict=True)) for other in kept)
    ]
