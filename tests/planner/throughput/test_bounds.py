"""The bounds on the load, by name: against every plan of small problems, and equal to the minimum in a stated share."""

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.measurement import LayerMeasurement
from bapipe.graph.downsets import downsets
from bapipe.graph.layer_graph import of_layers
from bapipe.planner.throughput.heterogeneous import HeterogeneousDevices
from bapipe.planner.throughput.homogeneous import HomogeneousDevices
from bapipe.planner.throughput.loads import Boundaries, StageCostSums
from bapipe.planner.throughput.min_devices_dp import find_plan_below, min_max_load_homogeneous
from tests import builders
from tests.random_graphs import branching_profile

SEEDS = range(40)


def random_problem(seed: int) -> tuple[HomogeneousDevices, Boundaries]:
    random = Random(seed)
    profile = branching_profile(random, random.randint(1, 4), sizes=(1,))
    graph = of_layers(profile)
    node_sets = downsets(graph, 100)
    assert node_sets is not None
    boundaries = Boundaries(node_sets, [[node] for node in range(graph.num_nodes)], graph.num_nodes)
    num_devices = random.randint(1, 3)
    return HomogeneousDevices(
        boundaries,
        StageCostSums(boundaries, profile, 1, 1.0),
        num_devices=num_devices,
        num_microbatches=random.randint(num_devices, 7),
        link=Bandwidth(bytes_per_s=random.randrange(10**8, 10**10), latency_ns=random.randrange(20)),
        overlaps=random.random() < 0.5,
        memory_bytes=random.choice([10**9, random.randrange(200, 2000)]),
    ), boundaries


def every_plan(
    problem: HomogeneousDevices, boundaries: Boundaries
) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Yields the largest load, the boundaries and the devices of each stage, of every plan that fits."""
    last = problem.num_boundaries - 1

    def extend(end: int, later: int) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        """From the last stage backwards: `later` devices run the layers after `end`."""
        if end == 0:
            yield 0.0, (0,), ()
            return
        for begin in range(end):
            for devices in range(1, problem.num_devices - later + 1):
                if not boundaries.nested[begin, end] or not problem.fits(
                    np.array([devices]), np.array([begin]), np.array([end]), np.array([later])
                ):
                    continue
                for load, path, counts in extend(begin, later + devices):
                    yield max(load, problem.load(devices, begin, end)), (*path, end), (*counts, devices)

    yield from extend(last, 0)


@pytest.mark.parametrize("part", range(4))
def test_lower_and_upper_bound(part: int) -> None:
    """No plan is below `bound_ns` or at `ceiling_ns`; the minimum is within 10 % of the bound in some cases."""
    near = tried = 0
    for seed in list(SEEDS)[part::4]:
        problem, boundaries = random_problem(seed)
        loads = [load for load, _, _ in every_plan(problem, boundaries)]
        result = min_max_load_homogeneous(problem, bound=problem.bound_ns, ceiling=problem.ceiling_ns)
        assert (result.best.load if result.best else None) == min(loads, default=None), seed
        if not loads:
            continue
        assert problem.bound_ns <= min(loads), seed
        assert max(loads) < problem.ceiling_ns, seed
        tried += 1
        near += min(loads) <= 1.1 * problem.bound_ns
    assert tried > 3
    assert near >= 1


def test_devices_around_a_boundary() -> None:
    """At each cut of a plan below a limit, both sides have at least the bound's number of devices, often exactly."""
    seen = equal = 0
    for seed in SEEDS:
        problem, boundaries = random_problem(seed)
        for load, path, counts in every_plan(problem, boundaries):
            before, after = problem.min_devices_around(load + 1)
            for i, boundary in enumerate(path):
                assert before[boundary] <= sum(counts[:i]), seed
                assert after[boundary] <= sum(counts[i:]) or boundary == path[-1], seed
                seen += 0 < i < len(counts)
                equal += 0 < i < len(counts) and before[boundary] == sum(counts[:i])
    assert seen > 100
    assert equal > seen / 3


def test_the_minimal_number_of_devices() -> None:
    """`min_devices` is the smallest number whose load is below the limit and that fits, found one by one."""
    checked = 0
    for seed in SEEDS:
        problem, boundaries = random_problem(seed)
        result = min_max_load_homogeneous(problem, bound=problem.bound_ns, ceiling=problem.ceiling_ns)
        if result.best is None:
            continue
        limit, last = 1.3 * result.best.load + 1, problem.num_boundaries - 1
        assert find_plan_below(problem, limit) is not None
        for begin in range(last):
            want = [
                devices
                for devices in range(1, problem.num_devices + 1)
                if problem.load(devices, begin, last) < limit
                and problem.fits(np.array([devices]), np.array([begin]), np.array([last]), np.array([0]))
            ]
            found = problem.min_devices(
                np.array([begin]), np.array([last]), np.array([0]), np.array([[problem.num_devices]]), limit
            )
            assert boundaries.nested[begin, last]
            assert found[0, 0] == min(want, default=problem.num_devices + 1), seed
            checked += 1
    assert checked > 60


def test_rounding_on_unlike_devices_is_left_out_of_the_bound() -> None:
    """F, I and W of two layers that round down on their own device, and up together on the faster one."""
    times_ns = [(16, 16, 210), (33, 33, 166)]
    measured = [
        LayerMeasurement(forward_ns=f, input_grad_ns=i, weight_grad_ns=w, stash_bytes=0, output_bytes=(0,))
        for f, i, w in times_ns
    ]
    profile = builders.profile_of("two layers", builders.chain([1, 1]).layers, measured)
    boundaries = Boundaries([0, 1, 3], [[0], [1]], 2)
    speeds = [0.97, 0.93]
    cluster = builders.devices(2)
    unlike = tuple(replace(each, speed=speed) for each, speed in zip(cluster.devices, speeds, strict=True))
    problem = HeterogeneousDevices(
        boundaries,
        [StageCostSums(boundaries, profile, 1, speed) for speed in speeds],
        replace(cluster, devices=unlike),
        num_microbatches=1000,
        memory_bytes=[10**9, 10**9],
        fastest_first=[0, 1],
    )
    # By hand: each layer on its own device takes 248 ns a micro-batch.
    loads = [sum(round(ns / speed) for ns in of_layer) for of_layer, speed in zip(times_ns, speeds, strict=True)]
    assert loads == [16 + 16 + 216, 35 + 35 + 178]
    assert problem.bound_ns <= 1000 * max(loads)
