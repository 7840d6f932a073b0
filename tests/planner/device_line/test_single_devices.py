"""The relaxation of plans without replicas: every plan is feasible in it at its own step time."""

from dataclasses import replace as with_fields
from itertools import combinations, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.device_line.in_flight import FORWARDS_FIRST, IN_FLIGHT, IN_PAIRS
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.device_line.single_devices import SingleDevices
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.line_solution import solve_on_line
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.stages.device_orders import device_orders
from bapipe.planner.stages.stage_schedule import stage_schedule_of
from bapipe.schedules import SCHEDULES
from bapipe.schedules.table import Phase
from tests.builders import MS, chain, devices
from tests.planner.device_line.test_prefix_bound import random_line
from tests.planner.device_line.test_unlike_devices import unlike_line


def single_line(seed: int, schedule: str) -> DeviceLine:
    """A random line without replicas, over links as slow as layers on one half of the hosts."""
    random = Random(seed)
    line = (unlike_line if seed % 2 else random_line)(seed, schedule, buckets=False)
    options = with_fields(line.options, replicas=False, recompute=seed % 3 == 0, minibatch_size=random.choice([2, 8]))
    cluster = replace(
        line.cluster,
        inter_host=Bandwidth(bytes_per_s=random.choice([10**8, 10**9]), latency_ns=random.choice([0, 40])),
    )
    if random.random() < 0.5:
        limits = [random.randint(60, 400) for _ in cluster.devices]
        limited = zip(cluster.devices, limits, strict=True)
        cluster = replace(cluster, devices=tuple(replace(device, memory_bytes=limit) for device, limit in limited))
    overlap = Random(seed).choice([(True,), (False,), (True, False)])
    overlapping = tuple(replace(each, overlaps_transfers=random.choice(overlap)) for each in cluster.devices)
    return DeviceLine(line.profiles, replace(cluster, devices=overlapping), options)


def plans_of(line: DeviceLine, schedule: str) -> list[LinePlan]:
    last = len(line.cuts) - 1
    return [
        LinePlan(
            cuts=(line.cuts[0], *inner, line.cuts[-1]),
            counts=(1,) * (num_cuts + 1),
            schedule=schedule,
            microbatch_size=1,
        )
        for num_cuts in range(min(len(line.cluster.devices), last))
        for inner in combinations(line.cuts[1:-1], num_cuts)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_plan_is_feasible_at_its_step_time(schedule: str) -> None:
    checked = refuted = 0
    for seed in range(24):
        given = single_line(seed, schedule)
        for order in device_orders(given.profiles, given.cluster, given.options):
            line = given.in_order(order.ranks)
            every = SingleDevices(line, schedule, 1)
            timed = [each for each in map(line.time, plans_of(line, schedule)) if each is not None]
            for each in timed:
                num_cuts = len(each.plan.counts) - 1
                most = every.num_cuts[1]
                for fewest, end in (
                    (0, most),
                    (num_cuts, num_cuts),
                    (max(0, num_cuts - 1), min(most, num_cuts + 1)),
                ):
                    some = every.with_num_cuts(fewest, end)
                    assert some.path(each.step_ns, UNLIMITED) is not None, (seed, order.words, each.plan)
                checked += 1
            if timed:
                refuted += every.is_refuted(min(each.step_ns for each in timed) * 3 // 4, UNLIMITED)
    assert checked > 150
    assert refuted > 5


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in FORWARDS_FIRST])
def test_so_many_micro_batches_are_in_flight(schedule: str) -> None:
    for num_stages in range(1, 7):
        for num_microbatches in range(1, 16):
            table = SCHEDULES[schedule](num_stages, num_microbatches)
            for stage, order in enumerate(table.order):
                expected = min(IN_FLIGHT[schedule](num_stages - stage), num_microbatches)
                assert stage_schedule_of(order, 1).max_in_flight == expected


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in FORWARDS_FIRST])
def test_behind_the_first_backward_forwards_and_backwards_take_turns(schedule: str) -> None:
    take_turns = True
    for num_stages in range(1, 7):
        for num_microbatches in range(1, 16):
            for order in SCHEDULES[schedule](num_stages, num_microbatches).order:
                forwards = [each.phase is Phase.FORWARD for each in order if each.phase is not Phase.WEIGHT_GRAD]
                since = forwards[forwards.index(False) : len(forwards) - forwards[::-1].index(True)]
                take_turns &= all(a != b for a, b in pairwise(since))
    assert take_turns == (schedule not in IN_PAIRS)


