"""No plan of a small problem is faster than the search's, with every feature of profiles, clusters and options."""

import pytest

from benchmarks.certificates.__main__ import fault_of, small


@pytest.mark.parametrize("seed", range(100_000, 100_012))
def test_the_search_finds_the_best_of_all_plans(seed: int) -> None:
    assert small(seed).fault == ""


def test_an_answer_that_a_plan_contradicts_is_a_fault() -> None:
    assert fault_of(100, 90, 89, "") == "BELOW THE BOUND"
    assert fault_of(100, 90, 90, "") == ""
    assert fault_of(None, None, 100, "nothing fits") == "nothing fits, but a plan does"
    assert fault_of(None, None, None, "nothing fits") == ""
    assert fault_of(None, None, None, "KeyError: 'x'") == "KeyError: 'x'"
