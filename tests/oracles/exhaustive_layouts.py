"""Simulates every layout of every problem: the oracle of the searches, for at most some 12 layers and 5 devices."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from bapipe.planner.branch_and_bound.problem import Layout, Problem, SearchResult
from bapipe.planner.stages.placements import StagePlacement


def exhaustive(problems: Sequence[Problem]) -> SearchResult | None:
    """Returns the fastest layout whose simulated memory fits; None if nothing fits.

    A stage recomputes if its devices cannot hold it otherwise.
    """
    best: SearchResult | None = None
    for problem in problems:
        for layout in layouts(problem):
            if any(shortfall > 0 for shortfall in problem.shortfall_bytes(layout).values()):
                continue
            step_ns = problem.simulate(layout).step_ns
            if best is None or step_ns < best.step_ns:
                best = SearchResult(problem=problem, layout=layout, step_ns=step_ns, lower_bound_ns=step_ns)
    return best


def layouts(problem: Problem) -> Iterator[Layout]:
    """Yields every layout of a problem, also those that do not fit."""
    last = len(problem.cuts) - 1
    for root in problem.roots:
        for placements in pipelines(root.first_placements):
            for inner in combinations(range(1, last), len(placements) - 1):
                yield problem.layout((0, *inner, last), placements)


def pipelines(first: Sequence[StagePlacement]) -> Iterator[tuple[StagePlacement, ...]]:
    """Yields every path of placements from some first ones to a last one."""
    for placement in first:
        if placement.is_last:
            yield (placement,)
        else:
            for following in pipelines(placement.successors):
                yield (placement, *following)
