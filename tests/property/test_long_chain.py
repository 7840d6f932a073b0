"""The search of long chains: its bound is below every plan, and its plans come near it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.long_chain.bisection import MAX_EXACT_INTERVALS, solve_long_chain
from bapipe.planner.long_chain.relaxation import range_min
from bapipe.planner.stages.intervals import INF
from bapipe.schedules import LOOPED, SCHEDULES
from tests.oracles.exhaustive_layouts import exhaustive
from tests.problems import problems_of, random_problems
from tests.strategies import examples


def check(problems: Sequence[Problem], *, best_first: bool = False, seed: int | None = None) -> tuple[int, int, int]:
    """Bound, best and optimum of problems, or zeros if nothing fits.

    Without `best_first`, the relaxation and the plans near it stand alone.
    """
    max_exact_intervals = MAX_EXACT_INTERVALS if best_first else 0
    want = exhaustive(problems)
    found = solve_long_chain(problems, max_exact_intervals=max_exact_intervals, max_gap=0.0)
    assert (found is None) == (want is None), seed
    if found is None or want is None:
        return 0, 0, 0
    assert found.lower_bound_ns <= want.step_ns <= found.step_ns, seed
    assert found.problem.simulate(found.layout).step_ns == found.step_ns, seed
    return found.lower_bound_ns, found.step_ns, want.step_ns


@pytest.mark.parametrize("schedules", [["1f1b", "gpipe"], ["1f1b"], ["gpipe"]])
def test_bounds_hold_and_most_plans_are_optimal(schedules: list[str]) -> None:
    found = [check(random_problems(seed, schedules), seed=seed) for seed in range(24)]
    feasible = [each for each in found if each[2]]
    assert len(feasible) > 15
    assert sum(best == want for _, best, want in feasible) > 0.8 * len(feasible)


@examples(12)
@given(problems_of())
def test_small_chains_are_solved_exactly(problems: tuple[Problem, ...]) -> None:
    bound, best, want = check(problems, best_first=True)
    assert bound == best == want


def test_bounds_hold_if_all_reduces_take_several_buckets() -> None:
    assert all(check(random_problems(seed, buckets=True), seed=seed)[2] for seed in range(12))


def test_bounds_hold_if_members_exchange_data_whatever_their_speed() -> None:
    for schedules in (["1f1b", "gpipe"], ["zb-h1"], ["zb-v"]):
        for seed in range(10):
            check(random_problems(seed, schedules, exchanges=True, buckets=seed % 2 == 0), seed=seed)


def test_bounds_hold_if_the_host_can_be_slower_than_the_device() -> None:
    for schedules in (["1f1b", "gpipe"], ["zb-h1"], ["zb-v"]):
        for seed in range(10):
            check(random_problems(seed, schedules, host_times=True, buckets=seed % 2 == 0), seed=seed)


@pytest.mark.parametrize("schedule", [*LOOPED, *(name for name in SCHEDULES if name not in ("1f1b", "gpipe"))])
def test_bounds_hold_for_every_schedule(schedule: str) -> None:
    @examples(5)
    @given(problems_of([schedule], splits_badly=None))
    def bounds_hold(problems: tuple[Problem, ...]) -> None:
        if any(problem.roots for problem in problems):
            check(problems)

    bounds_hold()


@pytest.mark.parametrize("schedule", ["zb-h2", "1f1b-2bp"])
def test_bounds_hold_if_some_cuts_carry_no_gradients(schedule: str) -> None:
    assert sum(check(random_problems(seed, [schedule], frozen=True), seed=seed)[2] > 0 for seed in range(12)) > 6


@examples(40)
@given(st.lists(st.integers(0, 99), min_size=2, max_size=40), st.data())
def test_range_min_is_the_minimum_of_a_window(values: list[int], data: st.DataObject) -> None:
    size = len(values)
    ends = data.draw(st.lists(st.integers(-1, size - 1), min_size=size, max_size=size))
    want = [min(values[i + 1 : end + 1], default=INF) for i, end in enumerate(ends)]
    assert range_min(np.array(values), np.array(ends)).tolist() == want
