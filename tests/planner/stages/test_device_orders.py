"""The orders in which plans for many devices take them, and plans in such an order."""

from collections.abc import Iterator
from itertools import combinations, permutations, product

import pytest
from msgspec.structs import replace

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.planner.branch_and_bound.partition_space import line_space
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.searched_space import on_first_devices
from bapipe.planner.stages.device_orders import device_orders
from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices
from tests.step_time import plan_step_time


def cluster_of(speeds: list[float], hosts: str, *, is_fast_within: bool = False) -> Cluster:
    """Devices of some speeds, each on the host of its letter."""
    cluster = devices(len(speeds))
    named = tuple(
        replace(device, speed=speed, host=host)
        for device, speed, host in zip(cluster.devices, speeds, hosts, strict=True)
    )
    within = replace(cluster.inter_host, bytes_per_s=cluster.inter_host.bytes_per_s * (1 + 9 * is_fast_within))
    return replace(cluster, devices=named, intra_host=within)


def orders_of(cluster: Cluster, **options: object) -> dict[str, tuple[int, ...]]:
    orders = device_orders({"a": chain([1, 1])}, cluster, PlanOptions(minibatch_size=8, **options))  # type: ignore[arg-type]
    return {order.words: order.ranks for order in orders}


def test_alike_devices_have_the_order_of_the_cluster_and_of_other_speeds_two() -> None:
    assert orders_of(cluster_of([1.0, 1.0, 1.0], "abb")) == {"in the cluster's order": (0, 1, 2)}
    assert orders_of(cluster_of([0.5, 1.0, 0.5, 0.8], "abab")) == {
        "the fastest first": (1, 3, 0, 2),
        "the slowest first": (0, 2, 3, 1),
    }
    assert [*orders_of(cluster_of([1.0, 0.5], "aa"))] == ["the fastest first", "the slowest first"]


def test_devices_that_differ_in_more_than_speed_also_have_the_order_of_the_cluster() -> None:
    of_speeds = cluster_of([0.5, 1.0, 0.8], "aaa")
    large = replace(of_speeds.devices[0], memory_bytes=2 * of_speeds.devices[0].memory_bytes)
    expected = {
        "in the cluster's order": (0, 1, 2),
        "the fastest first": (1, 2, 0),
        "the slowest first": (0, 2, 1),
    }
    assert orders_of(replace(of_speeds, devices=(large, *of_speeds.devices[1:]))) == expected
    middle = replace(of_speeds.devices[1], memory_bytes=2 * of_speeds.devices[1].memory_bytes)
    with_most_memory = {"those with the most memory first": (1, 0, 2)}
    of_memory = replace(of_speeds, devices=(of_speeds.devices[0], middle, of_speeds.devices[2]))
    assert orders_of(of_memory) == expected | with_most_memory
    assert orders_of(of_speeds, constraints=["l0 on d1"]) == expected


def test_devices_of_one_host_are_not_called_hosts() -> None:
    assert [*orders_of(cluster_of([0.5, 1.0, 0.8], "aaa", is_fast_within=True))] == [
        "in the cluster's order",
        "the fastest first",
        "the slowest first",
    ]


def test_devices_of_a_host_stay_together_where_its_links_are_faster() -> None:
    cluster = cluster_of([0.5, 1.0, 0.6, 0.8, 0.9, 0.7], "abaabb", is_fast_within=True)
    assert orders_of(cluster) == {
        "in the cluster's order": (0, 1, 2, 3, 4, 5),
        "the fastest hosts first": (1, 4, 5, 3, 2, 0),
        "the slowest hosts first": (0, 2, 3, 5, 4, 1),
    }


def test_a_plan_may_leave_out_devices_with_little_memory() -> None:
    """One micro-batch, and every other device too small for any stage."""
    profile, cluster = chain([1] * 70, stash_bytes=50), devices(40, memory_bytes=60)
    mixed = tuple(
        replace(device, memory_bytes=200 + rank if rank % 2 else 10) for rank, device in enumerate(cluster.devices)
    )
    made = plan_step_time({"a": profile}, replace(cluster, devices=mixed), PlanOptions(minibatch_size=1))
    assert {int(name[1:]) % 2 for stage in made.stages for name in stage.devices} == {1}
    assert "those with the most memory first" in made.certificate.space


def test_that_nothing_fits_is_said_of_the_devices_that_were_tried() -> None:
    profile, cluster = chain([1] * 4, stash_bytes=50), devices(40, memory_bytes=10)
    mixed = tuple(replace(device, memory_bytes=10 + rank) for rank, device in enumerate(cluster.devices))
    tried = "no plan on the first devices, in the cluster's order, or those with the most memory first, of too many"
    with pytest.raises(Infeasible, match=tried):
        plan_step_time({"a": profile}, replace(cluster, devices=mixed), PlanOptions(minibatch_size=1))


def test_a_plan_in_another_order_names_the_devices_of_the_cluster() -> None:
    profiles, cluster = {"a": chain([4, 2])}, cluster_of([0.5, 1.0, 0.5, 1.0], "abcd")
    line = DeviceLine(profiles, cluster, PlanOptions(minibatch_size=8))
    sorted_line = line.in_order((1, 3, 0, 2))
    plan = LinePlan(cuts=(0, 1, 2), counts=(2, 2), schedule="1f1b", microbatch_size=1)
    timed, mixed = sorted_line.time(plan), line.time(plan)
    assert timed is not None
    assert mixed is not None
    assert timed.step_ns < mixed.step_ns
    solution = sorted_line.solution(timed, 0, line_space(profiles, cluster, line.options))
    assert [stage.devices for stage in solution.stages] == [("d1", "d3"), ("d0", "d2")]
    assert solution.prediction.step_ns == timed.step_ns


