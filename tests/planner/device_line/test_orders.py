"""The orders in which plans for many devices take them, and plans in such an order."""

from msgspec.structs import replace

from bapipe.formats.cluster import Cluster
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.orders import device_orders
from bapipe.planner.options import PlanOptions
from bapipe.planner.partition_space import line_space
from bapipe.planner.plan_step import plan_step_time
from bapipe.planner.searched_space import on_first_devices
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices


def cluster_of(speeds: list[float], hosts: str, *, is_fast_within: bool = False) -> Cluster:
    """Devices of some speeds, each on the host of its letter."""
    cluster = devices(len(speeds))
    named = tuple(
        replace(device, speed=speed, host=host)
        for device, speed, host in zip(cluster.devices, speeds, hosts, strict=True)
    )
    within = replace(cluster.inter_host, bytes_per_s=cluster.inter_host.bytes_per_s * (1 + 9 * is_fast_within))
    return replace(cluster, devices=named, intra_host=within)


def orders_of(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    orders = device_orders(cluster, [1 / device.speed for device in cluster.devices])
    return {order.words: order.ranks for order in orders}


def test_alike_devices_have_one_order_and_unlike_ones_three() -> None:
    assert orders_of(cluster_of([1.0, 1.0, 1.0], "abb")) == {"in the cluster's order": (0, 1, 2)}
    assert orders_of(cluster_of([0.5, 1.0, 0.5, 0.8], "abab")) == {
        "in the cluster's order": (0, 1, 2, 3),
        "the fastest first": (1, 3, 0, 2),
        "the slowest first": (0, 2, 3, 1),
    }
    assert [*orders_of(cluster_of([1.0, 0.5], "aa"))] == ["in the cluster's order", "the slowest first"]


def test_devices_of_a_host_stay_together_where_its_links_are_faster() -> None:
    cluster = cluster_of([0.5, 1.0, 0.6, 0.8, 0.9, 0.7], "abaabb", is_fast_within=True)
    assert orders_of(cluster) == {
        "in the cluster's order": (0, 1, 2, 3, 4, 5),
        "the fastest hosts first": (1, 4, 5, 3, 2, 0),
        "the slowest hosts first": (0, 2, 3, 5, 4, 1),
    }


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


def test_the_search_for_many_devices_sorts_them_and_its_certificate_says_so() -> None:
    """Slow devices on every other place: sorted, a stage has devices of one speed."""
    profiles = {"a": chain([2, 1] * 10, output_bytes=10**5)}
    mixed = cluster_of([1.0, 0.5] * 18, "a" * 36)
    made = plan_step_time(profiles, mixed, PlanOptions(minibatch_size=18))
    speed = {device.name: device.speed for device in mixed.devices}
    assert all(len({speed[name] for name in stage.devices}) == 1 for stage in made.stages)
    orders = device_orders(mixed, [1 / device.speed for device in mixed.devices])
    assert on_first_devices([order.words for order in orders]) in made.certificate.space
    assert ", in the cluster's order, or the fastest first, or the slowest first, of too many" in made.certificate.space
    assert simulate(made, profiles).step_ns == made.prediction.step_ns >= made.certificate.lower_bound_ns
