"""The best plan over the groupings of a cluster's devices, with a bound on all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from bapipe.errors import BapipeError, ConstraintsUnmet, Infeasible
from bapipe.formats.plan import Alternative
from bapipe.planner.baselines import slower_than_this
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.inputs.device_grouping import Grouping
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes, named_schedules
from bapipe.planner.results.no_plan import bounds_without_plan, error_of_all
from bapipe.planner.results.searched_space import GroupingsSpace, is_of_action_orders
from bapipe.planner.results.solution import Rival, Solution, sort_alternatives

Solve = Callable[[Grouping, Sequence[Grouping], Deadline, Rival | None], Solution]
"""Searches the plans for one grouping, of which others are left to search, until a deadline; a rival is the best plan
for those before."""


def order_to_search(possible: Sequence[Grouping], options: PlanOptions) -> list[int]:
    """Returns the numbers of the groupings in the order in which to search them; with few devices, as they are.

    With many, the one whose most promising naive plan is fastest comes first: the others need no more than a bound that
    says that they are worse. They follow from the worst, which is ruled out soonest, to the second best.
    """
    from bapipe.planner.device_line.search import MIN_DEVICES

    if len(possible) == 1 or options.objective != "step" or len(possible[0].cluster.devices) < MIN_DEVICES:
        return list(range(len(possible)))
    best, *others = sorted(range(len(possible)), key=lambda number: _naive_step_ns(possible[number], options))
    return [best, *reversed(others)]


def _naive_step_ns(grouping: Grouping, options: PlanOptions) -> float:
    """Returns the step time of the naive plan with the smallest bound; infinite if none fits."""
    from bapipe.planner.device_line.line import DeviceLine
    from bapipe.planner.device_line.naive import naive_plans

    profiles, cluster = grouping.profiles, grouping.cluster.sequential
    check_inputs(profiles, cluster, options)
    line = DeviceLine(profiles, cluster, options)
    try:
        plans = naive_plans(line, named_schedules(options), microbatch_sizes(profiles, cluster, options))
    except BapipeError:
        return inf  # the search says why
    timed = line.time(plans[0][1]) if plans else None
    return inf if timed is None else timed.step_ns


def best_grouping(
    possible: Sequence[Grouping], solve: Solve, deadline: Deadline, order: Sequence[int] | None = None
) -> Solution:
    """Returns the best solution over some groupings, with a bound on all; the others' are among its alternatives.

    Args:
        possible: the groupings; of those that are equal by `Preference` the first is chosen.
        order: their numbers in the order in which they are searched; if left out, as they are. The first has half of
            the time, the others equal shares of the rest.

    Raises:
        Infeasible: nothing fits with any grouping; the message is that of the first one of which that is not proven, or
            else of the first one searched.
        OutOfTime: the deadline passed before any plan was found that fits.
    """
    order = range(len(possible)) if order is None else order
    solutions: dict[int, Solution] = {}
    refused: list[BapipeError] = []
    without_plan_ns: list[int] = []
    rival: Rival | None = None
    for num_before, number in enumerate(order):
        left = [possible[other] for other in order[num_before + 1 :]]
        share = deadline.share(2 if num_before == 0 else 1 + len(left)) if left else deadline
        try:
            found = solve(possible[number], left, share, rival)
        except (Infeasible, ConstraintsUnmet, OutOfTime) as error:
            refused.append(error)
            without_plan_ns += bounds_without_plan(error)
            continue
        solutions[number] = found
        if rival is None or found.objective_ns < rival.objective_ns:
            bound_ns = min([each.bound_of_all_ns for each in solutions.values()] + without_plan_ns)
            rival = Rival(objective_ns=found.objective_ns, lower_bound_ns=bound_ns)
    if not solutions:
        raise error_of_all(refused)
    in_order = sorted(solutions.items())
    best = min((solution for _, solution in in_order), key=lambda solution: solution.preference)
    if len(possible) == 1:
        return best
    others = tuple(_alternative(possible[i].name, other, best) for i, other in in_order if other is not best)
    bound_ns = min([_bound_ns(other, best) for other in solutions.values()] + without_plan_ns)
    of_all_ns = min([other.bound_of_all_ns for other in solutions.values()] + without_plan_ns)
    return replace(
        best,
        lower_bound_ns=bound_ns,
        asked_bound_ns=None if of_all_ns == bound_ns else of_all_ns,
        space=GroupingsSpace(names=tuple(grouping.name for grouping in possible), of_best=best.space),
        alternatives=sort_alternatives((*best.alternatives, *others)),
    )


def _bound_ns(solution: Solution, best: Solution) -> int:
    """Returns what is proven of one grouping, for plans such as those that the space of the best one has."""
    is_alike = is_of_action_orders(solution.space) and is_of_action_orders(best.space)
    return solution.lower_bound_ns if solution is best or is_alike else solution.bound_of_all_ns


def _alternative(name: str, solution: Solution, best: Solution) -> Alternative:
    return Alternative(
        name=name,
        step_ns=solution.prediction.step_ns,
        peak_bytes=solution.prediction.peak_bytes,
        feasible=True,
        why_not=slower_than_this(solution.objective_ns, best.objective_ns),
    )
