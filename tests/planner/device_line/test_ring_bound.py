"""Bounds with the rings of early stages: every plan is feasible in them at its own step time."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.device_line import prefix_bound, ring_ranges
from bapipe.planner.device_line.early_waits import count_turns, early_waits
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_bound import RingBound
from bapipe.planner.device_line.ring_goals import RingGoals
from bapipe.planner.device_line.ring_ranges import RingRanges
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans, random_line
from tests.planner.device_line.test_unlike_devices import unlike_line


def alike_line(seed: int, schedule: str, *, buckets: bool) -> DeviceLine:
    """A random line whose devices all have one speed."""
    line = random_line(seed, schedule, buckets=buckets)
    alike = tuple(replace(device, speed=1.0) for device in line.cluster.devices)
    return DeviceLine(line.profiles, replace(line.cluster, devices=alike), line.options)


def growing_line() -> DeviceLine:
    """Rings as long as layers, and few devices for them: stages grow."""
    profile = chain([1] * 8, param_bytes=20 * 10**6, output_bytes=10**6)
    return DeviceLine({"a": profile}, devices(12, bytes_per_s=5 * 10**9), PlanOptions(minibatch_size=24))


@pytest.mark.parametrize("make_line", [alike_line, unlike_line])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("buckets", [False, True])
def test_every_plan_is_feasible_among_those_like_it_at_its_step_time(
    schedule: str, buckets: bool, make_line: Callable[..., DeviceLine]
) -> None:
    infeasible = checked = 0
    for seed in range(6):
        line = make_line(seed, schedule, buckets=buckets)
        num_devices = len(line.cluster.devices)
        prefix = PrefixBound(line, schedule, 1, num_devices)
        timed = [each for each in map(line.time, plans(line, schedule)) if each is not None]
        best_ns = min(each.step_ns for each in timed)
        bound = RingBound(prefix, best_ns / 4)
        for each in timed:
            cuts, first, last = len(each.plan.counts) - 1, each.plan.counts[0], each.plan.counts[-1]
            end = line.cuts.index(each.plan.cuts[1])
            like_it = [
                PlanKind(cuts, cuts, last, last, first, first),
                PlanKind(cuts, cuts, last, last, first, first, end, end),
                PlanKind(max(0, cuts - 1), cuts, 1, last, 1, 12),
                PlanKind(0, cuts, last, 12, 1, first, 0, end),
            ]
            for kind, counts_cuts in product([*like_it, prefix.kind], (False, True)):
                is_within = bound.is_feasible(kind, each.step_ns, UNLIMITED, counts_cuts=counts_cuts)
                assert is_within, (seed, each.plan, kind, counts_cuts)
        checked += len(timed)
        infeasible += not bound.is_feasible(prefix.kind, best_ns * 3 // 4, UNLIMITED)
    assert checked > 60
    assert infeasible >= (3 if make_line is alike_line else 2)


def test_rings_behind_the_backwards_of_later_stages_raise_the_bound() -> None:
    """Kinds of plans within some time if only their own rings count, but not with those of the stages before."""
    line = growing_line()
    timed = [each for each in map(line.time, plans_of_few_stages(line)) if each is not None]
    best = min(timed, key=lambda each: each.step_ns)
    prefix = PrefixBound(line, "1f1b", 1, 12)
    bound = RingBound(prefix, best.step_ns / 2)
    num_cuts = len(best.plan.counts) - 1
    like_best = PlanKind(num_cuts, num_cuts, 1, 12, 1, 12)
    limits_ns = [best.step_ns * part // 200 for part in range(170, 201)]
    with_own = [FurthestPrefixes(prefix.programme, like_best, limit_ns) for limit_ns in limits_ns]
    num_with_own = sum(prefixes.find(UNLIMITED) is not None for prefixes in with_own)
    num_with_all = sum(bound.is_feasible(like_best, limit_ns, UNLIMITED) for limit_ns in limits_ns)
    assert 0 < num_with_all < num_with_own


def test_early_stages_that_wait_for_each_other_raise_the_bound() -> None:
    """1F1B with many micro-batches for each device, over links on which a transfer takes twice as long as a layer."""
    profile = chain([1] * 24, param_bytes=4 * 10**6, output_bytes=2 * 10**6)
    line = DeviceLine({"a": profile}, devices(12), PlanOptions(minibatch_size=48))
    programme = PrefixBound(line, "1f1b", 1, 12).programme
    assert programme.has_cycles
    of_five_stages = PlanKind(4, 4, 1, 12, 1, 1)

    def is_within(limit_ms: int, *, has_cycles: bool) -> bool:
        prefixes = FurthestPrefixes(programme._replace(has_cycles=has_cycles), of_five_stages, limit_ms * 10**6)
        return prefixes.find(UNLIMITED) is not None

    num_with, num_without = (sum(is_within(ms, has_cycles=flag) for ms in range(380, 420)) for flag in (True, False))
    assert 0 < num_with < num_without


def test_where_the_first_stage_ends_raises_the_bound() -> None:
    """Of plans whose first stage ends at a known boundary it is known what that stage runs between two round trips."""
    profile = chain([1] * 48, param_bytes=10**6, output_bytes=2 * 10**5)
    line = DeviceLine({"a": profile}, devices(12), PlanOptions(minibatch_size=48))
    bound = RingBound(PrefixBound(line, "1f1b", 1, 12), 10**8)

    def first_feasible_ms(earliest: int, latest: int) -> int:
        kind = PlanKind(3, 3, 1, 12, 2, 2, earliest, latest)
        return next(ms for ms in range(600, 800) if bound.is_feasible(kind, ms * 10**6, UNLIMITED))

    assert first_feasible_ms(0, 48) < min(first_feasible_ms(end, end) for end in range(1, 13))


def test_turns_of_the_first_stage_fill_what_other_turns_leave() -> None:
    """Two or three replicas of the first stage, which ends behind layer 3 at least: closed forms."""
    line = DeviceLine({"a": chain([1, 2, 3, 4, 5, 6])}, devices(8), PlanOptions(minibatch_size=20))
    problem = PrefixBound(line, "1f1b", 1, 8).programme
    ends = np.full(9, 3, dtype=np.int64)
    waits = early_waits(problem, PlanKind(0, 5, 1, 8, 2, 3), ends)
    # Behind B of micro-batch 0 the first stage runs F of number 8 with two replicas, and of number 9 with three.
    assert waits.num_left == 20 - 1 - 9
    turn_ns = 3 * (1 + 2 + 3) * 10**6
    slack_ns = 2 * problem.rounding_ns
    assert waits.first_ns == pytest.approx([left // 3 * (turn_ns - slack_ns) for left in range(11)])
    of_two = early_waits(problem, PlanKind(0, 5, 1, 8, 2, 2, 2), np.zeros(9, dtype=np.int64))
    assert of_two.num_left == 20 - 1 - 8
    assert of_two.first_ns == pytest.approx([left // 2 * (turn_ns / 2 - slack_ns) for left in range(12)])
    # Five replicas in one stage run 5 micro-batches a turn, two turns; and one turn of the first stage is left.
    classes = problem.stages[0]["most"].tolist()
    assert count_turns(problem, of_two, 0, classes.index(5)) == (2, of_two.first_ns[1])
    assert early_waits(problem._replace(has_cycles=False), PlanKind(0, 5, 1, 8, 2, 3), ends).num_left == 0


def test_the_busiest_replica_of_the_first_stage_may_begin_its_turns_later() -> None:
    """Of two replicas the second one takes twice as long, and has micro-batch 1: closed forms."""
    cluster = devices(8)
    unlike = tuple(replace(device, speed=1 - 0.5 * (number == 1)) for number, device in enumerate(cluster.devices))
    line = DeviceLine({"a": chain([1, 2, 3])}, replace(cluster, devices=unlike), PlanOptions(minibatch_size=20))
    problem = PrefixBound(line, "1f1b", 1, 8).programme
    waits = early_waits(problem, PlanKind(0, 5, 1, 8, 2, 2, 2), np.zeros(9, dtype=np.int64))
    turn_ns, slack_ns = 3 * (1 + 2) * 10**6, 2 * problem.rounding_ns
    fast, slow = turn_ns - slack_ns, 2 * turn_ns - slack_ns
    expected = [max(left // 2 * fast, max(left - 1, 0) // 2 * slow) for left in range(12)]
    assert waits.first_ns == pytest.approx(expected)
    assert expected[2] == fast
    assert expected[3] == slow


def plans_of_few_stages(line: DeviceLine) -> list[LinePlan]:
    """Plans of two and three stages on all devices of the growing line."""
    two = [((0, i, 8), (r, 12 - r)) for i in range(1, 8) for r in range(1, 12)]
    three = [
        ((0, i, j, 8), (r, q, 12 - r - q))
        for i in range(1, 7)
        for j in range(i + 1, 8)
        for r in range(1, 11)
        for q in range(1, 12 - r)
    ]
    return [LinePlan(cuts=cuts, counts=counts, schedule="1f1b", microbatch_size=1) for cuts, counts in [*two, *three]]


@pytest.mark.parametrize(("schedule", "max_alike"), [("1f1b", 128), ("gpipe", 128), ("1f1b", 4), ("gpipe", 4)])
def test_the_bound_of_all_ranges_is_higher_and_no_plan_is_below_it(
    schedule: str, max_alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where seven alike devices count as many."""
    monkeypatch.setattr(prefix_bound, "MAX_ALIKE", max_alike)
    profile = chain([3, 1, 2, 2, 3, 1, 2], param_bytes=8 * 10**7, output_bytes=4 * 10**7)
    cluster = devices(7, bytes_per_s=10**10, memory_bytes=10**12)
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=7))
    best = min((timed for timed in map(line.time, plans(line, schedule)) if timed), key=lambda timed: timed.step_ns)
    problem = PrefixBound(line, schedule, 1, 7)
    low_ns, high_ns = 0, best.step_ns
    while high_ns - low_ns > 1:
        middle_ns = (low_ns + high_ns) // 2
        has_path = problem.path(middle_ns, UNLIMITED) is not None
        low_ns, high_ns = (low_ns, middle_ns) if has_path else (middle_ns, high_ns)
    ranges = RingRanges([problem], 0, best)
    RingGoals(ranges=ranges, high_ns=best.step_ns, deadline=UNLIMITED, left=lambda: 1.0).raise_bound()
    assert 1.05 * low_ns < ranges.bound_ns <= best.step_ns


