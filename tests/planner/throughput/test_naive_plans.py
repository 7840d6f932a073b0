"""No result has a larger load than a naive plan that fits, and progress reports no load that no plan has."""

from random import Random
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

import bapipe
from bapipe.errors import Infeasible
from bapipe.formats.cluster import Bandwidth, Cluster, Link
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan import plan_once
from bapipe.planner.throughput.load_search import is_homogeneous
from bapipe.planner.throughput.loads import slowest_of
from bapipe.planner.throughput.naive_plans import slowest_links_from
from bapipe.simulator.stage_cost import build_stages
from tests.builders import MS, chain, devices
from tests.property.test_throughput import fastest_first, largest_load, load_ns, minimal_load, plan_of
from tests.random_profiles import random_cluster, random_profile, same_devices


def naive_load(profile: ModelProfile, cluster: Cluster, minibatch_size: int, sizes: tuple[int, ...]) -> int | None:
    """The least load of a plan of one stage on one device, or on any number of the first; None if none fits."""
    names = [device.name for device in cluster.devices]
    layers = tuple(layer.name for layer in profile.layers)
    choices = [(rank,) for rank in range(len(names))] + [tuple(range(n)) for n in range(2, len(names) + 1)]
    found = []
    for size in sizes:
        for ranks in choices:
            if len(ranks) <= minibatch_size // size:
                replicas = fastest_first(ranks, cluster)
                stage = StagePlan(layers=layers, devices=tuple(names[rank] for rank in replicas))
                costs = build_stages((stage,), {"a": profile}, cluster, size)
                found.append(largest_load(costs, (replicas,), cluster, minibatch_size // size, max(ranks) + 1))
    return min((load for load in found if load is not None), default=None)


@pytest.mark.parametrize("limit_s", [None, 0.0])
def test_no_load_is_larger_than_that_of_a_naive_plan(limit_s: float | None) -> None:
    num_found = 0
    for seed in range(12):
        random = Random(seed)
        profile = random_profile(random, 3)
        cluster = random_cluster(random, random.choice([2, 5, 17, 19]))
        sizes = profile.microbatch_sizes
        minibatch_size = sizes[-1] * random.choice([6, 12, 18])
        best = naive_load(profile, cluster, minibatch_size, (sizes[-1],))
        options = PlanOptions(
            minibatch_size=minibatch_size, microbatch_size=sizes[-1], objective="throughput", time_limit_s=limit_s
        )
        try:
            plan = plan_once({"a": profile}, cluster, options)
        except Infeasible:
            assert best is None
            continue
        if best is not None:
            num_found += 1
            assert load_ns(plan) <= best
            assert plan.certificate.lower_bound_ns <= load_ns(plan)
    assert num_found > 3


def unlike(num_devices: int, **given: Any) -> Cluster:
    """Devices of which the last one is a little slower, so that they are not searched as alike."""
    cluster = devices(num_devices, **given)
    *others, last = cluster.devices
    return replace(cluster, devices=(*others, replace(last, speed=0.999)))


def test_a_number_of_replicas_that_is_no_power_of_two_is_a_naive_plan() -> None:
    """18 micro-batches on 18 devices: one each on 18, but two each on 16. A layer cannot be divided."""
    plan = bapipe.plan(chain([1]), unlike(20), minibatch_size=18, objective="throughput")
    assert len(plan.stages[0].devices) == 18
    assert load_ns(plan) == 3 * MS
    assert plan.certificate.proven_optimal
    assert plan.certificate.space.endswith(
        "; or all layers on one device, or on any number of the first ones, each with a micro-batch"
    )
    few = bapipe.plan(chain([1]), unlike(8), minibatch_size=18, objective="throughput")
    assert "or all layers" not in few.certificate.space
    assert "; any number of 8 devices for a stage, each with a micro-batch, in any order, " in few.certificate.space


def test_replicas_count_with_their_step_where_the_all_reduce_overlaps_the_backward() -> None:
    """Of 40 layers with 10 MB of parameters, most gradients are summed during the backward of layers before them."""
    profile = chain([2] * 40, param_bytes=10 * 10**6, output_bytes=10**9)  # which takes 0.1 s to send
    cluster = devices(4, bytes_per_s=10**10, memory_bytes=10**12)
    plan = bapipe.plan(profile, cluster, minibatch_size=4, objective="throughput")
    assert [len(stage.devices) for stage in plan.stages] == [4]
    # F and B of all layers in 240 ms; 2 x 3/4 of 400 MB over 10 GB/s is 60 ms, of which a part is left at the end.
    assert 240 * MS < load_ns(plan) == plan.prediction.step_ns < 300 * MS
    assert ("data-parallel", "as small a load as this plan's") in [(a.name, a.why_not) for a in plan.alternatives]


def test_all_plans_of_one_stage_count_with_their_steps() -> None:
    """The result is the least load of more stages, or the shortest step of one, on any devices that follow each other."""
    num_by_step = num_later = 0
    for seed in range(150):
        random = Random(seed)
        num_devices, num_microbatches = random.choice([2, 3, 4]), random.choice([2, 3, 6])
        is_alike = random.random() < 0.3
        profile = random_profile(random, random.choice([2, 3]), sizes=(1,))
        # Gradients fill more than one bucket, and take as long as some layers.
        num_bytes = [random.choice([0, 1, 30, 60]) * 10**6 for _ in profile.layers]
        heavy = zip(profile.layers, num_bytes, strict=True)
        profile = replace(profile, layers=tuple(replace(layer, param_bytes=number) for layer, number in heavy))
        cluster = (same_devices if is_alike else random_cluster)(random, num_devices)
        fast, slow = (Bandwidth(bytes_per_s=random.choice([1, 3, 10]) * 10**15, latency_ns=i) for i in range(2))
        limits = [random.choice([1, 10**12]) if i == 0 and not is_alike else 10**12 for i in range(num_devices)]
        with_limits = zip(cluster.devices, limits, strict=True)
        cluster = Cluster(
            devices=tuple(replace(device, memory_bytes=limit) for device, limit in with_limits),
            intra_host=fast,
            inter_host=slow,
            intra_host_sum=Bandwidth(bytes_per_s=10**15, latency_ns=3) if random.random() < 0.3 else UNSET,
        )
        is_alike = is_homogeneous(cluster, limits)
        want = minimal_load(profile, cluster, num_microbatches, 1, is_alike)
        plan = plan_of(profile, cluster, num_microbatches, 1)
        if plan is None:
            assert want is None, seed
            continue
        assert (load_ns(plan), plan.certificate.lower_bound_ns) == (want, want), seed
        if len(plan.stages) == 1:
            ranks = tuple(cluster.index[name] for name in plan.stages[0].devices)
            stages = build_stages(plan.stages, {"a": profile}, cluster, 1)
            load = largest_load(stages, (ranks,), cluster, num_microbatches, max(ranks) + 1)
            num_by_step += load is not None and load_ns(plan) < load
            num_later += min(ranks) > 0
    assert num_by_step > 10
    assert num_later > 10


def test_data_parallelism_is_an_alternative_at_its_own_micro_batch_size() -> None:
    """Micro-batches of 2 take as long as of 1, so a plan with them is best, but there are two for three devices."""
    profile = chain([1, 1, 1], param_bytes=10**6)
    (measured,) = profile.measurements
    profile = replace(profile, measurements=(measured, replace(measured, microbatch_size=2)))
    plan = bapipe.plan(profile, devices(3, bytes_per_s=10**8), minibatch_size=4, objective="throughput")
    assert plan.microbatch_size == 2
    assert {"one-device", "data-parallel"} <= {a.name for a in plan.alternatives}


@pytest.mark.parametrize("cluster", [devices(3), unlike(3), unlike(17)])
def test_progress_reports_only_loads_of_plans_and_bounds_of_all_sizes(cluster: Cluster) -> None:
    profile = chain([1 + i % 3 for i in range(7)], output_bytes=10**5, param_bytes=10**5)
    (measured,) = profile.measurements
    twice = tuple(replace(layer, forward_ns=3 * layer.forward_ns) for layer in measured.layers)
    profile = replace(profile, measurements=(measured, replace(measured, microbatch_size=2, layers=twice)))
    said: list[tuple[int, int]] = []

    def plan(deadline: Deadline | None) -> Plan:
        options = PlanOptions(minibatch_size=12, objective="throughput")
        said.clear()
        return plan_once(
            {"a": profile}, cluster, options, deadline=deadline, progress=lambda _, *figures: said.append(figures)
        )

    for deadline in (Deadline(0.0), None):
        made = plan(deadline)
        assert said
        for best_ns, bound_ns in said:
            assert load_ns(made) <= best_ns
            assert bound_ns <= load_ns(made)
        assert said == sorted(said, key=lambda figures: -figures[0])


@pytest.mark.parametrize("has_links", [False, True])
def test_the_slowest_links_are_those_of_all_pairs(has_links: bool) -> None:
    for seed in range(10):
        random = Random(seed)
        cluster = random_cluster(random, 6)
        slow = Link(source="d1", target="d0", bytes_per_s=1000, latency_ns=7)
        names = {device.name for device in cluster.devices}
        cluster = replace(cluster, links=(slow,) if has_links and {"d0", "d1"} <= names else ())
        start = seed % 2
        for n, found in enumerate(slowest_links_from(cluster, start)[1:], start=start + 2):
            links = [cluster.link(a, b) for a in range(start, n) for b in range(start, n) if a != b]
            assert set(found) <= set(links)
            assert slowest_of(found) == Bandwidth(
                bytes_per_s=min(link.bytes_per_s for link in links), latency_ns=max(link.latency_ns for link in links)
            )
