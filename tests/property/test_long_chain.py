"""The search of long chains: its bound is below every plan, and its plans come near it."""

from random import Random

import numpy as np
import pytest

from bapipe.planner.branch_and_bound.intervals import INF
from bapipe.planner.long_chain.bisection import MAX_EXACT_INTERVALS, solve_long_chain
from bapipe.planner.long_chain.relaxation import range_min
from bapipe.schedules import LOOPED, SCHEDULES
from tests.oracles.exhaustive_layouts import exhaustive
from tests.problems import random_problems


def check(
    seed: int, schedules: list[str], *, best_first: bool = False, splits_badly: bool = False, buckets: bool = False
) -> tuple[int, int, int]:
    """Bound, best and optimum of random problems, or zeros if nothing fits.

    Without `best_first`, the relaxation and the plans near it stand alone.
    """
    problems = random_problems(seed, schedules, splits_badly=splits_badly, buckets=buckets)
    max_exact_intervals = MAX_EXACT_INTERVALS if best_first else 0
    want, found = exhaustive(problems), solve_long_chain(problems, max_exact_intervals=max_exact_intervals)
    assert (found is None) == (want is None), seed
    if found is None or want is None:
        return 0, 0, 0
    assert found.lower_bound_ns <= want.step_ns <= found.step_ns, seed
    assert found.problem.simulate(found.layout).step_ns == found.step_ns, seed
    return found.lower_bound_ns, found.step_ns, want.step_ns


@pytest.mark.parametrize("schedules", [["1f1b", "gpipe"], ["1f1b"], ["gpipe"]])
def test_bounds_hold_and_most_plans_are_optimal(schedules: list[str]) -> None:
    found = [check(seed, schedules) for seed in range(24)]
    feasible = [each for each in found if each[2]]
    assert len(feasible) > 15
    assert sum(best == want for _, best, want in feasible) > 0.8 * len(feasible)


def test_small_chains_are_solved_exactly() -> None:
    found = [check(seed, ["1f1b", "gpipe"], best_first=True) for seed in range(12)]
    assert all(bound == best == want for bound, best, want in found)


def test_bounds_hold_if_all_reduces_take_several_buckets() -> None:
    assert all(check(seed, ["1f1b", "gpipe"], buckets=True)[2] for seed in range(12))


@pytest.mark.parametrize("schedule", [*LOOPED, *(name for name in SCHEDULES if name not in ("1f1b", "gpipe"))])
def test_bounds_hold_for_every_schedule(schedule: str) -> None:
    for seed in range(5):
        if any(problem.roots for problem in random_problems(seed, [schedule], splits_badly=seed % 2 == 1)):
            check(seed, [schedule], splits_badly=seed % 2 == 1)


def test_range_min_is_the_minimum_of_a_window() -> None:
    random = Random(0)
    for size in range(2, 40):
        values = [random.randrange(100) for _ in range(size)]
        ends = [random.randrange(-1, size) for _ in range(size)]
        want = [min(values[i + 1 : end + 1], default=INF) for i, end in enumerate(ends)]
        assert range_min(np.array(values), np.array(ends)).tolist() == want
