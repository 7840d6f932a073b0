"""The fastest plan that can be had without a search, also when all time is over."""

from collections.abc import Sequence

from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.fitting_cuts import fitting_plans
from bapipe.planner.device_line.line import DeviceLine, TimedPlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.schedules import SCHEDULES

MIN_LATE, MAX_LATE = 3, 12
"""So many plans are timed even after the deadline, and so many if none of them fits, ..."""

MAX_LATE_ACTIONS = 50_000
"""... and more until they have so many actions: a quarter of a second."""

ACTIONS_OF_PLAN, ACTIONS_OF_DEVICE = 100, 5
"""A plan and each of its devices take as long to time as so many actions do."""


def best_naive(
    line: DeviceLine,
    schedules: Sequence[str],
    sizes: Sequence[int],
    deadline: Deadline,
    below_ns: int | None = None,
) -> TimedPlan | None:
    """Returns the fastest naive plan that fits of those that the deadline leaves time for, None if there is none.

    If none fits, their cuts are moved so that they do. After the deadline those on one device come first: their bounds
    are their step times, while of the others those with the smallest bounds may be slow.

    Args:
        below_ns: plans that are no faster are of no use.
    """
    best: TimedPlan | None = None
    plans = naive_plans(line, schedules, sizes)
    if deadline.is_over:  # tables of several stages per device take long to make: these come last
        plans.sort(key=lambda each: (each[1].schedule not in SCHEDULES, sum(each[1].counts) > 1))
    num_late = num_actions = 0
    for bound_ns, plan in plans:
        limit_ns = below_ns if best is None else best.step_ns
        if limit_ns is not None and bound_ns >= limit_ns:
            continue
        if deadline.is_over:
            is_enough = num_late >= (MAX_LATE if limit_ns is None else MIN_LATE)
            if is_enough and num_actions > MAX_LATE_ACTIONS:
                break
            num_late += 1
        num_actions += line.num_actions(plan) + ACTIONS_OF_PLAN + ACTIONS_OF_DEVICE * sum(plan.counts)
        timed = line.time(plan)
        if timed is not None and (limit_ns is None or timed.step_ns < limit_ns):
            best = timed
    return best if best is not None or below_ns is not None else _first_fitting(line, schedules, sizes, deadline)


def _first_fitting(
    line: DeviceLine, schedules: Sequence[str], sizes: Sequence[int], deadline: Deadline
) -> TimedPlan | None:
    """Returns the first plan that fits of those with moved cuts, None without one among the first ones."""
    for number, plan in enumerate(fitting_plans(line, schedules, sizes)):
        if deadline.is_over and number >= MAX_LATE:
            break
        timed = line.time(plan)
        if timed is not None:
            return timed
    return None
