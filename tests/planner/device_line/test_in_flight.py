"""What replicas hold under each schedule, against the tables of its actions."""

from itertools import accumulate, pairwise
from random import Random

import pytest

from bapipe.planner.branch_and_bound.stage_schedule import memory_peaks
from bapipe.planner.device_line.in_flight import most_held
from bapipe.schedules import SCHEDULES
from bapipe.schedules.placement import merge_stages


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
