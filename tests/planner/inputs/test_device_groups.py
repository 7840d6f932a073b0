"""Ways to see a cluster: of profiles with one, two and four members the best is the plan, the others its alternatives."""

from dataclasses import replace as replace_fields

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError
from bapipe.explorer.pages import plan_page
from bapipe.formats.cluster import Bandwidth, Cluster, Link
from bapipe.formats.profile import ESTIMATE, ModelProfile
from bapipe.formats.settings import Settings
from bapipe.planner.analysis.explain import explain
from bapipe.planner.analysis.intra_layer import NOT_SEARCHED, intra_layer
from bapipe.planner.best_grouping import order_to_search
from bapipe.planner.inputs.device_grouping import groupings
from bapipe.planner.inputs.device_groups import with_groups
from bapipe.planner.inputs.options import PlanOptions
from bapipe.report import render_plan
from tests.builders import MS, chain, devices
from tests.explorer.page_data import data_of


def of_members(num: int, forward_ms: int, split: str = "spatial") -> ModelProfile:
    """Two layers without parameters whose backward takes twice their forward."""
    profile = chain([forward_ms, forward_ms])
    return profile if num == 1 else replace(profile, device=replace(profile.device, members=num, split=split))


def two_hosts() -> Cluster:
    four = devices(4)
    return replace(four, devices=tuple(replace(d, host="hh" if i < 2 else "kk") for i, d in enumerate(four.devices)))


def test_the_cluster_is_seen_as_singles_pairs_and_fours() -> None:
    profiles = [of_members(4, 2), of_members(1, 10), of_members(2, 6), of_members(2, 7, "filter")]
    seen = groupings(profiles, devices(4))
    names = [
        "4 a devices",
        "2 a groups of 2 (filter)",
        "2 a groups of 2 (spatial)",
        "1 a group of 4 (spatial)",
    ]
    assert [grouping.name for grouping in seen] == names
    assert [device.members for device in seen[2].cluster.devices] == [("d0", "d1"), ("d2", "d3")]


def test_the_plan_is_the_fastest_of_all_ways_and_each_is_an_alternative() -> None:
    profiles = {1: of_members(1, 10), 2: of_members(2, 6), 4: of_members(4, 2)}
    options = PlanOptions(minibatch_size=4)
    best = bapipe.plan(list(profiles.values()), devices(4), options)
    alone = {
        num: bapipe.plan(list(profiles.values()), devices(4), replace_fields(options, group=num)).prediction.step_ns
        for num in profiles
    }
    by_itself = {num: bapipe.plan({"a": each}, seen(num), options).prediction.step_ns for num, each in profiles.items()}
    assert alone == by_itself
    assert best.prediction.step_ns == min(alone.values()) == alone[4]
    steps = {other.name: other.step_ns for other in best.alternatives}
    assert (steps["4 a devices"], steps["2 a groups of 2 (spatial)"]) == (alone[1], alone[2])
    assert [device.members for device in best.cluster.devices] == [("d0", "d1", "d2", "d3")]


def seen(num_members: int) -> Cluster:
    return devices(4) if num_members == 1 else with_groups(devices(4), "a", num_members)


def test_the_certificate_holds_for_all_ways() -> None:
    """The pairs' way is the best; that of single devices has the smaller bound."""
    profiles = [of_members(1, 10), of_members(2, 6)]
    best = bapipe.plan(profiles, devices(2), minibatch_size=1)
    apart = bapipe.plan(profiles, devices(2), minibatch_size=1, group=1)
    assert (best.prediction.step_ns, apart.prediction.step_ns) == (36 * MS, 60 * MS)
    assert best.certificate.proven_optimal
    assert best.certificate.space.startswith(
        "the devices seen as 2 a devices, or as 1 a group of 2 (spatial); with those of the plan: every cut"
    )
    assert not apart.certificate.space.startswith("the devices seen as")


def test_of_many_devices_the_grouping_whose_naive_plan_is_fastest_is_searched_first() -> None:
    profiles = [replace(of_members(num, ms), model="chain") for num, ms in ((1, 10), (2, 4), (4, 9))]
    options = PlanOptions(minibatch_size=72)
    possible = groupings(profiles, devices(72), None)
    order = [possible[number].cluster.devices[0].num_members for number in order_to_search(possible, options)]
    assert order == [2, 4, 1]
    assert order_to_search(groupings(profiles, devices(4)), options) == [0, 1, 2]


def test_groups_are_within_hosts() -> None:
    assert [d.members for d in with_groups(two_hosts(), "a", 2).devices] == [("d0", "d1"), ("d2", "d3")]
    with pytest.raises(BapipeError) as error:
        bapipe.plan([of_members(1, 10), of_members(4, 2)], two_hosts(), minibatch_size=4)
    assert str(error.value) == (
        "groups of 4 do not tile the host 'hh', which has 2 devices of kind 'a': leave the profile of 4 members out, or "
        "write the groups into the cluster file"
    )


