"""The pages that `bapipe show` and `bapipe compare` write: what they draw, and that they load nothing."""

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError
from bapipe.explorer import document
from bapipe.explorer.pages import plan_page, plans_page, profile_page, two_plans_page
from bapipe.formats.certificate import CHANGED_BY_HAND
from bapipe.planner.plan import plan
from bapipe.report import encode_trace
from bapipe.report.chrome_trace import read_trace
from bapipe.simulator.simulate import simulate, unit_cost_timeline
from bapipe.simulator.timeline import Timeline
from tests.builders import chain, devices
from tests.explorer.page_data import data_of, loads_nothing
from tests.random_profiles import random_cluster, random_profile

PROFILE = chain([1, 2, 3, 4, 2, 1, 5, 2], param_bytes=100, stash_bytes=10, output_bytes=1000)
OF_KIND = {"a": PROFILE}
PLAN = bapipe.plan(PROFILE, devices(3, bytes_per_s=10**6), minibatch_size=12, num_stages=3)


def slower(timeline: Timeline) -> Timeline:
    """The step as it would be measured by a clock that runs twice as fast; without memory."""
    spans = tuple(span._replace(start_ns=2 * span.start_ns, end_ns=2 * span.end_ns) for span in timeline.spans)
    return Timeline(devices=timeline.devices, spans=spans, memory=timeline.memory)


@pytest.mark.parametrize(("schedule", "side_by_side"), [("zb-v", False), ("fbp-as", True)])
def test_a_page_draws_every_action_and_loads_nothing(schedule: str, side_by_side: bool) -> None:
    random = Random(3)
    profile, cluster = random_profile(random, 8), random_cluster(random, 2)
    roomy = tuple(replace(d, memory_bytes=10**12, overlaps_transfers=True) for d in cluster.devices)
    found = plan(profile, replace(cluster, devices=roomy), minibatch_size=12, schedules=[schedule], microbatch_size=3)
    beside = tuple(replace(d, side_by_side=side_by_side) for d in roomy)
    found = replace(found, cluster=replace(found.cluster, devices=beside))
    timeline = simulate(found, {"a": profile})
    page = plan_page(found, {}, [("predicted", timeline)])
    assert loads_nothing(page)
    (entry,) = data_of(page)["tried"]
    drawn = entry["answer"]["timeline"]
    actions = [
        (rank, f"{stage}{phase}{microbatch}", start, end)
        for rank, s in enumerate(drawn["spans"])
        for stage, phase, microbatch, start, end in zip(
            s["stage"], s["phase"], s["microbatch"], s["start"], s["end"], strict=True
        )
    ]
    assert actions == [(s.rank, str(s.action), s.start_ns, s.end_ns) for s in timeline.spans]
    assert len(drawn["transfers"]["start"]) == len(timeline.transfers)
    assert len(drawn["updates"]["start"]) == len(timeline.updates)
    assert [len(memory["stash"]) for memory in drawn["memory"]] == [len(usage) for usage in timeline.usage]


def test_the_page_of_a_plan_has_the_step_that_simulate_predicts() -> None:
    (entry,) = data_of(plan_page(PLAN, OF_KIND))["tried"]
    answer = entry["answer"]
    assert answer["step"] == PLAN.prediction.step_ns == simulate(PLAN, OF_KIND).step_ns
    assert answer["bound"]["ns"] == PLAN.certificate.lower_bound_ns
    assert [rank["peak"] for rank in answer["ranks"]] == [rank.peak_bytes for rank in PLAN.prediction.ranks]
    assert answer["path"]["shares"]


def test_a_plan_without_its_profile_is_shown_with_its_order_and_its_figures() -> None:
    data = data_of(plan_page(PLAN, {}))
    (entry,) = data["tried"]
    assert entry["answer"]["orderOnly"]
    assert entry["answer"]["step"] == PLAN.prediction.step_ns
    assert entry["answer"]["timeline"]["length"] == unit_cost_timeline(PLAN).step_ns
    assert [layer["name"] for layer in data["model"]["layers"]] == [layer.name for layer in PROFILE.layers]
    assert not data["layers"]["1"]["isKnown"]


def test_a_plan_changed_by_hand_says_so() -> None:
    changed = replace(PLAN, certificate=replace(PLAN.certificate, digest="0" * 64))
    assert not changed.is_judged
    (without,) = data_of(plan_page(changed, {}))["tried"]
    assert without["answer"]["unjudged"] == CHANGED_BY_HAND.space
    (simulated,) = data_of(plan_page(changed, OF_KIND))["tried"]
    assert simulated["answer"]["unjudged"] == CHANGED_BY_HAND.space
    assert simulated["answer"]["step"] == PLAN.prediction.step_ns
    assert not simulated["answer"]["bound"]["searched"]


