"""The best-first search: the bound that it has proved so far."""

import pytest

from bapipe.planner.branch_and_bound.search import _BestFirst
from bapipe.planner.compute.deadline import UNLIMITED
from tests.oracles.exhaustive_layouts import exhaustive
from tests.problems import random_problems


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zb-v"])
def test_the_proved_bound_never_decreases(schedule: str) -> None:
    """The bound of a child may be smaller than its parent's if devices have several stages; that of the search is not."""
    num_expanded = 0
    for seed in range(25):
        problems = random_problems(seed, [schedule])
        search, best = _BestFirst(problems, None, UNLIMITED), exhaustive(problems)
        bounds_ns = [search.lower_bound_ns]
        while search.is_open:
            search.expand_best()
            bounds_ns.append(search.lower_bound_ns)
        assert bounds_ns == sorted(bounds_ns), seed
        assert best is None or bounds_ns[-1] == best.step_ns, seed
        num_expanded += len(bounds_ns)
    assert num_expanded > 100
