"""The vectorised forms of the simulator's rules equal the scalar ones, for every interval of random chains and graphs."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.graph.downsets import downsets, members
from bapipe.graph.layer_graph import of_layers
from bapipe.planner.stages.chain import Chain, stage_on
from bapipe.report.layer_diagram import layer_rows
from bapipe.schedules.table import Phase
from bapipe.simulator import allreduce, stage_cost
from bapipe.simulator.cuts import find_cuts
from bapipe.simulator.interval_costs import (
    IntArray,
    IntervalCosts,
    at_speed,
    cut_bytes,
    gradient_crosses,
    ring_ns,
    transfer_ns,
)
from bapipe.simulator.stage import Stage, StageCost
from bapipe.simulator.tied_weights import TiedWeightCost, legal_cuts
from bapipe.units import at_speed as scalar_at_speed
from tests.random_graphs import branching_profile
from tests.random_profiles import of_groups, random_profile, with_exchanges, with_host_times

SPEEDS = [1.0, 0.3, 1.7, 2.5]


def sends_gradient(profile: ModelProfile, before: set[int]) -> bool:
    """Whether a tensor with a gradient that some layers make is used by the other ones."""
    used = {tensor for i, layer in enumerate(profile.layers) if i not in before for tensor in layer.inputs}
    made = (set(profile.layers[i].outputs) - set(profile.layers[i].no_gradient) for i in before)
    return any(map(used.intersection, made))


def scalar_cost(profile: ModelProfile, before: list[int], layers: list[int], speed: float) -> StageCost:
    measured = profile.at(2)
    pairs = [(profile.layers[i], measured[i]) for i in reversed(layers)]
    sends = sends_gradient(profile, set(before))
    return stage_cost.stage_cost_by_speed(pairs, frozenset(), (), TiedWeightCost(), sends_gradient=sends)(speed)


def check_equal(costs: IntervalCosts, begin: int, end: int, want: StageCost) -> None:
    got = {
        "forward_ns": costs.forward_ns(begin, end),
        "input_grad_ns": costs.input_grad_ns(begin, end),
        "weight_grad_ns": costs.weight_grad_ns(begin, end),
        "backward_ns": costs.backward_ns(begin, end),
        "update_ns": costs.update_ns(begin, end),
        "param_bytes": costs.param_bytes(begin, end),
        "gradient_bytes": costs.gradient_bytes(begin, end),
        "optimizer_bytes": costs.optimizer_bytes(begin, end),
        "stash_bytes": costs.stash_bytes(begin, end),
        "gradient_stash_bytes": costs.gradient_stash_bytes(begin, end),
    }
    assert got == {name: getattr(want, name) for name in got}


@pytest.mark.parametrize("speed", SPEEDS)
def test_costs_of_intervals_of_a_chain_equal_those_of_stages(speed: float) -> None:
    for seed in range(20):
        profile = random_profile(Random(seed), 6, splits_badly=seed % 2 == 1, frozen=seed % 4 > 1)
        profile = with_host_times(Random(seed), profile) if seed % 5 == 0 else profile
        profile = with_exchanges(Random(seed), profile) if seed % 4 == 1 else profile
        costs = IntervalCosts(profile, 2, speed)
        for begin in range(6):
            for end in range(begin + 1, 7):
                check_equal(costs, begin, end, scalar_cost(profile, [*range(begin)], [*range(begin, end)], speed))


@pytest.mark.parametrize("speed", SPEEDS)
def test_costs_of_stages_of_a_chain_equal_the_simulator_s(speed: float) -> None:
    for seed in range(30):
        profile = random_profile(Random(seed), 6, splits_badly=seed % 2 == 1, shares=seed % 3 == 1, frozen=seed % 4 > 1)
        profile = with_host_times(Random(seed), profile) if seed % 5 == 0 else profile
        profile = with_exchanges(Random(seed), profile) if seed % 4 == 1 else profile
        names = [layer.name for layer in profile.layers]
        chain = Chain(profile, 2, speed)
        device = Device(name="d0", host="h", kind=profile.device.kind, memory_bytes=0, speed=speed)
        link = Bandwidth(bytes_per_s=10**9, latency_ns=0)
        devices = tuple(replace(device, name=f"d{r}") for r in range(3))
        cluster = Cluster(devices=devices, intra_host=link, inter_host=link)
        cluster = of_groups(cluster) if profile.device.num_members == 2 else cluster
        for cut in legal_cuts(profile.layers):
            recompute = seed % 2 == 0
            plans = (
                StagePlan(layers=tuple(names[:cut]), devices=("d0",), recompute=recompute),
                StagePlan(layers=tuple(names[cut:]), devices=("d1", "d2"), recompute=recompute),
            )
            want = stage_cost.build_stages(plans, {profile.device.kind: profile}, cluster, 2)
            again = (frozenset(range(cut)), frozenset(range(cut, 6))) if recompute else (frozenset[int](),) * 2
            first = stage_on([chain], 0, cut, recompute=again[0])
            second = stage_on([chain] * 2, cut, 6, recompute=again[1])
            assert (first, second) == want


def boundaries_of(profile: ModelProfile) -> list[int]:
    sets = downsets(of_layers(profile), 10_000)
    assert sets is not None
    return sets


def inside_of(profile: ModelProfile, boundaries: list[int]) -> IntArray:
    return np.array([[nodes >> i & 1 for i in range(len(profile.layers))] for nodes in boundaries])


def test_costs_of_intervals_of_a_graph_equal_those_of_stages() -> None:
    for seed in range(5):
        profile = branching_profile(Random(seed), 6)
        boundaries = boundaries_of(profile)
        costs = IntervalCosts(profile, 2, 1.7, inside=inside_of(profile, boundaries))
        for begin, smaller in enumerate(boundaries):
            for end, larger in enumerate(boundaries):
                if smaller != larger and not smaller & ~larger:
                    want = scalar_cost(profile, members(smaller), members(larger & ~smaller), 1.7)
                    check_equal(costs, begin, end, want)


def test_long_times_are_exact_up_to_the_limit() -> None:
    for speed in SPEEDS:
        times = [0, 1, 10**9, 10**15, 2**58 + 1]
        assert at_speed(np.array(times), speed).tolist() == [min(2**60, scalar_at_speed(t, speed)) for t in times]
    assert at_speed(np.array([10**12]), 0.5, max_ns=10**9).tolist() == [10**9]


def test_transfer_times_equal_those_of_the_link() -> None:
    sizes = [1, 3, 10**9, 2**32 + 1, 10**10, 3 * 10**12, 10**15]
    for link in (Bandwidth(bytes_per_s=12 * 10**9, latency_ns=7), Bandwidth(bytes_per_s=10**9, latency_ns=0)):
        assert transfer_ns(np.array(sizes), link).tolist() == [link.transfer_ns(num_bytes) for num_bytes in sizes]
    assert transfer_ns(np.array([0, 5]), link, max_ns=3).tolist() == [0, 3]


def test_ring_times_equal_the_simulator_s() -> None:
    for seed in range(50):
        random = Random(seed)
        num_devices = random.randint(2, 5)
        slow, fast, host_sum = (
            Bandwidth(bytes_per_s=random.randint(1, 10**9), latency_ns=random.randrange(50)) for _ in range(3)
        )
        devices = tuple(Device(name=f"d{r}", host="h", kind="a", memory_bytes=0) for r in range(num_devices))
        plain = Cluster(devices=devices, intra_host=slow, inter_host=fast)
        summing = Cluster(devices=devices, intra_host=slow, inter_host=fast, intra_host_sum=host_sum)
        sizes = [random.randint(1, 10**6) for _ in range(5)]
        for cluster, links in ((plain, [slow]), (summing, [slow, host_sum])):
            want = [allreduce.ring_ns(num_bytes, range(num_devices), cluster) for num_bytes in sizes]
            assert ring_ns(np.array(sizes), num_devices, links).tolist() == want
        assert ring_ns(np.array(sizes), 1, [slow]).tolist() == [0] * 5
        assert ring_ns(np.array([0]), num_devices, [slow]).tolist() == [0]


def test_every_count_of_what_crosses_a_cut_is_the_same() -> None:
    for seed in range(20):
        profile = random_profile(Random(seed), 7) if seed % 2 else branching_profile(Random(seed), 7)
        layers = list(zip(profile.layers, profile.at(2), strict=True))
        boundaries = boundaries_of(profile)
        for sets, inside in (
            ([2**cut - 1 for cut in range(len(layers) + 1)], None),
            (boundaries, inside_of(profile, boundaries)),
        ):
            send, grad = cut_bytes(profile, 2, inside)
            crosses = gradient_crosses(profile, inside)
            for boundary, nodes in enumerate(sets):
                stage_of = {layer.name: int(not nodes >> i & 1) for i, layer in enumerate(profile.layers)}
                cut = find_cuts(layers, stage_of)[0]
                assert (send[boundary], grad[boundary]) == (cut.send_bytes, cut.grad_bytes)
                sends = sends_gradient(profile, set(members(nodes)))
                assert (crosses[boundary], cut.num_gradients > 0) == (sends, sends)


def test_the_drawing_of_the_layers_has_the_bytes_of_each_cut() -> None:
    for seed in range(10):
        profile = branching_profile(Random(seed), 7)
        send, _ = cut_bytes(profile, profile.microbatch_sizes[-1])
        assert [row.cut_bytes for row in layer_rows(profile)] == send[1:].tolist()


def test_buckets_are_reduced_one_after_another() -> None:
    link = Bandwidth(bytes_per_s=10**9, latency_ns=0)
    devices = tuple(Device(name=f"d{r}", host="h", kind="a", memory_bytes=0) for r in range(2))
    cluster = Cluster(devices=devices, intra_host=link, inter_host=link)
    cost = StageCost(forward_ns=1, input_grad_ns=10, weight_grad_ns=10, gradient_done_ns=((5, 2), (20, 9)))
    stage = Stage(costs=(cost, cost), bucket_bytes=(20, 4))
    last = [(100, Phase.BACKWARD), (110, Phase.WEIGHT_GRAD)]
    reduced = allreduce.reduce_buckets(stage, (0, 1), last, cluster)
    assert reduced == [(112, 132), (132, 136)]
    assert all(before[1] <= after[0] for before, after in pairwise(reduced))
    assert allreduce.reduce_buckets(stage, (0, 1), [(100, Phase.BACKWARD), None], cluster)[0] == (105, 125)
