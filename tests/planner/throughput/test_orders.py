"""Throughput on unlike devices, in every order of few of them and in some orders of many."""

from itertools import permutations
from math import ceil
from random import Random

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import Infeasible
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.solution import make_plan
from bapipe.planner.throughput.load_search import is_homogeneous
from bapipe.planner.throughput.orders import orders_to_search, searches_all_orders
from bapipe.planner.throughput.search import solve_throughput
from bapipe.simulator.simulate import simulate
from tests.builders import MS, chain, devices
from tests.property.test_throughput import load_ns, minimal_load
from tests.random_graphs import branching_profile
from tests.random_profiles import random_cluster, random_profile


def with_memory(cluster: Cluster, *num_bytes: int) -> Cluster:
    named = zip(cluster.devices, num_bytes, strict=True)
    return replace(cluster, devices=tuple(replace(device, memory_bytes=limit) for device, limit in named))


def with_speeds(cluster: Cluster, *speeds: float) -> Cluster:
    named = zip(cluster.devices, speeds, strict=True)
    return replace(cluster, devices=tuple(replace(device, speed=speed) for device, speed in named))


def planned(profile: ModelProfile, cluster: Cluster, minibatch_size: int) -> Plan:
    return bapipe.plan(profile, cluster, minibatch_size=minibatch_size, objective="throughput")


@pytest.mark.parametrize("large", [0, 1, 2])
def test_where_a_cluster_lists_its_large_device_does_not_matter(large: int) -> None:
    """One layer has a large stash. The large device has it, 8 x 0.3 ms; the others share the rest, 4 x 0.9 ms."""
    profile = chain([1] * 4, stash_bytes=100)
    (measured,) = profile.measurements
    layers = (replace(measured.layers[0], stash_bytes=1000), *measured.layers[1:])
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    cluster = with_memory(devices(3), *(10**5 if rank == large else 900 for rank in range(3)))
    plan = planned(profile, cluster, 8)
    assert plan.stages[0].devices == (f"d{large}",)
    assert load_ns(plan) == plan.certificate.lower_bound_ns == 4 * 9 * MS
    assert "3 devices for a stage, each with a micro-batch, in any order; " in plan.certificate.space


def test_few_unlike_devices_have_the_minimum_over_all_orders() -> None:
    """By brute force over each order of the cluster, with stages that hold what all later devices make them hold."""
    num_better = num_found = 0
    for seed in range(40):
        random = Random(seed)
        make = branching_profile if seed % 2 else random_profile
        profile = make(random, random.randint(2, 4), sizes=(1,))
        cluster = random_cluster(random, random.randint(2, 3))
        num_microbatches = random.choice([2, 3, 4])
        is_alike = is_homogeneous(cluster, [device.memory_bytes for device in cluster.devices])
        wanted = [
            minimal_load(profile, replace(cluster, devices=order), num_microbatches, 1, is_alike)
            for order in permutations(cluster.devices)
        ]
        want = min((load for load in wanted if load is not None), default=None)
        options = PlanOptions(minibatch_size=num_microbatches, objective="throughput")
        try:
            plan = make_plan(solve_throughput({"a": profile}, cluster, options))
        except Infeasible:
            assert want is None, seed
            continue
        assert (load_ns(plan), plan.certificate.lower_bound_ns) == (want, want), seed
        assert simulate(plan, {"a": profile}).prediction(num_microbatches).ranks == plan.prediction.ranks
        num_found += 1
        num_better += wanted[0] != want
    assert num_found > 25
    assert num_better > 8


def test_many_unlike_devices_are_taken_in_some_orders_too() -> None:
    """Only the ninth device holds the first layer: in the cluster's order all but one of the others are then idle."""
    profile = chain([3] + [1] * 9, stash_bytes=10)
    (measured,) = profile.measurements
    layers = (replace(measured.layers[0], stash_bytes=10**4), *measured.layers[1:])
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    limits = [2000 + rank for rank in range(10)]
    cluster = with_memory(devices(10), *limits[:8], 10**6, limits[9])
    plan = planned(profile, cluster, 4)
    assert plan.stages[0].devices == ("d8",)
    assert load_ns(plan) == 4 * 3 * 3 * MS
    orders = "next to one another in the cluster's order, or those with the most memory first, without gaps; "
    assert orders in plan.certificate.space


