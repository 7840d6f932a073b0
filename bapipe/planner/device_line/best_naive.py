"""The fastest plan that can be found without a search, even after the deadline."""

import time
from collections.abc import Sequence

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.compute.pace import Pace
from bapipe.planner.device_line.fitting_cuts import fitting_plans, seems_to_fit
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.line_memory import LineMemory
from bapipe.planner.device_line.naive import naive_plans
from bapipe.schedules import SCHEDULES

MIN_LATE, MAX_LATE = 3, 12
"""How many plans are timed after the deadline: at least, and as long as none fits, ..."""

MAX_LATE_ACTIONS = 50_000
"""... and more until this many actions have been simulated, in a quarter of a second to a second. A plan with more is
timed after the deadline only if nothing else has been found, ..."""

LAST_ACTIONS = 100_000
"""... and none at all once this many have been simulated."""

MAX_LATE_S = 0.5
"""How long to search for plans for tight memory after the deadline."""

MANY_ACTIONS = 1_000_000
"""If all plans together have more, those that seem not to fit come last, and only if there is time for them."""

ACTIONS_OF_PLAN, ACTIONS_OF_DEVICE = 100, 5
"""What timing a plan costs for itself and for each of its devices, in simulated actions."""


def best_naive(
    lines: Sequence[DeviceLine],
    schedules: Sequence[str],
    sizes: Sequence[int],
    deadline: Deadline,
    below_ns: int | None = None,
) -> TimedPlan | None:
    """Returns the fastest naive plan that fits, of those that can be timed before the deadline; None if there is none.

    If none fits, their cuts are moved so that they do. After the deadline those on one device come first, since their
    bounds are their step times, while other plans with small bounds may be slow. Plans with too many actions for the
    remaining time come last, those with the fewest first.

    Args:
        lines: the same devices in several orders.
        below_ns: only a faster plan is returned.
    """
    best: TimedPlan | None = None
    plans = [(bound_ns, line, plan) for line in lines for bound_ns, plan in naive_plans(line, schedules, sizes)]
    plans.sort(key=lambda each: each[0])
    is_late, pace = deadline.is_over, Pace()
    plans.sort(key=lambda each: _rank(each[1], each[2], pace, deadline, is_late=is_late))
    hopeless = _hopeless(plans, sizes)
    plans.sort(key=lambda each: each[1:] in hopeless)
    num_late = done = 0
    for bound_ns, line, plan in plans:
        num_actions = _actions(line, plan)
        limit_ns = below_ns if best is None else best.step_ns
        if limit_ns is not None and bound_ns >= limit_ns:
            continue
        if deadline.is_over:
            is_enough = num_late >= (MAX_LATE if limit_ns is None else MIN_LATE)
            if (is_enough and done > MAX_LATE_ACTIONS) or done > LAST_ACTIONS:
                break
            num_late += 1
        is_of_use = limit_ns is None and (line, plan) not in hopeless
        if not is_of_use and not _is_in_time(num_actions, pace, deadline):
            continue
        done += num_actions
        began_s = time.perf_counter()
        timed = line.time(plan)
        pace.note(num_actions, time.perf_counter() - began_s)
        if timed is not None and (limit_ns is None or timed.step_ns < limit_ns):
            best = timed
    return best if best is not None or below_ns is not None else _first_fitting(lines, schedules, sizes, deadline)


def _hopeless(
    plans: Sequence[tuple[int, DeviceLine, LinePlan]], sizes: Sequence[int]
) -> set[tuple[DeviceLine, LinePlan]]:
    """Returns the plans that seem not to fit, if timing all plans would take long; else none."""
    if sum(_actions(line, plan) for _, line, plan in plans) <= MANY_ACTIONS:
        return set()
    memory = {size: LineMemory(plans[0][1], size) for size in sizes}
    return {(line, plan) for _, line, plan in plans if not seems_to_fit(line, plan, memory[plan.microbatch_size])}


def _actions(line: DeviceLine, plan: LinePlan) -> int:
    """Returns what timing a plan costs, in simulated actions."""
    return line.num_actions(plan) + ACTIONS_OF_PLAN + ACTIONS_OF_DEVICE * sum(plan.counts)


def _rank(line: DeviceLine, plan: LinePlan, pace: Pace, deadline: Deadline, *, is_late: bool) -> tuple[int, bool, bool]:
    """Returns the key by which plans are sorted: the smallest is timed first."""
    num_actions = _actions(line, plan)
    many = 0 if _is_in_time(num_actions, pace, deadline) else num_actions
    # Tables of several stages per device take long to make.
    return many, is_late and plan.schedule not in SCHEDULES, is_late and sum(plan.counts) > 1


def _is_in_time(num_actions: int, pace: Pace, deadline: Deadline) -> bool:
    """Returns whether there is time to simulate one more plan once one that fits is known."""
    if deadline.is_over:
        return num_actions <= MAX_LATE_ACTIONS
    return pace.has_time_for_result(num_actions, deadline)


def _first_fitting(
    lines: Sequence[DeviceLine], schedules: Sequence[str], sizes: Sequence[int], deadline: Deadline
) -> TimedPlan | None:
    """Returns the first plan that fits of those for tight memory; None if none of the first ones does."""
    done, began_s = 0, time.perf_counter()
    fitting = ((line, plan) for line in lines for plan in fitting_plans(line, schedules, sizes))
    for number, (line, plan) in enumerate(fitting):
        is_enough = number >= MAX_LATE or done > LAST_ACTIONS or time.perf_counter() - began_s > MAX_LATE_S
        if deadline.is_over and is_enough and number >= MIN_LATE:
            break
        if plan is not None:
            done += _actions(line, plan)
            timed = line.time(plan)
            if timed is not None:
                return timed
    return None
