"""The plans that a search for many devices begins with, in the order in which they are worth timing."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf, isinf
from typing import NamedTuple

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.climb import Climbs, Estimated
from bapipe.planner.device_line.fitting_cuts import fitting_plans
from bapipe.planner.device_line.growing_stages import growing_stages
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.naive import naive_plans

MAX_ESTIMATED = 400
"""The maximum number of naive plans that are estimated, so that the search begins with the best ones."""

NUM_FITTING = 6
"""The number of plans of each order of the devices that are tried where memory is tight."""


class FirstPlans(NamedTuple):
    """Plans to begin with.

    Attributes:
        ranked: all of them, in the order in which they are to be timed.
        estimated: those that fit by their estimates, the fastest first.
        is_memory_tight: whether some naive plan does not fit by its estimate.
    """

    ranked: list[tuple[DeviceLine, LinePlan]]
    estimated: list[Estimated]
    is_memory_tight: bool


def first_plans(
    lines: Sequence[DeviceLine], schedules: Sequence[str], sizes: Sequence[int], climbs: Climbs, deadline: Deadline
) -> FirstPlans:
    """Returns the naive and the growing plans of all lines: those with estimates first, by estimate, then by bound.

    Naive plans are estimated until a bound exceeds the smallest estimate. If the time for that ends before, the rest
    come in the order of their numbers of actions, as the plans with the smallest bounds have many stages.
    """
    bounded = [(bound_ns, line, plan) for line in lines for bound_ns, plan in naive_plans(line, schedules, sizes)]
    estimated: list[Estimated] = []
    least_ns, bounded = inf, sorted(bounded, key=lambda each: each[0])
    naive_deadline = deadline.share(2)
    for bound_ns, line, plan in bounded[:MAX_ESTIMATED]:
        if bound_ns > least_ns or naive_deadline.is_over:
            break
        estimated.append((climbs.estimate_ns(line, plan), line, plan))
        least_ns = min(least_ns, estimated[-1][0])
    is_memory_tight = any(isinf(estimate_ns) for estimate_ns, _, _ in estimated)
    num_naive = len(estimated)
    for line, schedule, size in product(lines, schedules, sizes) if lines[0].options.replicas else ():
        step_ns = partial(climbs.estimate_ns, line)
        for estimate_ns, plan in growing_stages(line, schedule, size, step_ns, deadline):
            estimated.append((estimate_ns, line, plan))
    estimated.sort(key=lambda each: each[0])
    others = bounded[num_naive:]
    if naive_deadline.is_over:
        others.sort(key=lambda each: each[1].num_actions(each[2]))
    ranked = [(line, plan) for _, line, plan in [*estimated, *others]]
    return FirstPlans(ranked, [each for each in estimated if not isinf(each[0])], is_memory_tight)


def first_fitting(
    lines: Sequence[DeviceLine], schedules: Sequence[str], sizes: Sequence[int], is_over: Callable[[], bool]
) -> Iterator[tuple[DeviceLine, LinePlan]]:
    """Yields a few plans that fit, from each line in turn, until `is_over`."""
    tried = deque((line, fitting_plans(line, schedules, sizes)) for line in lines)
    num_left = NUM_FITTING * len(tried)
    while tried and num_left > 0 and not is_over():
        line, of_line = tried.popleft()
        with suppress(StopIteration):
            plan = next(of_line)
            tried.append((line, of_line))
            if plan is not None:
                num_left -= 1
                yield line, plan
