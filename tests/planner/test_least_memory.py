"""Of plans whose steps are equally long, the one with the least memory, and then with the fewest devices, is chosen."""

from dataclasses import replace

import pytest
from msgspec import structs

import bapipe
from bapipe.planner import best_grouping
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.device_grouping import Grouping
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan_step import solve_partition
from bapipe.planner.results.solution import Rival, Solution
from bapipe.planner.search_request import SearchRequest
from tests.builders import MS, chain, devices

STASH, PARAMS = 1000, 100


@pytest.mark.parametrize("schedules", [("1f1b", "gpipe"), ("gpipe", "1f1b")])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_equal_stages_follow_the_schedule_with_the_fewest_micro_batches_in_flight(
    schedules: tuple[str, str], num_devices: int
) -> None:
    """With equal stages GPipe takes as long as 1F1B, (m + p - 1)(F + B), and keeps m micro-batches in place of p."""
    num_microbatches = 8
    made = bapipe.plan(
        [chain([1] * num_devices, param_bytes=PARAMS, stash_bytes=STASH)],
        devices(num_devices),
        minibatch_size=num_microbatches,
        schedules=schedules,
        replicas=False,
    )
    assert made.prediction.step_ns == (num_microbatches + num_devices - 1) * 3 * MS
    assert made.prediction.peak_bytes == 2 * PARAMS + num_devices * STASH
    assert made.certificate.lower_bound_ns == made.prediction.step_ns
    assert {other.peak_bytes for other in made.alternatives if other.name == "equal-layers"} <= {
        made.prediction.peak_bytes
    }


def test_a_plan_keeps_its_schedule_where_a_lighter_one_is_slower() -> None:
    """With room for all micro-batches GPipe hides the transfers that 1F1B waits for."""
    profile, cluster = chain([1, 1], stash_bytes=STASH, output_bytes=10**6), devices(2)
    alone = {
        name: bapipe.plan([profile], cluster, minibatch_size=8, schedules=name, replicas=False).prediction
        for name in ("1f1b", "gpipe")
    }
    assert alone["gpipe"].step_ns < alone["1f1b"].step_ns
    made = bapipe.plan([profile], cluster, minibatch_size=8, schedules=["1f1b", "gpipe"], replicas=False)
    assert made.prediction == alone["gpipe"]


@pytest.mark.parametrize("lighter", ["singles", "merged"])
def test_of_equally_fast_groupings_the_one_with_less_memory_is_chosen(lighter: str) -> None:
    possible = [
        Grouping(name=name, profiles={"a": chain([1, 2])}, cluster=devices(2)) for name in ("singles", "merged")
    ]

    def solve(grouping: Grouping, deadline: Deadline, rival: Rival | None) -> Solution:
        options = PlanOptions(minibatch_size=4)
        found = solve_partition(
            SearchRequest(profiles=grouping.profiles, cluster=grouping.cluster, options=options, deadline=deadline)
        )
        less = 1 if grouping.name == lighter else 0
        ranks = tuple(structs.replace(rank, peak_bytes=10 - less) for rank in found.prediction.ranks)
        return replace(found, prediction=structs.replace(found.prediction, ranks=ranks))

    best = best_grouping.best_grouping(possible, solve, UNLIMITED)
    assert best.prediction.peak_bytes == 9
    assert best.alternatives[-1].why_not == "as fast as this plan"
