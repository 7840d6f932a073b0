"""Of equally fast plans the one with the least memory is chosen, then with the fewest devices, then the fewest stages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

import bapipe
from bapipe.formats.profile import ModelProfile
from bapipe.planner import best_grouping
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.device_grouping import Grouping
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan_step import solve_partition
from bapipe.planner.results.preference import Preference
from bapipe.planner.results.solution import Rival, Solution, preference
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


def tied(profile: ModelProfile) -> ModelProfile:
    """The profile with its last layer using the weights of its first one, which a stage with both has once."""
    first, *inner, last = profile.layers
    first = structs.replace(first, shares=(last.name,))
    last = structs.replace(last, shares=(first.name,), shared_bytes=PARAMS, param_bytes=0)
    return structs.replace(profile, layers=(first, *inner, last))


@pytest.mark.parametrize("schedules", [("interleaved-1f1b", "1f1b"), ("1f1b", "interleaved-1f1b")])
@pytest.mark.parametrize("is_tied", [False, True])
def test_one_stage_is_chosen_where_two_on_its_device_are_no_faster(schedules: tuple[str, str], is_tied: bool) -> None:
    """One device takes m (F + B) whatever its stages, and has one micro-batch in flight with 1F1B.

    Where two stages would need no more, one stage is all that is left to prefer; tied weights would be there twice.
    """
    num_layers, num_microbatches = 4, 8
    profile = chain([1] * num_layers, param_bytes=PARAMS, stash_bytes=STASH)
    profile = tied(profile) if is_tied else profile
    made = bapipe.plan([profile], devices(1), minibatch_size=num_microbatches, schedules=schedules)
    assert made.prediction.step_ns == num_microbatches * num_layers * 3 * MS
    assert made.prediction.peak_bytes == num_layers * STASH + (num_layers - is_tied) * 2 * PARAMS
    assert (made.schedule, len(made.stages)) == ("1f1b", 1)
    assert made.certificate.lower_bound_ns == made.prediction.step_ns
    assert bapipe.simulate(made, [profile]).step_ns == made.prediction.step_ns


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 2},
        {"constraints": ["l0 without l3"]},
        {"schedules": ["interleaved-1f1b"]},
    ],
)
def test_an_equally_fast_baseline_that_the_options_rule_out_is_not_chosen(options: dict[str, Any]) -> None:
    given = {"schedules": ["interleaved-1f1b", "1f1b"], **options}
    profile = tied(chain([1] * 4, param_bytes=PARAMS))
    made = bapipe.plan([profile], devices(1), minibatch_size=8, **given)
    one_device = {other.name: other for other in made.alternatives}["one-device"]
    assert one_device.step_ns == made.prediction.step_ns
    assert one_device.peak_bytes == made.prediction.peak_bytes - 2 * PARAMS  # without the second copy
    assert len(made.stages) == 2


def test_of_plans_that_are_equal_in_all_else_the_one_with_the_fewest_stages_is_preferred() -> None:
    least, *others = sorted(Preference(*key) for key in ((5, 10, 1, 2), (5, 10, 1, 1), (5, 9, 2, 4), (4, 20, 3, 9)))
    assert (least, others) == ((4, 20, 3, 9), [(5, 9, 2, 4), (5, 10, 1, 1), (5, 10, 1, 2)])
    made = [
        bapipe.make([chain([1, 1])], devices(1), minibatch_size=2, schedule=name)
        for name in ("1f1b", "interleaved-1f1b")
    ]
    assert [preference(plan) for plan in made] == [(2 * 2 * 3 * MS, 0, 1, 1), (2 * 2 * 3 * MS, 0, 1, 2)]


@pytest.mark.parametrize("lighter", ["singles", "merged"])
def test_of_equally_fast_groupings_the_one_with_less_memory_is_chosen(lighter: str) -> None:
    possible = [
        Grouping(name=name, profiles={"a": chain([1, 2])}, cluster=devices(2)) for name in ("singles", "merged")
    ]

    def solve(grouping: Grouping, left: Sequence[Grouping], deadline: Deadline, rival: Rival | None) -> Solution:
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
