"""Improves the result of any search: compares it with naive plans, then moves the cuts of the best plan.

Naive plans have one stage per device, or one stage on all devices; their cuts give equal times or equal numbers of
layers. A search that ends early may miss them.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise

from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.local_search import descend
from bapipe.planner.fixed_placements.naive_cuts import Cuts, naive_cuts
from bapipe.planner.fixed_placements.path_bound import PathBound
from bapipe.planner.fixed_placements.placed_pipeline import MAX_ENTRIES, PlacedPipeline
from bapipe.planner.stages.equal_replicas import pipeline_with_replicas
from bapipe.planner.stages.placements import StagePlacement


def improve(
    problems: Sequence[Problem], found: SearchResult, *, max_actions: int, deadline: Deadline = UNLIMITED
) -> SearchResult:
    """Returns the result of a search, or a faster layout with the same lower bound.

    Args:
        problems: the problems that were searched.
        found: the result.
        max_actions: the budget, in simulated actions.
        deadline: ends it with the best layout so far.
    """
    budget = Budget(max_actions, deadline)
    best = found
    with suppress(OutOfTime):  # raised while a pipeline's tables are made
        for problem in problems:
            for placements in _naive_pipelines(problem):
                for cuts in naive_cuts(problem, placements):
                    if budget.is_over():
                        break
                    budget.spend(2 * problem.num_microbatches * len(placements))
                    best = _better_of(best, problem, cuts, placements)
        return _with_moved_cuts(best, budget)
    return best


def _naive_pipelines(problem: Problem) -> Iterator[tuple[StagePlacement, ...]]:
    """Yields a pipeline with one stage per device, then one with a single stage, on as many devices as possible."""
    roots = sorted((root for root in problem.roots if not root.num_positions), key=lambda root: -root.num_devices)
    for on_all in (False, True):
        paths = (pipeline_with_replicas(root.first_placements, root.num_devices if on_all else 1) for root in roots)
        yield from islice((path for path in paths if path is not None and len(path) < len(problem.cuts)), 1)


def _better_of(
    best: SearchResult, problem: Problem, cuts: Cuts, placements: tuple[StagePlacement, ...]
) -> SearchResult:
    """Returns the best result, or a layout of a pipeline with some cuts if that fits and is faster."""
    costs = problem.lower_bound.costs
    for placement, (begin, end) in zip(placements, pairwise(cuts), strict=True):
        if not costs.candidates_from(placement, begin).fits[end - begin - 1]:
            return best
    layout = problem.layout(cuts, placements)
    if not problem.fits(layout):
        return best
    step_ns = problem.step_ns(layout)
    return replace(best, problem=problem, layout=layout, step_ns=step_ns) if step_ns < best.step_ns else best


def _with_moved_cuts(best: SearchResult, budget: Budget) -> SearchResult:
    """Returns the best layout, or a faster one by local search from its cuts and from naive cuts of its pipeline."""
    problem, placements = best.problem, best.layout.placements
    num_intervals = len(problem.lower_bound.costs.intervals.begins)
    if num_intervals * sum(placement.num_replicas for placement in placements) > MAX_ENTRIES:
        return best
    if budget.is_over():
        return best
    game = PathBound(PlacedPipeline(problem, placements), {})
    own = tuple(problem.cuts.index(cut) for cut in best.layout.cuts)
    for start in dict.fromkeys((own, *naive_cuts(problem, placements))):
        step_ns = game.pipeline.step_ns(start)
        if step_ns is not None and len(start) > 2:
            game.add_cuts(start)
            _, cuts = descend(game, start, step_ns, budget)
            best = _better_of(best, problem, cuts, placements)
    return best
