"""Plans for throughput against every assignment of layers to stages and of devices to stages."""

import re
from contextlib import suppress
from functools import partial
from itertools import permutations, product
from math import ceil
from random import Random

import pytest
from hypothesis import given
from msgspec.structs import replace

from bapipe.errors import Infeasible, InvalidFile
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.codec import decode, encode
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.searched_space import in_words
from bapipe.planner.results.solution import make_plan
from bapipe.planner.throughput import search
from bapipe.planner.throughput.load_search import is_homogeneous
from bapipe.planner.throughput.search import MAX_DOWNSETS, explore_throughput, solve_throughput
from bapipe.schedules.placement import place_schedule
from bapipe.simulator.simulate import simulate, simulate_schedule
from bapipe.simulator.stage import Stage
from bapipe.simulator.stage_cost import build_stages
from tests import builders
from tests.random_graphs import branching_profile
from tests.random_profiles import (
    of_groups,
    random_cluster,
    random_profile,
    same_devices,
    with_exchanges,
    with_host_times,
)
from tests.strategies import drawn, examples


def minimal_load(
    profile: ModelProfile,
    cluster: Cluster,
    num_microbatches: int,
    size: int,
    homogeneous: bool,
    *,
    in_any_order: bool = False,
) -> int | None:
    """The minimum over all plans of the largest load or, of one stage, of the step; None if nothing fits.

    With `in_any_order` the replicas of a stage take micro-batches in each order, else the fastest first.
    """
    best: int | None = None
    names = [layer.name for layer in profile.layers]
    count = len(cluster.devices)
    for num_stages in range(1, min(count, len(names)) + 1):
        ascending = device_groups(count, num_stages, gaps=not homogeneous)
        if in_any_order:
            groups = [orders for each in ascending for orders in product(*map(permutations, each))]
        else:
            groups = [tuple(fastest_first(ranks, cluster) for ranks in each) for each in ascending]
        for of in product(range(num_stages), repeat=len(names)):
            if len(set(of)) < num_stages or not flows(profile, of):
                continue
            layers = [tuple(name for name, s in zip(names, of, strict=True) if s == i) for i in range(num_stages)]
            for devices in groups:
                if max(map(len, devices)) > num_microbatches:
                    continue
                stages = [
                    StagePlan(layers=own, devices=tuple(cluster.devices[rank].name for rank in ranks))
                    for own, ranks in zip(layers, devices, strict=True)
                ]
                costs = build_stages(stages, {"a": profile}, cluster, size)
                used = sum(map(len, devices)) if homogeneous else None
                if num_stages == 1:
                    load = load_of_one_stage(costs, devices[0], cluster, num_microbatches)
                else:
                    load = largest_load(costs, devices, cluster, num_microbatches, used)
                if load is not None and (best is None or load < best):
                    best = load
    return best


def fastest_first(ranks: tuple[int, ...], cluster: Cluster) -> tuple[int, ...]:
    return tuple(sorted(ranks, key=lambda rank: (-cluster.devices[rank].speed, rank)))


def device_groups(count: int, num_stages: int, gaps: bool) -> list[tuple[tuple[int, ...], ...]]:
    found: list[tuple[tuple[int, ...], ...]] = [()]
    for _ in range(num_stages):
        found = [
            (*groups, tuple(range(start, stop)))
            for groups in found
            for first in [groups[-1][-1] + 1 if groups else 0]
            for start in (range(first, count) if gaps else [first])
            for stop in range(start + 1, count + 1)
        ]
    return found


def flows(profile: ModelProfile, of: tuple[int, ...]) -> bool:
    place = {layer.name: i for i, layer in enumerate(profile.layers)}
    for i, layer in enumerate(profile.layers):
        if any(of[int(tensor[1:])] > of[i] for tensor in layer.inputs if tensor != "x"):
            return False
        if any(of[place[other]] != of[i] for other in layer.shares):
            return False
    return True


