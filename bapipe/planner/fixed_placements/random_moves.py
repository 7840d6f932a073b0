"""A climb over the cuts of a pipeline by random moves, many of which are estimated at once.

A move shifts one cut, or all from one to another, by a few boundaries; a neighbour is one to three moves away. The
longest path of the step estimates a neighbour; run through for hundreds of neighbours at once, in columns, it costs
little more than one simulation. Only neighbours that are estimated to be faster are simulated.
"""

from collections.abc import Callable

import numpy as np

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.pipeline import Pipeline

MAX_MOVES, ONE_CUT_SHARE = 3, 0.6
"""How many moves away neighbours are at most; the share of moves that shift one cut alone."""

SHIFTS = np.array((1, 1, 1, 2, 2, 3, 4, 8))
"""By how many boundaries cuts are shifted, small shifts more often."""

MANY_BOUNDARIES = 200
"""In longer chains half of the shifts are by so many times as much as there are so many boundaries."""

NUM_NEIGHBOURS, MAX_ENDS = 256, 4_000_000
"""Neighbours estimated at once: at most so many, and so many ends of actions in all."""

MAX_SIMULATED = 3
"""Of these, at most so many are simulated."""

MAX_WORSE = 16
"""A climb ends after so many times without a faster neighbour."""

MAX_TRIES = 32
"""How many times a climb looks for a faster neighbour before another search has its turn."""

ESTIMATE_COST = 3
"""Exchange rate: simulated actions that take as long as an action of all neighbours that are estimated at once."""


def climb(
    pipeline: Pipeline,
    cuts: Cuts,
    step_ns: int,
    *,
    simulated_ns: Callable[[Cuts], int | None],
    budget: Budget,
    random: np.random.Generator,
) -> bool:
    """Goes from some cuts to faster ones for some time; returns whether random moves find none any more.

    Args:
        step_ns: of the cuts.
        simulated_ns: times cuts, and keeps the best ones; None if they do not fit.
    """
    num_worse = 0
    for _ in range(MAX_TRIES):
        if budget.is_over():
            break
        num_worse += 1
        for other in _promising(pipeline, neighbours(pipeline, cuts, random), step_ns, budget):
            other_ns = simulated_ns(other)
            if other_ns is not None and other_ns < step_ns:
                cuts, step_ns, num_worse = other, other_ns, 0
                break
        if num_worse == MAX_WORSE:
            return True
    return False


def _promising(pipeline: Pipeline, others: IntArray, step_ns: int, budget: Budget) -> list[Cuts]:
    """The cuts with the shortest estimates, if these are below the step."""
    times, fits = pipeline.time_vectors(others)
    others, times = others[fits], times[fits]
    budget.spend(ESTIMATE_COST * pipeline.num_actions + pipeline.vectors_cost)
    if not len(others):
        return []
    lengths_ns = pipeline.lengths(times)
    first = np.argsort(lengths_ns, kind="stable")[:MAX_SIMULATED]
    return [tuple(others[i].tolist()) for i in first if lengths_ns[i] < step_ns]


def neighbours(pipeline: Pipeline, cuts: Cuts, random: np.random.Generator) -> IntArray:
    """Returns cuts that random moves lead to, every stage with a layer; there may be none. [n, stages + 1]"""
    num, at = max(1, min(NUM_NEIGHBOURS, MAX_ENDS // pipeline.num_actions)), np.arange(len(cuts))
    moved = np.tile(np.array(cuts), (num, 1))
    if len(cuts) < 3:
        return moved[:0]
    num_moves = random.integers(1, MAX_MOVES + 1, num)
    far = max(1, pipeline.intervals.num_boundaries // MANY_BOUNDARIES)
    for i in range(MAX_MOVES):
        one, other = random.integers(1, len(cuts) - 1, (2, num))
        other = np.where(random.random(num) < ONE_CUT_SHARE, one, other)
        by = random.choice(SHIFTS, num) * random.choice((-1, 1), num) * random.choice((1, far), num)
        is_shifted = (np.minimum(one, other)[:, None] <= at) & (at <= np.maximum(one, other)[:, None])
        moved += np.where(num_moves > i, by, 0)[:, None] * is_shifted
    apart: IntArray = moved[(np.diff(moved, axis=1) > 0).all(axis=1)]
    return apart
