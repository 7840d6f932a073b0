"""Growing stages are plans of all devices, as even as they can be where sums take long, and faster than equal groups."""

from itertools import pairwise
from math import inf
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.device_line.estimate import StepEstimate
from bapipe.planner.device_line.growing_stages import growing_stages
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices


def line_of(seed: int, *, unlike: bool = False, options: PlanOptions | None = None) -> DeviceLine:
    """Sixty layers with long sums on 64 devices."""
    random = Random(seed)
    profiles = {"a": chain([random.randint(5, 9) for _ in range(60)], param_bytes=10**7, output_bytes=10**6)}
    alike = devices(64, memory_bytes=10**13, bytes_per_s=10**8)
    if unlike:
        alike = replace(alike, devices=tuple(replace(d, speed=random.uniform(0.6, 1.0)) for d in alike.devices))
    return DeviceLine(profiles, alike, options or PlanOptions(minibatch_size=48))


def grown(line: DeviceLine, schedule: str, deadline: Deadline = UNLIMITED) -> list[tuple[float, LinePlan]]:
    return growing_stages(line, schedule, 1, StepEstimate(line, schedule, 1).step_ns, deadline)


@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_plans_hold_every_layer_once_and_no_more_devices_than_there_are(schedule: str, unlike: bool) -> None:
    line = line_of(1, unlike=unlike)
    plans = grown(line, schedule)
    assert len(plans) > 3
    for step_ns, plan in plans:
        assert plan.cuts[0] == 0
        assert plan.cuts[-1] == 60
        assert all(a < b for a, b in pairwise(plan.cuts))
        assert len(plan.counts) == len(plan.cuts) - 1
        assert min(plan.counts) >= 1
        assert max(plan.counts) <= 48
        assert 56 <= sum(plan.counts) <= 64
        timed = line.time(plan)
        assert timed is not None
        assert step_ns == pytest.approx(timed.step_ns, rel=1e-3)


@pytest.mark.parametrize("unlike", [False, True])
def test_they_are_faster_than_equal_groups_where_sums_take_long(unlike: bool) -> None:
    line = line_of(2, unlike=unlike)
    step_ns, plan = min((each for name in ("1f1b", "gpipe") for each in grown(line, name)), key=lambda each: each[0])
    naive_ns = []
    for schedule in ("1f1b", "gpipe"):
        estimate = StepEstimate(line, schedule, 1)
        naive_ns += [estimate.step_ns(other) for _, other in naive_plans(line, [schedule], [1])]
    assert step_ns < 0.9 * min(naive_ns)
    sizes = [b - a for a, b in pairwise(plan.cuts)]
    assert sum(sizes[: len(sizes) // 2]) < sum(sizes[-(len(sizes) // 2) :])


def test_they_keep_constraints_and_the_deadline() -> None:
    options = PlanOptions(minibatch_size=48, num_stages=5)
    assert {len(plan.counts) for _, plan in grown(line_of(3, options=options), "1f1b")} <= {5}
    over = Deadline(0, clock=lambda: 1.0)
    assert grown(line_of(3), "1f1b", over) == []


def test_plans_that_do_not_fit_are_as_slow_as_can_be() -> None:
    line = line_of(4)
    found = growing_stages(line, "gpipe", 1, lambda _: inf, UNLIMITED)
    assert found
    assert all(step_ns == inf for step_ns, _ in found)


@pytest.mark.filterwarnings("error")
def test_layers_that_take_no_time_have_no_growing_stages() -> None:
    line = DeviceLine({"a": chain([0] * 60, param_bytes=10**7)}, devices(64), PlanOptions(minibatch_size=48))
    assert grown(line, "1f1b") == []
