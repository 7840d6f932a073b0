"""The relaxation of long chains: no plan is lost, and it says no to some limits."""

from itertools import pairwise
from random import Random

import pytest

from bapipe.planner.branch_and_bound.problem import Layout, Problem
from bapipe.planner.long_chain.feasible_intervals import FeasibleIntervals
from bapipe.planner.long_chain.relaxation import Relaxation
from tests.oracles.exhaustive_layouts import exhaustive, layouts
from tests.problems import random_problems


def feasible_intervals(problem: Problem) -> FeasibleIntervals:
    placements = [placement for root in problem.roots for placement in root.first_placements]
    return FeasibleIntervals(problem.lower_bound.costs, placements)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "eager-1f1b"])
def test_stages_of_a_plan_are_feasible_within_its_step_time(schedule: str) -> None:
    checked = 0
    for seed in range(12):
        for problem in random_problems(seed, [schedule], max_layers=5, buckets=seed % 3 == 0):
            feasible = feasible_intervals(problem)
            for layout in layouts(problem):
                if all(shortfall <= 0 for shortfall in problem.shortfall_bytes(layout).values()):
                    check_stages(problem, feasible, layout)
                    checked += 1
    assert checked > 50


def check_stages(problem: Problem, feasible: FeasibleIntervals, layout: Layout) -> None:
    step_ns = problem.step_ns(layout)
    boundaries = [problem.cuts.index(cut) for cut in layout.cuts]
    for placement, (begin, end), recompute in zip(
        layout.placements, pairwise(boundaries), layout.recompute, strict=True
    ):
        time_ends = feasible.time_ends(feasible.limits(placement), step_ns)[recompute]
        memory_ends = feasible.memory_ends(placement)[recompute]
        assert end <= time_ends[begin]
        assert end <= memory_ends[begin]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "eager-1f1b"])
def test_relaxation_is_feasible_at_the_optimum_and_infeasible_far_below(schedule: str) -> None:
    infeasible = optima = 0
    for seed in range(25):
        for problem in random_problems(seed, [schedule]):
            optimum = exhaustive([problem])
            if optimum is None:
                continue
            first = [placement for root in problem.roots for placement in root.first_placements]
            relaxation = Relaxation(problem, feasible_intervals(problem), first, lambda each: each.successors)
            assert relaxation.is_feasible(optimum.step_ns), seed
            infeasible += not relaxation.is_feasible(Random(seed).randrange(optimum.step_ns // 2, optimum.step_ns))
            optima += 1
    assert optima > 20
    assert infeasible > 0.4 * optima
