"""The graph of placements: the numbers of pipelines are those of combinatorics, and which devices are symmetric."""

from itertools import product
from math import comb

import pytest

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.planner.branch_and_bound.devices import device_classes
from bapipe.planner.branch_and_bound.placements import PlacementGraph
from tests.oracles.exhaustive_layouts import pipelines


@pytest.mark.parametrize("num_devices", range(1, 8))
def test_pipelines_on_equal_devices_are_the_compositions(num_devices: int) -> None:
    """Devices 1 + 2 + ... as an ordered sum: 2^(n - 1) ways, comb(n - 1, k - 1) of them with k stages."""
    graph = PlacementGraph("1f1b", 8, [0], replicas=True)
    assert len(list(pipelines(graph.roots_any_order((num_devices,), None)))) == 2 ** (num_devices - 1)
    assert len(list(pipelines(graph.roots_in_order([0] * num_devices, None)))) == 2 ** (num_devices - 1)
    for num_stages in range(1, num_devices + 1):
        paths = list(pipelines(graph.roots_any_order((num_devices,), num_stages)))
        assert len(paths) == comb(num_devices - 1, num_stages - 1)
        assert all(len(path) == num_stages for path in paths)


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_pipelines_on_two_classes_are_the_vector_compositions(counts: tuple[int, int]) -> None:
    graph = PlacementGraph("1f1b", 8, [0, 1], replicas=True)
    assert len(list(pipelines(graph.roots_any_order(counts, None)))) == num_vector_compositions(counts)


def num_vector_compositions(counts: tuple[int, ...]) -> int:
    """Ordered sums of vectors other than 0 (Andrews 1976, The Theory of Partitions, chapter 4)."""
    if not any(counts):
        return 1
    firsts = [first for first in product(*(range(count + 1) for count in counts)) if any(first)]
    return sum(num_vector_compositions(tuple(a - b for a, b in zip(counts, first, strict=True))) for first in firsts)


def test_without_replicas_every_stage_has_one_device() -> None:
    graph = PlacementGraph("1f1b", 8, [0], replicas=False)
    (path,) = pipelines(graph.roots_any_order((5,), None))
    assert [placement.num_replicas for placement in path] == [1] * 5


def test_a_stage_has_no_more_replicas_than_micro_batches() -> None:
    graph = PlacementGraph("1f1b", 2, [0], replicas=True)
    paths = list(pipelines(graph.roots_any_order((5,), None)))
    assert max(placement.num_replicas for path in paths for placement in path) == 2
    assert len(paths) == 8  # compositions of 5 into 1 and 2: the Fibonacci number F(6)


def test_placements_with_equal_futures_are_one_object() -> None:
    graph = PlacementGraph("1f1b", 8, [0], replicas=True)
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
    return [(cls.ranks, cls.symmetric_to) for cls in device_classes(cluster, [10**6] * num, [()] * num, times)]


def test_devices_are_one_class_if_no_link_tells_them_apart() -> None:
    devices = [device(f"d{i}", f"h{i // 2}") for i in range(4)]
    assert classes_of(devices, 10**9) == [((0, 1, 2, 3), 0)]


def test_hosts_with_equal_devices_are_symmetric() -> None:
    devices = [device(f"d{i}", f"h{i // 2}") for i in range(4)]
    assert classes_of(devices, 10**8) == [((0, 1), 0), ((2, 3), 0)]


def test_hosts_with_unlike_devices_are_not_symmetric() -> None:
    devices = [device(f"d{i}", f"h{i // 2}", speed=2.0 if i < 2 else 1.0) for i in range(4)]
    assert classes_of(devices, 10**8) == [((0, 1), 0), ((2, 3), 1)]