def largest_load(
    stages: tuple[Stage, ...],
    devices: tuple[tuple[int, ...], ...],
    cluster: Cluster,
    num_microbatches: int,
    used: int | None,
) -> int | None:
    """The largest load of a device, from the rules in docs/throughput.md; None if a device lacks memory."""

    def move(num_bytes: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> int:
        links = [cluster.link(a, b) for a in sources for b in targets]
        slow = min(link.bytes_per_s for link in links)
        late = max(link.latency_ns for link in links)
        return late + ceil(num_bytes * 10**9 / slow) if num_bytes else 0

    worst = 0
    for s, (stage, ranks) in enumerate(zip(stages, devices, strict=True)):
        for place, rank in enumerate(ranks):
            cost, r = stage.costs[place], len(ranks)
            times = len(range(place, num_microbatches, r))
            compute = times * (cost.forward_ns + cost.backward_ns) + cost.update_ns
            if r > 1 and cost.param_bytes:
                links = [cluster.link(a, b) for a in ranks for b in ranks if a != b]
                links += [link for link in [cluster.host_sum_link(ranks)] if link is not None]
                turn = max(k.latency_ns for k in links)
                turn += ceil(ceil(cost.param_bytes / r) * 10**9 / min(k.bytes_per_s for k in links))
                compute += 2 * (r - 1) * turn
            moved = []
            received = 0
            if s > 0:
                before = stages[s - 1]
                moved += [
                    times * move(before.send_bytes, devices[s - 1], ranks),
                    times * move(before.grad_bytes, ranks, devices[s - 1]),
                ]
                received += before.send_bytes
            if s + 1 < len(stages):
                moved += [
                    times * move(stage.send_bytes, ranks, devices[s + 1]),
                    times * move(stage.grad_bytes, devices[s + 1], ranks),
                ]
                received += stage.grad_bytes
            device = cluster.devices[rank]
            worst = max(worst, max(compute, *moved, 0) if device.overlaps_transfers else compute + sum(moved))
            width = (used or len(cluster.devices)) - min(ranks)
            kept = min(ceil(width / r), times) * cost.stash_bytes
            held = 2 * cost.param_bytes + cost.optimizer_bytes + kept + cost.workspace_bytes + times * received
            if held > device.memory_bytes:
                return None
    return worst


def load_of_one_stage(
    stages: tuple[Stage, ...], ranks: tuple[int, ...], cluster: Cluster, num_microbatches: int
) -> int | None:
    """The load of all layers as one stage, with one micro-batch in flight, or its step if that is shorter."""
    load = largest_load(stages, (ranks,), cluster, num_microbatches, max(ranks) + 1)
    if load is None:
        return None
    table = place_schedule("1f1b", [ranks], num_microbatches, len(cluster.devices))
    return min(load, simulate_schedule(table, stages, cluster).step_ns)


def plan_of(
    profile: ModelProfile, cluster: Cluster, num_microbatches: int, size: int, max_downsets: int = MAX_DOWNSETS
) -> Plan | None:
    try:
        return make_plan(
            explore_throughput(
                {"a": profile},
                cluster,
                minibatch_size=num_microbatches * size,
                microbatch_sizes=[size],
                limits=[device.memory_bytes for device in cluster.devices],
                max_downsets=max_downsets,
            )
        )
    except Infeasible:
        return None


def load_ns(plan: Plan) -> int:
    assert isinstance(plan.prediction.load_ns, int)
    return plan.prediction.load_ns


@pytest.mark.parametrize("homogeneous", [True, False])
def test_the_load_is_the_minimum_over_all_assignments(homogeneous: bool) -> None:
    found = fitted = 0
    for seed in range(90):
        random = Random(seed)
        num_layers, num_devices = random.randint(1, 5), random.randint(1, 3)
        make = branching_profile if random.random() < 0.7 else random_profile
        profile = make(random, num_layers)
        profile = with_host_times(Random(seed), profile) if seed % 5 == 2 else profile
        profile = with_exchanges(Random(seed), profile) if seed % 4 == 3 else profile
        cluster = same_devices(random, num_devices) if homogeneous else random_cluster(random, num_devices)
        cluster = of_groups(cluster) if profile.device.num_members == 2 else cluster
        num_microbatches = random.choice([1, 2, 3, 4, 7])
        plan = plan_of(profile, cluster, num_microbatches, 2)
        same = homogeneous or is_homogeneous(cluster, [device.memory_bytes for device in cluster.devices])
        want = minimal_load(profile, cluster, num_microbatches, 2, same)
        assert (plan.prediction.load_ns if plan else None) == want, seed
        found += 1
        fitted += plan is not None
        if plan:
            assert plan.certificate.proven_optimal
            assert plan.certificate.lower_bound_ns == want
        if same:
            as_large = plan_of(profile, cluster, num_microbatches, 2, max_downsets=1)
            assert (as_large and (as_large.prediction.load_ns, as_large.certificate.lower_bound_ns)) == (
                plan and (want, want)
            ), seed
    assert found > fitted > 48


def test_no_order_of_replicas_that_differ_in_speed_has_a_smaller_load() -> None:
    """The fastest ones run the micro-batch that is left over; with memory enough, no other order is better."""
    num_out_of_order = 0
    for seed in range(60):
        random = Random(seed)
        profile = random_profile(random, random.randint(1, 3))
        cluster = random_cluster(random, random.randint(2, 3))
        alike = tuple(replace(one, memory_bytes=10**6, overlaps_transfers=True) for one in cluster.devices)
        cluster = replace(cluster, devices=alike)
        num_microbatches = random.choice([3, 4, 5, 7])
        plan = plan_of(profile, cluster, num_microbatches, 2)
        assert plan is not None
        homogeneous = is_homogeneous(cluster, [10**6] * len(alike))
        want = minimal_load(profile, cluster, num_microbatches, 2, homogeneous, in_any_order=True)
        assert (load_ns(plan), plan.certificate.lower_bound_ns) == (want, want), seed
        ranks = [[cluster.index[name] for name in stage.devices] for stage in plan.stages]
        num_out_of_order += any(own != sorted(own) for own in ranks)
        is_sorted = fastest_first(tuple(range(len(alike))), cluster) == tuple(range(len(alike)))
        assert ("the fastest first" in plan.certificate.space) == (not is_sorted)
    assert num_out_of_order > 10


def test_a_plan_simulates_fits_and_round_trips() -> None:
    deep = 0
    for seed in range(60):
        random = Random(seed)
        profile = branching_profile(random, random.randint(2, 9))
        cluster = random.choice([same_devices, random_cluster])(random, random.randint(2, 5))
        plan = plan_of(profile, cluster, random.randint(2, 9), 1)
        if plan is None:
            continue
        timeline = simulate(plan, {"a": profile})
        assert timeline.step_ns == plan.prediction.step_ns
        for rank, device in zip(plan.prediction.ranks, cluster.devices, strict=True):
            assert rank.peak_bytes <= device.memory_bytes
        if all(len(stage.devices) == 1 for stage in plan.stages):
            assert load_ns(plan) <= plan.prediction.step_ns
            deep += len(plan.stages) > 2
        assert decode(encode(plan)) == plan
        assert b'"objective": "throughput"' in encode(plan)
    assert deep > 2


def test_longer_steps_come_near_the_load() -> None:
    """The predicted steady state of a pipeline agrees with the simulator if a step has many micro-batches."""
    near = 0
    for seed in range(40):
        random = Random(seed)
        profile = branching_profile(random, 6)
        link = Bandwidth(bytes_per_s=10**12, latency_ns=0)
        cluster = Cluster(
            devices=tuple(Device(name=f"d{i}", host="h", kind="a", memory_bytes=10**9) for i in range(3)),
            intra_host=link,
            inter_host=link,
        )
        plan = plan_of(profile, cluster, 600, 1)
        assert plan is not None
        if not plan.prediction.load_ns:
            continue
        assert plan.prediction.step_ns < 1.02 * plan.prediction.load_ns, seed
        near += 1
    assert near > 30


@examples(30)
@given(drawn(lambda random: branching_profile(random, 6, sizes=(1,))), drawn(lambda random: same_devices(random, 4)))
def test_scaling_times_and_bytes_per_second_scales_the_load(profile: ModelProfile, cluster: Cluster) -> None:
    cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=10**6, speed=1.0) for d in cluster.devices))
    link = Bandwidth(bytes_per_s=10**9, latency_ns=7)
    slow = Bandwidth(bytes_per_s=10**8, latency_ns=70)
    ten = replace(
        profile,
        layers=tuple(replace(layer, update_ns=10 * layer.update_ns) for layer in profile.layers),
        measurements=tuple(
            replace(
                m,
                layers=tuple(
                    replace(
                        one,
                        forward_ns=10 * one.forward_ns,
                        input_grad_ns=10 * one.input_grad_ns,
                        weight_grad_ns=10 * one.weight_grad_ns,
                    )
                    for one in m.layers
                ),
            )
            for m in profile.measurements
        ),
    )
    one = plan_of(profile, replace(cluster, intra_host=link, inter_host=link), 5, 1)
    other = plan_of(ten, replace(cluster, intra_host=slow, inter_host=slow), 5, 1)
    assert one is not None
    assert other is not None
    assert load_ns(other) == 10 * load_ns(one)


