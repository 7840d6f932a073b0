"""ParaDL's strategies for three layers, against closed forms of their steps, and what stops each of them.

The layers and the links are those of `tests/estimates/test_estimate.py`: on a micro-batch of two samples they take 1,600,
140 and 120 ns, have 400, 200 and 800 bytes of parameters and as many ns of update; a link takes 100 ns, and a ns a byte.
"""

import dataclasses

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError
from bapipe.estimates import estimate
from bapipe.explorer.pages import strategies_page
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.analysis.strategies import Strategy, StrategyPlanner, compare_strategies
from bapipe.planner.inputs.options import PlanOptions
from bapipe.report.strategies import StrategyTable
from tests.builders import MS, chain, devices
from tests.estimates.test_estimate import hosts, network

SAMPLES = 8
HALO, FIRST, SECOND = 100 + 128, 100 + 512, 100 + 128
"""A plane of the first tensor, and half of the first and of the second tensor."""


def strategies(cluster: Cluster, *profiles: ModelProfile, **options: object) -> dict[str, Strategy]:
    wanted = PlanOptions(minibatch_size=SAMPLES, schedules=["1f1b"], **options)  # type: ignore[arg-type]
    found = compare_strategies(profiles or (network(2),), cluster, wanted)
    assert list(found) == [
        "data", "spatial", "filter", "channel", "pipeline", "data + spatial", "data + filter", "sharded data", "best plan",
    ]  # fmt: skip
    return found


def rows(found: dict[str, Strategy], cluster: Cluster) -> dict[object, dict[str, object]]:
    table = StrategyTable(strategies=found, cluster=cluster, minibatch_size=SAMPLES)
    return {row["strategy"]: row for row in table.rows()}


