"""Plans made and changed by hand: decisions as given, times of the simulator, bounds that hold, files that say so."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError, Infeasible, InvalidFile
from bapipe.formats.certificate import BY_HAND, OVER_LIMIT, certify
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import decode, encode
from bapipe.formats.plan import Alternative, Plan
from bapipe.planner.make import ANY_PLAN, judge
from bapipe.planner.results.decision import decision_of
from bapipe.planner.results.searched_space import ORDERS_OF_STAGES
from bapipe.planner.results.solution import sort_alternatives
from bapipe.planner.results.work_bound import work_bound_ns
from bapipe.planner.stages.nearest_cuts import nearest_cuts
from bapipe.report.plan_changes import render_changes
from bapipe.schedules import ALL, LOOPED
from bapipe.schedules.placement import place_schedule
from bapipe.simulator.simulate import simulate
from bapipe.units import number
from tests.builders import MS, chain, devices
from tests.random_profiles import random_cluster, random_profile

PROFILE = chain([1, 2, 3, 4, 2, 1, 5, 2], param_bytes=100, stash_bytes=10, output_bytes=1000)


def decoded(text: bytes) -> Plan:
    plan = decode(text)
    assert isinstance(plan, Plan)
    return plan


LEFT_OUT = object()


def changed_file(plan: Plan, **changes: Any) -> Plan:
    """The plan read from its file after a user changed the file, or left keys out."""
    content = json.loads(encode(plan)) | changes
    return decoded(json.dumps({key: value for key, value in content.items() if value is not LEFT_OUT}).encode())


def test_a_made_plan_has_the_decisions_given_and_the_times_of_the_simulator() -> None:
    plan = bapipe.make(
        PROFILE,
        devices(4, bytes_per_s=10**6),
        minibatch_size=8,
        cuts=["l2", 5],
        schedule="zb-h1",
        microbatch_size=1,
        devices=["d3", ["d0", "d1"], "d2"],
        recompute=[1],
    )
    assert [stage.layers for stage in plan.stages] == [("l0", "l1"), ("l2", "l3", "l4"), ("l5", "l6", "l7")]
    assert [stage.devices for stage in plan.stages] == [("d3",), ("d0", "d1"), ("d2",)]
    assert [stage.recompute for stage in plan.stages] == [False, True, False]
    assert (plan.schedule, plan.num_microbatches) == ("zb-h1", 8)
    assert plan.table == place_schedule("zb-h1", ((3,), (0, 1), (2,)), 8, 4)
    assert simulate(plan, {"a": PROFILE}).prediction(8) == plan.prediction
    assert decoded(encode(plan)) == plan


def test_the_same_decisions_make_the_same_plan_by_a_search_and_by_hand() -> None:
    profile = replace(PROFILE, factory="models:chain", arguments={"depth": "8"})
    found = bapipe.plan(profile, devices(3, bytes_per_s=10**6), minibatch_size=12, num_stages=3)
    made = bapipe.make(
        profile,
        found.cluster,
        minibatch_size=12,
        microbatch_size=found.microbatch_size,
        schedule=found.schedule,
        cuts=[stage.layers[0] for stage in found.stages[1:]],
        devices=[stage.devices for stage in found.stages],
    )
    assert (made.factory, made.arguments) == ("models:chain", {"depth": "8"})
    assert made.certificate.space == ANY_PLAN
    assert replace(made, certificate=found.certificate, alternatives=found.alternatives) == found


@pytest.mark.parametrize(
    "use", [lambda path: bapipe.simulate(path, PROFILE), lambda path: bapipe.edit(path, PROFILE), bapipe.run]
)
def test_a_path_in_the_place_of_a_plan_is_told(use: Callable[[Any], object]) -> None:
    with pytest.raises(BapipeError, match=r"^'plan.json' is no plan: want what `bapipe.plan`, or `bapipe.read\(path"):
        use("plan.json")


def test_cuts_may_be_an_iterator() -> None:
    listed, iterated = (
        bapipe.make(PROFILE, devices(2), minibatch_size=8, cuts=cuts) for cuts in (["l4"], iter(["l4"]))
    )
    assert [stage.layers[0] for stage in iterated.stages] == ["l0", "l4"]
    assert iterated == listed


def test_single_layers_recompute() -> None:
    """Four stashes of 8 layers at 10 bytes are in flight; recomputing l1, l2 and l5 keeps five, and 3 tensors."""
    profile = chain([1, 2, 3, 4, 2, 1, 5, 2], stash_bytes=10, output_bytes=7)
    whole = bapipe.make(profile, devices(1), minibatch_size=4, schedule="gpipe", microbatch_size=1)
    part = bapipe.edit(whole, profile, recompute_layers=["l1", "l2", "l5"])
    assert part.stages[0].recompute_layers == ("l1", "l2", "l5")
    # Each of the 4 backwards runs F of these layers again. l0, l2, l4 and l5 make the tensors between the two kinds.
    assert part.prediction.step_ns - whole.prediction.step_ns == 4 * (2 + 3 + 1) * MS
    assert whole.prediction.ranks[0].memory.stash == 4 * 80
    assert part.prediction.ranks[0].memory.stash == 4 * (50 + 4 * 7) + 30
    made = bapipe.make(
        profile, devices(1), minibatch_size=4, schedule="gpipe", microbatch_size=1, recompute_layers=["l5", "l1", "l2"]
    )
    assert (made.stages, made.prediction) == (part.stages, part.prediction)
    assert decoded(encode(part)) == part
    assert bapipe.edit(part, profile, keep=[0]).stages == whole.stages
    every = bapipe.edit(part, profile, recompute=[0])
    assert every.stages[0].recompute
    assert every.stages[0].recompute_layers is msgspec.UNSET
    assert bapipe.edit(every, profile, recompute_layers=["l1", "l2", "l5"]).stages == part.stages
    assert bapipe.edit(part, profile, recompute_layers=["l3"]).stages[0].recompute_layers == ("l1", "l2", "l3", "l5")


def test_layers_of_the_file_that_cannot_be_recomputed_alone_are_refused() -> None:
    plan = bapipe.make(PROFILE, devices(1), minibatch_size=4)
    stages = json.loads(encode(plan))["stages"]
    for again, names, message in [
        (False, ["l1"], "'recompute' is false"),
        (True, [], "want one or more layers"),
        (True, ["l1", "l1"], "each once"),
        (True, ["l9"], "'l9' is not a layer of the stage"),
        (True, list(plan.stages[0].layers), "all layers of the stage"),
    ]:
        with pytest.raises(InvalidFile, match=message):
            changed_file(plan, stages=[stages[0] | {"recompute": again, "recompute_layers": names}])


def test_by_default_the_stages_take_equally_long_on_all_devices() -> None:
    plan = bapipe.make(chain([3, 1, 1, 1, 3, 3]), devices(4), minibatch_size=4)
    assert [stage.layers for stage in plan.stages] == [("l0",), ("l1", "l2", "l3"), ("l4",), ("l5",)]
    folded = bapipe.make(PROFILE, devices(2), minibatch_size=4, schedule="zb-v")
    assert [stage.devices for stage in folded.stages] == [("d0",), ("d1",), ("d1",), ("d0",)]


def test_equally_long_stages_are_cut_as_the_naive_plans_of_searches_are() -> None:
    """The first device does 60 % of the work: nearest is the middle, where two cuts have a layer without time between."""
    two = devices(2)
    unlike = replace(two, devices=tuple(replace(x, speed=v) for x, v in zip(two.devices, (1.2, 0.8), strict=True)))
    made = bapipe.make(chain([5, 0, 5]), unlike, minibatch_size=4)
    assert [stage.layers for stage in made.stages] == [("l0", "l1"), ("l2",)]
    assert nearest_cuts([0, 15, 15, 30], [0.6 * 30]) == (2,)


def test_one_device_meets_the_bound_of_its_work() -> None:
    plan = bapipe.make(PROFILE, devices(1), minibatch_size=4)
    assert plan.certificate.lower_bound_ns == 4 * 3 * 20 * MS == plan.prediction.step_ns
    assert plan.certificate.proven_optimal
    assert "made by hand" in plan.certificate.space


def test_the_bound_of_the_work_holds_for_sizes_that_no_search_tries() -> None:
    """Kind b was measured from micro-batches of 2 on, so plans have these; an edited plan on a device of kind a has 1."""
    sizes = {size: replace(PROFILE.measurements[0], microbatch_size=size) for size in (1, 2)}
    slow = tuple(replace(m, forward_ns=20 * m.forward_ns) for m in sizes[2].layers)
    other = replace(sizes[2], layers=slow)
    a = replace(PROFILE, measurements=(sizes[1], other))
    b = replace(PROFILE, device=replace(PROFILE.device, kind="b"), measurements=(other,))
    first, second = devices(2).devices
    cluster = replace(devices(2), devices=(first, replace(second, kind="b")))
    plan = bapipe.make([a, b], cluster, minibatch_size=2, microbatch_size=2, num_stages=1)
    edited = bapipe.edit(plan, [a, b], microbatch_size=1)
    assert edited.prediction.step_ns == edited.certificate.lower_bound_ns == 2 * 3 * 20 * MS


@pytest.mark.parametrize("seed", range(18))
def test_no_plan_is_faster_than_the_bound_of_its_work(seed: int) -> None:
    random = Random(seed)
    profile, cluster = random_profile(random, 6), random_cluster(random, random.randint(1, 4))
    cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=10**12) for d in cluster.devices))
    bound_ns = work_bound_ns({"a": profile}, cluster, 12)
    assert bound_ns > 0
    for schedule in random.sample(sorted(ALL), 4):
        try:
            plan = bapipe.make(profile, cluster, minibatch_size=12, schedule=schedule)
        except BapipeError:
            continue  # fewer layers than the schedule has stages
        assert bound_ns <= plan.prediction.step_ns
    best = bapipe.plan(profile, cluster, minibatch_size=12)
    assert bound_ns <= best.prediction.step_ns


def test_a_plan_that_does_not_fit_names_what_each_device_lacks() -> None:
    with pytest.raises(Infeasible, match=r"d0 lacks [\d,]+ bytes, d1 lacks"):
        bapipe.make(PROFILE, devices(2, memory_bytes=100), minibatch_size=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cuts": ["x"]}, "no layer is named 'x'"),
        ({"cuts": "l2"}, "want a list of layers"),
        ({"cuts": 2}, "`cuts` is 2: want a list of layers"),
        ({"recompute": 1}, r"`recompute` is 1: want a list, such as \[1\]"),
        ({"recompute_layers": "l0"}, r"`recompute_layers` is 'l0': want a list, such as \['l0'\]"),
        ({"cuts": [3, 3], "on": 3}, "a stage without layers"),
        ({"cuts": [3], "devices": ["d0", "d9"]}, "the cluster has no device 'd9'; it has d0, d1"),
        ({"cuts": [3], "devices": ["d0"]}, "1 `devices` for 2 stages"),
        ({"cuts": [3], "devices": ["d0", "d0"]}, "has one stage per device"),
        ({"cuts": [2, 4, 6]}, "4 stages on 2 devices"),
        ({"schedule": "zb-v", "num_stages": 3}, "has 2, 4 stages, not 3"),
        ({"schedule": "1F1B"}, "unknown schedule '1F1B'; choose from .*; did you mean '1f1b'"),
        ({"recompute": [2]}, "names stage 2; there are stages 0 to 1"),
        ({"recompute_layers": ["l9"]}, "names 'l9': the plan has no such layer"),
        ({"recompute": [0], "recompute_layers": ["l0"]}, "stage 0 is both to recompute its forward and .* 'l0' alone"),
        ({"recompute": [-1]}, "names stage -1; there are stages 0 to 1"),
        ({"recompute": [0.5]}, "names stage 0.5; there are stages 0 to 1"),
        ({"microbatch_size": 3}, "does not divide into micro-batches of 3"),
        ({"microbatch_size": 0}, "`microbatch_size` is 0: want at least 1"),
        ({"minibatch_size": 0}, "`minibatch_size` is 0: want at least 1"),
        ({"num_stages": 0}, "`num_stages` is 0: want at least 1"),
        ({"num_stages": -1}, "`num_stages` is -1: want at least 1"),
        ({"devices": []}, "`devices` is empty: name the device of each stage, or leave it out"),
        ({"cuts": [1.5]}, "`cuts` has 1.5: want the name of a layer, or how many layers are before the cut"),
    ],
)
def test_decisions_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = dict(arguments)
    with pytest.raises(BapipeError, match=message):
        bapipe.make(PROFILE, devices(arguments.pop("on", 2)), **({"minibatch_size": 4} | arguments))


def planned(cluster: Cluster | None = None, **options: Any) -> Plan:
    return bapipe.plan(PROFILE, cluster or devices(3, bytes_per_s=10**6), minibatch_size=12, num_stages=3, **options)


def test_an_edit_moves_layers_and_keeps_the_bound_of_the_plan() -> None:
    plan = planned()
    assert plan.certificate.proven_optimal
    moved = bapipe.edit(plan, PROFILE, moves=["stage 0 -1 layer", "stage 2 +1 layers"])
    before, after = ([len(stage.layers) for stage in p.stages] for p in (plan, moved))
    assert after == [before[0] - 1, before[1], before[2] + 1]
    assert not moved.certificate.proven_optimal
    assert moved.certificate.lower_bound_ns == plan.certificate.lower_bound_ns
    assert moved.certificate.space == plan.certificate.space + BY_HAND
    assert simulate(moved, {"a": PROFILE}).prediction(12) == moved.prediction
    back = bapipe.edit(moved, PROFILE, moves=["stage 2 -1", "stage 0 +1"])
    assert back.prediction == plan.prediction
    assert back.certificate.space.count("by hand") == 1


def test_an_edited_plan_that_needs_more_than_the_limit_of_its_bound_says_so() -> None:
    """Without a limit GPipe keeps four stashes of each layer; under it, stages recompute."""
    profile, limit = chain([1, 1, 1, 1], stash_bytes=100), 500
    plan = bapipe.plan(
        profile, devices(2), minibatch_size=4, schedules="gpipe", replicas=False, num_stages=2, memory_limit_bytes=limit
    )
    assert plan.prediction.peak_bytes <= limit
    larger = bapipe.edit(plan, profile, moves=["stage 0 +1 layer"])
    assert larger.prediction.peak_bytes > limit
    assert larger.certificate.lower_bound_ns == plan.certificate.lower_bound_ns
    assert larger.certificate.memory == plan.certificate.memory
    assert larger.certificate.space == plan.certificate.space + BY_HAND + OVER_LIMIT
    assert OVER_LIMIT in list(render_changes(plan, larger))[-1]
    back = bapipe.edit(larger, profile, moves=["stage 0 -1 layer"])
    assert back.certificate.space == plan.certificate.space + BY_HAND


@pytest.mark.parametrize("objective", ["step", "throughput"])
def test_a_bound_proven_for_other_inputs_is_not_kept(objective: str) -> None:
    """It is of slower layers, or of loads in place of steps; the edited plan is slower than it all the same."""
    cluster = devices(3, bytes_per_s=10**5)
    plan = bapipe.plan(PROFILE, cluster, minibatch_size=12, objective=objective)
    shorter = [1, 1, 2, 3, 1, 1, 4, 1] if objective == "step" else [1, 2, 3, 4, 2, 1, 5, 2]
    profile = chain(shorter, param_bytes=100, stash_bytes=10, output_bytes=1000)
    edited = bapipe.edit(plan, profile, cuts=["l1", "l2"])
    bound_ns = work_bound_ns({"a": profile}, cluster, 12)
    assert edited.prediction.step_ns > plan.certificate.lower_bound_ns > bound_ns
    assert edited.certificate.lower_bound_ns == bound_ns
    assert edited.certificate.space == ANY_PLAN


def test_an_edit_changes_schedule_sizes_devices_and_recomputation() -> None:
    plan = planned()
    edited = bapipe.edit(
        plan, PROFILE, schedule="gpipe", swap=("d0", "d2"), recompute=[1], cuts=["l1", "l7"], minibatch_size=6
    )
    assert (edited.schedule, edited.minibatch_size, edited.num_microbatches) == ("gpipe", 6, 6)
    assert [stage.recompute for stage in edited.stages] == [False, True, False]
    other = {"d0": "d2", "d2": "d0", "d1": "d1"}
    assert [stage.devices[0] for stage in edited.stages] == [other[stage.devices[0]] for stage in plan.stages]
    assert edited.stages[0].layers == ("l0",)
    assert edited.certificate.lower_bound_ns == work_bound_ns({"a": PROFILE}, plan.cluster, 6)  # another mini-batch
    replicated = bapipe.edit(edited, PROFILE, cuts=["l4"], place=["stage 1 on d1,d2"])
    assert [stage.devices for stage in replicated.stages] == [("d0",), ("d1", "d2")]
    folded = bapipe.edit(plan, PROFILE, schedule="zb-v", cuts=[f"l{i}" for i in range(1, 6)])
    assert [stage.devices[0] for stage in folded.stages] == ["d0", "d1", "d2", "d2", "d1", "d0"]


def test_an_edit_of_the_cuts_keeps_a_searched_order() -> None:
    plan = planned()
    own = replace(plan, schedule="search")
    assert decision_of(own).own_table == own.table
    assert bapipe.edit(own, PROFILE, moves=["stage 0 -1"]).order == plan.order
    # A bound on the orders of some stages is none on those of others.
    step_ns = plan.prediction.step_ns
    proven = certify(step_ns, step_ns, f"{ORDERS_OF_STAGES}; and so on")
    along_each = certify(step_ns, step_ns, f"2 orders of the layers; along each: {proven.space}")
    for certificate in (proven, along_each):
        own = replace(plan, schedule="search", certificate=certificate)  # without a digest: taken to be unchanged
        assert own.certificate.lower_bound_ns == step_ns
        edited = bapipe.edit(own, PROFILE, moves=["stage 0 -1"])
        assert edited.prediction.step_ns > step_ns
        assert edited.certificate.space == ANY_PLAN
        assert edited.certificate.lower_bound_ns == work_bound_ns({"a": PROFILE}, plan.cluster, 12) < step_ns
    swapped = bapipe.edit(own, PROFILE, swap=["d0", "d1"], schedule="1f1b")
    assert swapped.certificate.lower_bound_ns < plan.prediction.step_ns
    with pytest.raises(BapipeError, match="'search' is not a named schedule"):
        bapipe.edit(own, PROFILE, minibatch_size=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moves": ["stage 1 3 layers"]}, "moves no layers: want 'stage 1 \\+3 layers'"),
        ({"moves": ["stage 9 +1"]}, "there is no stage 9: the plan has stages 0 to 2"),
        ({"moves": ["stage 0 +8"]}, "leaves stage 1 without layers"),
        ({"moves": ["stage 0 +" + "9" * 5000]}, "moves no layers"),
        ({"place": ["1 on d0"]}, "places no stage"),
        ({"place": [f"stage {'9' * 5000} on d0"]}, "places no stage"),
        ({"place": ["stage 1 on x"]}, "has no device 'x'"),
        ({"swap": ("d0", "x")}, "has no device 'x'"),
        ({"recompute": [3]}, "there is no stage 3"),
        ({"keep": [3]}, "there is no stage 3"),
        ({"keep": [-1]}, "there is no stage -1: the plan has stages 0 to 2"),
        ({"recompute": [-1]}, "there is no stage -1: the plan has stages 0 to 2"),
        ({"minibatch_size": 0}, "`minibatch_size` is 0: want at least 1"),
        ({"minibatch_size": -8}, "`minibatch_size` is -8: want at least 1"),
        ({"microbatch_size": 0}, "`microbatch_size` is 0: want at least 1"),
        ({"swap": "d0"}, "`swap` is 'd0': want a list of 2 str or None"),
        ({"moves": "stage 0 +1"}, "`moves` is 'stage 0 \\+1': want a list of str"),
        ({"recompute": [0, 1], "keep": [1]}, "stage 1 is both to recompute its forward and to keep its activations"),
        ({"cuts": ["x"]}, "the plan has no layer 'x'"),
        ({"schedule": "x"}, "unknown schedule 'x'"),
        (
            {"minibatch_size": 2**30, "schedule": "zb-v"},
            r"3 stages of [\d,]+ micro-batches: want at most 2,097,152 forwards in a step",
        ),
    ],
)
def test_changes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError, match=message):
        bapipe.edit(planned(), PROFILE, **changes)


@pytest.mark.parametrize("schedule", sorted(ALL))
def test_a_file_may_leave_out_the_order_of_a_named_schedule(schedule: str) -> None:
    num_stages = 4 if schedule in LOOPED else 2
    plan = bapipe.make(PROFILE, devices(2), minibatch_size=6, schedule=schedule, num_stages=num_stages)
    assert changed_file(plan, order=LEFT_OUT) == plan


def test_a_file_without_prediction_is_a_plan_that_was_not_judged() -> None:
    plan = planned()
    for left_out in (["prediction"], ["prediction", "certificate", "order", "alternatives"]):
        bare = changed_file(plan, **dict.fromkeys(left_out, LEFT_OUT))
        assert not bare.is_judged
        assert not bare.certificate.proven_optimal
        assert bare.alternatives == ()
        assert bare.order == plan.order
        assert not {"prediction", "certificate"} & set(json.loads(encode(bare)))
        assert decoded(encode(bare)) == bare
    assert changed_file(plan, certificate=LEFT_OUT).prediction == plan.prediction
    judged = judge(bare, {"a": PROFILE}, simulate(bare, {"a": PROFILE}))
    assert judged.prediction == plan.prediction
    assert not judged.certificate.proven_optimal


def test_the_order_of_the_named_schedule_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bapipe.make(PROFILE, devices(3), minibatch_size=12, schedule="zb-v")
    monkeypatch.setattr("bapipe.formats.plan.parse_actions", None)
    without = changed_file(plan, order=LEFT_OUT)
    assert (without.order, without.table) == (plan.order, plan.table)


def test_a_file_without_an_order_needs_a_schedule_with_a_name() -> None:
    with pytest.raises(InvalidFile, match=r"holds no `order`, and none follows.*'search' is not a named.*\$\.schedule"):
        changed_file(planned(), order=LEFT_OUT, schedule="search")


def test_a_plan_changed_in_its_file_is_not_proven_any_more() -> None:
    plan = planned()
    content = json.loads(encode(plan))
    stages = content["stages"]
    stages[0]["layers"].append(stages[1]["layers"].pop(0))
    faster_link = content["cluster"]["intra_host"] | {"bytes_per_s": 10**9}
    cases: list[dict[str, Any]] = [
        {"stages": stages},
        {"schedule": "2f2b"},
        {"cluster": content["cluster"] | {"intra_host": faster_link}},
    ]
    for change in cases:
        changed = changed_file(plan, **change)
        assert not changed.is_judged
        assert not changed.certificate.proven_optimal
        assert "changed by hand since it was judged" in changed.certificate.space
        assert changed.alternatives == ()
    factory = changed_file(plan, factory="my.module:model")
    assert factory.certificate == plan.certificate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"certificate": {"proven_optimal": True}},
            r"said to be optimal, but.*want false.*\$\.certificate\.proven_optimal",
        ),
        ({"certificate": {"gap": 0.0}}, r"a gap of 0, but.*\$\.certificate\.gap"),
        ({"certificate": {"lower_bound_ns": 1}}, r"a gap of .*, but.*lower bound 1 ns.*\$\.certificate\.gap"),
        ({"prediction": {"step_ns": 1}}, r"is 1 ns, and its lower bound.*\$\.certificate\.lower_bound_ns"),
        ({"prediction": {"step_ns": 10**12}}, r"a gap of .*, but.*1,000,000,000,000 ns.*\$\.certificate\.gap"),
    ],
)
def test_a_file_whose_step_bound_gap_and_proof_contradict_one_another_is_refused(
    changes: dict[str, dict[str, Any]], message: str
) -> None:
    plan = bapipe.edit(planned(), PROFILE, moves=["stage 0 -1"])
    assert plan.certificate.lower_bound_ns
    assert plan.certificate.gap > 0
    content = json.loads(encode(plan))
    changed = {part: content[part] | fields for part, fields in changes.items()}
    with pytest.raises(InvalidFile, match=message):
        changed_file(plan, **changed)
    del content["certificate"]["digest"]
    unsigned = {part: content[part] | fields for part, fields in changes.items()}
    with pytest.raises(InvalidFile, match=message):
        changed_file(plan, **{"certificate": content["certificate"]} | unsigned)


def test_a_file_of_a_proven_plan_cannot_say_that_it_is_not() -> None:
    plan = planned()
    certificate = msgspec.to_builtins(plan.certificate) | {"proven_optimal": False}
    with pytest.raises(InvalidFile, match=r"said to be unproven, but.*want true"):
        changed_file(plan, certificate=certificate)


def test_older_files_without_a_digest_are_read_as_they_are() -> None:
    plan = planned()
    certificate = msgspec.to_builtins(plan.certificate)
    del certificate["digest"]
    old = changed_file(plan, certificate=certificate)
    assert old.certificate.proven_optimal
    assert old.prediction == plan.prediction


def test_a_prediction_with_other_times_loses_the_certificate() -> None:
    """As of an older file that was changed by hand, or with another profile."""
    plan = planned()
    same = judge(plan, {"a": PROFILE}, simulate(plan, {"a": PROFILE}))
    assert same == plan
    slower = chain([2, 2, 3, 4, 2, 1, 5, 2], param_bytes=100, stash_bytes=10, output_bytes=1000)
    other = judge(plan, {"a": slower}, simulate(plan, {"a": slower}))
    assert not other.certificate.proven_optimal
    assert other.alternatives == ()
    assert other.certificate.lower_bound_ns == work_bound_ns({"a": slower}, plan.cluster, 12)


def test_the_same_step_of_other_profiles_or_another_step_in_the_file_loses_the_certificate() -> None:
    plan = planned()
    more = chain([1, 2, 3, 4, 2, 1, 5, 2], param_bytes=100, stash_bytes=11, output_bytes=1000)
    other = judge(plan, {"a": more}, simulate(plan, {"a": more}))
    assert other.prediction.step_ns == plan.prediction.step_ns
    prediction = replace(plan.prediction, step_ns=plan.prediction.step_ns + 1)
    certificate = certify(prediction.step_ns, plan.prediction.step_ns, plan.certificate.space)
    changed = replace(plan, prediction=prediction, certificate=certificate)
    assert changed.certificate.lower_bound_ns == plan.certificate.lower_bound_ns
    for judged in (other, judge(changed, {"a": PROFILE}, simulate(changed, {"a": PROFILE}))):
        assert judged.certificate.space == ANY_PLAN
        assert judged.certificate.lower_bound_ns == work_bound_ns({"a": PROFILE}, plan.cluster, 12)


def test_alternatives_that_fit_come_before_others_and_the_fastest_first() -> None:
    given = [
        Alternative(name=name, step_ns=step_ns, peak_bytes=1, feasible=feasible, why_not="")
        for name, step_ns, feasible in (("third", 3, True), ("last", 1, False), ("second", 2, True))
    ]
    assert [one.name for one in sort_alternatives(given)] == ["second", "third", "last"]


def test_values_show_themselves_in_one_line() -> None:
    plan = planned()
    sizes = f"{plan.num_microbatches} x {plan.microbatch_size}"
    step = f"{number(plan.prediction.step_ns / 1e6)} ms"
    assert repr(plan) == f"Plan('chain', 3 stages, {plan.schedule!r}, {sizes}, {step})"
    assert repr(PROFILE) == "ModelProfile('chain' on 'a', 8 layers, micro-batches of 1)"
    timeline = simulate(plan, {"a": PROFILE})
    assert repr(timeline) == f"Timeline(3 devices, {len(timeline.spans)} actions, {step})"
    assert repr(changed_file(plan, prediction=LEFT_OUT)).endswith("not judged)")


def test_cuts_and_a_number_of_stages_must_agree() -> None:
    with pytest.raises(BapipeError) as error:
        bapipe.make(chain([1, 1, 1]), 3, cuts=[2], num_stages=3, minibatch_size=2)
    assert str(error.value) == "1 `cuts` make 2 stages, not `num_stages` 3: leave one out"


def test_numbers_of_numpy_are_numbers() -> None:
    made = bapipe.make(PROFILE, devices(2), minibatch_size=np.int64(8), cuts=["l4"])  # type: ignore[arg-type]
    assert made == decoded(encode(made)) == bapipe.make(PROFILE, devices(2), minibatch_size=8, cuts=["l4"])


def test_lists_of_numbers_of_numpy_and_numbers_of_devices_are_numbers() -> None:
    one, two = np.int64(1), np.int64(2)
    make: Any = bapipe.make  # numbers of numpy are no `int` for a type checker
    made = make(PROFILE, two, minibatch_size=8, cuts=[two], recompute=[one])
    assert made == bapipe.make(PROFILE, 2, minibatch_size=8, cuts=[2], recompute=[1])
    assert decoded(encode(made)) == made
    assert bapipe.edit(made, PROFILE, keep=[one]) == bapipe.edit(made, PROFILE, keep=[1])


def test_equal_plans_and_profiles_have_equal_hashes() -> None:
    made = [bapipe.make(PROFILE, devices(2), minibatch_size=8, cuts=[cut]) for cut in (2, 2, 3)]
    assert len({*made}) == len({*made, decoded(encode(made[0]))}) == 2
    assert len({PROFILE, decode(encode(PROFILE)), chain([1, 2])}) == 2


def test_devices_may_be_iterators() -> None:
    given: Any = iter([iter(["d0"]), "d1"])
    assert bapipe.make(PROFILE, devices(2), minibatch_size=8, devices=given) == bapipe.make(
        PROFILE, devices(2), minibatch_size=8, devices=["d0", "d1"]
    )


@pytest.mark.parametrize("given", ["d0", [0, 1], 2])
def test_devices_are_names(given: Any) -> None:
    with pytest.raises(BapipeError, match=r"^`devices` is .*: want a list of the device, or of a list of replicas, of"):
        bapipe.make(PROFILE, devices(2), minibatch_size=8, devices=given)


def test_replicas_without_a_micro_batch_are_refused() -> None:
    """Nothing could run the plan, as `check_runnable` says with the same words."""
    words = (
        "stage 0 has 3 devices for 2 micro-batches of 1, so some would compute nothing: take a mini-batch of at least "
        "3, or fewer devices for the stage"
    )
    replicas = [["d0", "d1", "d2"]]
    with pytest.raises(BapipeError) as refused:
        bapipe.make(PROFILE, devices(3), minibatch_size=2, cuts=[], devices=replicas)
    assert str(refused.value) == words
    plan = bapipe.make(PROFILE, devices(3), minibatch_size=3, cuts=[], devices=replicas)
    with pytest.raises(BapipeError) as refused:
        bapipe.edit(plan, PROFILE, minibatch_size=2)
    assert str(refused.value) == words


def test_of_the_sizes_those_are_taken_that_leave_each_replica_a_micro_batch() -> None:
    """In micro-batches of 2 this takes as long for half of the samples, so it is faster, but a device is idle."""
    one = PROFILE.measurements[0]
    profile = replace(PROFILE, measurements=(one, replace(one, microbatch_size=2)))
    two = bapipe.make(profile, devices(2), minibatch_size=4, cuts=[], devices=[["d0", "d1"]])
    assert two.microbatch_size == 2
    three = bapipe.make(profile, devices(3), minibatch_size=4, cuts=[], devices=[["d0", "d1", "d2"]])
    assert three.microbatch_size == 1
