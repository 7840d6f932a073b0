"""Bounds by what a micro-batch takes before and behind stages: every plan is feasible in them at its own step time."""

import pytest
from msgspec.structs import replace

from bapipe.planner.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.device_line import replica_classes, ring_ranges
from bapipe.planner.device_line.line import DeviceLine, TimedPlan
from bapipe.planner.device_line.orders import device_orders
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_bound import RingBound
from bapipe.planner.device_line.ring_ranges import RingRanges
from bapipe.planner.device_line.trip_bound import TripBound
from bapipe.planner.options import PlanOptions
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans
from tests.planner.device_line.test_ring_bound import alike_line
from tests.planner.device_line.test_unlike_devices import unlike_line

ROUNDS = 8


def sorted_line(num_devices: int, *, output_bytes: int = 0) -> DeviceLine:
    """Twelve layers on devices with speeds from 1 to 0.5, as many micro-batches."""
    cluster = devices(num_devices, bytes_per_s=10**10)
    speeds = [1 - 0.5 * i / (num_devices - 1) for i in range(num_devices)]
    unlike = tuple(replace(device, speed=speed) for device, speed in zip(cluster.devices, speeds, strict=True))
    profile = chain([2, 1, 3, 1, 2, 2, 1, 3, 1, 2, 1, 2], param_bytes=4 * 10**6, output_bytes=output_bytes)
    return DeviceLine({"a": profile}, replace(cluster, devices=unlike), PlanOptions(minibatch_size=num_devices))


def best_of_two_or_three_stages(line: DeviceLine) -> TimedPlan:
    timed = [line.time(plan) for plan in plans(line, "1f1b") if len(plan.counts) in (2, 3)]
    return min((each for each in timed if each is not None), key=lambda each: each.step_ns)


@pytest.mark.parametrize("is_alike", [False, True])
@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_plan_is_feasible_among_those_like_it_at_its_step_time(
    schedule: str, is_coarse: bool, is_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_coarse:  # as of more than 32 devices of a stage
        monkeypatch.setattr(replica_classes, "MAX_ALL_GROUPS", 1)
        monkeypatch.setattr(replica_classes, "GROUP_GROWTH", 3)
    infeasible = checked = 0
    for seed in range(6):
        given = (alike_line if is_alike else unlike_line)(seed, schedule, buckets=seed % 4 > 1)
        for order in device_orders(given):
            line = given.in_order(order.ranks)
            prefix = PrefixBound(line, schedule, 1, len(line.cluster.devices))
            bound, timed = TripBound(prefix), [each for each in map(line.time, plans(line, schedule)) if each]
            of_all = bound.behind(prefix.kind, max(each.step_ns for each in timed), UNLIMITED, 0)
            assert of_all is not None
            for each in timed:
                cuts, first, last = len(each.plan.counts) - 1, each.plan.counts[0], each.plan.counts[-1]
                like_it = [(cuts, cuts, last, last, first, first), (0, cuts, 1, 12, 1, 12), prefix.kind]
                for kind in map(PlanKind._make, like_it):
                    for earlier in (None, of_all):
                        is_within = bound.behind(kind, each.step_ns, UNLIMITED, ROUNDS, earlier) is not None
                        assert is_within, (seed, order.words, each.plan, kind)
            checked += len(timed)
            best_ns = min(each.step_ns for each in timed)
            infeasible += bound.behind(prefix.kind, best_ns * 3 // 4, UNLIMITED, ROUNDS) is None
    assert checked > 60
    assert infeasible >= 4


def test_what_comes_before_and_behind_a_stage_of_unlike_devices_raises_the_bound() -> None:
    line = sorted_line(9)
    best = best_of_two_or_three_stages(line)
    prefix = PrefixBound(line, "1f1b", 1, 9)
    by_rings, by_trips = RingBound(prefix, best.step_ns / 2), TripBound(prefix)
    limits_ns = [best.step_ns * part // 100 for part in range(60, 101)]
    num_by_rings = sum(by_rings.is_feasible(prefix.kind, limit_ns, UNLIMITED) for limit_ns in limits_ns)
    num_by_trips = sum(by_trips.behind(prefix.kind, limit_ns, UNLIMITED, ROUNDS) is not None for limit_ns in limits_ns)
    assert 0 < num_by_trips < num_by_rings


@pytest.mark.parametrize("max_kept_bytes", [0, 2**29])
@pytest.mark.parametrize("output_bytes", [0, 4 * 10**7])
def test_the_bound_of_all_ranges_is_near_the_best_plan_and_not_above_it(
    output_bytes: int, max_kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With short transfers, where all plans are asked about first, and with long ones; also where nothing is kept."""
    monkeypatch.setattr(ring_ranges, "MAX_KEPT_BYTES", max_kept_bytes)
    line = sorted_line(7, output_bytes=output_bytes)
    best = min((each for each in map(line.time, plans(line, "1f1b")) if each), key=lambda each: each.step_ns)
    ranges = RingRanges([PrefixBound(line, "1f1b", 1, 7)], 0, best)
    ranges.raise_bound(best.step_ns, UNLIMITED, lambda: True)
    assert 0.9 * best.step_ns < ranges.bound_ns <= best.step_ns


def test_it_ends_at_the_deadline() -> None:
    prefix = PrefixBound(sorted_line(5), "1f1b", 1, 5)
    with pytest.raises(OutOfTime):
        TripBound(prefix).behind(prefix.kind, 10**9, Deadline(0.0), ROUNDS)