def test_stashes_in_flight_leave_no_room_for_many_stages() -> None:
    """Of 4 stages the first one holds 4 stashes, 400 bytes; of 3 with 1, 1 and 2 layers none holds more than 300."""
    profiles, cluster = {"a": chain([1] * 4, stash_bytes=100)}, devices(4, memory_bytes=399)
    for recompute in (False, True):
        options = PlanOptions(minibatch_size=8, schedules=["1f1b"], replicas=False, recompute=recompute)
        every = SingleDevices(DeviceLine(profiles, cluster, options), "1f1b", 1)
        assert every.with_num_cuts(3, 3).is_refuted(10**15, UNLIMITED) != recompute
        assert not every.with_num_cuts(2, 2).is_refuted(10**15, UNLIMITED)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_cuts_between_hosts_are_where_little_is_sent(schedule: str) -> None:
    """Only every fifth tensor is small, and a large one takes as long as ten layers between hosts."""
    profile = chain([1] * 75)
    (measured,) = profile.measurements
    layers = tuple(
        replace(times, output_bytes=(10**3 if i % 5 == 2 else 10**6,)) for i, times in enumerate(measured.layers)
    )
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    cluster = devices(24, bytes_per_s=10**10)
    hosts = tuple(replace(device, host=f"h{i // 2}") for i, device in enumerate(cluster.devices))
    cluster = replace(cluster, devices=hosts, inter_host=Bandwidth(bytes_per_s=10**8, latency_ns=0))
    options = PlanOptions(minibatch_size=32, microbatch_size=1, schedules=[schedule], replicas=False)
    line = DeviceLine({"a": profile}, cluster, options)
    naive_ns = min(timed.step_ns for _, plan in naive_plans(line, [schedule], [1]) if (timed := line.time(plan)))
    found = solve_on_line(SearchRequest(profiles={"a": profile}, cluster=cluster, options=options))
    assert found is not None
    assert found.solution.prediction.step_ns < 0.66 * naive_ns
    assert found.solution.lower_bound_ns > 0.88 * found.solution.prediction.step_ns


def two_stages(
    schedule: str, forward_ms: list[int], *, overlaps: bool = True, output_bytes: int = 0
) -> tuple[SingleDevices, int]:
    """Two layers on a device each, four micro-batches; I and W take as long as F. The relaxation, and the step in ms."""
    profile = chain(forward_ms, output_bytes=output_bytes)
    options = PlanOptions(minibatch_size=4, microbatch_size=1, schedules=[schedule], replicas=False)
    line = DeviceLine({"a": profile}, devices(2, overlaps=overlaps), options)
    timed = line.time(LinePlan(cuts=(0, 1, 2), counts=(1, 1), schedule=schedule, microbatch_size=1))
    assert timed is not None
    return SingleDevices(line, schedule, 1).with_num_cuts(1, 1), timed.step_ns // MS


def test_all_backwards_come_behind_the_first_round_trip() -> None:
    """The first device runs F, waits for F and I of the second one, and then runs 4 I + W, and 2 F between them."""
    every, step_ms = two_stages("zb-h1", [3, 2])
    assert step_ms == 3 + (2 + 2) + 4 * 6 + 2 * 3
    assert every.is_refuted(step_ms * MS - 1, UNLIMITED)
    assert not every.is_refuted(step_ms * MS, UNLIMITED)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_device_does_not_compute_while_it_transfers(schedule: str) -> None:
    """The second device gets its first input after 2 ms. It computes for 12 ms, and three more inputs and all but the
    last gradient take 1 ms each. The last gradient is then 3 ms on its way back to the end of the step."""
    every, step_ms = two_stages(schedule, [1, 1], overlaps=False, output_bytes=10**6)
    assert every.is_refuted((2 + 12 + 3 + 3 + 3) * MS - 1, UNLIMITED)
    assert not every.is_refuted(step_ms * MS, UNLIMITED)
    assert not two_stages(schedule, [1, 1], output_bytes=10**6)[0].is_refuted(20 * MS, UNLIMITED)