def test_too_many_downsets_leave_a_bound_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_LISTED", 5)
    gaps = 0
    for seed in range(40):
        random = Random(seed)
        profile = branching_profile(random, 8)
        cluster = same_devices(random, 3)
        exact = plan_of(profile, cluster, 4, 1)
        rough = plan_of(profile, cluster, 4, 1, max_downsets=5)
        if exact is None or rough is None:
            continue
        assert load_ns(rough) >= load_ns(exact) >= rough.certificate.lower_bound_ns
        gaps += not rough.certificate.proven_optimal
    assert gaps > 10


def test_a_plan_that_just_fits_is_found_next_to_those_that_lack_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_LISTED", 5)
    found_later = 0
    for seed in range(15):
        random = Random(seed)
        profile, cluster = branching_profile(random, 8), same_devices(random, 3)
        explore = partial(explore_throughput, {"a": profile}, cluster, minibatch_size=4, microbatch_sizes=[1])
        with pytest.raises(Infeasible, match="no plan for throughput fits in memory") as caught:
            explore(limits=[0] * 3)
        (lacking,) = re.findall(r"lacks ([\d,]+) bytes", str(caught.value))
        just_enough = [int(lacking.replace(",", ""))] * 3
        assert explore(limits=just_enough, max_downsets=5).stages
        with suppress(Infeasible):
            explore(limits=just_enough, max_downsets=5, max_neighbours=0)
            continue
        found_later += 1
    assert found_later > 0


