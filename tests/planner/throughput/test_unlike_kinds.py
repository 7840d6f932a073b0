"""Throughput on devices whose kinds, links, or links among members differ: loads worked out by hand."""

import pytest
from msgspec.structs import replace

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, ProfilesByKind
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import microbatch_sizes
from bapipe.planner.make import make
from bapipe.planner.plan import plan
from bapipe.planner.results.solution import make_plan
from bapipe.planner.simulate import simulate
from bapipe.planner.throughput.search import explore_throughput
from tests.builders import MS, chain, devices

FAST = Bandwidth(bytes_per_s=10**9, latency_ns=0)


def plan_in_order(profiles: ProfilesByKind, cluster: Cluster, minibatch_size: int) -> Plan:
    """Returns the plan whose stages take the devices in the cluster's order."""
    options = PlanOptions(minibatch_size=minibatch_size)
    return make_plan(
        explore_throughput(
            profiles,
            cluster,
            minibatch_size=minibatch_size,
            microbatch_sizes=microbatch_sizes(profiles, cluster, options),
            limits=options.limits(cluster),
        )
    )


def of_kind(profile: ModelProfile, kind: str) -> ModelProfile:
    return replace(profile, device=replace(profile.device, kind=kind))


@pytest.mark.parametrize(("kinds", "load_ms"), [("abb", 20), ("bba", 20), ("baa", 20), ("aab", 12), ("aba", 20)])
def test_what_crosses_a_cut_has_the_bytes_of_the_device_before_it(kinds: str, load_ms: int) -> None:
    """Three layers of 12 ms a step; behind a layer on b there are 5 MB for each of four micro-batches, on a none."""
    profiles = {kind: of_kind(chain([1] * 3, output_bytes=size), kind) for kind, size in (("a", 0), ("b", 5 * 10**6))}
    layers = tuple(replace(layer, no_replicas=True) for layer in profiles["a"].layers)
    profiles = {kind: replace(profile, layers=layers) for kind, profile in profiles.items()}
    named = tuple(Device(name=f"d{i}", host="h", kind=kind, memory_bytes=10**10) for i, kind in enumerate(kinds))
    cluster = Cluster(devices=named, intra_host=FAST, inter_host=FAST)
    found = plan_in_order(profiles, cluster, minibatch_size=4)
    assert found.prediction.load_ns == load_ms * MS
    assert found.certificate.lower_bound_ns == load_ms * MS
    in_any_order = plan(profiles, cluster, minibatch_size=4, objective="throughput")
    assert in_any_order.prediction.load_ns == (12 if kinds.count("a") == 2 else 20) * MS  # as "aab", or as "abb"
    assert in_any_order.certificate.proven_optimal


@pytest.mark.parametrize(("own", "other", "num_stages"), [(2000, 100, 1), (100, 2000, 2)])
def test_receive_buffers_have_the_bytes_of_the_device_before_the_cut(own: int, other: int, num_stages: int) -> None:
    """Four micro-batches of 2,000 bytes do not fit in the second device's 3,000, whatever it sends itself."""
    profiles = {kind: of_kind(chain([1, 1], output_bytes=size), kind) for kind, size in (("a", own), ("b", other))}
    layers = tuple(replace(layer, no_replicas=True) for layer in profiles["a"].layers)
    profiles = {kind: replace(profile, layers=layers) for kind, profile in profiles.items()}
    named = tuple(
        Device(name=f"d{i}", host="h", kind=kind, memory_bytes=num_bytes)
        for i, (kind, num_bytes) in enumerate((("a", 10**10), ("b", 3000)))
    )
    cluster = Cluster(devices=named, intra_host=FAST, inter_host=FAST)
    found = plan_in_order(profiles, cluster, minibatch_size=4)
    assert len(found.stages) == num_stages
    assert found.certificate.proven_optimal
    held = simulate(found, profiles).memory
    assert all(m.total <= device.memory_bytes for m, device in zip(held, cluster.devices, strict=True))


def test_transfers_between_stages_have_the_largest_latency_and_the_least_bandwidth_of_their_links() -> None:
    """One stage is 2 x 90 ms of work for two devices, 90 each; as stages of 30 and 60 ms a step they are 60 on d0, d1 and d2.

    A micro-batch of 10 MB takes 15 + 10 ms from d0 to d1, 25 ms to d2; as a load it counts 15 + 25 for each, also for
    d2, which never waits 15: 2 x 40 on d0. That is below 90, and above the 2 x 25 of either link.
    """
    profile = chain([10, 20], output_bytes=10**7)
    links = (
        Link(source="d0", target="d1", bytes_per_s=10**9, latency_ns=15 * MS),
        Link(source="d0", target="d2", bytes_per_s=4 * 10**8, latency_ns=0),
    )
    wide = Bandwidth(bytes_per_s=10**12, latency_ns=0)
    cluster = replace(devices(3), intra_host=wide, links=links)
    found = plan_in_order({"a": profile}, cluster, minibatch_size=2)
    assert [stage.devices for stage in found.stages] == [("d0",), ("d1", "d2")]
    assert found.prediction.load_ns == 80 * MS
    assert found.certificate.lower_bound_ns == 80 * MS
    # With d0 in the other stage, the links to it are those that are not listed, and fast.
    assert plan(profile, cluster, minibatch_size=2, objective="throughput").prediction.load_ns == 60 * MS
    sends = [t for t in simulate(found, profile).transfers if t.source == 0]
    assert {t.end_ns - t.start_ns for t in sends} == {25 * MS}  # the step has each link as it is


