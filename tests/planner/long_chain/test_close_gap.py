"""Best-first search among the intervals that plans within a limit can have: bounds and plans of long chains."""

from itertools import count, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.long_chain.bisection import solve_long_chain
from tests.builders import chain, devices
from tests.oracles.exhaustive_layouts import exhaustive
from tests.problems import random_problems


def wide_gap_problems(schedule: str, num_layers: int = 40) -> tuple[Problem, ...]:
    """Few micro-batches on four unlike devices with replicas: the relaxation alone leaves a gap."""
    random = Random(3)
    cluster = devices(4)
    unlike = tuple(replace(each, speed=s) for each, s in zip(cluster.devices, (1.0, 0.8, 0.6, 0.5), strict=True))
    return build_space(
        {"a": chain([random.randint(1, 9) for _ in range(num_layers)], output_bytes=100_000)},
        replace(cluster, devices=unlike),
        PlanOptions(minibatch_size=4, schedules=[schedule]),
        sizes=[1],
    ).problems


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_the_gap_of_a_long_chain_is_closed(schedule: str) -> None:
    problems = wide_gap_problems(schedule)
    without = solve_long_chain(problems, max_exact_intervals=0)
    found = solve_long_chain(problems, max_gap=0.0)
    optimum = best_first(problems)  # among all intervals
    assert without is not None
    assert found is not None
    assert optimum is not None
    assert without.lower_bound_ns < 0.95 * without.step_ns
    assert found.lower_bound_ns == found.step_ns == optimum.step_ns <= without.step_ns
    assert found.problem in problems
    assert found.problem.simulate(found.layout).step_ns == found.step_ns


def test_progress_never_goes_back() -> None:
    shown: list[tuple[int, int, int]] = []
    found = solve_long_chain(
        wide_gap_problems("1f1b"), max_gap=0.0, progress=lambda *figures: shown.append(tuple(figures))
    )
    assert found is not None
    assert len(shown) > 3
    for (num_before, best, bound), (num_simulated, next_best, next_bound) in pairwise(shown):
        assert num_before <= num_simulated
        assert next_best <= best
        assert next_bound >= min(bound, next_best)
    assert shown[-1][1:] == (found.step_ns, found.lower_bound_ns)


@pytest.mark.parametrize("seed", range(10))
def test_bounds_hold_wherever_the_deadline_passes(seed: int) -> None:
    problems = random_problems(seed, ["1f1b", "gpipe"])
    optimum = exhaustive(problems)
    assert optimum is not None
    for num_questions in (50, 100, 200, 400, 800):
        ticks = count()
        deadline = Deadline(num_questions, clock=lambda ticks=ticks: float(next(ticks)))  # type: ignore[misc]
        try:
            found = solve_long_chain(problems, max_gap=0.0, deadline=deadline)
        except OutOfTime:
            continue
        assert found is not None
        assert found.lower_bound_ns <= optimum.step_ns <= found.step_ns


def test_bounds_hold_if_hardly_any_intervals_are_searched() -> None:
    problems = wide_gap_problems("1f1b")
    optimum, best = best_first(problems), solve_long_chain(problems, max_gap=999)
    assert optimum is not None
    assert best is not None
    for max_intervals in (0, 10, 1_000):
        found = solve_long_chain(problems, max_exact_intervals=max_intervals)
        assert found is not None
        assert best.lower_bound_ns <= found.lower_bound_ns <= optimum.step_ns <= found.step_ns <= best.step_ns
