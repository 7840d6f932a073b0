"""Plans like a given one: under another schedule, its cuts moved a little, or its devices given to other stages."""

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from bapipe.planner.branch_and_bound.lower_bound import PartialPlan
from bapipe.planner.branch_and_bound.placements import ClassCounts, StagePlacement
from bapipe.planner.branch_and_bound.problem import Problem

CUT_MOVES = (-1, 1, -2, 2, -4, 4)
"""Places that a cut is moved by."""

Groups = tuple[ClassCounts, ...]
"""The number of devices of each class that each stage has."""


def change_schedule(problem: Problem, prefix: PartialPlan, below_ns: int) -> Iterator[PartialPlan]:
    """Yields the same stages in another problem, where their bound is below."""
    slots = None if prefix.work_ns else path(problem, _groups(problem, prefix))
    found = None if slots is None else complete_on(problem, slots, prefix.places, below_ns)
    if found is not None:
        yield found


def move_cut(problem: Problem, prefix: PartialPlan, below_ns: int) -> Iterator[PartialPlan]:
    """Yields the same stages with one cut moved, where their bound is below."""
    for k in range(1, len(prefix.places) - 1):
        for shift in CUT_MOVES:
            places = list(prefix.places)
            places[k] += shift
            if places[k - 1] < places[k] < places[k + 1]:
                found = complete_on(problem, prefix.slots, places, below_ns)
                if found is not None:
                    yield found


def move_device(problem: Problem, prefix: PartialPlan, below_ns: int) -> Iterator[PartialPlan]:
    """Yields other stages, cut where the bound is least, where it is below: a device moved, exchanged, or alone."""
    if prefix.work_ns:  # devices with several stages stay in their order
        return
    seen = set()
    for other in _neighbours(_groups(problem, prefix), [len(own.ranks) for own in problem.classes]):
        if other not in seen:
            seen.add(other)
            slots = path(problem, other)
            found = None if slots is None else complete_on(problem, slots, None, below_ns)
            if found is not None:
                yield found


def _groups(problem: Problem, prefix: PartialPlan) -> Groups:
    classes = range(len(problem.classes))
    return tuple(tuple(slot.devices.count(c) for c in classes) for slot in prefix.slots)


def path(problem: Problem, groups: Groups) -> tuple[StagePlacement, ...] | None:
    """Returns the slots of stages with these devices; None where the problem has no such pipeline."""
    wanted = [tuple(c for c, count in enumerate(group) for _ in range(count)) for group in groups]
    total = sum(map(len, wanted))
    for start in problem.starts:
        if start.devices == total and not start.num_places:
            found: list[StagePlacement] = []
            choice: Sequence[StagePlacement] = start.first
            for devices in wanted:
                slot = next((slot for slot in choice if tuple(sorted(slot.devices)) == devices), None)
                if slot is None:
                    break
                found.append(slot)
                choice = slot.next
            if len(found) == len(wanted) and found[-1].last:
                return tuple(found)
    return None


def complete_on(
    problem: Problem, slots: tuple[StagePlacement, ...], places: Sequence[int] | None, below_ns: int
) -> PartialPlan | None:
    """Returns a plan on these slots, cut at these places, or else wherever the bound is least; None if not below."""
    bounds = problem.bounds
    num_places = len({slot.place for slot in slots} - {None})
    ready = [prefix for bound_ns, prefix in bounds.starts(slots[:1], num_places) if bound_ns < below_ns]
    prefix = ready[0] if ready else None
    k = 0
    while prefix is not None and not prefix.whole:
        bound_ns, ends, numbers = bounds.children(prefix)
        number = -1 if prefix.slots[-1].last else prefix.slots[-1].next.index(slots[k + 1])
        mine = numbers == number
        if places is not None:
            mine = mine & (ends == places[k + 1])
        chosen = np.flatnonzero(mine)
        if not len(chosen):
            return None
        least = chosen[np.argmin(bound_ns[chosen])]
        if bound_ns[least] >= below_ns:
            return None
        prefix = bounds.extend(prefix, int(ends[least]), number)
        k += 1
    return prefix


def _neighbours(groups: Groups, have: Sequence[int]) -> Iterator[Groups]:
    spare = [most - sum(group[c] for group in groups) for c, most in enumerate(have)]
    stages, classes = range(len(groups)), range(len(have))
    for a, b in permutations(stages, 2):
        for c in classes:
            if groups[a][c]:
                moved = _plus(_plus(groups, a, c, -1), b, c, 1)
                yield tuple(group for group in moved if any(group))
                for d in classes:
                    if d != c and groups[b][d]:
                        yield _plus(_plus(moved, b, d, -1), a, d, 1)
    for c in classes:
        if spare[c]:
            yield from (_plus(groups, a, c, 1) for a in stages)
        single = tuple(int(d == c) for d in classes)
        for a in stages:
            taken = groups if spare[c] else _plus(groups, a, c, -1)
            if min(taken[a]) >= 0 and any(taken[a]):
                yield from ((*taken[:b], single, *taken[b:]) for b in range(len(groups) + 1))


def _plus(groups: Groups, stage: int, c: int, more: int) -> Groups:
    group = groups[stage]
    changed = (*group[:c], group[c] + more, *group[c + 1 :])
    return (*groups[:stage], changed, *groups[stage + 1 :])
