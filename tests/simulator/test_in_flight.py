"""Memory in flight: the vectorized form of the searches equals the simulator's, for every interval."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.simulator.in_flight import InFlight, in_flight_bytes
from tests.oracles.exhaustive_layouts import layouts
from tests.problems import problems_of
from tests.strategies import examples

SCHEDULES = ["1f1b", "2f2b", "zb-h1"]


@examples(30)
@given(st.tuples(*[st.integers(0, 5)] * 3), st.lists(st.tuples(*[st.integers(0, 2**40)] * 3), min_size=1, max_size=5))
def test_the_bytes_of_arrays_are_those_of_their_entries(
    counts: tuple[int, int, int], rows: list[tuple[int, ...]]
) -> None:
    columns = np.array(rows).T
    want = [in_flight_bytes(InFlight(*counts), *row) for row in rows]
    assert in_flight_bytes(InFlight(*counts), *columns).tolist() == want


def test_memory_of_every_interval_equals_the_simulator_s() -> None:
    seen = [0, 0]

    @examples(40)
    @given(problems_of(SCHEDULES, max_layers=4, splits_badly=None))
    def check(problems: tuple[Problem, ...]) -> None:
        for problem in problems:
            costs = problem.lower_bound.costs
            flags = [False, True] if costs.memory.recomputation is not None else [False]
            for layout in layouts(problem):
                boundaries = [problem.cuts.index(cut) for cut in layout.cuts]
                every = tuple(frozenset(range(begin, end)) for begin, end in pairwise(layout.cuts))
                counts = [
                    problem.shortfall_bytes(replace(layout, recompute=every if flag else (frozenset(),) * len(every)))
                    for flag in flags
                ]
                for s, (placement, ranks) in enumerate(
                    zip(layout.placements, problem.ranks(layout.placements), strict=True)
                ):
                    row = costs.intervals.row(boundaries[s])
                    found = costs.memory.shortfall_bytes(placement)[row][boundaries[s + 1] - boundaries[s] - 1]
                    assert found == min(max(count[rank] for rank in ranks) for count in counts)
                    seen[len(ranks) > 1] += 1

    check()
    assert min(seen) > 50