def test_an_all_reduce_has_the_largest_latency_and_the_least_bandwidth_of_its_links() -> None:
    """As above, 60 ms on d1 and d2, and 2 messages of 5 MB: 2 (3 + 5) ms as a load, 2 x 5 in the step."""
    profile = chain([10, 20])
    profile = replace(profile, layers=(profile.layers[0], replace(profile.layers[1], param_bytes=10**7)))
    links = (
        Link(source="d1", target="d2", bytes_per_s=10**10, latency_ns=3 * MS),
        Link(source="d2", target="d1", bytes_per_s=10**9, latency_ns=0),
    )
    found = plan_in_order({"a": profile}, replace(devices(3), links=links), minibatch_size=2)
    assert [stage.devices for stage in found.stages] == [("d0",), ("d1", "d2")]
    assert found.prediction.load_ns == 76 * MS
    assert found.certificate.lower_bound_ns == 76 * MS
    assert [sync.end_ns - sync.start_ns for sync in simulate(found, profile).syncs] == [10 * MS]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_group_whose_members_have_slow_links_is_not_taken_for_another(slow: int) -> None:
    single = chain([1], param_bytes=10**6)
    device = replace(single.device, members=2, split="filter")
    profile = replace(single, device=device, layers=(replace(single.layers[0], group_sum_bytes=10**6),))
    groups = tuple(
        Device(name=f"g{i}", host=f"h{i}", kind="a", memory_bytes=10**10, members=(f"g{i}a", f"g{i}b"))
        for i in range(2)
    )
    links = tuple(
        Link(source=f"g{slow}{a}", target=f"g{slow}{b}", bytes_per_s=10**6, latency_ns=0) for a, b in ("ab", "ba")
    )
    between = Bandwidth(bytes_per_s=1000, latency_ns=0)
    cluster = Cluster(devices=groups, intra_host=FAST, inter_host=between, links=links)
    found = plan(profile, cluster, minibatch_size=1, objective="throughput")
    assert [stage.devices for stage in found.stages] == [(f"g{1 - slow}",)]
    assert found.prediction is not None
    assert found.prediction.load_ns == found.prediction.step_ns == 4 * MS  # F + B, and a ring of 1 MB at 1 GB/s


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"trained_bytes": 0}, "gradient bytes of layer 'l1' is 8 in one and 0 in the other"),
        ({"no_gradient": ("t2",)}, "no gradient of layer 'l1' is empty in one and 't2' in the other"),
        ({"no_replicas": True}, "allows replicas of layer 'l1' is true in one and false in the other"),
    ],
)
def test_profiles_of_other_training_are_refused(change: dict[str, object], difference: str) -> None:
    profiles = {kind: of_kind(chain([1, 1], param_bytes=8), kind) for kind in "ab"}
    first, second = profiles["b"].layers
    unlike = profiles | {"b": replace(profiles["b"], layers=(first, replace(second, **change)))}
    named = tuple(Device(name=f"d{kind}", host="h", kind=kind, memory_bytes=10**10) for kind in "ab")
    cluster = Cluster(devices=named, intra_host=FAST, inter_host=FAST)
    message = f"^the profiles of a and b are of different training: {difference}: profile one model, with the same"
    made = make(profiles, cluster, minibatch_size=2, cuts=[], devices=[["da", "db"]])
    with pytest.raises(BapipeError, match=message):
        simulate(made, unlike)
    with pytest.raises(BapipeError, match=message):
        plan(unlike, cluster, minibatch_size=2)
    alone = replace(cluster, devices=cluster.devices[:1])
    assert plan(unlike, alone, minibatch_size=2).stages  # the other kind is not there


def test_a_profile_from_before_buffers_counted_goes_with_one_of_today() -> None:
    profiles = {kind: of_kind(chain([1, 1], param_bytes=8), kind) for kind in "ab"}
    first, second = profiles["b"].layers
    today = replace(second, param_bytes=12, trained_bytes=8, buffer_bytes=4)
    both = profiles | {"b": replace(profiles["b"], layers=(first, today))}
    named = tuple(Device(name=f"d{kind}", host="h", kind=kind, memory_bytes=10**10) for kind in "ab")
    cluster = Cluster(devices=named, intra_host=FAST, inter_host=FAST)
    made = make(both, cluster, minibatch_size=2, cuts=[], devices=[["da", "db"]])
    assert [rank.memory.params for rank in made.prediction.ranks] == [8 + 8, 8 + 12]


def test_members_that_sum_with_their_own_compute_take_as_long_as_the_simulator_says() -> None:
    """F + B of 3 ms for each of four micro-batches, and a ring of 10 MB over two members at 1 GB/s, not at the link's."""
    single = chain([1], param_bytes=10**7)
    device = replace(single.device, members=2, split="filter")
    profile = replace(single, device=device, layers=(replace(single.layers[0], group_sum_bytes=10**7),))
    groups = tuple(
        Device(name=f"g{i}", host="h", kind="a", memory_bytes=10**10, members=(f"g{i}a", f"g{i}b")) for i in range(2)
    )
    link = Bandwidth(bytes_per_s=10**12, latency_ns=0)
    for used in (groups[:1], groups):
        cluster = Cluster(devices=used, intra_host=link, inter_host=link, intra_host_sum=FAST)
        found = plan(profile, cluster, minibatch_size=4, objective="throughput")
        assert found.prediction.load_ns == found.prediction.step_ns == simulate(found, profile).step_ns
        assert found.certificate.lower_bound_ns == found.prediction.load_ns
    # Two groups: two micro-batches each, and a ring of four, 2 x 3/4 of 10 ms.
    assert found.prediction.load_ns == (2 * 3 + 15) * MS
