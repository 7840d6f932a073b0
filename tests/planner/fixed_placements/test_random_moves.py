"""Climbs by random moves: estimates of many cuts at once are those of each, and climbs find the best."""

from itertools import combinations

import numpy as np
import pytest

from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.naive_cuts import Cuts, naive_cuts
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.fixed_placements.random_moves import Climb, continue_climb, neighbours
from bapipe.schedules import LOOPED
from tests.planner.fixed_placements.test_path_bound import random_cuts, random_placements


@pytest.mark.parametrize("schedules", [tuple(LOOPED), ("1f1b", "gpipe", "zb-h1", "2f2b", "1f1b-2bp")])
def test_lengths_of_many_time_vectors_are_those_of_each(schedules: tuple[str, ...]) -> None:
    for random, problem, placements in random_placements(12, schedules):
        pipeline = PlacedPipeline(problem, tuple(placements))
        times, _ = pipeline.time_vectors(random_cuts(random, problem, len(placements), 8))
        assert pipeline.lengths(times).tolist() == [pipeline.longest_path(each)[0] for each in times]


def test_neighbours_leave_every_stage_a_layer_and_the_ends_where_they_are() -> None:
    for _, problem, placements in random_placements(8, tuple(LOOPED)):
        pipeline = PlacedPipeline(problem, tuple(placements))
        last = len(problem.cuts) - 1
        for cuts in naive_cuts(problem, placements):
            found = neighbours(pipeline, cuts, np.random.default_rng(0))
            assert set(found[:, 0].tolist()) <= {0}
            assert set(found[:, -1].tolist()) <= {last}
            assert (np.diff(found, axis=1) > 0).all()


def test_climbs_end_at_the_best_cuts_of_nine_tenths_of_small_problems() -> None:
    num_best = num_problems = 0
    for _, problem, placements in random_placements(18, tuple(LOOPED)):
        pipeline, last = PlacedPipeline(problem, tuple(placements)), len(problem.cuts) - 1
        every = [(0, *inner, last) for inner in combinations(range(1, last), len(placements) - 1)]
        steps_ns = {cuts: step_ns for cuts in every if (step_ns := pipeline.step_ns(cuts)) is not None}
        start = next((cuts for cuts in naive_cuts(problem, placements) if cuts in steps_ns), None)
        if start is None:
            continue
        found = {start: steps_ns[start]}

        def simulated_ns(cuts: Cuts, found: dict[Cuts, int] = found, known: dict[Cuts, int] = steps_ns) -> int | None:
            found.update({cuts: known[cuts]} if cuts in known else {})
            return known.get(cuts)

        climb, random = Climb(start, steps_ns[start]), np.random.default_rng(0)
        while not climb.is_over:
            continue_climb(climb, pipeline, simulated_ns=simulated_ns, budget=Budget(10**9, UNLIMITED), random=random)
        num_problems += 1
        num_best += min(found.values()) == min(steps_ns.values())
    assert num_best >= 0.9 * num_problems > 10