def test_a_link_between_groups_is_the_slowest_between_partners() -> None:
    links = (
        Link(source="d0", target="d2", bytes_per_s=70, latency_ns=1),
        Link(source="d1", target="d3", bytes_per_s=50, latency_ns=2),
        Link(source="d0", target="d3", bytes_per_s=1, latency_ns=3),  # not partners
        Link(source="d0", target="d1", bytes_per_s=20, latency_ns=4),
    )
    grouped = with_groups(replace(devices(4), links=links), "a", 2)
    assert grouped.link(0, 1) == Bandwidth(bytes_per_s=50, latency_ns=2)
    assert grouped.link(1, 0) == grouped.intra_host
    assert set(grouped.member_links(0)) == {Bandwidth(bytes_per_s=20, latency_ns=4), grouped.intra_host}


def test_links_between_members_of_other_groups_are_kept() -> None:
    """Whether the other devices are grouped, or merged for a profile of more threads."""
    link = Link(source="x", target="y", bytes_per_s=5, latency_ns=6)
    pair = replace(devices(1).devices[0], name="xy", kind="b", members=("x", "y"))
    cluster = replace(devices(2), devices=(*devices(2).devices, pair), links=(link,))
    assert with_groups(cluster, "a", 2).links == (link,)
    of_pair = replace(of_members(2, 6), device=replace(of_members(2, 6).device, kind="b"))
    two_threads = replace(of_members(1, 4), settings=Settings(optimizer="sgd", threads=2))
    _, merged = groupings([of_members(1, 10), two_threads, of_pair], cluster)
    assert [device.name for device in merged.cluster.devices] == ["d0", "xy"]
    assert merged.cluster.links == (link,)


def test_a_measured_profile_is_preferred_to_an_estimate() -> None:
    measured = of_members(2, 6)
    estimated = replace(of_members(2, 3), environment={ESTIMATE: "estimated"})
    for profiles in ([estimated, measured], [measured, estimated]):
        assert groupings([of_members(1, 10), *profiles], devices(2))[1].profiles["a"] == measured


def test_a_group_that_no_profile_is_of_is_refused() -> None:
    with pytest.raises(BapipeError, match="`group` 3: no profile is of 3 members"):
        bapipe.plan(of_members(1, 10), devices(6), minibatch_size=4, group=3)


def test_a_profile_of_groups_alone_groups_the_devices() -> None:
    plan = bapipe.plan(of_members(2, 6), devices(4), minibatch_size=4)
    assert [device.members for device in plan.cluster.devices] == [("d0", "d1"), ("d2", "d3")]


def test_an_explanation_says_what_is_exchanged_and_what_other_groups_would_change() -> None:
    pair = of_members(2, 6)
    exchanging = tuple(
        replace(m, forward_exchange_ns=2 * MS, backward_exchange_ns=MS) for m in pair.measurements[0].layers
    )
    pair = replace(pair, measurements=(replace(pair.measurements[0], layers=exchanging),))
    best = bapipe.plan([of_members(1, 40), pair, of_members(4, 30)], devices(4), minibatch_size=4)
    assert [device.num_members for device in best.cluster.devices] == [2, 2]
    said = intra_layer(best, {"a": pair})
    # Of F 6 and B 12 ms, the members exchange data for 2 + 1.
    assert "of the F and B of stage 0, the 2 members of d0..d1 exchange data for 16.7%" in said
    assert "4 a devices: " in said
    assert "1 a group of 4 (spatial): " in said
    (resources,) = [text for text in explain(best, {"a": pair}, PlanOptions(minibatch_size=4)) if "10 % more" in text]
    assert "the members of groups exchange data for as long as the profile says, whatever the links" in resources


def test_tables_and_pages_name_the_members_and_a_run_refuses_them() -> None:
    best = bapipe.plan([of_members(1, 40), of_members(2, 6)], devices(4), minibatch_size=4)
    assert "members of groups: d0..d1: d0, d1; d2..d3: d2, d3" in [
        part for part in render_plan(best) if isinstance(part, str)
    ]
    ranks = data_of(plan_page(best, {"a": of_members(2, 6)}))["tried"][0]["answer"]["ranks"]
    assert [rank["members"] for rank in ranks] == [["d0", "d1"], ["d2", "d3"]]
    with pytest.raises(BapipeError) as error:
        bapipe.run(best)
    assert str(error.value) == (
        "device 'd0..d1' of the plan is a group of 2, and bapipe does not split layers when it trains: plan again without "
        "profiles of groups, or train with an engine that does"
    )
    alone = bapipe.plan(of_members(1, 10), devices(2), minibatch_size=4)
    assert not any(isinstance(part, str) and part.startswith("members of groups") for part in render_plan(alone))


def test_plans_without_groups_are_explained_as_before() -> None:
    assert intra_layer(bapipe.plan(of_members(1, 10), devices(2), minibatch_size=4), {}) == NOT_SEARCHED