def test_layers_that_share_parameters_stay_in_one_stage_as_certificates_and_errors_say() -> None:
    profile = builders.chain([1, 2, 2, 1], param_bytes=100, output_bytes=10)
    tied = replace(profile.layers[3], param_bytes=0, shares=("l0",), shared_bytes=100)
    profile = replace(profile, layers=(replace(profile.layers[0], shares=("l3",)), *profile.layers[1:3], tied))
    explore = partial(explore_throughput, {"a": profile}, builders.devices(2), minibatch_size=4, microbatch_sizes=[1])
    plan = explore(limits=[10**9] * 2)
    assert len(plan.stages) == 1
    assert "of 4 layers, those that share parameters, and all between them, in one stage; " in in_words(plan.space)
    with pytest.raises(Infeasible, match="Layers that share parameters stay in one stage here") as caught:
        explore(limits=[500] * 2)
    assert not caught.value.is_proven


def test_missing_memory_is_named_if_nothing_fits() -> None:
    random = Random(3)
    profile = random_profile(random, 4, sizes=(1,))
    link = Bandwidth(bytes_per_s=10**9, latency_ns=0)
    device = Device(name="d0", host="h", kind="a", memory_bytes=20)
    cluster = Cluster(devices=(device,), intra_host=link, inter_host=link)
    needed = sum(2 * layer.param_bytes + layer.optimizer_state_bytes for layer in profile.layers)
    measured = profile.measurements[0].layers
    needed += sum(m.stash_bytes for m in measured) + max(m.workspace_bytes for m in measured)
    largest = 2 * profile.layers[1].param_bytes + profile.layers[1].optimizer_state_bytes
    with pytest.raises(Infeasible) as caught:
        explore_throughput({"a": profile}, cluster, minibatch_size=2, microbatch_sizes=[1], limits=[20])
    assert str(caught.value) == (
        f"no plan for throughput fits in memory; the closest, with micro-batches of 1, lacks {needed - 20:,} bytes on "
        f"each device, which may hold 20. 'l1' alone takes {largest} bytes for its parameters, gradients and optimizer "
        "state, more than any device may hold (20): only devices with more memory, or smaller layers, would do"
    )


def test_disconnected_layers_are_named() -> None:
    profile = random_profile(Random(1), 4, sizes=(1,))
    layers = list(profile.layers)
    layers[2] = replace(layers[2], inputs=("y",))
    layers[3] = replace(layers[3], inputs=("t2",))
    link = Bandwidth(bytes_per_s=10**9, latency_ns=0)
    device = Device(name="d0", host="h", kind="a", memory_bytes=10**6)
    cluster = Cluster(devices=(device,), intra_host=link, inter_host=link)
    apart = {"a": replace(profile, layers=tuple(layers))}
    with pytest.raises(InvalidFile) as caught:
        solve_throughput(apart, cluster, PlanOptions(minibatch_size=2))
    assert str(caught.value) == (
        "the layers fall into 2 parts that share no tensor: 'l0' is in one of 2, 'l2' in one of 2; remove what the "
        "loss does not use, or plan the parts apart - at `$.layers[2].inputs`"
    )
