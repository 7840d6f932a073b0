"""Bounds and plans of graphs whose downsets are too many, on small graphs where all of them can be tried."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import msgspec
import numpy as np
import pytest

from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import downsets, members
from bapipe.graph.layer_graph import Graph, contract, of_layers
from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.throughput import downset_bound
from bapipe.planner.throughput.cut_windows import crossing_tensors, cut_windows, work_of_nodes
from bapipe.planner.throughput.homogeneous import HomogeneousDevices
from bapipe.planner.throughput.large_graph import LargeGraph
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.loads import Boundaries
from bapipe.planner.throughput.promising_cuts import crossing_bytes, promising_downsets
from bapipe.planner.throughput.search import explore_throughput
from bapipe.planner.throughput.window_bound import WindowBound
from tests.random_graphs import branching_profile
from tests.random_profiles import same_devices

ALIKE = same_devices(Random(0), 2)


def random_profile(seed: int) -> tuple[ModelProfile, Graph, tuple[tuple[int, ...], ...]]:
    profile = branching_profile(Random(seed), Random(seed).randint(2, 7), sizes=(1,))
    graph, layers_of_node = contract(
        of_layers(profile),
        [
            (i, *(j for j, other in enumerate(profile.layers) if other.name in layer.shares))
            for i, layer in enumerate(profile.layers)
            if layer.shares
        ],
    )
    return profile, graph, layers_of_node


def random_search(seed: int) -> tuple[LoadSearch, LargeGraph, LoadSolution]:
    """A search over all downsets of a graph with its best plan, and the same graph as a large one."""
    profile, graph, layers_of_node = random_profile(seed)
    listed = downsets(graph, 1000)
    assert listed is not None
    random = Random(seed)
    cluster = same_devices(random, random.randint(2, 5))
    search = LoadSearch(
        profiles={"a": profile},
        cluster=cluster,
        boundaries=Boundaries(listed, layers_of_node, len(profile.layers)),
        has_all_downsets=True,
        limits=(2**40,) * len(cluster.devices),
        minibatch_size=random.randint(2, 8),
    )
    large = LargeGraph(
        graph=graph,
        layers_of_node=layers_of_node,
        profile=profile,
        cluster=cluster,
        listed=listed,
        deadline=UNLIMITED,
    )
    return search, large, search.solve(1)


def test_no_downset_transfers_less_than_its_window_says() -> None:
    equal = 0
    for seed in range(60):
        profile, graph, layers_of_node = random_profile(seed)
        windows = cut_windows(graph, layers_of_node, profile, ALIKE, 1, max_windows=7)
        listed = downsets(graph, 1000)
        assert listed is not None
        bounds = Boundaries(listed, layers_of_node, len(profile.layers))
        node_ns, tensors = (
            work_of_nodes(profile, ALIKE, 1, layers_of_node),
            crossing_tensors(profile, 1, layers_of_node),
        )
        gradients = np.array([layer.gradient_bytes - layer.group_gradient_bytes for layer in profile.layers])
        for nodes, inside in zip(listed, bounds.inside, strict=True):
            work_ns = sum(node_ns[node] for node in members(nodes))
            crossing = crossing_bytes(nodes, tensors)
            own = (windows.least_ns <= work_ns) & (work_ns <= windows.most_ns)
            own[-1] &= nodes == listed[-1]  # the last window is the end of the graph only
            assert own.any()
            assert crossing >= windows.send_bytes[own].max()
            assert sum(
                size for size, maker, users, back in tensors if back and nodes >> maker & 1 and users & ~nodes
            ) >= (windows.grad_bytes[own].max())
            assert (
                windows.least_gradient_bytes[own].max() <= inside @ gradients <= windows.most_gradient_bytes[own].min()
            )
            equal += int(crossing == windows.send_bytes[own].max())
    assert equal > 250


def test_no_plan_is_below_the_bound_of_the_windows() -> None:
    raised = exact = 0
    for seed in range(40):
        search, large, best = random_search(seed)
        plain_ns = int(search.homogeneous(1).bound_ns)
        unlisted = replace(large, listed=None)
        bound_ns = unlisted.below(search, replace(best, bound_ns=plain_ns), best.load_ns).bound_ns
        assert bound_ns <= best.load_ns
        raised += bound_ns > plain_ns + 2
        exact += bound_ns >= 0.99 * best.load_ns
    assert raised > 10
    assert exact > 0


def variant(search: LoadSearch, seed: int) -> LoadSearch:
    """The search with layers that have no replicas and devices that are groups, in some cases."""
    random, profile, cluster = Random(seed), search.profiles["a"], search.cluster
    if seed % 4 == 1:
        layers = tuple(msgspec.structs.replace(layer, no_replicas=random.random() < 0.4) for layer in profile.layers)
        profile = msgspec.structs.replace(profile, layers=layers)
    if seed % 4 == 2:
        layers = tuple(
            msgspec.structs.replace(layer, group_sum_bytes=random.randrange(layer.param_bytes + 1))
            for layer in profile.layers
        )
        kind = msgspec.structs.replace(profile.device, members=2, split="filter")
        profile = msgspec.structs.replace(profile, layers=layers, device=kind)
        devices = tuple(
            msgspec.structs.replace(device, members=(f"{device.name}a", f"{device.name}b"))
            for device in cluster.devices
        )
        cluster = msgspec.structs.replace(cluster, devices=devices)
    return replace(search, profiles={"a": profile}, cluster=cluster)


def least_devices(problem: HomogeneousDevices, limit_ns: int) -> list[list[int]]:
    """The fewest devices before, and after, each downset in a chain of stages within a limit, from every pair of them."""
    count, many = problem.num_boundaries, problem.num_devices + 1
    every = np.arange(count)
    needed = problem.min_devices(
        every, every, np.zeros(count, dtype=np.int64), np.full((count, count), problem.num_devices), limit_ns + 1
    )
    before, after = [0] + [many] * (count - 1), [many] * (count - 1) + [0]
    for end in range(1, count):
        before[end] = min(many, *(before[begin] + int(needed[begin, end]) for begin in range(end)))
    for begin in reversed(range(count - 1)):
        after[begin] = min(many, *(after[end] + int(needed[begin, end]) for end in range(begin + 1, count)))
    return [before, after]


def test_the_bound_of_all_downsets_never_says_more_devices_than_are_needed() -> None:
    equal = total = 0
    for seed in range(48):
        search, large, _ = random_search(seed)
        search = variant(search, seed)
        best = search.solve(1)
        problem = search.homogeneous(1)
        assert large.listed is not None
        bound = large.downset_bound(search, 1)
        assert bound is not None
        for limit_ns in (best.load_ns - 1, best.load_ns, int(1.3 * best.load_ns)):
            before = bound.before(limit_ns, UNLIMITED)
            after = bound.after(limit_ns, before, UNLIMITED)
            least = np.array(least_devices(problem, limit_ns))
            used = least.sum(axis=0) <= problem.num_devices  # where a plan can be cut
            assert (before <= least[0]).all()
            assert (after[used] <= least[1][used]).all()
            equal, total = equal + int((before == least[0]).sum()), total + len(before)
            if before[-1] <= problem.num_devices:
                path = bound.path(limit_ns, before)
                sets = [large.listed[i] for i in path]
                assert (path[0], path[-1]) == (0, len(before) - 1)
                assert all(a != b and a & ~b == 0 for a, b in pairwise(sets))
    assert equal > 0.85 * total  # less where times are rounded, or all-reduces have a latency


def test_a_search_along_relaxed_plans_finds_and_proves_the_best_load() -> None:
    for seed in range(24):
        search, large, _ = random_search(seed)
        search = variant(search, seed)
        best = search.solve(1)
        rough = replace(best, load_ns=2 * best.load_ns + 1, bound_ns=int(search.homogeneous(1).bound_ns))
        improved = large.improved(search, rough)
        assert (improved.load_ns, improved.bound_ns) == (best.load_ns, best.load_ns), seed


def test_too_many_values_leave_the_bound_of_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downset_bound, "MAX_VALUES", 1)
    for seed in range(10):
        search, large, best = random_search(seed)
        assert large.downset_bound(search, 1) is None
        assert large.below(search, replace(best, bound_ns=0), best.load_ns).bound_ns <= best.load_ns


def test_every_cut_of_the_best_plan_is_possible_within_its_load() -> None:
    for seed in range(40):
        search, large, best = random_search(seed)
        windows = large.windows(1)
        assert windows is not None
        device = search.cluster.devices[0]
        bound = WindowBound(
            windows=windows,
            microbatch_size=1,
            num_devices=len(search.cluster.devices),
            num_microbatches=search.minibatch_size,
            speed=device.speed,
            link=search.cluster.link(0, 1),
            overlaps=device.overlaps_transfers,
        )
        measured = search.profiles["a"].at(1)
        work_ns, used = 0, 0
        for layers, ranks in best.stages[:-1]:
            work_ns += sum(measured[i].forward_ns + measured[i].whole_backward_ns for i in layers)
            used += len(ranks)
            before, after = bound.devices_around(np.array([work_ns]), best.load_ns)
            assert before[0] <= used
            assert after[0] <= len(search.cluster.devices) - used
            assert any(least <= work_ns <= most for least, most in bound.between(best.load_ns))


def test_large_graphs_have_the_best_plan_if_all_downsets_can_be_listed() -> None:
    for seed in range(30):
        search, _, best = random_search(seed)
        profile, cluster = search.profiles["a"], search.cluster
        found = explore_throughput(
            {"a": profile},
            cluster,
            minibatch_size=search.minibatch_size,
            microbatch_sizes=[1],
            limits=[2**40] * len(cluster.devices),
            max_downsets=3,
        )
        assert found.prediction.load_ns == best.load_ns, seed
        assert found.lower_bound_ns == best.load_ns, seed


def test_promising_downsets_are_downsets_with_work_in_the_ranges() -> None:
    for seed in range(40):
        profile, graph, layers_of_node = random_profile(seed)
        node_ns, tensors = (
            work_of_nodes(profile, ALIKE, 1, layers_of_node),
            crossing_tensors(profile, 1, layers_of_node),
        )
        total = sum(node_ns)
        ranges = [(0.2 * total, 0.5 * total), (0.5 * total, 0.9 * total)]
        every = downsets(graph, 1000)
        assert every is not None
        found = promising_downsets(graph, [0], node_ns, tensors, ranges, 1000)
        inside = [
            nodes
            for nodes in every
            if nodes in (every[0], every[-1])
            or any(least <= sum(node_ns[v] for v in members(nodes)) <= most for least, most in ranges)
        ]
        assert sorted(found) == sorted(inside)
