"""The replicas that are looked at one by one are no slower, and no later, than those of any stage of their class."""

from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.planner.device_line import replica_classes
from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.tracked import tracked_microbatches
from bapipe.planner.device_line.trip_tables import AFTER
from bapipe.planner.inputs.options import PlanOptions
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
    monkeypatch.setattr(replica_classes, "MAX_FINE", 2)
    monkeypatch.setattr(replica_classes, "CLASS_GROWTH", 1.5)
    random = Random(num_microbatches)
    speeds = [round(random.uniform(0.3, 1), 2) for _ in range(40)]
    prefix = PrefixBound(line_of(speeds, num_microbatches), schedule, 1, 40)
    rows, checked = tracked_microbatches(prefix, num_steps), 0
    num_rows = AFTER + rows.behind.size + rows.before.size
    before = rows.before, num_rows, AFTER + rows.behind.size
    for g, (few, most) in enumerate(zip(prefix.classes.fewest, prefix.classes.most, strict=True)):
        for k, replica in enumerate(rows.replicas[g]):
            if replica["count"] == 0:
                continue
            for num_replicas in range(few, most + 1):
                for p in range(len(speeds) - num_replicas + 1):
                    fastest_first = sorted(speeds[p : p + num_replicas], reverse=True)
                    assert any(
                        replica["count"] <= len(own)
                        and own[0] in of_places(*before, replica["first"])
                        and own[replica["count"] - 1] in of_places(*before, replica["last"])
                        and num_microbatches - 1 - own[replica["count"] - 1]
                        in of_places(rows.behind, num_rows, AFTER, replica["behind"])
                        and all(
                            own[replica["count"] - gradient["count"]]
                            in of_places(rows.before, rows.before.size, 0, gradient["rows"])
                            for gradient in rows.gradients[g, k]
                            if gradient["count"]
                        )
                        and rows.replica_ns[p, g, k] <= 1 / fastest_first[q] + 1e-12
                        for q in range(num_replicas)
                        if (own := range(q, num_microbatches, num_replicas))
                    )
                    checked += 1
    assert checked > 1000


def of_places(numbers: Any, num_rows: int, first: int, places: Any) -> set[int]:
    """The micro-batches of the rows of which the lesser of two places is the least, see `note_levels`."""
    found: set[int] = set()
    for place in places:
        level, row = divmod(int(place) - first, num_rows)
        assert 0 <= row < numbers.size - (1 << level) + 1
        ends = np.append(numbers, 10**6)
        found |= set(range(ends[row], min(ends[row + (1 << level)], 10**3)))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_micro_batches_before_those_of_a_row_are_where_it_says(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same replica: the first, the last, and how many; of every number of replicas in a class."""
    monkeypatch.setattr(replica_classes, "MAX_SINGLE", 2)
    monkeypatch.setattr(replica_classes, "MAX_FINE", 2)
    monkeypatch.setattr(replica_classes, "CLASS_GROWTH", 1.5)
    num = 50
    prefix = PrefixBound(line_of([1 - i / 50 for i in range(20)], num), schedule, 1, 20)
    rows = tracked_microbatches(prefix, 4)
    num_rows = AFTER + rows.behind.size + rows.before.size
    after = [*rows.before[1:], num], [*rows.behind[1:], num]
    for g, (few, most) in enumerate(zip(prefix.classes.fewest, prefix.classes.most, strict=True)):
        for row, number in enumerate(rows.before):
            first, last = (
                of_places(rows.before, num_rows, AFTER + rows.behind.size, there[g, row])
                for there in (rows.then_before, rows.last_before)
            )
            earlier = int(rows.more_before[g, row]) - 1
            assert first == of_places(rows.before, rows.before.size, 0, rows.then_late[g, row])
            for m in range(number, after[0][row]):
                for num_replicas in range(few, most + 1):
                    assert m - earlier * num_replicas in first
                    assert range(m % num_replicas, num, num_replicas)[-1] in last
                    assert rows.places[g, rows.behind.size + row] <= m % num_replicas
        for row, number in enumerate(rows.behind):
            then = of_places(rows.behind, num_rows, AFTER, rows.then_behind[g, row])
            for y in range(number, after[1][row]):
                for num_replicas in range(few, most + 1):
                    assert y - int(rows.more_behind[g, row]) * num_replicas in then
                    assert rows.places[g, row] <= (num - 1 - y) % num_replicas


@pytest.mark.parametrize(("num", "num_steps"), [(33, 8), (96, 16), (128, 16), (128, 40)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_there_are_levels_for_all_rows_that_are_asked_for(schedule: str, num: int, num_steps: int) -> None:
    """With as many replicas as micro-batches the first B of GPipe waits for any of all rows before."""
    line = line_of([1 - 0.5 * number / num for number in range(num)], num)
    rows = tracked_microbatches(PrefixBound(line, schedule, 1, num), num_steps)
    num_places = (AFTER + rows.behind.size + rows.before.size) * rows.num_levels
    places = [rows.of_class, rows.of_any, rows.of_all, rows.then_before, rows.then_behind, rows.last_before]
    places += [rows.waits[name] for name in ("before_first", "before_any")]
    assert max(int(each.max()) for each in places) < num_places