def test_steps_of_two_devices_are_the_closed_forms() -> None:
    found = rows(strategies(hosts(2)), hosts(2))
    expected = {  # compute and exchange; nothing waits where all devices do the same
        "data": (2 * 1860 + 1400, 2 * (100 + 700)),
        "spatial": (4 * (800 + 70 + 120) + 1400, 4 * (2 * HALO + SECOND) + 2 * (100 + 300)),
        "filter": (4 * 930 + 700, 4 * 2 * (FIRST + SECOND)),
        "channel": (4 * 930 + 700, 4 * 2 * (FIRST + SECOND + 120)),
        "sharded data": (4 * 930 + 700, 4 * 3 * (300 + 200 + 500)),
    }
    for name, (compute_ns, exchange_ns) in expected.items():
        row = found[name]
        assert (row["compute_ns"], row["exchange_ns"], row["waiting_ns"]) == (compute_ns, exchange_ns, 0), name
        assert row["step_ns"] == compute_ns + exchange_ns, name
    # The second stage has the linear layer alone. The first never waits for it, and updates 600 bytes at the end.
    step_ns, transfers_ns = 4 * 1740 + 600, 3 * (100 + 256)
    assert found["pipeline"]["step_ns"] == step_ns
    compute_ns = (4 * 1860 + 1400) // 2
    assert (found["pipeline"]["compute_ns"], found["pipeline"]["exchange_ns"]) == (compute_ns, transfers_ns // 2)
    assert found["pipeline"]["waiting_ns"] == step_ns - compute_ns - transfers_ns // 2
    # Parameters, gradients and twice as much of the optimizer; a stash of all three tensors; the workspace.
    assert found["data"]["peak_bytes"] == 4 * 1400 + 1024 + 256 + 40 + 100
    assert found["best plan"]["step_ns"] == min(ns for row in found.values() if isinstance(ns := row["step_ns"], int))


def test_a_profile_of_no_device_changes_nothing_whatever_its_sizes() -> None:
    own, cluster = network(2), hosts(2)
    measurements = tuple(replace(each, microbatch_size=SAMPLES) for each in own.measurements)
    unused = replace(own, device=replace(own.device, kind="unused"), measurements=measurements)
    assert rows(strategies(cluster, own, unused), cluster) == rows(strategies(cluster, own), cluster)


def test_faster_devices_have_no_faster_links() -> None:
    fast = replace(hosts(2), devices=tuple(replace(device, speed=2.0) for device in hosts(2).devices))
    found, at_speed_1 = rows(strategies(fast), fast), rows(strategies(hosts(2)), hosts(2))
    for name in ("spatial", "filter", "channel", "sharded data"):
        assert found[name]["exchange_ns"] == at_speed_1[name]["exchange_ns"], name
        compute_ns = at_speed_1[name]["compute_ns"]
        assert isinstance(compute_ns, int)
        # Of 4 micro-batches F, I and W, and the update, are rounded to the nanosecond.
        assert found[name]["compute_ns"] == pytest.approx(compute_ns / 2, abs=7), name


def test_mixes_of_four_devices_are_the_closed_forms() -> None:
    found = rows(strategies(hosts(4)), hosts(4))
    # Two groups of two. Split planes: the 600 bytes of the first two layers in a ring of four, the others of two.
    sums_ns = 6 * (100 + 150) + 2 * (100 + 400)
    spatial = found["data + spatial"]
    assert (spatial["compute_ns"], spatial["exchange_ns"]) == (2 * 990 + 1400, 2 * (2 * HALO + SECOND) + sums_ns)
    filters = found["data + filter"]
    assert (filters["compute_ns"], filters["exchange_ns"]) == (2 * 930 + 700, 4 * (FIRST + SECOND) + 2 * (100 + 350))
    assert filters["plan"] == "1 stage x 2, groups of 2 (filter), 4 x 2 samples"  # one stage has no schedule
    assert str(found["pipeline"]["plan"]).startswith("2 stages, 1f1b, ")


def test_of_unequal_devices_the_fastest_replicas_run_the_most_micro_batches() -> None:
    """Of five micro-batches of 30 ms the two fast devices run two each, the one that is named first but slow one."""
    alike = devices(3)
    slow, *fast = alike.devices
    cluster = replace(alike, devices=(replace(slow, speed=0.5), *fast))
    options = PlanOptions(minibatch_size=5, microbatch_size=1, schedules=["1f1b"])
    data = compare_strategies((chain([4, 6]),), cluster, options)["data"].plan
    assert data is not None
    assert data.prediction.step_ns == 60 * MS
    baselines = bapipe.plan(chain([4, 6]), cluster, options).alternatives
    assert {each.name: each.step_ns for each in baselines}["data-parallel"] == 60 * MS


def test_what_stops_a_strategy_is_said() -> None:
    found = strategies(hosts(4))
    limits = {name: (each.limit.num_devices, each.limit.reason) for name, each in found.items() if each.limit}
    assert limits == {
        "data": (4, "8 samples in micro-batches of at least 2"),
        "spatial": (4, "4 devices on a host (the layers: 4 planes of layer 'second')"),
        "filter": (4, "4 devices on a host (the layers: 4 filters of layer 'first')"),
        "channel": (4, "4 devices on a host (the layers: 4 input channels of layer 'first')"),
        "pipeline": (3, "3 layers"),
        "data + spatial": (
            16,
            "8 samples in micro-batches of at least 2; 4 devices on a host (the layers: 4 planes of layer 'second')",
        ),
        "data + filter": (
            16,
            "8 samples in micro-batches of at least 2; 4 devices on a host (the layers: 4 filters of layer 'first')",
        ),
        "sharded data": (8, "8 samples"),
    }
    more = strategies(hosts(8))
    assert more["data"].why_not.startswith("a mini-batch of 8 has 4 micro-batches of 2 for 8 replicas: ")
    assert more["filter"].why_not.startswith("layer 'first' has 4 filters for 8 members: ")
    assert more["filter"].limit
    assert more["filter"].limit.reason == "4 filters of layer 'first'"
    two_hosts = replace(hosts(2), devices=(hosts(2).devices[0], replace(hosts(2).devices[1], host="other")))
    apart = strategies(two_hosts)
    assert apart["spatial"].why_not == "the members of a group are on one host, and the 2 devices are on 2 hosts"
    assert apart["data + filter"].why_not == (
        "there is no size of at least 2 for two groups or more: it has to divide the number of devices of a kind on "
        "every host, 1"
    )


def test_strategies_that_cannot_be_are_rows_with_the_reason() -> None:
    alone = strategies(hosts(1))
    assert alone["spatial"].why_not == "there is one device, and nothing to share"
    without_shapes = strategies(
        replace(hosts(2), intra_host_sum=hosts(2).intra_host), with_one_sample_more(chain([1, 2, 3]))
    )
    assert "lacks `shape`" in without_shapes["filter"].why_not
    assert without_shapes["data"].plan
    small = strategies(hosts(2), memory_limit_bytes=6000)
    assert "does not fit" in small["data"].why_not
    assert small["filter"].plan


def with_one_sample_more(profile: ModelProfile) -> ModelProfile:
    return replace(profile, measurements=(*profile.measurements, replace(profile.measurements[0], microbatch_size=2)))


def test_measured_profiles_of_groups_are_preferred() -> None:
    measured = replace(estimate(network(2), "filter", 2, hosts(2)), environment={})
    layers = tuple(replace(m, forward_ns=m.forward_ns + 5) for m in measured.measurements[0].layers)
    slower = replace(measured, measurements=(replace(measured.measurements[0], layers=layers),))
    found = strategies(hosts(2), network(2), slower)
    estimated = strategies(hosts(2))
    assert found["filter"].plan
    assert estimated["filter"].plan
    later_ns = found["filter"].plan.prediction.step_ns - estimated["filter"].plan.prediction.step_ns
    assert later_ns == 4 * 3 * 5


def test_the_best_plan_is_no_slower_than_another_strategy_of_its_space() -> None:
    """As if a time limit had ended the search for it at the pipeline, of 7,560 ns a step; data parallelism has 6,720."""
    found = strategies(hosts(2))
    slow, data = found["pipeline"], found["data"]
    assert slow.plan
    assert data.plan
    planner = StrategyPlanner([network(2)], hosts(2), PlanOptions(minibatch_size=SAMPLES, schedules=["1f1b"]), ())
    best = planner.fastest(slow, [data, found["spatial"]])
    assert best.plan
    assert (best.plan.stages, best.plan.prediction.step_ns) == (data.plan.stages, 6720)
    assert best.plan.certificate.space == slow.plan.certificate.space
    assert best.plan.certificate.lower_bound_ns == min(6720, slow.plan.certificate.lower_bound_ns)
    without = PlanOptions(minibatch_size=SAMPLES, schedules=["1f1b"], replicas=False)
    assert StrategyPlanner([network(2)], hosts(2), without, ()).fastest(slow, [data]) is slow
    assert planner.fastest(dataclasses.replace(slow, plan=None, why_not="no time"), [data]).plan == data.plan


def test_wrong_input_is_refused() -> None:
    grouped = replace(hosts(1), devices=(replace(hosts(1).devices[0], members=("x", "y")),))
    with pytest.raises(BapipeError, match="the cluster has groups already"):
        strategies(grouped)
    with pytest.raises(BapipeError, match="two profiles are of the same kind of device, members and split"):
        strategies(hosts(2), network(2), network(2))
    with pytest.raises(BapipeError, match=f"^`whole` names 'nix', which is no layer of {network(2).model}$"):
        compare_strategies([network(2)], hosts(2), PlanOptions(minibatch_size=SAMPLES), whole=["nix"])


def test_the_page_has_a_row_for_each_strategy() -> None:
    cluster = hosts(2)
    table = StrategyTable(strategies=strategies(cluster), cluster=cluster, minibatch_size=SAMPLES)
    page = strategies_page(table).decode()
    assert page.count("<tr>") == 1 + 9
    assert "<td>data + spatial</td>" in page
    assert "prefers-color-scheme: dark" in page  # in the style of the other pages
    assert page.count('<th scope="col">') == len(table.rows()[0])
