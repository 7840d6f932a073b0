"""The relaxation of many unlike devices, in every order: every plan is feasible in it at its own step time."""

from itertools import combinations
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Device
from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.device_line import replica_classes
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.device_orders import device_orders
from bapipe.schedules import SCHEDULES
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans, random_line
from tests.random_profiles import random_profile, with_tensors_of


def unlike_line(seed: int, schedule: str, *, buckets: bool) -> DeviceLine:
    """A random line of three to five devices of many speeds on two hosts, in half of the cases of two kinds."""
    random, line = Random(seed), random_line(seed, schedule, buckets=buckets)
    profile, first = line.profiles["a"], line.cluster.devices[0]
    others = random_profile(random, len(line.names)).measurements
    measured = with_tensors_of(others, profile.measurements)
    kinds = {"a": profile, "b": replace(profile, device=replace(profile.device, kind="b"), measurements=measured)}
    unlike = tuple(
        replace(
            first,
            name=f"d{i}",
            host=random.choice(["h0", "h1"]),
            kind=random.choice("aab") if seed % 2 else "a",
            speed=random.choice([1.0, 0.9, 0.5, 0.75, 0.3]),
            overlaps_transfers=random.random() < 0.8,
        )
        for i in range(random.randint(3, 5))
    )
    profiles = {kind: kinds[kind] for kind in {device.kind for device in unlike}}
    return DeviceLine(profiles, replace(line.cluster, devices=unlike), line.options)


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_plan_is_feasible_at_its_step_time_in_every_order(
    schedule: str, is_coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_coarse:  # as of more than 32 devices of a stage
        monkeypatch.setattr(replica_classes, "MAX_SINGLE", 1)
        monkeypatch.setattr(replica_classes, "CLASS_GROWTH", 3)
    infeasible = checked = 0
    for seed in range(3):
        given = unlike_line(seed, schedule, buckets=seed % 3 > 1)
        for order in device_orders(given.profiles, given.cluster, given.options):
            line = given.in_order(order.ranks)
            bound = PrefixBound(line, schedule, 1, len(line.cluster.devices))
            steps_ns = [timed.step_ns for timed in map(line.time, plans(line, schedule)) if timed is not None]
            feasible = [bound.path(step_ns, UNLIMITED) is not None for step_ns in sorted(set(steps_ns))]
            assert all(feasible), (seed, order.words)
            checked += len(feasible)
            infeasible += bound.path(min(steps_ns) * 3 // 4, UNLIMITED) is None
    assert checked > 80
    assert infeasible >= 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slow_device_may_have_few_of_the_layers_that_those_before_it_have_time_for(schedule: str) -> None:
    """The first device could run two layers, and the second, 33 times slower, not the third one."""
    three = devices(3)
    cluster = replace(three, devices=tuple(map(with_speed, three.devices, (1.0, 0.03, 1.0))))
    options = PlanOptions(minibatch_size=4, schedules=[schedule], replicas=False)
    line = DeviceLine({"a": chain([10, 1, 100])}, cluster, options)
    timed = line.time(LinePlan(cuts=(0, 1, 2, 3), counts=(1, 1, 1), schedule=schedule, microbatch_size=1))
    assert timed is not None
    found = PrefixBound(line, schedule, 1, 3).path(timed.step_ns, UNLIMITED)
    assert found is not None
    assert list(found.cuts) == sorted(set(found.cuts))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_replicas_every_plan_is_feasible_at_its_step_time(schedule: str) -> None:
    """Chains with some long layers, on devices of which some are slow."""
    for seed in range(12):
        random = Random(seed)
        num_layers, num_devices = random.randint(4, 7), random.randint(3, 5)
        profile = chain([random.choice([1, 1, 5, 30]) for _ in range(num_layers)], output_bytes=10)
        some = devices(num_devices)
        speeds = [random.choice([1.0, 0.9, 0.1, 0.03]) for _ in some.devices]
        cluster = replace(some, devices=tuple(map(with_speed, some.devices, speeds)))
        options = PlanOptions(minibatch_size=random.choice([2, 4, 8]), schedules=[schedule], replicas=False)
        line = DeviceLine({"a": profile}, cluster, options)
        bound = PrefixBound(line, schedule, 1, num_devices)
        for num_cuts in range(min(num_devices, num_layers)):
            for inner in combinations(range(1, num_layers), num_cuts):
                cuts, counts = (0, *inner, num_layers), (1,) * (num_cuts + 1)
                timed = line.time(LinePlan(cuts=cuts, counts=counts, schedule=schedule, microbatch_size=1))
                assert timed is not None
                assert bound.path(timed.step_ns, UNLIMITED) is not None, (seed, cuts)


def test_the_forwards_before_the_first_backward_of_a_slow_replica_in_gpipe_may_be_those_of_a_fast_one() -> None:
    """M = 6, 2 and 3 replicas: B of micro-batch 1 waits for F of 4, which is on the fast device of the first stage."""
    profile = chain([1, 1])
    (measured,) = profile.measurements
    times = zip(measured.layers, (100, 0), (1000, 5000), strict=True)
    layers = tuple(replace(one, forward_ns=f, input_grad_ns=0, weight_grad_ns=b) for one, f, b in times)
    five = devices(5)
    cluster = replace(five, devices=tuple(map(with_speed, five.devices, (1.0, 10.0, 10.0, 10.0, 10.0))))
    profiles = {"a": replace(profile, measurements=(replace(measured, layers=layers),))}
    line = DeviceLine(profiles, cluster, PlanOptions(minibatch_size=6))
    timed = line.time(LinePlan(cuts=(0, 1, 2), counts=(2, 3), schedule="gpipe", microbatch_size=1))
    assert timed is not None
    assert timed.step_ns == 3600  # F and B of micro-batch 1 on slow and fast device, 100 + 500, then three B of 1000
    bound = PrefixBound(line, "gpipe", 1, 5, last_replicas=(3, 3))
    assert bound.path(timed.step_ns, UNLIMITED) is not None
    assert bound.path(timed.step_ns * 9 // 10, UNLIMITED) is None


def with_speed(device: Device, speed: float) -> Device:
    return replace(device, speed=speed)


@pytest.mark.parametrize("first", ["a", "b"])
def test_the_order_of_the_profiles_does_not_matter(first: str) -> None:
    """The profile that comes first has a smaller micro-batch, which the first device has not been measured at."""
    kept = chain([1, 2, 3, 4])
    (measured,) = kept.measurements
    larger = replace(kept, measurements=(replace(measured, microbatch_size=4),))
    smaller = replace(kept, measurements=(measured, *larger.measurements))
    profiles = {
        kind: replace(larger if kind == first else smaller, device=replace(kept.device, kind=kind)) for kind in "ba"
    }
    two = devices(2)
    cluster = replace(
        two, devices=(replace(two.devices[0], kind=first), replace(two.devices[1], kind="ab"[first == "a"]))
    )
    for order in ("ab", "ba"):
        line = DeviceLine({kind: profiles[kind] for kind in order}, cluster, PlanOptions(minibatch_size=8))
        assert line.cuts == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_layers_count_on_the_kinds_of_devices_that_a_stage_has(schedule: str) -> None:
    """Every second layer takes a third of the time on the other kind, so a stage on one kind takes twice the least."""
    slow_first, slow_last = (chain(times * 4, output_bytes=10) for times in ([3, 1], [1, 3]))
    profiles = {
        kind: replace(profile, device=replace(profile.device, kind=kind))
        for kind, profile in (("a", slow_first), ("b", slow_last))
    }
    four = devices(4)
    of_kinds = tuple(replace(device, kind=kind) for device, kind in zip(four.devices, "aabb", strict=True))
    options = PlanOptions(minibatch_size=16, schedules=[schedule], replicas=False)
    line = DeviceLine(profiles, replace(four, devices=of_kinds), options)
    bound = PrefixBound(line, schedule, 1, 4)
    work_ns = int(bound.least.work[-1]) * 16 // 4
    assert work_ns == 16 * 8 * 3 * 10**6 // 4
    assert bound.path(work_ns * 19 // 10, UNLIMITED) is None
    assert bound.path(work_ns * 5 // 2, UNLIMITED) is not None
