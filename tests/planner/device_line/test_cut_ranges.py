"""Bounds by the number of cuts: no plan with so many cuts is faster, and the bound of all is the smallest."""

import dataclasses
from collections import Counter
from random import Random

import pytest

from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.device_line.cut_ranges import CutRanges
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.inputs.options import PlanOptions
from bapipe.schedules import SCHEDULES
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans, random_line
from tests.planner.device_line.test_unlike_devices import unlike_line


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_plan_is_feasible_among_those_with_as_many_cuts(schedule: str, is_alike: bool) -> None:
    checked = closer = 0
    for seed in range(4):
        line = (random_line if is_alike else unlike_line)(seed, schedule, buckets=seed % 2 == 1)
        num_devices = len(line.cluster.devices)
        every = PrefixBound(line, schedule, 1, num_devices)
        most = every.num_cuts[1]
        best_ns: dict[int, int] = {}
        for plan in plans(line, schedule):
            timed, num_cuts = line.time(plan), len(plan.counts) - 1
            if timed is not None:
                best_ns[num_cuts] = min(timed.step_ns, best_ns.get(num_cuts, timed.step_ns))
                for fewest, end in ((num_cuts, num_cuts), (max(0, num_cuts - 1), min(most, num_cuts + 1))):
                    assert every.with_num_cuts(fewest, end).path(timed.step_ns, UNLIMITED) is not None, plan
                checked += 1
        for num_cuts, step_ns in best_ns.items():
            one = every.with_num_cuts(num_cuts, num_cuts)
            limit_ns = step_ns * 95 // 100
            closer += one.path(limit_ns, UNLIMITED) is None and every.path(limit_ns, UNLIMITED) is not None
    assert checked > 50
    assert closer >= 1


def test_plans_without_layers_for_some_devices_lose_no_cut() -> None:
    """The first device could run four of six layers in the time of two stages of three."""
    line = DeviceLine({"a": chain([1] * 6, output_bytes=10)}, devices(3), PlanOptions(minibatch_size=4))
    for plan in plans(line, "1f1b"):
        timed = line.time(plan)
        assert timed is not None
        num_cuts = len(plan.counts) - 1
        one = PrefixBound(line, "1f1b", 1, 3).with_num_cuts(num_cuts, num_cuts)
        assert one.path(timed.step_ns, UNLIMITED) is not None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bound_of_all_ranges_is_higher_and_no_plan_is_below_it(schedule: str) -> None:
    """Transfers take as long as layers, and so do the rings of gradients that few cuts mean."""
    random = Random(0)
    profile = chain([random.randint(1, 3) for _ in range(7)], param_bytes=8 * 10**7, output_bytes=4 * 10**7)
    line = DeviceLine(
        {"a": profile}, devices(7, bytes_per_s=10**10, memory_bytes=10**12), PlanOptions(minibatch_size=7)
    )
    best = min((timed for timed in map(line.time, plans(line, schedule)) if timed), key=lambda each: each.step_ns)
    problem = PrefixBound(line, schedule, 1, 7)
    low_ns, high_ns = 0, best.step_ns
    while high_ns - low_ns > 1:
        middle_ns = (low_ns + high_ns) // 2
        has_path = problem.path(middle_ns, UNLIMITED) is not None
        low_ns, high_ns = (low_ns, middle_ns) if has_path else (middle_ns, high_ns)
    ranges = CutRanges([problem], len(best.plan.counts) - 1)
    ranges.raise_bound(best.step_ns, UNLIMITED, lambda: True)
    assert 1.05 * low_ns < ranges.bound_ns <= best.step_ns


def test_ranges_contain_every_number_of_cuts_once() -> None:
    """Whatever was divided: near the best plan's number first, and GPipe by its last stage at the end."""
    line = DeviceLine({"a": chain([1] * 60, output_bytes=10**7)}, devices(32), PlanOptions(minibatch_size=16))
    asked = iter(range(40))
    ranges = CutRanges([PrefixBound(line, "gpipe", 1, 32)], 8)
    ranges.raise_bound(10**12, UNLIMITED, lambda: next(asked, None) is not None)
    of_cuts = Counter(
        (cuts, replicas)
        for each in ranges.ranges
        if isinstance(each, PrefixBound)
        for cuts in range(each.num_cuts[0], each.num_cuts[1] + 1)
        for replicas in range(each.last_replicas[0], min(16, each.last_replicas[1]) + 1)
    )
    assert set(of_cuts.values()) == {1}
    assert len(of_cuts) == 32 * 16
    assert len({each.num_cuts for each in ranges.ranges}) > 3


def test_a_given_number_of_stages_bounds_plans_with_as_many() -> None:
    """Each transfer takes 4 ms, and a layer 3."""
    profile = chain([1] * 6, output_bytes=4 * 10**7)
    line = DeviceLine(
        {"a": profile}, devices(6, bytes_per_s=10**10, memory_bytes=10**12), PlanOptions(minibatch_size=2)
    )
    six = line.time(LinePlan(cuts=tuple(range(7)), counts=(1,) * 6, schedule="1f1b", microbatch_size=1))
    assert six is not None
    limit_ns = six.step_ns * 9 // 10
    assert PrefixBound(line, "1f1b", 1, 6).path(limit_ns, UNLIMITED) is not None
    line.options = dataclasses.replace(line.options, num_stages=6)
    assert PrefixBound(line, "1f1b", 1, 6).path(limit_ns, UNLIMITED) is None
    assert PrefixBound(line, "1f1b", 1, 6).path(six.step_ns, UNLIMITED) is not None