def test_orders_differ_in_more_than_alike_devices() -> None:
    def ranks_of(cluster: Cluster) -> list[tuple[int, ...]]:
        options = PlanOptions(minibatch_size=8, objective="throughput")
        found = orders_to_search({"a": chain([1])}, cluster, options)
        assert searches_all_orders({"a": chain([1])}, cluster, options) == (
            len(found) == 1 or {order.words for order in found} == {"in any order"}
        )
        return [order.ranks for order in found]

    assert ranks_of(devices(30)) == [(*range(30),)]
    four = ranks_of(with_speeds(devices(4), 1.0, 2.0, 3.0, 4.0))
    assert four[0] == (0, 1, 2, 3)
    assert sorted(four) == [*permutations(range(4))]
    # Two of four are alike: 4! / 2 orders, each with the first of them before the other.
    alike = ranks_of(with_speeds(devices(4), 1.0, 2.0, 1.0, 4.0))
    assert sorted(alike) == [order for order in permutations(range(4)) if order.index(0) < order.index(2)]
    five = ranks_of(with_speeds(devices(5), 1.0, 3.0, 2.0, 4.0, 5.0))
    assert five == [(0, 1, 2, 3, 4), (4, 3, 1, 2, 0), (0, 2, 1, 3, 4)]
    eight = ranks_of(with_speeds(devices(8), *[1.0] * 7, 2.0))
    assert sorted(order.index(7) for order in eight) == [*range(8)]


def test_missing_memory_is_that_of_the_closest_order() -> None:
    """The first layer needs 1,000 bytes: 100 are missing on the second device, 600 on the first."""
    profile = chain([1, 1], stash_bytes=0)
    (measured,) = profile.measurements
    layers = (replace(measured.layers[0], stash_bytes=1000), replace(measured.layers[1], stash_bytes=700))
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    cluster = with_memory(devices(2), 600, 900)
    for named in (cluster, replace(cluster, devices=cluster.devices[::-1])):
        with pytest.raises(Infeasible, match="with micro-batches of 1, lacks 100 bytes on each device"):
            planned(profile, named, 1)


@pytest.mark.parametrize("num_devices", [4, 9])
def test_the_cluster_s_order_comes_first_and_a_deadline_leaves_a_bound_that_holds(num_devices: int) -> None:
    profile = chain([1 + i % 3 for i in range(12)], param_bytes=10**5, output_bytes=10**5)
    cluster = with_speeds(devices(num_devices), *(1.0 + rank * 7 % num_devices / 8 for rank in range(num_devices)))
    options = PlanOptions(minibatch_size=6, objective="throughput")
    whole = solve_throughput({"a": profile}, cluster, options)
    seen: list[tuple[float, float]] = []
    reports = 0

    def ends_after(num: int) -> int:
        nonlocal reports
        deadline, reports = Deadline(None), 0

        def report(load_ns: float, bound_ns: float) -> None:
            nonlocal reports
            reports += 1
            seen.append((load_ns, bound_ns))
            if reports == num:
                deadline.stop()

        hurried = solve_throughput({"a": profile}, cluster, options, deadline=deadline, progress=report)
        assert hurried.lower_bound_ns <= whole.objective_ns <= hurried.objective_ns
        assert hurried.objective_ns <= min(load for load, _ in seen[-reports:])
        return reports

    total = ends_after(0)
    for num in range(1, total, ceil(total / 8)):
        ends_after(num)
    assert max(bound for _, bound in seen) <= whole.objective_ns


def test_transfers_are_those_of_the_order() -> None:
    """Two layers of 10 ms on two of three devices: only between d2 and d0, in that direction, is a link fast."""
    profile = chain([10, 10], output_bytes=10**6)
    layers = tuple(replace(layer, no_replicas=True) for layer in profile.layers)
    fast, slow = Bandwidth(bytes_per_s=10**12, latency_ns=0), Bandwidth(bytes_per_s=10**6, latency_ns=0)
    links = tuple(Link(source=a, target=b, bytes_per_s=10**12, latency_ns=0) for a, b in (("d2", "d0"), ("d0", "d2")))
    named = tuple(Device(name=f"d{i}", host="h", kind="a", memory_bytes=10**10) for i in range(3))
    cluster = Cluster(devices=named, intra_host=slow, inter_host=fast, links=links)
    plan = planned(replace(profile, layers=layers), cluster, 4)
    assert {stage.devices for stage in plan.stages} == {("d0",), ("d2",)}
    assert load_ns(plan) == plan.certificate.lower_bound_ns == 4 * 30 * MS
