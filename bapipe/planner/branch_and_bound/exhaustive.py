"""Judges every layout of every problem. The oracle of the other searches; for at most some 12 layers and 5 devices."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.problem import Layout, Problem, SearchResult


def exhaustive(problems: Sequence[Problem]) -> SearchResult | None:
    """Returns the fastest layout whose judged memory fits; None where nothing fits.

    A stage recomputes where its devices cannot hold it otherwise.
    """
    best: SearchResult | None = None
    for problem in problems:
        for layout in layouts(problem):
            if any(lack > 0 for lack in problem.lacks(layout).values()):
                continue
            step_ns = problem.judge(layout).step_ns
            if best is None or step_ns < best.step_ns:
                best = SearchResult(problem=problem, layout=layout, step_ns=step_ns, lower_bound_ns=step_ns)
    return best


def layouts(problem: Problem) -> Iterator[Layout]:
    """Yields every layout of a problem, also those that do not fit."""
    last = len(problem.cuts) - 1
    for start in problem.starts:
        for slots in _paths(start.first):
            for inner in combinations(range(1, last), len(slots) - 1):
                yield problem.layout((0, *inner, last), slots)


def _paths(first: Sequence[StagePlacement]) -> Iterator[tuple[StagePlacement, ...]]:
    for slot in first:
        if slot.last:
            yield (slot,)
        else:
            for rest in _paths(slot.next):
                yield (slot, *rest)
