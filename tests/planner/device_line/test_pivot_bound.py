"""The bound of pivots: every plan on alike devices is feasible in it at its own step time, and it is above the other."""

import pytest
from msgspec.structs import replace

from bapipe.planner.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.pivot_bound import PivotBound
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.options import PlanOptions
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans, random_line


def alike_line(seed: int, schedule: str, *, buckets: bool) -> DeviceLine:
    """A random line whose devices all have one speed."""
    line = random_line(seed, schedule, buckets=buckets)
    alike = tuple(replace(device, speed=1.0) for device in line.cluster.devices)
    return DeviceLine(line.profiles, replace(line.cluster, devices=alike), line.options)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("buckets", [False, True])
def test_every_plan_is_feasible_at_its_step_time(schedule: str, buckets: bool) -> None:
    infeasible = checked = 0
    for seed in range(5):
        line = alike_line(seed, schedule, buckets=buckets)
        prefix = PrefixBound(line, schedule, 1, len(line.cluster.devices))
        steps_ns = [timed.step_ns for timed in map(line.time, plans(line, schedule)) if timed is not None]
        bound = PivotBound(prefix, min(steps_ns) / 32, UNLIMITED)
        for step_ns in sorted(set(steps_ns)):
            assert bound.is_feasible(step_ns, UNLIMITED), (seed, step_ns)
        checked += len(steps_ns)
        infeasible += not bound.is_feasible(min(steps_ns) * 3 // 4, UNLIMITED)
    assert checked > 60
    assert infeasible >= 3


def test_rings_before_the_largest_stage_and_micro_batches_that_end_at_once_raise_the_bound() -> None:
    """Of the limits between the two bounds, some have a path of prefixes, but no largest stage that leaves it time."""
    line = DeviceLine(
        {"a": chain([1] * 8, param_bytes=20 * 10**6, output_bytes=10**5)},
        devices(12, bytes_per_s=5 * 10**9),
        PlanOptions(minibatch_size=24),
    )
    two = line.time(LinePlan(cuts=(0, 4, 8), counts=(6, 6), schedule="1f1b", microbatch_size=1))
    assert two is not None
    prefix = PrefixBound(line, "1f1b", 1, 12)
    bound = PivotBound(prefix, two.step_ns / 64, UNLIMITED)
    limits_ns = [two.step_ns * part // 200 for part in range(170, 201)]
    by_prefixes = [prefix.path(limit_ns, UNLIMITED) is not None for limit_ns in limits_ns]
    by_pivots = [bound.is_feasible(limit_ns, UNLIMITED) for limit_ns in limits_ns]
    assert by_pivots[-1]
    assert all(by_prefix for by_prefix, by_pivot in zip(by_prefixes, by_pivots, strict=True) if by_pivot)
    assert sum(by_pivots) < sum(by_prefixes)


def test_it_ends_at_the_deadline() -> None:
    line = alike_line(0, "1f1b", buckets=False)
    prefix = PrefixBound(line, "1f1b", 1, len(line.cluster.devices))
    with pytest.raises(OutOfTime):
        PivotBound(prefix, 1e6, Deadline(0.0))