def test_recorded_steps_are_drawn_beside_the_predicted_one(tmp_path: Path) -> None:
    predicted = simulate(PLAN, OF_KIND)
    (tmp_path / "trace.json").write_bytes(encode_trace([("predicted", predicted), ("measured", slower(predicted))]))
    recorded = read_trace(tmp_path / "trace.json")
    for of_kind in (OF_KIND, {}):  # the predicted step of the trace is the one of the page, so it is not drawn twice
        (entry,) = data_of(plan_page(PLAN, of_kind, recorded))["tried"]
        assert [one["title"] for one in entry["answer"]["measured"]] == ["measured"]
        assert entry["answer"]["timeline"]["length"] == predicted.step_ns
        assert entry["answer"]["measured"][0]["timeline"]["length"] == 2 * max(s.end_ns for s in predicted.spans)


def test_a_measured_step_without_its_profile_has_its_name_and_no_critical_path() -> None:
    measured = slower(simulate(PLAN, OF_KIND))
    (entry,) = data_of(plan_page(PLAN, {}, [("measured", measured)]))["tried"]
    assert entry["answer"]["drawn"] == "measured"
    assert entry["answer"]["timeline"]["length"] == measured.step_ns
    assert "path" not in entry["answer"]
    assert not any(rank["causes"] for rank in entry["answer"]["ranks"])
    (predicted,) = data_of(plan_page(PLAN, {}, [("predicted", simulate(PLAN, OF_KIND))]))["tried"]
    assert predicted["answer"]["path"]["shares"]
    assert "drawn" not in predicted["answer"]


def test_two_plans_stand_side_by_side() -> None:
    other = bapipe.make(PROFILE, PLAN.cluster, minibatch_size=12, cuts=[1, 2])
    data = data_of(two_plans_page(("a.json", PLAN, OF_KIND), ("b.json", other, OF_KIND)))
    assert [entry["name"] for entry in data["tried"]] == ["a.json", "b.json"]
    assert data["marked"]
    assert data["changes"][0].startswith("step: ")
    of_another = bapipe.make(chain([1, 2]), devices(2), minibatch_size=4)
    with pytest.raises(BapipeError, match="plans of different layers, of chain and chain"):
        two_plans_page(("a", PLAN, OF_KIND), ("b", of_another, OF_KIND))


def test_two_plans_of_other_profiles_have_each_its_own_times() -> None:
    slow = chain([10, 20, 30, 40, 20, 10, 50, 20], param_bytes=100, stash_bytes=10, output_bytes=1000)
    other = bapipe.plan(slow, PLAN.cluster, minibatch_size=12, num_stages=3)
    first, second = data_of(two_plans_page(("a", PLAN, OF_KIND), ("b", other, {"a": slow})))["tried"]
    for entry, of in ((first, PLAN), (second, other)):
        assert entry["answer"]["step"] == of.prediction.step_ns
        assert entry["answer"]["bound"]["ns"] == of.certificate.lower_bound_ns
    assert "layers" not in first
    assert second["layers"]["F"] == [m.forward_ns for m in slow.measurements[0].layers]
    data = data_of(two_plans_page(("a", PLAN, OF_KIND), ("b", other, {})))  # one has none: the figures of the files
    assert [entry["answer"]["step"] for entry in data["tried"]] == [p.prediction.step_ns for p in (PLAN, other)]
    assert all(entry["answer"]["orderOnly"] for entry in data["tried"])
    backwards = replace(slow, layers=tuple(replace(one, name=f"l{7 - i}") for i, one in enumerate(slow.layers)))
    with pytest.raises(BapipeError, match=r"have their layers in different orders: show each by itself"):
        two_plans_page(("a", PLAN, OF_KIND), ("b", other, {"a": backwards}))


def test_the_page_of_compared_strategies_has_the_plan_of_each() -> None:
    plans = [(name, plan(PROFILE, PLAN.cluster, minibatch_size=12, schedules=[name])) for name in ("1f1b", "gpipe")]
    data = data_of(plans_page([(name, one, OF_KIND) for name, one in plans]))
    found = [(entry["name"], entry["answer"]["step"]) for entry in data["tried"]]
    assert found == [(name, one.prediction.step_ns) for name, one in plans]


def test_the_page_of_a_profile_has_its_layers() -> None:
    data = data_of(profile_page(PROFILE))
    assert data["tried"] == []
    assert data["layers"]["1"]["F"] == [m.forward_ns for m in PROFILE.measurements[0].layers]
    assert data["layers"]["1"]["cut"] == [0, *[1000] * 7, 0]


def test_steps_beyond_the_size_of_a_file_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_BYTES_OF_STEPS", 1)
    plans = [("a", PLAN, OF_KIND), ("b", PLAN, OF_KIND)]
    assert [entry["name"] for entry in data_of(plans_page(plans))["tried"]] == ["a"]


def test_two_plans_of_other_profiles_have_each_its_own_parameters() -> None:
    """In bfloat16 a parameter has half the bytes."""
    halved = replace(PROFILE, layers=tuple(replace(layer, param_bytes=50) for layer in PROFILE.layers))
    other = bapipe.plan(halved, PLAN.cluster, minibatch_size=12, num_stages=3)
    data = data_of(two_plans_page(("a.json", PLAN, OF_KIND), ("b.json", other, {"a": halved})))
    assert data["layers"]["1"]["params"] == [100] * 8
    assert data["tried"][1]["layers"]["params"] == [50] * 8
