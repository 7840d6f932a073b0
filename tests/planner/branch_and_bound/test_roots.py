"""Orders of the devices for schedules with several stages on each: all but those that an exchange of hosts makes."""

from itertools import pairwise, permutations

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import Infeasible
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.planner.branch_and_bound.roots import MAX_DEVICE_ORDERS, _all_orders, num_in_any_order
from bapipe.planner.branch_and_bound.space import search_space
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.devices import device_classes
from tests.builders import chain

FAST, SLOW = Bandwidth(bytes_per_s=10**12, latency_ns=0), Bandwidth(bytes_per_s=10**9, latency_ns=0)


def cluster_of(hosts: list[int], speeds: list[float], memory_bytes: int = 10**9) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(name=f"d{i}", host=f"h{host}", kind="a", memory_bytes=memory_bytes, speed=speed)
            for i, (host, speed) in enumerate(zip(hosts, speeds, strict=True))
        ),
        intra_host=FAST,
        inter_host=SLOW,
    )


@pytest.mark.parametrize(
    ("hosts", "speeds"),
    [
        ([0, 1, 0, 1], [1.0, 1.0, 1.0, 1.0]),
        ([0, 1, 2, 0, 1, 2], [1.0] * 6),
        ([0, 0, 1, 1, 2], [1.0, 0.5, 1.0, 0.5, 1.0]),
        ([0, 0, 1, 1, 2], [1.0, 0.5, 0.5, 0.5, 1.0]),
        ([0, 1, 2, 3], [1.0, 1.0, 0.5, 0.5]),
    ],
)
def test_one_order_of_each_kind_is_listed(hosts: list[int], speeds: list[float]) -> None:
    """Orders are of one kind if their devices have the same speeds and the same of them share a host."""
    cluster = cluster_of(hosts, speeds)
    classes = device_classes(cluster, [10**9] * len(hosts), [None] * len(hosts), [1 / speed for speed in speeds])

    def kind(ranks: tuple[int, ...]) -> tuple[tuple[float, int], ...]:
        of_hosts = [hosts[rank] for rank in ranks]
        return tuple((speeds[rank], of_hosts.index(hosts[rank])) for rank in ranks)

    for count, orders in _all_orders(classes):
        left = [list(cls.ranks) for cls in classes]
        listed = []
        for order in orders:
            taken = [0] * len(classes)
            ranks = []
            for c in order:
                ranks.append(left[c][taken[c]])
                taken[c] += 1
            listed.append(kind(tuple(ranks)))
        assert set(listed) == {kind(ranks) for ranks in permutations(range(len(hosts)), count)}


def test_the_devices_of_a_host_follow_each_other() -> None:
    """Eight devices, two on each of four hosts, which the cluster names by turns.

    All orders are tried, as those in which hosts are exchanged count as one; in the best a host's stages are neighbours.
    """
    profile = chain([1] * 16, output_bytes=2 * 10**6)
    cluster = cluster_of([0, 1, 2, 3] * 2, [1.0] * 8)
    plan = bapipe.plan(profile, cluster, minibatch_size=8, schedules=["interleaved-1f1b"])
    hosts = [cluster.devices[cluster.index[stage.devices[0]]].host for stage in plan.stages]
    assert sum(a != b for a, b in pairwise(hosts[:8])) == 3
    assert plan.certificate.proven_optimal
    assert "several stages" not in plan.certificate.space


def test_orders_that_are_too_many_are_named() -> None:
    """Of six speeds five have 720 orders: some of them are tried, and the certificate says which."""
    cluster = cluster_of([0] * 6, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    profile = chain([1] * 12)
    plan = bapipe.plan(profile, cluster, minibatch_size=2, schedules=["interleaved-1f1b"])
    text = (
        "with several stages on each of more than 4 devices only the first ones in the cluster's order, those of a host"
    )
    assert text in plan.certificate.space
    one_stage_each = bapipe.plan(chain([1]), cluster, minibatch_size=2)
    assert "several stages" not in one_stage_each.certificate.space
    small = replace(cluster, devices=tuple(replace(device, memory_bytes=1) for device in cluster.devices))
    with pytest.raises(
        Infeasible, match="no plan on the devices in the orders that were tried, of too many to try all"
    ):
        bapipe.plan(
            chain([1] * 12, param_bytes=100), small, minibatch_size=2, schedules=["interleaved-1f1b"], recompute=False
        )


def test_the_number_of_orders_is_bounded() -> None:
    cluster = cluster_of([i // 2 for i in range(128)], [1.0] * 128)
    classes = device_classes(cluster, [10**9] * 128, [None] * 128, [1.0] * 128)
    counts = [len(orders) for _, orders in _all_orders(classes)]
    assert len(counts) == 128
    assert max(counts) <= MAX_DEVICE_ORDERS
    assert counts[:4] == [1, 2, 4, 10]
    assert num_in_any_order(classes) == 7


def test_a_single_layer_has_one_pipeline_on_each_choice_of_devices() -> None:
    """24 alike devices; with more stages than cuts allow there would be 2^23 ways to divide them."""
    space = search_space({"a": chain([1])}, cluster_of([0] * 24, [1.0] * 24), PlanOptions(minibatch_size=32))
    for problem in space.problems:
        assert [root.num_devices for root in problem.roots] == list(range(1, 25))
        assert all(
            [each.num_replicas for each in root.first_placements] == [root.num_devices] for root in problem.roots
        )
    plan = bapipe.plan(chain([1]), cluster_of([0] * 24, [1.0] * 24), minibatch_size=32, schedules=["gpipe"])
    assert plan.certificate.proven_optimal
    assert plan.prediction.step_ns == 2 * 3 * 1_000_000  # 8 devices have two micro-batches each, 16 one


def test_every_number_of_many_devices_is_tried() -> None:
    """80 alike devices are taken in the cluster's order: too many for any order."""
    cluster = cluster_of([0] * 80, [1.0] * 80)
    options = PlanOptions(minibatch_size=2, schedules=["1f1b", "interleaved-1f1b"], replicas=False)
    space = search_space({"a": chain([1] * 70)}, cluster, options)
    assert "in the cluster's order" in space.order
    assert space.device_counts == tuple(range(1, 71))
