"""The graph of placements: the numbers of pipelines are those of combinatorics, and which devices are symmetric."""

from collections.abc import Hashable
from itertools import product
from math import comb
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.devices import ClassSymmetry, device_classes
from bapipe.planner.stages.placements import PlacementGraph, StagePlacement, positions_of_stages
from bapipe.schedules import ALL, SCHEDULES
from tests.oracles.exhaustive_layouts import exhaustive, pipelines
from tests.random_profiles import random_profile

ONE_CLASS = ClassSymmetry(types=(0,), hosts=(None,))
TWO_CLASSES = ClassSymmetry(types=(0, 1), hosts=(None, None))


@pytest.mark.parametrize("num_devices", range(1, 8))
def test_pipelines_on_equal_devices_are_the_compositions(num_devices: int) -> None:
    """Devices 1 + 2 + ... as an ordered sum: 2^(n - 1) ways, comb(n - 1, k - 1) of them with k stages."""
    graph = PlacementGraph("1f1b", 8, ONE_CLASS, replicas=True)
    assert len(list(pipelines(graph.roots_any_order((num_devices,), None)))) == 2 ** (num_devices - 1)
    assert len(list(pipelines(graph.roots_in_order([0] * num_devices, None)))) == 2 ** (num_devices - 1)
    for num_stages in range(1, num_devices + 1):
        paths = list(pipelines(graph.roots_any_order((num_devices,), num_stages)))
        assert len(paths) == comb(num_devices - 1, num_stages - 1)
        assert all(len(path) == num_stages for path in paths)


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_pipelines_on_two_classes_are_the_vector_compositions(counts: tuple[int, int]) -> None:
    graph = PlacementGraph("1f1b", 8, TWO_CLASSES, replicas=True)
    assert len(list(pipelines(graph.roots_any_order(counts, None)))) == num_vector_compositions(counts)


def num_vector_compositions(counts: tuple[int, ...]) -> int:
    """Ordered sums of vectors other than 0 (Andrews 1976, The Theory of Partitions, chapter 4)."""
    if not any(counts):
        return 1
    firsts = [first for first in product(*(range(count + 1) for count in counts)) if any(first)]
    return sum(num_vector_compositions(tuple(a - b for a, b in zip(counts, first, strict=True))) for first in firsts)


@pytest.mark.parametrize("schedule", [name for name in ALL if name not in SCHEDULES])
def test_stages_have_the_positions_of_their_table(schedule: str) -> None:
    for num_devices in range(1, 8):
        table = ALL[schedule](num_devices, 2)
        assert positions_of_stages(schedule, num_devices) == tuple(ranks[0] for ranks in table.devices)


def test_without_replicas_every_stage_has_one_device() -> None:
    graph = PlacementGraph("1f1b", 8, ONE_CLASS, replicas=False)
    (path,) = pipelines(graph.roots_any_order((5,), None))
    assert [placement.num_replicas for placement in path] == [1] * 5


def test_a_stage_has_no_more_replicas_than_micro_batches() -> None:
    graph = PlacementGraph("1f1b", 2, ONE_CLASS, replicas=True)
    paths = list(pipelines(graph.roots_any_order((5,), None)))
    assert max(placement.num_replicas for path in paths for placement in path) == 2
    assert len(paths) == 8  # compositions of 5 into 1 and 2: the Fibonacci number F(6)


def test_placements_with_equal_futures_are_one_object() -> None:
    graph = PlacementGraph("1f1b", 8, ONE_CLASS, replicas=True)
    of_three, of_four = (graph.roots_any_order((count,), None) for count in (3, 4))
    (after_one,) = (first for first in of_four if first.num_replicas == 1)
    assert set(after_one.successors) == set(of_three)


def device(name: str, host: str, speed: float = 1.0) -> Device:
    return Device(name=name, host=host, kind="a", memory_bytes=10**6, speed=speed)


def classes_of(devices: list[Device], inter_host_bytes_per_s: int) -> list[tuple[tuple[int, ...], int]]:
    cluster = Cluster(
        devices=tuple(devices),
        intra_host=Bandwidth(bytes_per_s=10**9, latency_ns=0),
        inter_host=Bandwidth(bytes_per_s=inter_host_bytes_per_s, latency_ns=0),
    )
    num = len(devices)
    times = [1 / device.speed for device in devices]
    return [(cls.ranks, cls.type_number) for cls in device_classes(cluster, [10**6] * num, [()] * num, times)]


def test_devices_are_one_class_if_no_link_distinguishes_them() -> None:
    devices = [device(f"d{i}", f"h{i // 2}") for i in range(4)]
    assert classes_of(devices, 10**9) == [((0, 1, 2, 3), 0)]


