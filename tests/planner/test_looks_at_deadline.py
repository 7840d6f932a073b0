"""How much work happens between two looks at a deadline, in calls of functions that are slow on large inputs."""

from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from bapipe.planner.branch_and_bound import local_search
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.fixed_placements.stage_times import StageTimes
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan import plan
from bapipe.planner.stages.intervals import IntervalIndex
from bapipe.planner.stages.placements import PlacementGraph
from bapipe.planner.throughput.heterogeneous import HeterogeneousDevices
from bapipe.schedules import LOOPED, SCHEDULES
from tests.builders import chain, devices


class Looks:
    """A clock that counts calls of functions since it was last read.

    Attributes:
        most: the largest count so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._since, self.most, self.num = monkeypatch, 0, 0, 0

    def __call__(self) -> float:
        self._since, self.num = 0, self.num + 1
        return self.num

    def count(self, owner: type | ModuleType, name: str) -> None:
        """Counts the calls of a method, or of a module's function, from now on."""
        method: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **keywords: Any) -> Any:
            self._since += 1
            self.most = max(self.most, self._since)
            return method(*args, **keywords)

        self._monkeypatch.setattr(owner, name, counted)


def random_chain(num_layers: int) -> Any:
    random = Random(0)
    return chain([random.randint(1, 9) for _ in range(num_layers)], param_bytes=10**4, output_bytes=10**4)


def test_tables_of_several_stages_a_device_are_made_one_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.count(StageTimes, "_table_on")
    options = PlanOptions(minibatch_size=8, schedules=["looped-bfs"])
    plan(random_chain(120), devices(6), options, deadline=Deadline(60, clock=looks))
    assert looks.most == 1


def test_sums_over_all_intervals_are_made_a_few_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.count(IntervalIndex, "sums")
    options = PlanOptions(minibatch_size=8)
    plan(random_chain(40), devices(3), options, deadline=Deadline(400, clock=looks))
    assert 1 <= looks.most <= 20


def test_neighbours_that_are_no_plans_are_gone_through_one_by_one_between_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With as many stages as devices no device can join another's stage."""
    looks = Looks(monkeypatch)
    looks.count(local_search, "placements_for")
    alike = devices(4)
    unlike = replace(alike, devices=tuple(replace(d, memory_bytes=10**9 + i) for i, d in enumerate(alike.devices)))
    options = PlanOptions(minibatch_size=4, schedules=["zb-h1"], num_stages=4, replicas=False)
    plan(random_chain(8), unlike, options, deadline=Deadline(10**6, clock=looks))
    assert 1 <= looks.most <= 2


def test_placements_are_made_one_by_one_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.count(PlacementGraph, "_any_order")
    options = PlanOptions(minibatch_size=8)
    plan(random_chain(310), devices(8), options, deadline=Deadline(400, clock=looks))
    assert looks.most == 1


def test_a_first_plan_of_many_unlike_devices_for_throughput_takes_few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.count(HeterogeneousDevices, "load")
    cluster = devices(48)
    unlike = tuple(replace(device, speed=1 - i / 100) for i, device in enumerate(cluster.devices))
    options = PlanOptions(minibatch_size=32, objective="throughput")
    made = plan(random_chain(60), replace(cluster, devices=unlike), options, deadline=Deadline(1, clock=looks))
    assert len({device for stage in made.stages for device in stage.devices}) > 24
    assert looks.most < 1000


def test_after_the_deadline_plans_of_one_stage_a_device_are_timed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    time = DeviceLine.time

    def noted(line: DeviceLine, plan: LinePlan) -> TimedPlan | None:
        timed.append(plan.schedule)
        return time(line, plan)

    monkeypatch.setattr(DeviceLine, "time", noted)
    options = PlanOptions(minibatch_size=8, schedules="all")
    made = plan(random_chain(20), devices(4), options, deadline=Deadline(0, clock=Looks(monkeypatch)))
    assert timed
    assert not {*timed} & {*LOOPED}
    assert made.schedule in SCHEDULES
