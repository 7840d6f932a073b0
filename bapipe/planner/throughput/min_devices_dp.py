"""Exact search for a `HomogeneousLoadProblem`: the fewest devices that stay below a load, for a falling load.

If all devices are the same, a stage's load and memory do not depend on the stages before it, and on those after it only
through the number of their devices: the more, the more micro-batches the stage keeps in flight. So of all plans for the
layers after a boundary, one with the fewest devices is at least as good as any other, and the table of the dynamic
programme holds one number per boundary. For a limit L on the load,

    N(b) = min over boundaries e > b of  devices(b, e, N(e), L) + N(e),     N(last) = 0

where devices(...) is the fewest devices with which the stage [b, e) has a load below L and fits in memory. A plan below
L exists if and only if N(0) is at most the number of devices. The minimal load is found by bisection on L.
"""

from collections.abc import Iterator
from contextlib import suppress
from math import inf

import numpy as np

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.throughput.problem import (
    LIMIT_GROWTH,
    MAX_STAGES_PER_BLOCK,
    HomogeneousLoadProblem,
    MinMaxLoad,
    StagePath,
)
from bapipe.progress import LoadProgress


def min_max_load_homogeneous(
    problem: HomogeneousLoadProblem,
    *,
    bound: float,
    ceiling: float,
    best: StagePath | None = None,
    progress: LoadProgress | None = None,
    deadline: Deadline = UNLIMITED,
) -> MinMaxLoad:
    """Returns the plan with the minimal largest load, proven optimal unless the deadline ends the search before.

    Args:
        bound: a lower bound on the largest load of every plan.
        ceiling: an upper bound on the largest load of every plan.
        best: a plan that is already known.
    """
    known = MinMaxLoad(best=best, bound=bound)
    with suppress(OutOfTime):
        for improved in _narrowed(problem, known, ceiling, progress, deadline):
            known = improved
    return known


def _narrowed(
    problem: HomogeneousLoadProblem,
    known: MinMaxLoad,
    ceiling: float,
    progress: LoadProgress | None,
    deadline: Deadline,
) -> Iterator[MinMaxLoad]:
    """Yields the best plan and the bound each time that one of them has improved, until they meet."""
    best, bound = known.best, known.bound
    # First a plan: limits grow from the lower bound, and each limit without a plan is the next lower bound.
    for limit in sorted({min(ceiling, bound * growth * (1 + 1e-9)) for growth in LIMIT_GROWTH} | {ceiling}):
        if best is not None:
            break
        best = find_plan_below(problem, limit, deadline)
        if best is None:
            bound = limit
            if progress:
                progress(inf, bound)
        yield MinMaxLoad(best=best, bound=bound)
    # Then the optimum: bisection alternates with a limit at the best load itself, because loads are not continuous.
    # A plan found lowers the best load to one that occurs, and a limit at the best load ends the search.
    bisects = True
    while best is not None and bound < best.load:
        limit = (best.load + bound) / 2 if bisects else best.load
        better = find_plan_below(problem, limit, deadline)
        if better is None:
            bound = limit
        else:
            best = better
        bisects = not bisects
        if progress:
            progress(best.load, bound)
        yield MinMaxLoad(best=best, bound=bound)


def find_plan_below(problem: HomogeneousLoadProblem, limit: float, deadline: Deadline = UNLIMITED) -> StagePath | None:
    """Returns a plan with every load below the limit, None if there is none. O(boundaries**2) stages."""
    # Loads are not negative.
    if limit <= 0:
        return None
    last, num_devices = problem.num_boundaries - 1, problem.num_devices
    before, after = problem.min_devices_around(limit)  # [boundaries]
    # Pruning: too few devices for the layers before and after, or none left for the stage that begins here.
    candidates = np.nonzero((before + after <= num_devices) & (before < num_devices))[0]
    min_devices: Ints = np.full(last + 1, num_devices + 1, dtype=np.int64)  # N(b)
    min_devices[last] = after[last] = 0
    stage_devices: Ints = np.zeros(last + 1, dtype=np.int64)  # of the stage that begins at each boundary
    stage_end: Ints = np.zeros(last + 1, dtype=np.int64)
    # If a stage's memory depends on N(e), N must be final for every later boundary: one beginning at a time.
    rows = 1 if problem.depends_on_later_devices else max(1, MAX_STAGES_PER_BLOCK // (last + 1))
    position = candidates.size
    while position > 0:
        deadline.check()
        begins = candidates[max(0, position - rows) : position]
        position -= begins.size
        ends = np.concatenate([candidates[candidates > begins[0]], [last]])
        follow = min_devices[ends] if problem.depends_on_later_devices else after[ends]
        available = num_devices - before[begins][:, None] - follow[None, :]  # [begins, ends]
        needed = problem.min_devices(begins, ends, follow, available, limit)
        for row in np.nonzero((needed <= num_devices).any(axis=1))[0][::-1].tolist():
            begin = int(begins[row])
            total = needed[row] + min_devices[ends]
            choice = int(total.argmin())
            # The devices before this boundary are needed too.
            if total[choice] <= num_devices - before[begin]:
                min_devices[begin] = total[choice]
                stage_devices[begin], stage_end[begin] = needed[row, choice], ends[choice]
    if min_devices[0] > num_devices:
        return None
    return _path(problem, stage_devices, stage_end)


def _path(problem: HomogeneousLoadProblem, stage_devices: Ints, stage_end: Ints) -> StagePath:
    """Returns the plan of the best stages, from boundary 0 to the last one."""
    boundaries, devices, load = [0], [], 0.0
    while boundaries[-1] < problem.num_boundaries - 1:
        begin = boundaries[-1]
        devices.append(int(stage_devices[begin]))
        boundaries.append(int(stage_end[begin]))
        load = max(load, problem.load(devices[-1], begin, boundaries[-1]))
    return StagePath(load=load, boundaries=tuple(boundaries), states=tuple(devices))
