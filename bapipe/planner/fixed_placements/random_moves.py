"""Improves the cuts of a pipeline by random moves (a climb), many of which are estimated at once.

A move shifts one cut, or several consecutive ones, by a few boundaries; a neighbour is one to three moves away. The
length of the longest path estimates the step of a neighbour. Computed for hundreds of neighbours at once, as columns of
arrays, it costs little more than one simulation. Only neighbours that are estimated to be faster are simulated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.stages.intervals import MANY_BOUNDARIES, IntArray

MAX_MOVES, ONE_CUT_SHARE = 3, 0.6
"""Maximum number of moves from cuts to a neighbour; the share of moves that shift a single cut."""

SHIFTS = np.array((1, 1, 1, 2, 2, 3, 4, 8))
"""The numbers of boundaries by which cuts are shifted; small ones occur more often."""

NUM_NEIGHBOURS, MAX_ENDS = 256, 4_000_000
"""Maximum number of neighbours that are estimated at once, and of their actions together."""

MAX_SIMULATED = 3
"""Maximum number of neighbours that are simulated after each estimate of many."""

MAX_WORSE = 16
"""A climb ends after this many tries in a row without a faster neighbour."""

TRIES_PER_TURN = 32
"""How many times a climb looks for a faster neighbour before another search has its turn."""


@dataclass(slots=True)
class Climb:
    """The state of a climb.

    Attributes:
        cuts, step_ns: the best cuts so far, and their step time.
        num_worse: how many tries in a row have found no faster neighbour.
    """

    cuts: Cuts
    step_ns: int
    num_worse: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_worse >= MAX_WORSE


def continue_climb(
    climb: Climb,
    pipeline: PlacedPipeline,
    *,
    simulated_ns: Callable[[Cuts], int | None],
    budget: Budget,
    random: np.random.Generator,
) -> None:
    """Continues a climb for `TRIES_PER_TURN` tries, or to its end.

    Args:
        simulated_ns: returns the simulated step time of cuts, None if they do not fit.
    """
    for _ in range(TRIES_PER_TURN):
        if climb.is_over or budget.is_over():
            break
        climb.num_worse += 1
        for other in _promising(pipeline, neighbours(pipeline, climb.cuts, random), climb.step_ns, budget):
            other_ns = simulated_ns(other)
            if other_ns is not None and other_ns < climb.step_ns:
                climb.cuts, climb.step_ns, climb.num_worse = other, other_ns, 0
                break


def _promising(pipeline: PlacedPipeline, others: IntArray, step_ns: int, budget: Budget) -> list[Cuts]:
    """Returns the cuts with the shortest estimated steps, if below `step_ns`. `others` are [n, stages + 1]."""
    times, fits = pipeline.time_vectors(others)
    others, times = others[fits], times[fits]
    budget.spend(pipeline.lengths_cost(len(others)))
    if not len(others):
        return []
    lengths_ns = pipeline.lengths(times)
    first = np.argsort(lengths_ns, kind="stable")[:MAX_SIMULATED]
    return [tuple(others[i].tolist()) for i in first if lengths_ns[i] < step_ns]


def neighbours(pipeline: PlacedPipeline, cuts: Cuts, random: np.random.Generator) -> IntArray:
    """Returns random neighbours of some cuts in which every stage has a layer; there may be none. [n, stages + 1]"""
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
