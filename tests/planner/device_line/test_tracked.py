"""The replicas that are looked at one by one are no slower, and no later, than those of any stage of their class."""

from random import Random

import pytest
from msgspec.structs import replace

from bapipe.planner.device_line import replica_classes
from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.tracked import tracked_microbatches
from bapipe.planner.options import PlanOptions
from tests.builders import chain, devices


def line_of(speeds: list[float], num_microbatches: int) -> DeviceLine:
    cluster = devices(len(speeds), bytes_per_s=10**10)
    unlike = tuple(replace(device, speed=speed) for device, speed in zip(cluster.devices, speeds, strict=True))
    return DeviceLine(
        {"a": chain([1] * 6)}, replace(cluster, devices=unlike), PlanOptions(minibatch_size=num_microbatches)
    )


@pytest.mark.parametrize("num_steps", [2, 8])
@pytest.mark.parametrize("num_microbatches", [40, 64, 97])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_replica_is_no_slower_and_no_later_than_in_any_stage_of_its_class(
    schedule: str, num_microbatches: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_classes, "MAX_SINGLE", 2)
    monkeypatch.setattr(replica_classes, "CLASS_GROWTH", 1.5)
    random = Random(num_microbatches)
    speeds = [round(random.uniform(0.3, 1), 2) for _ in range(40)]
    prefix = PrefixBound(line_of(speeds, num_microbatches), schedule, 1, 40)
    rows, checked = tracked_microbatches(prefix, num_steps), 0
    for g, (few, most) in enumerate(zip(prefix.classes.fewest, prefix.classes.most, strict=True)):
        for k, replica in enumerate(rows.replicas[g]):
            if replica["count"] == 0:
                continue
            for num_replicas in range(few, most + 1):
                for p in range(len(speeds) - num_replicas + 1):
                    fastest_first = sorted(speeds[p : p + num_replicas], reverse=True)
                    assert any(
                        replica["count"] <= len(own)
                        and rows.before[replica["first"]] <= own[0]
                        and rows.before[replica["last"]] <= own[replica["count"] - 1]
                        and rows.behind[replica["behind"]] <= num_microbatches - 1 - own[replica["count"] - 1]
                        and rows.replica_ns[p, g, k] <= 1 / fastest_first[q] + 1e-12
                        for q in range(num_replicas)
                        if (own := range(q, num_microbatches, num_replicas))
                    )
                    checked += 1
    assert checked > 1000


def test_numbers_of_micro_batches_between_rows_count_as_the_one_below() -> None:
    prefix = PrefixBound(line_of([1.0, 0.9, 0.8, 0.7, 0.6], 50), "1f1b", 1, 5)
    rows = tracked_microbatches(prefix, 2)
    for num_replicas in range(1, 6):
        for numbers, more, then in (
            (rows.behind, rows.more_behind, rows.then_behind),
            (rows.before, rows.more_before, rows.then_before),
        ):
            for number, more_here, then_here in zip(
                numbers, more[num_replicas - 1], then[num_replicas - 1], strict=True
            ):
                assert more_here == number // num_replicas + (numbers is rows.before)
                assert numbers[then_here] <= number % num_replicas
