"""The relaxation of long chains: every plan is feasible in it, and some limits are not."""

from bisect import bisect_left
from collections.abc import Hashable
from itertools import combinations, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.planner.branch_and_bound.cost_to_go import sharing_key
from bapipe.planner.branch_and_bound.problem import Layout, Problem
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.long_chain.bisection import solve_long_chain
from bapipe.planner.long_chain.feasible_intervals import FeasibleIntervals
from bapipe.planner.long_chain.relaxation import Relaxation
from tests.builders import MS, chain, devices
from tests.oracles.exhaustive_layouts import exhaustive, layouts, pipelines
from tests.problems import random_problems


def feasible_intervals(problem: Problem) -> FeasibleIntervals:
    placements = [placement for root in problem.roots for placement in root.first_placements]
    return FeasibleIntervals(problem.lower_bound.costs, placements)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "eager-1f1b"])
def test_stages_of_a_plan_are_feasible_within_its_step_time(schedule: str) -> None:
    checked = 0
    for seed in range(12):
        for problem in random_problems(
            seed, [schedule], max_layers=5, buckets=seed % 3 == 0, splits_badly=seed % 2 == 1
        ):
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
        time_ends = feasible.time_ends(feasible.limits(placement), step_ns)[bool(recompute)]
        memory_ends = feasible.memory_ends(placement)[bool(recompute)]
        assert end <= time_ends[begin]
        assert end <= memory_ends[begin]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "1f1b-2bp", "eager-1f1b"])
def test_relaxation_is_feasible_at_the_optimum_and_infeasible_far_below(schedule: str) -> None:
    infeasible = optima = 0
    for seed in range(25):
        for problem in random_problems(seed, [schedule], splits_badly=seed % 2 == 1):
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


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b-2bp"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_the_first_stage_takes_b_where_that_is_shorter_than_i(schedule: str, num_microbatches: int) -> None:
    # One device: its W is all of the backward, so each of the three layers takes F + B = 6 ms, not F + I = 11 ms.
    profile = chain([1, 1, 1])
    (measured,) = profile.measurements
    layers = tuple(replace(m, input_grad_ns=10 * MS, weight_grad_ns=MS, backward_ns=5 * MS) for m in measured.layers)
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    options = PlanOptions(minibatch_size=num_microbatches, schedules=[schedule])
    (problem,) = build_space({"a": profile}, devices(1), options, sizes=[1]).problems
    optimum = exhaustive([problem])
    assert optimum is not None
    assert optimum.step_ns == num_microbatches * 18 * MS
    first = [placement for root in problem.roots for placement in root.first_placements]
    relaxation = Relaxation(problem, feasible_intervals(problem), first, lambda each: each.successors)
    assert relaxation.is_feasible(optimum.step_ns)
    assert not relaxation.is_feasible(num_microbatches * 3 * MS)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "eager-1f1b", "zb-v"])
def test_stages_of_every_plan_within_a_limit_have_possible_intervals(schedule: str) -> None:
    num_within = num_left_out = 0
    for seed in range(12):
        for problem in random_problems(
            seed, [schedule], max_layers=5, buckets=seed % 3 == 0, splits_badly=seed % 2 == 1
        ):
            fitting = [
                (problem.step_ns(layout), layout)
                for layout in layouts(problem)
                if all(shortfall <= 0 for shortfall in problem.shortfall_bytes(layout).values())
            ]
            if not fitting:
                continue
            first = [placement for root in problem.roots for placement in root.first_placements]
            relaxation = Relaxation(problem, feasible_intervals(problem), first, lambda each: each.successors)
            fastest_ns = min(step_ns for step_ns, _ in fitting)
            for limit_ns in (fastest_ns, fastest_ns * 5 // 4):
                possible = relaxation.possible_intervals(limit_ns)
                for step_ns, layout in fitting:
                    if step_ns <= limit_ns:
                        assert intervals_of(problem, layout) <= {
                            (key, number) for key, numbers in possible.items() for number in numbers.tolist()
                        }
                        num_within += 1
                num_left_out += sum(len(problem.lower_bound.costs.intervals.begins) - len(n) for n in possible.values())
    assert num_within > 40
    assert num_left_out > 100


def intervals_of(problem: Problem, layout: Layout) -> set[tuple[Hashable, int]]:
    """The number of the interval of each stage, with what says which placements share tables."""
    boundaries = [problem.cuts.index(cut) for cut in layout.cuts]
    of_ends = {(b, e): i for i, (b, e) in enumerate(combinations(range(len(problem.cuts)), 2))}
    return {
        (sharing_key(placement), of_ends[interval])
        for placement, interval in zip(layout.placements, pairwise(boundaries), strict=True)
    }


def test_a_limit_below_every_plan_leaves_no_intervals() -> None:
    problem = random_problems(1, ["1f1b"])[0]
    first = [placement for root in problem.roots for placement in root.first_placements]
    relaxation = Relaxation(problem, feasible_intervals(problem), first, lambda each: each.successors)
    assert relaxation.possible_intervals(1) == {}


def test_no_plan_beats_the_bound_if_the_first_of_many_unequal_devices_is_slow() -> None:
    # More than five devices are taken in the cluster's order, so only the first of them can have the first stage.
    random = Random(1)
    forward_ms = [random.randint(1, 9) for _ in range(310)]
    speeds = [0.4, *(1.0 - i / 100 for i in range(9))]
    cluster = devices(len(speeds))
    unequal = tuple(replace(each, speed=speed) for each, speed in zip(cluster.devices, speeds, strict=True))
    problems = build_space(
        {"a": chain(forward_ms, output_bytes=1000)},
        replace(cluster, devices=unequal),
        PlanOptions(minibatch_size=16, schedules=["1f1b"], replicas=False),
        sizes=[1],
    ).problems
    result = solve_long_chain(problems, max_exact_intervals=0)
    assert result is not None
    # Cuts in proportion to the speeds: each stage ends at its share of the work, or with the layer before.
    shares = [sum(speeds[:i]) / sum(speeds) for i in range(len(speeds) + 1)]
    work = [sum(forward_ms[:i]) / sum(forward_ms) for i in range(len(forward_ms) + 1)]
    ends = tuple(bisect_left(work, share - 1e-9) for share in shares)
    steps_ns = [
        problem.step_ns(problem.layout(ends, placements))
        for problem in problems
        for root in problem.roots
        for placements in pipelines(root.first_placements)
        if len(placements) == len(speeds)
    ]
    assert steps_ns
    assert result.lower_bound_ns <= min(steps_ns)
    assert result.step_ns <= min(steps_ns)
