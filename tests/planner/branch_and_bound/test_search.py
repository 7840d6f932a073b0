"""The best-first search: the bound that it has proved so far."""

import pytest

from bapipe.planner.branch_and_bound.search import _BestFirst
from bapipe.planner.compute.deadline import UNLIMITED, OutOfTime
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_a_node_whose_expansion_is_cut_off_stays_in_the_bound(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expansion is cut off once before it begins: the bound is that of the optimum, which is found all the same."""

    def cut_off(*_: object) -> None:
        raise OutOfTime("too late")

    num_cut_off = 0
    for seed in range(25):
        problems = random_problems(seed, [schedule])
        search, best = _BestFirst(problems, None, UNLIMITED), exhaustive(problems)
        while search.is_open:
            with monkeypatch.context() as patched:
                patched.setattr(search, "_expand", cut_off)
                with pytest.raises(OutOfTime):
                    search.expand_best()
            num_cut_off += 1
            assert best is None or search.lower_bound_ns <= best.step_ns, seed
            search.expand_best()
        assert best is None or search.lower_bound_ns == best.step_ns, seed
    assert num_cut_off > 100