def test_equally_fast_devices_take_micro_batches_in_one_order_in_every_order_of_the_line() -> None:
    """d1 and d2 share a host; wherever a stage has all three, d0 is the first, as in the exact search."""
    profiles, cluster = {"a": chain([1, 1])}, cluster_of([1.0, 1.0, 1.0], "abb", is_fast_within=True)
    line = DeviceLine(profiles, cluster, PlanOptions(minibatch_size=8))
    for ranks in permutations(range(3)):
        ordered = line.in_order(ranks)
        names = [ordered.cluster.devices[place].name for place in ordered.replicas(0, 3)]
        assert names[0] == "d0"


@pytest.mark.parametrize("overlaps", [[True] * 20 + [False] * 20, [True, False] * 20])
def test_the_certificate_says_where_a_stage_takes_its_devices_in_another_order_than_the_cluster(
    overlaps: list[bool],
) -> None:
    """Devices of two classes, whose speeds are equal: no other order of the cluster is tried."""
    alike = cluster_of([1.0] * 40, "a" * 40)
    devices = zip(alike.devices, overlaps, strict=True)
    cluster = replace(alike, devices=tuple(replace(device, overlaps_transfers=each) for device, each in devices))
    made = plan_step_time({"a": chain([2, 1] * 10)}, cluster, PlanOptions(minibatch_size=40, schedules=["1f1b"]))
    ranks = [[cluster.index[name] for name in stage.devices] for stage in made.stages]
    assert "in the cluster's order" in made.certificate.space
    is_named = "in the cluster's order, those of one stage in one order, the fastest first" in made.certificate.space
    assert is_named == (overlaps[1] != overlaps[0])
    assert is_named or all(each == sorted(each) for each in ranks)


def test_the_search_for_many_devices_sorts_them_and_its_certificate_says_so() -> None:
    """Slow devices on every other place: sorted, a stage has devices of one speed."""
    profiles = {"a": chain([2, 1] * 10, output_bytes=10**5)}
    mixed = cluster_of([1.0, 0.5] * 18, "a" * 36)
    made = plan_step_time(profiles, mixed, PlanOptions(minibatch_size=18))
    speed = {device.name: device.speed for device in mixed.devices}
    assert all(len({speed[name] for name in stage.devices}) == 1 for stage in made.stages)
    orders = device_orders(profiles, mixed, PlanOptions(minibatch_size=18))
    assert on_first_devices([order.words for order in orders], are_sorted=False) in made.certificate.space
    words = ", the fastest first, or the slowest first, those of one stage in one order, the fastest first, of too many"
    assert words in made.certificate.space
    assert simulate(made, profiles).step_ns == made.prediction.step_ns >= made.certificate.lower_bound_ns


def first_plans_of(line: DeviceLine, schedule: str) -> Iterator[LinePlan]:
    """Every plan on the first devices of a line, at most as many for a stage as there are micro-batches of one sample."""
    num_layers, most = line.cuts[-1], line.options.minibatch_size
    for num_stages in range(1, num_layers + 1):
        for inner in combinations(range(1, num_layers), num_stages - 1):
            for counts in product(range(1, most + 1), repeat=num_stages):
                yield LinePlan(cuts=(0, *inner, num_layers), counts=counts, schedule=schedule, microbatch_size=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_layers_on_many_unlike_devices_take_them_in_every_order_of_the_certificate(schedule: str) -> None:
    """Three layers use at most twelve of 34 devices, all slow in the cluster's order.

    The plan is the fastest of all plans in the orders that the certificate names.
    """
    profiles = {"a": chain([2, 3, 4], param_bytes=10**6, output_bytes=10**6)}
    cluster = cluster_of([1.0] * 16 + [1.5] * 17 + [1.0], "a" * 34, is_fast_within=True)
    options = PlanOptions(minibatch_size=4, schedules=[schedule])
    made = plan_step_time(profiles, cluster, options)
    line = DeviceLine(profiles, cluster, options)
    fastest_ns = {
        order.words: min(
            timed.step_ns for plan in first_plans_of(ordered, schedule) if (timed := ordered.time(plan)) is not None
        )
        for order in device_orders(profiles, cluster, options)
        for ordered in [line.in_order(order.ranks)]
    }
    assert made.prediction.step_ns == min(fastest_ns.values()) < fastest_ns["in the cluster's order"]
    assert on_first_devices([*fastest_ns], are_sorted=False) in made.certificate.space
    assert made.certificate.proven_optimal


@pytest.mark.parametrize("schedule", LOOPED)
def test_schedules_with_several_stages_per_device_take_the_fastest_devices_of_many(schedule: str) -> None:
    """Of four equal layers each of two devices has two: twice as fast ones take half of the time."""
    profile, slow = chain([2] * 4), devices(2)
    cluster = cluster_of([0.5, 1.0] * 18, "a" * 36)
    options = PlanOptions(minibatch_size=4, schedules=[schedule])
    made, of_two = plan_step_time({"a": profile}, cluster, options), plan_step_time({"a": profile}, slow, options)
    assert made.prediction.step_ns == of_two.prediction.step_ns
    assert {cluster.devices[cluster.index[name]].speed for stage in made.stages for name in stage.devices} == {1.0}
    assert made.certificate.proven_optimal == of_two.certificate.proven_optimal
    assert ", the fastest first, or the slowest first, " in made.certificate.space
