"""What replicas hold under each schedule, against the tables of its actions."""

from functools import partial
from itertools import accumulate, pairwise, product
from random import Random

import pytest

import bapipe
from bapipe.errors import BapipeError
from bapipe.planner.device_line.in_flight import (
    FORWARDS_FIRST,
    IN_FLIGHT,
    WEIGHTS_BEHIND_FORWARDS,
    most_held,
)
from bapipe.planner.stages.stage_schedule import memory_peaks
from bapipe.schedules import ALL, SCHEDULES, splits_backwards
from bapipe.schedules.k_f_k_b import k_f_k_b
from bapipe.schedules.placement import merge_stages
from bapipe.schedules.table import Phase
from tests.builders import chain, devices


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_hold_what_their_actions_say(schedule: str) -> None:
    """Of random groups of devices: all numbers of one replica of each stage are at their most at the same time."""
    random = Random(0)
    for _ in range(60):
        num_devices, num_microbatches = random.randint(1, 10), random.randint(1, 24)
        counts: list[int] = []
        while sum(counts) < num_devices:
            counts.append(random.randint(1, min(num_devices - sum(counts), num_microbatches)))
        groups = [tuple(range(*ends)) for ends in pairwise(accumulate(counts, initial=0))]
        table = merge_stages(SCHEDULES[schedule](num_devices, num_microbatches), groups, num_devices)
        for first, *others in groups:
            peaks = {peak for rank in (first, *others) for peak in memory_peaks(table.order[rank])}
            found = most_held(schedule, first, num_devices - first, num_microbatches, 1 + len(others))
            assert found in peaks
            assert all(own <= most for peak in peaks for own, most in zip(peak, found, strict=True))


@pytest.mark.parametrize("schedule", [name for name in IN_FLIGHT if splits_backwards(name)])
def test_the_first_stage_runs_w_where_bounds_count_its_r(schedule: str) -> None:
    """docs/many_devices.md, "Rounds and work": before F of d micro-batches later, or enough of them behind F and I."""
    for num_devices, num_microbatches, num_replicas in product(range(1, 7), range(1, 16), (1, 2, 3)):
        if num_replicas > min(num_devices, num_microbatches):
            continue
        groups = [tuple(range(num_replicas)), *((rank,) for rank in range(num_replicas, num_devices))]
        table = merge_stages(SCHEDULES[schedule](num_devices, num_microbatches), groups, num_devices)
        depth = IN_FLIGHT[schedule](num_devices)
        for order in table.order[:num_replicas]:
            forwards, inputs, weights = (
                [i for i, action in enumerate(order) if action.phase is phase]
                for phase in (Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)
            )
            if schedule in WEIGHTS_BEHIND_FORWARDS:
                assert weights[0] > forwards[-1]
                num_left = sum(weight > inputs[-1] for weight in weights)
                assert num_left >= max(1, (num_microbatches - depth) // num_replicas + 1)
            else:
                later = forwards[-(-depth // num_replicas) :]
                assert all(weight < forward for weight, forward in zip(weights, later, strict=False))


def test_every_schedule_with_a_stage_per_device_is_described_once() -> None:
    assert sorted((*FORWARDS_FIRST, *IN_FLIGHT)) == sorted(SCHEDULES)


@pytest.mark.parametrize("schedule", ["3f3b", "search"])  # the latter begins with all schedules
def test_planning_says_where_to_describe_a_new_schedule(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    for schedules in (SCHEDULES, ALL):
        monkeypatch.setitem(schedules, "3f3b", partial(k_f_k_b, k=3))
    profile = chain([1 + i % 3 for i in range(80)], param_bytes=10, output_bytes=10, stash_bytes=1000)
    with pytest.raises(BapipeError, match=r"the schedule '3f3b': add it to .* in .*device_line/in_flight\.py"):
        bapipe.plan(profile, devices(64, memory_bytes=20_000), minibatch_size=128, schedules=schedule)