@pytest.mark.parametrize("max_alike", [4, 128])
def test_ranges_contain_every_number_of_cuts_and_of_last_replicas_once(
    max_alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_bound, "MAX_ALIKE", max_alike)
    line = DeviceLine({"a": chain([1] * 60, output_bytes=10**7)}, devices(32), PlanOptions(minibatch_size=16))
    problem = PrefixBound(line, "gpipe", 1, 32, last_replicas=(1, 16))
    on_all = line.time(LinePlan(cuts=(0, 60), counts=(16,), schedule="gpipe", microbatch_size=1))
    assert on_all is not None
    ranges = RingRanges([problem], 0, on_all)
    asked = iter(range(6))
    assert not ranges.is_refuted(10**12, UNLIMITED, lambda: next(asked, None) is not None)
    of_kinds = Counter(
        (cuts, replicas)
        for each in ranges.ranges
        for cuts in range(each.cuts[0], each.cuts[1] + 1)
        for replicas in range(each.last_replicas[0], each.last_replicas[1] + 1)
    )
    assert set(of_kinds.values()) == {1}
    assert len(of_kinds) == 32 * 16
    assert len({each.last_replicas for each in ranges.ranges}) > 3


def test_it_ends_at_the_deadline() -> None:
    line = alike_line(0, "1f1b", buckets=False)
    prefix = PrefixBound(line, "1f1b", 1, len(line.cluster.devices))
    with pytest.raises(OutOfTime):
        RingBound(prefix, 1e6).is_feasible(PlanKind(0, 1, 1, 2, 1, 2), 10**9, Deadline(0.0))


