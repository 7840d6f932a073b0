"""The best plan over the ways to see a cluster, with a bound on all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Alternative
from bapipe.formats.profile import ModelProfile
from bapipe.planner.deadline import Deadline, OutOfTime
from bapipe.planner.device_grouping import Grouping
from bapipe.planner.options import PlanOptions
from bapipe.planner.searched_space import GroupingsSpace
from bapipe.planner.solution import Rival, Solution, sort_alternatives
from bapipe.planner.validation import check_inputs, microbatch_sizes, named_schedules

Solve = Callable[[Mapping[str, ModelProfile], Cluster, Deadline, Rival | None], Solution]
"""Searches one way until a deadline; a rival is the best plan of the ways before."""


def order_of_ways(ways: Sequence[Grouping], options: PlanOptions) -> tuple[Grouping, ...]:
    """Returns the ways, of many devices that first whose most promising naive plan is fastest, the next best one last.

    The others then need no more than a bound, and the worst of them the least time. Few devices need no order.
    """
    from bapipe.planner.device_line.search import MIN_DEVICES

    if len(ways) == 1 or options.objective != "step" or len(ways[0].cluster.devices) < MIN_DEVICES:
        return tuple(ways)
    best, *others = sorted(ways, key=lambda way: _naive_step_ns(way, options))
    return (best, *reversed(others))


def _naive_step_ns(way: Grouping, options: PlanOptions) -> float:
    """The step time of the naive plan with the least bound; infinite if there is none, or it does not fit."""
    from bapipe.planner.device_line.line import DeviceLine
    from bapipe.planner.device_line.naive import naive_plans

    cluster = way.cluster.sequential
    check_inputs(way.profiles, cluster, options)
    line = DeviceLine(way.profiles, cluster, options)
    try:
        plans = naive_plans(line, named_schedules(options), microbatch_sizes(way.profiles, cluster, options))
    except BapipeError:
        return inf  # the search of the way says why
    timed = line.time(plans[0][1]) if plans else None
    return inf if timed is None else timed.step_ns


def best_grouping(
    ways: Sequence[Grouping], solve: Solve, deadline: Deadline, order: Sequence[Grouping] | None = None
) -> Solution:
    """Returns the best solution over the ways, those of the others among its alternatives, with a bound on all.

    Args:
        order: that in which they are searched. The first has half of the time, the others equal shares of the rest.

    Raises:
        Infeasible: nothing fits with any way; the message is that of the first one searched.
        OutOfTime: the deadline passed before any plan was found that fits.
    """
    solutions: dict[str, Solution] = {}
    refused: list[BapipeError] = []
    bounds_ns: list[int] = []
    rival: Rival | None = None
    for number, way in enumerate(order or ways):
        num_left = len(ways) - number
        share = deadline if num_left == 1 else deadline.share(2 if number == 0 else num_left)
        try:
            found = solve(way.profiles, way.cluster, share, rival)
        except (Infeasible, OutOfTime) as error:
            refused.append(error)
            if isinstance(error, OutOfTime):
                bounds_ns.append(error.lower_bound_ns)
            continue
        solutions[way.name] = found
        bounds_ns.append(found.lower_bound_ns)
        if rival is None or found.objective_ns < rival.objective_ns:
            rival = Rival(objective_ns=found.objective_ns, lower_bound_ns=min(bounds_ns))
    if not solutions:
        raise refused[0]
    solutions = {way.name: solutions[way.name] for way in ways if way.name in solutions}  # of equal ones, the first
    best = min(solutions.values(), key=lambda solution: solution.objective_ns)
    if len(ways) == 1:
        return best
    others = tuple(_alternative(name, other, best) for name, other in solutions.items() if other is not best)
    return replace(
        best,
        lower_bound_ns=min(bounds_ns),
        space=GroupingsSpace(names=tuple(way.name for way in ways), of_best=best.space),
        alternatives=sort_alternatives((*best.alternatives, *others)),
    )


def _alternative(name: str, solution: Solution, best: Solution) -> Alternative:
    slower = solution.objective_ns / max(best.objective_ns, 1) - 1
    return Alternative(
        name=name,
        step_ns=solution.prediction.step_ns,
        peak_bytes=solution.peak_bytes,
        feasible=True,
        why_not=f"{slower:.1%} slower",
    )