def test_devices_that_differ_in_their_host_alone_are_of_one_type() -> None:
    devices = [device(f"d{i}", f"h{i // 2}") for i in range(4)]
    assert classes_of(devices, 10**8) == [((0, 1), 0), ((2, 3), 0)]
    unlike = [device(f"d{i}", f"h{i // 2}", speed=2.0 if i < 2 else 1.0) for i in range(4)]
    assert classes_of(unlike, 10**8) == [((0, 1), 0), ((2, 3), 1)]


ON_THREE_HOSTS = ClassSymmetry(types=(0, 0, 0), hosts=("a", "b", "c"))
FAST_AND_SLOW = ClassSymmetry(types=(0, 0, 2, 2), hosts=("a", "b", "a", "b"))
"""Two hosts with a fast and a slow device each."""


def test_the_key_leaves_out_which_host_has_which_role() -> None:
    key = ON_THREE_HOSTS.key
    assert key((1, 0, 0), (0, 1, 0)) == key((0, 1, 0), (0, 0, 1)) == key((0, 0, 1), (1, 0, 0))
    assert key((1, 0, 0), (0, 1, 0)) != key((1, 0, 0), (1, 0, 0))
    assert key((1, 0, 0), (0, 1, 0)) != key((1, 0, 0), (0, 2, 0))


def test_the_key_depends_on_the_order_of_hosts_up_to_its_reversal() -> None:
    """Replicas are in the order of their classes, which decides which of two stages meet."""
    key = ON_THREE_HOSTS.key
    assert key((2, 1, 0), (0, 1, 1)) == key((0, 1, 2), (1, 1, 0))
    assert key((2, 1, 0), (0, 1, 1)) != key((1, 2, 0), (1, 0, 1))


def test_the_key_depends_on_which_devices_share_a_host() -> None:
    key = FAST_AND_SLOW.key
    assert key((1, 0, 0, 0), (0, 0, 1, 0)) == key((0, 1, 0, 0), (0, 0, 0, 1))
    assert key((1, 0, 0, 0), (0, 0, 1, 0)) != key((1, 0, 0, 0), (0, 0, 0, 1))


def on_hosts(seed: int, speeds_of_hosts: list[list[float]], **options: Any) -> Problem:
    """One problem on hosts with these devices, whose transfers between hosts take as long as stages do."""
    random = Random(seed)
    profile = random_profile(random, 3, sizes=(1,))
    devices = tuple(
        replace(device(f"d{h}{i}", f"h{h}", speed), overlaps_transfers=True)
        for h, speeds in enumerate(speeds_of_hosts)
        for i, speed in enumerate(speeds)
    )
    cluster = Cluster(
        devices=devices,
        intra_host=Bandwidth(bytes_per_s=10**10, latency_ns=0),
        inter_host=Bandwidth(bytes_per_s=10**8, latency_ns=random.choice([50, 300, 3000])),
    )
    (problem,) = build_space(
        {"a": profile},
        cluster,
        PlanOptions(
            minibatch_size=random.choice([3, 6]),
            schedules=["1f1b"],
            memory_limit_bytes=10**6,
            recompute=False,
            **options,
        ),
        sizes=[1],
    ).problems
    return problem


def with_successors(placement: StagePlacement, seen: set[StagePlacement]) -> None:
    """Adds a placement and all that can follow it."""
    if placement not in seen:
        seen.add(placement)
        for successor in placement.successors:
            with_successors(successor, seen)


HOSTS = {
    "two hosts": [[1.0, 1.0, 1.0]] * 2,
    "three hosts": [[1.0, 1.0]] * 3,
    "two hosts of fast and slow devices": [[1.0, 0.5, 0.5]] * 2,
    "hosts with unlike numbers of slow devices": [[1.0, 0.5], [1.0, 0.5, 0.5, 0.5]],
}


@pytest.mark.parametrize("name", HOSTS)
def test_placements_of_one_key_have_the_same_cost_to_go(name: str) -> None:
    problem = on_hosts(1, HOSTS[name])
    placements: set[StagePlacement] = set()
    for root in problem.roots:
        for first in root.first_placements:
            with_successors(first, placements)
    of_key: dict[Hashable, list[StagePlacement]] = {}
    for placement in placements:
        of_key.setdefault(placement.symmetry_key, []).append(placement)
        placement.symmetry_key = None  # so that each computes its own
    assert len(of_key) < len(placements)
    for key, alike in of_key.items():
        tables = [problem.lower_bound.cost_to_go.of(placement) for placement in alike]
        assert all(np.array_equal(a, b) for table in tables for a, b in zip(tables[0], table, strict=True)), key


def test_the_proof_holds_on_hosts_of_fast_and_slow_devices() -> None:
    """The search proves a longer step time here if a fast device's slow neighbour is mistaken for one on another host."""
    problem = on_hosts(10, [[1.0, 0.5]] * 3, num_stages=2)
    best, found = exhaustive([problem]), best_first([problem])
    assert best is not None
    assert found is not None
    assert found.step_ns == found.lower_bound_ns == best.step_ns
