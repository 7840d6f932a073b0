"""The neighbourhoods of the local search: another schedule or micro-batch size, a cut moved, a device moved.

Each neighbourhood is a generator: it yields the complete plans whose lower bound is below the incumbent's step time,
and None for each of the others: these may be thousands, and so the caller can check its deadline. The caller takes the
first plan that is better in the simulator.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from bapipe.planner.branch_and_bound.partial_plan import PartialPlan
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.stages.placements import ClassCounts, StagePlacement

CUT_MOVES = (-1, 1, -2, 2, -4, 4)
"""The numbers of boundaries by which a cut is moved."""

CountsOfStages = tuple[ClassCounts, ...]
"""The number of devices of each class that each stage has. [stages, classes]"""


def change_schedule(problem: Problem, plan: PartialPlan, upper_bound_ns: int) -> Iterator[PartialPlan | None]:
    """Yields the plan with the same cuts and devices in another problem; None if that has none with a bound below."""
    if plan.work_ns:  # with several stages per device, another schedule has other stages on each device
        return
    placements = placements_for(problem, _counts_of_stages(problem, plan))
    yield None if placements is None else complete_on(problem, placements, plan.boundaries, upper_bound_ns)


def move_cut(problem: Problem, plan: PartialPlan, upper_bound_ns: int) -> Iterator[PartialPlan | None]:
    """Yields the plans with one cut moved; None for those whose bound is not below `upper_bound_ns`."""
    for k in range(1, len(plan.boundaries) - 1):
        for move in CUT_MOVES:
            boundaries = list(plan.boundaries)
            boundaries[k] += move
            # Every stage must keep a layer.
            if boundaries[k - 1] < boundaries[k] < boundaries[k + 1]:
                yield complete_on(problem, plan.placements, boundaries, upper_bound_ns)


def move_device(problem: Problem, plan: PartialPlan, upper_bound_ns: int) -> Iterator[PartialPlan | None]:
    """Yields plans with new cuts and one device moved, exchanged, added, or in a stage of its own.

    None for those whose bound is not below `upper_bound_ns`.
    """
    if plan.work_ns:  # devices with several stages stay in their order
        return
    # Several moves lead to the same counts; each is bounded once.
    seen = set()
    num_available = [len(cls.ranks) for cls in problem.classes]
    for counts in _neighbours(_counts_of_stages(problem, plan), num_available):
        if counts not in seen:
            seen.add(counts)
            placements = placements_for(problem, counts)
            yield None if placements is None else complete_on(problem, placements, None, upper_bound_ns)


def _counts_of_stages(problem: Problem, plan: PartialPlan) -> CountsOfStages:
    """Returns how many devices of each class each stage of a complete plan has."""
    classes = range(len(problem.classes))
    return tuple(tuple(placement.device_classes.count(c) for c in classes) for placement in plan.placements)


def placements_for(problem: Problem, counts: CountsOfStages) -> tuple[StagePlacement, ...] | None:
    """Returns a pipeline whose stages have these devices, None if the problem has none."""
    wanted = [tuple(c for c, count in enumerate(own) for _ in range(count)) for own in counts]
    num_devices = sum(map(len, wanted))
    for root in problem.roots:
        if root.num_devices == num_devices and not root.num_positions:
            path: list[StagePlacement] = []
            choices: Sequence[StagePlacement] = root.first_placements
            for devices in wanted:
                # Groups have no order: of the placements with other orders of these replicas, take the first.
                match = next((each for each in choices if tuple(sorted(each.device_classes)) == devices), None)
                if match is None:
                    break
                path.append(match)
                choices = match.successors
            if len(path) == len(wanted) and path[-1].is_last:
                return tuple(path)
    return None


def complete_on(
    problem: Problem, placements: tuple[StagePlacement, ...], boundaries: Sequence[int] | None, upper_bound_ns: int
) -> PartialPlan | None:
    """Returns a complete plan on these placements, None if its bound is not below `upper_bound_ns`.

    Args:
        boundaries: where its stages begin and end; if None, each stage in turn gets the end with the smallest bound.
    """
    lower_bound = problem.lower_bound
    num_positions = len({placement.position for placement in placements} - {None})
    # The same steps as in the search tree: as soon as a prefix has a bound that is not below, the plan is dropped.
    roots = [plan for bound_ns, plan in lower_bound.roots(placements[:1], num_positions) if bound_ns < upper_bound_ns]
    plan = roots[0] if roots else None
    stage = 0
    while plan is not None and not plan.is_complete:
        bounds_ns, ends, numbers = lower_bound.children(plan)
        placement = plan.placements[-1]
        number = -1 if placement.is_last else placement.successors.index(placements[stage + 1])
        # The children whose next placement is the given one. [children]
        eligible = numbers == number
        if boundaries is not None:
            eligible = eligible & (ends == boundaries[stage + 1])
        children = np.flatnonzero(eligible)
        if not len(children):
            return None
        best = children[np.argmin(bounds_ns[children])]
        if bounds_ns[best] >= upper_bound_ns:
            return None
        plan = lower_bound.extend(plan, int(ends[best]), number)
        stage += 1
    return plan


def _neighbours(counts: CountsOfStages, num_available: Sequence[int]) -> Iterator[CountsOfStages]:
    """Yields the counts that one move makes of `counts`; some of them more than once.

    Args:
        num_available: how many devices of each class the cluster has. [classes]
    """
    # How many devices are unused. [classes]
    num_spare = [count - sum(own[c] for own in counts) for c, count in enumerate(num_available)]
    stages, classes = range(len(counts)), range(len(num_available))
    for source, target in permutations(stages, 2):
        for c in classes:
            if counts[source][c]:
                # Move a device to another stage; a stage without devices disappears.
                moved = _add(_add(counts, source, c, -1), target, c, 1)
                yield tuple(own for own in moved if any(own))
                for d in classes:
                    if d != c and counts[target][d]:  # exchange it for a device of another class
                        yield _add(_add(moved, target, d, -1), source, d, 1)
    for c in classes:
        if num_spare[c]:  # add an unused device to a stage
            yield from (_add(counts, stage, c, 1) for stage in stages)
        alone = tuple(int(d == c) for d in classes)
        for stage in stages:  # add a stage with one device, an unused one or one taken from `stage`
            remaining = counts if num_spare[c] else _add(counts, stage, c, -1)
            if min(remaining[stage]) >= 0 and any(remaining[stage]):
                yield from ((*remaining[:at], alone, *remaining[at:]) for at in range(len(counts) + 1))


def _add(counts: CountsOfStages, stage: int, c: int, change: int) -> CountsOfStages:
    """Returns the counts with `change` more devices of class `c` in a stage."""
    own = counts[stage]
    changed = (*own[:c], own[c] + change, *own[c + 1 :])
    return (*counts[:stage], changed, *counts[stage + 1 :])