def test_trips_raise_the_bound_of_gpipe_on_many_alike_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three stages, behind which most micro-batches come back one after another; eight devices count as many."""
    monkeypatch.setattr(prefix_bound, "MAX_ALIKE", 4)
    profile, cluster = chain([2, 1, 3, 1, 2, 2, 1, 3], param_bytes=4 * 10**6), devices(8, bytes_per_s=10**10)
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=24, num_stages=3))
    timed = [line.time(plan) for plan in plans(line, "gpipe") if len(plan.counts) == 3]
    best = min((each for each in timed if each is not None), key=lambda each: each.step_ns)

    def ranges_with(ask_trips_up_to: float) -> RingRanges:
        monkeypatch.setattr(ring_ranges, "ASK_TRIPS_UP_TO", ask_trips_up_to)
        ranges = RingRanges([PrefixBound(line, "gpipe", 1, 8)], 0, best)
        RingGoals(ranges=ranges, high_ns=best.step_ns, deadline=UNLIMITED, left=lambda: 1.0).raise_bound()
        return ranges

    assert ranges_with(0.0).bound_ns < 0.85 * best.step_ns
    ranges = ranges_with(0.96)
    assert 0.98 * best.step_ns < ranges.bound_ns <= best.step_ns
    of_last = Counter(
        last for each in ranges.ranges for last in range(each.last_replicas[0], each.last_replicas[1] + 1)
    )
    assert of_last == dict.fromkeys(range(1, 9), 1)
