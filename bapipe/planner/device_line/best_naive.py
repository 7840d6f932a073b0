"""The fastest plan that can be had without a search, also when all time is over."""

from collections.abc import Sequence

from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.fitting_cuts import fitting_plans
from bapipe.planner.device_line.line import DeviceLine, TimedPlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.schedules import SCHEDULES

MIN_LATE, MAX_LATE = 3, 12
"""After the deadline so many plans are timed, and up to so many if none of them fits, ..."""

MAX_LATE_ACTIONS = 100_000
"""... but none behind a plan that fits and plans of so many actions: a tenth of a second."""


def best_naive(
    line: DeviceLine,
    schedules: Sequence[str],
    sizes: Sequence[int],
    deadline: Deadline,
    below_ns: int | None = None,
) -> TimedPlan | None:
    """Returns the fastest naive plan that fits of those that the deadline leaves time for, None if there is none.

    If none fits, their cuts are moved so that they do.

    Args:
        below_ns: plans that are no faster are of no use.
    """
    best: TimedPlan | None = None
    plans = naive_plans(line, schedules, sizes)
    if deadline.is_over:  # tables of several stages per device take long to make: these come last
        plans.sort(key=lambda each: each[1].schedule not in SCHEDULES)
    num_late = num_actions = 0
    for bound_ns, plan in plans:
        limit_ns = below_ns if best is None else best.step_ns
        if limit_ns is not None and bound_ns >= limit_ns:
            continue
        if deadline.is_over:
            is_enough = num_late >= MIN_LATE or num_actions > MAX_LATE_ACTIONS
            if num_late >= MAX_LATE or (limit_ns is not None and is_enough):
                break
            num_late += 1
        num_actions += line.num_actions(plan)
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
