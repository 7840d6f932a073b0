"""Naive plans avoid links that are much slower than the others."""

from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Cluster, Link
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.make import make
from bapipe.planner.plan import plan_once
from bapipe.planner.simulate import simulate
from bapipe.planner.stages.fast_links import MAX_DEVICES, paths_along_fast_links
from tests.builders import chain, devices

MEGABYTE = 10**6


def with_slow_pairs(num_devices: int, pairs: set[tuple[int, int]]) -> Cluster:
    """Devices whose links take 1 ms for a megabyte, 1 s between some pairs, in one of the directions."""
    links = tuple(Link(source=f"d{a}", target=f"d{b}", bytes_per_s=10**6, latency_ns=0) for a, b in sorted(pairs))
    return replace(devices(num_devices, bytes_per_s=10**9), links=links)


def test_one_slow_link_is_between_no_neighbours_and_on_no_shorter_path() -> None:
    for a, b in permutations(range(5), 2):
        every, some = paths_along_fast_links(with_slow_pairs(5, {(a, b)}), MEGABYTE)
        assert sorted(every) == [0, 1, 2, 3, 4]
        assert {a, b} not in [set(pair) for pair in pairwise(every)]
        assert len(some) == 4
        assert not {a, b} <= set(some)


def test_the_shorter_path_has_as_many_devices_as_have_fast_links_only() -> None:
    num_smaller = 0
    for seed in range(40):
        random = Random(seed)
        pairs = set(random.sample(list(permutations(range(6), 2)), random.randint(1, 4)))
        most = next(
            size
            for size in range(6, 0, -1)
            if any(not any(set(pair) <= set(some) for pair in pairs) for some in combinations(range(6), size))
        )
        _, fast = paths_along_fast_links(with_slow_pairs(6, pairs), MEGABYTE)
        assert not any(set(pair) <= set(fast) for pair in pairs)
        assert most - 1 <= len(fast) <= most
        num_smaller += len(fast) < 5
    assert num_smaller > 10


def test_there_are_none_where_links_are_alike_or_devices_many() -> None:
    assert paths_along_fast_links(devices(4), MEGABYTE) == []
    assert paths_along_fast_links(devices(1), MEGABYTE) == []
    assert paths_along_fast_links(with_slow_pairs(MAX_DEVICES + 1, {(0, 1)}), MEGABYTE) == []


@pytest.mark.parametrize(("replicas", "num_devices"), [(False, 5), (True, 4)])
def test_a_plan_without_time_is_no_slower_than_one_without_the_slow_link(replicas: bool, num_devices: int) -> None:
    """Of five devices two exchange a thousand times as slowly: equal stages on the others, by hand."""
    profile = chain([1] * 20, param_bytes=MEGABYTE, output_bytes=MEGABYTE)
    cluster = with_slow_pairs(5, {(0, 1)})
    options = PlanOptions(minibatch_size=8, replicas=replicas)
    found = plan_once({"a": profile}, cluster, options, deadline=Deadline(0.0))
    path = ["d0", "d2", "d1", "d3", "d4"][5 - num_devices :]
    cuts = [f"l{20 * stage // num_devices}" for stage in range(1, num_devices)]
    by_hand = make(profile, cluster, minibatch_size=8, cuts=cuts, devices=[[name] for name in path], schedule="1f1b")
    assert found.prediction.step_ns <= by_hand.prediction.step_ns
    assert found.prediction.step_ns == simulate(found, {"a": profile}).step_ns
