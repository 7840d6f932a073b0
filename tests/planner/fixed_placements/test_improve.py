"""What a search leaves open is held against naive plans and improved by moving cuts; its bound stays."""

from dataclasses import replace
from random import Random

from bapipe.planner.branch_and_bound.problem import SearchResult
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.fixed_placements.improve import improve
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices
from tests.oracles.exhaustive_layouts import exhaustive, layouts
from tests.problems import random_problems


def test_a_bad_layout_becomes_no_worse_than_the_naive_plans() -> None:
    options = PlanOptions(minibatch_size=8, schedules=["1f1b"])
    profile = chain([3 + i % 4 for i in range(24)], output_bytes=100_000)
    (problem,) = build_space({"a": profile}, devices(3), options, sizes=[1]).problems
    path = [max(problem.roots, key=lambda root: root.num_devices).first_placements[0]]
    while not path[-1].is_last:
        path.append(path[-1].successors[0])
    bad = problem.layout((0, *range(1, len(path)), 24), tuple(path))
    found = SearchResult(problem=problem, layout=bad, step_ns=problem.step_ns(bad), lower_bound_ns=1)
    naive = improve([problem], found, max_actions=1_000)
    better = improve([problem], found, max_actions=200_000)
    equal = (
        problem.layout((0, 8, 16, 24), naive.layout.placements) if len(naive.layout.placements) == 3 else naive.layout
    )
    assert better.step_ns <= naive.step_ns <= problem.step_ns(equal) < found.step_ns
    assert better.lower_bound_ns == 1
    assert problem.simulate(better.layout).step_ns == better.step_ns


def test_improved_layouts_fit_and_never_beat_the_optimum() -> None:
    num_improved = 0
    for seed in range(24):
        problems = random_problems(seed, max_layers=5, limit=400)
        want = exhaustive(problems)
        if want is None:
            continue
        problem = want.problem
        fitting = [layout for layout in layouts(problem) if max(problem.shortfall_bytes(layout).values()) <= 0]
        bad = Random(seed).choice(fitting)
        found = replace(want, layout=bad, step_ns=problem.step_ns(bad))
        better = improve(problems, found, max_actions=50_000)
        assert want.step_ns <= better.step_ns <= found.step_ns
        assert all(lack <= 0 for lack in better.problem.shortfall_bytes(better.layout).values())
        num_improved += better.step_ns < found.step_ns
    assert num_improved > 4
