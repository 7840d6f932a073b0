"""A pinned plan keeps its stages, and gets the bound of the whole space."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from bapipe.errors import BapipeError, ConstraintsUnmet, Infeasible
from bapipe.formats.certificate import ReachedGoal, outside_of, searched_space
from bapipe.formats.cluster import Bandwidth
from bapipe.formats.codec import decode, encode
from bapipe.formats.measurement import Measurement
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner import exact_search, line_solution
from bapipe.planner.analysis.explain import explain
from bapipe.planner.analysis.pareto import pareto
from bapipe.planner.analysis.pinned import BEST_FOUND, certify_pinned
from bapipe.planner.compute.deadline import OutOfTime
from bapipe.planner.edit import edit
from bapipe.planner.inputs.goal import Goal
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.make import make
from bapipe.planner.plan import plan
from bapipe.planner.results.solution import make_plan
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.throughput.search import solve_throughput
from bapipe.report.plans import proof
from bapipe.simulator.simulate import simulate
from tests.builders import MS, chain, devices
from tests.planner.test_linearizations import towers
from tests.step_time import plan_step_time

OPTIONS = PlanOptions(minibatch_size=4, schedules=("1f1b",), replicas=False)


def best_and_unbalanced(profiles: dict[str, ModelProfile]) -> tuple[Plan, Plan]:
    """Returns the best plan of two stages, and the one that has a single layer in the first stage."""
    best = plan_step_time(profiles, devices(2), OPTIONS)
    names = tuple(layer.name for layer in profiles["a"].layers)
    first, second = best.stages
    stages = (replace(first, layers=names[:1]), replace(second, layers=names[1:]))
    return best, replace(best, stages=stages)


def twice(profile: ModelProfile) -> Measurement:
    """Returns the times of micro-batches of two, twice those of one."""
    (one,) = profile.measurements
    names = "forward_ns", "input_grad_ns", "weight_grad_ns"
    layers = (replace(layer, **{name: 2 * getattr(layer, name) for name in names}) for layer in one.layers)
    return replace(one, microbatch_size=2, layers=tuple(layers))


def test_the_gap_of_a_pinned_plan_is_to_the_best_plan() -> None:
    profiles = {"a": chain([1, 1, 1, 1])}
    best, unbalanced = best_and_unbalanced(profiles)
    pinned = certify_pinned(unbalanced, profiles, OPTIONS)
    assert pinned.stages == unbalanced.stages
    assert pinned.prediction.step_ns == simulate(unbalanced, profiles).step_ns > best.prediction.step_ns
    assert pinned.certificate.lower_bound_ns == best.prediction.step_ns
    assert not pinned.certificate.proven_optimal
    (other,) = pinned.alternatives
    slower = pinned.prediction.step_ns / best.prediction.step_ns - 1
    assert (other.name, other.step_ns) == (BEST_FOUND, best.prediction.step_ns)
    assert other.why_not == f"the pinned plan takes {slower:.1%} longer"


def test_the_best_plan_is_proven_when_it_is_pinned() -> None:
    profiles = {"a": chain([1, 1, 1, 1])}
    best, _ = best_and_unbalanced(profiles)
    pinned = certify_pinned(best, profiles, OPTIONS)
    assert pinned.certificate.proven_optimal
    assert pinned.alternatives[0].why_not == "not faster than the pinned plan"


def test_a_pinned_plan_that_does_not_fit_is_refused_with_the_bytes_it_lacks() -> None:
    profiles = {"a": chain([1, 1, 1, 1], param_bytes=100)}
    _, unbalanced = best_and_unbalanced(profiles)
    needed = simulate(unbalanced, profiles).memory[1].total
    cluster = unbalanced.cluster
    small = replace(cluster.devices[1], memory_bytes=needed - 1)
    short = replace(unbalanced, cluster=replace(cluster, devices=(cluster.devices[0], small)))
    message = rf"d1 needs {needed:,} bytes and has {needed - 1:,} \(1 bytes short\)"
    with pytest.raises(Infeasible, match=message):
        certify_pinned(short, profiles, OPTIONS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_stages": 3, "schedules": ("gpipe",)}, "2 stages, not 3; schedule gpipe-2bp"),
        ({"constraints": ("l0 with l3",)}, "it breaks 'l0 with l3'"),
        ({"constraints": ("l0 without l1", "l0 on d1")}, "it breaks 'l0 without l1'; it breaks 'l0 on d1'"),
        ({"microbatch_size": 2}, "micro-batches of 1"),
    ],
)
def test_it_is_said_why_a_pinned_plan_lies_outside_the_space(changes: dict[str, Any], reason: str) -> None:
    profiles = {"a": chain([1, 1, 1, 1], output_bytes=10)}
    profiles["a"] = replace(profiles["a"], measurements=(*profiles["a"].measurements, twice(profiles["a"])))
    schedule = "1f1b" if changes.get("num_stages") is None else "gpipe-2bp"
    plan = make(
        profiles, devices(4), minibatch_size=4, microbatch_size=1, cuts=[2], devices=["d0", "d1"], schedule=schedule
    )
    options = PlanOptions(minibatch_size=4, replicas=False, **changes)
    certificate = certify_pinned(plan, profiles, options).certificate
    assert outside_of(certificate) == f", which lies outside ({reason})"
    beside = f"which lies outside ({reason})"
    gap, proven = f"the pinned plan, {beside}, is within ", f"is faster than the pinned one, {beside}: every cut"
    assert (proven if certificate.proven_optimal else gap) in proof(certificate)
    assert searched_space(certificate).startswith("every cut of 4 layers")


def test_recomputation_that_is_not_needed_lies_outside() -> None:
    """Of four micro-batches the stages keep 2 and 1, of 20 bytes each."""
    profiles, options = {"a": chain([1, 1, 1, 1], stash_bytes=10)}, dataclasses.replace(OPTIONS, num_stages=2)
    kept = make(profiles, devices(2), minibatch_size=4, cuts=[2])
    needless = make(profiles, devices(2), minibatch_size=4, cuts=[2], recompute=[0])
    assert outside_of(certify_pinned(kept, profiles, options).certificate) == ""
    told = outside_of(certify_pinned(needless, profiles, options).certificate)
    assert told == ", which lies outside (recomputation that is not needed)"
    needed = max(held.total for held in simulate(kept, profiles).memory)
    fits, short = (dataclasses.replace(options, memory_limit_bytes=limit) for limit in (needed, needed - 1))
    assert outside_of(certify_pinned(needless, profiles, fits).certificate) == told
    assert outside_of(certify_pinned(needless, profiles, short).certificate) == ""


def test_replicas_without_a_microbatch_lie_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan file may have some, though none is made.

    Two micro-batches of 2 (1 + 2) ms. d0 and d1 sum 1,000 bytes with their own compute: 1 ms behind the backward.

    A third replica on another host, which has no micro-batch, makes it a ring over links: 4 messages of 334 us that
    begin when the last layer has its gradient, 2 ms before the end. d2 is too slow to be one of two.
    """
    profile = chain([1, 1])
    profile = replace(profile, layers=(profile.layers[0], replace(profile.layers[1], param_bytes=1000)))
    profiles, slow = {"a": profile}, Bandwidth(bytes_per_s=10**6, latency_ns=0)
    cluster = replace(devices(3), inter_host=slow, intra_host_sum=slow)
    last = replace(cluster.devices[2], host="other", speed=0.5)
    cluster = replace(cluster, devices=(*cluster.devices[:2], last))
    options = PlanOptions(minibatch_size=2, schedules=("1f1b",))
    best = plan_step_time(profiles, cluster, options)
    assert best.certificate.lower_bound_ns == best.prediction.step_ns == 7 * MS
    front = pareto(profiles, cluster, options)
    assert min(point.step_ns for point in front) == 7 * MS
    spaces = [best.certificate.space, *(point.plan.certificate.space for point in front)]
    assert all("; any replicas, each with a micro-batch, " in space for space in spaces)
    with pytest.raises(BapipeError, match="stage 0 has 3 devices for 2 micro-batches of 1"):
        make(profiles, cluster, minibatch_size=2, cuts=[], devices=[["d0", "d1", "d2"]])
    monkeypatch.setattr("bapipe.planner.make.check_replicas", lambda *_: None)
    made = make(profiles, cluster, minibatch_size=2, cuts=[], devices=[["d0", "d1", "d2"]])
    pinned = certify_pinned(made, profiles, options)
    assert pinned.prediction.step_ns == 6 * MS
    assert outside_of(pinned.certificate) == ", which lies outside (replicas without a micro-batch)"


def test_a_pinned_plan_is_not_called_optimal_over_the_space_beside_it() -> None:
    profiles = {"a": chain([1, 1, 1, 1])}
    best, unbalanced = best_and_unbalanced(profiles)
    told = proof(certify_pinned(best, profiles, OPTIONS).certificate)
    assert told.startswith("no plan of this space is faster than the pinned one: every cut of 4 layers")
    assert proof(certify_pinned(unbalanced, profiles, OPTIONS).certificate).startswith("the pinned plan is within ")


def test_a_bound_of_other_schedules_does_not_prove_a_pinned_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search was cut off when it knew of GPipe alone, whose best plan takes longer than the pinned one."""
    profiles, cluster, options = (
        {"a": chain([1] * 6)},
        devices(3),
        dataclasses.replace(OPTIONS, schedules=("gpipe", "zb-v")),
    )
    by_hand = make(profiles["a"], cluster, minibatch_size=4, microbatch_size=1, schedule="zb-v")
    found = certify_pinned(by_hand, profiles, dataclasses.replace(options, schedules=("gpipe",)))
    assert outside_of(found.certificate)

    def cut_off(_: SearchRequest) -> None:
        raise OutOfTime("ended")

    monkeypatch.setattr(exact_search, "find_best_layout", cut_off)
    monkeypatch.setattr(line_solution, "MIN_FIRST", 1)
    pinned = certify_pinned(by_hand, profiles, options)
    assert not outside_of(pinned.certificate)
    assert not pinned.certificate.proven_optimal
    assert pinned.certificate.lower_bound_ns == step_bound_ns(profiles, cluster, options)
    assert "schedules gpipe, zb-v;" in pinned.certificate.space


def test_a_plan_changed_from_a_pinned_one_is_not_pinned() -> None:
    profiles = {"a": chain([1, 1, 1, 1])}
    best, _ = best_and_unbalanced(profiles)
    changed = edit(certify_pinned(best, profiles, OPTIONS), profiles, moves=["stage 0 +1"])
    assert changed.certificate.space.startswith("every cut of 4 layers")
    assert outside_of(changed.certificate) is None
    same = edit(best, profiles)
    assert proof(same.certificate).startswith("no plan of this space is faster: every cut of 4 layers")


def test_devices_that_work_side_by_side_lie_outside() -> None:
    """The bound is of devices that run one action at a time."""
    profiles = {"a": chain([1, 1, 1, 1])}
    best, _ = best_and_unbalanced(profiles)
    side_by_side = tuple(replace(device, side_by_side=True) for device in best.cluster.devices)
    pinned = certify_pinned(replace(best, cluster=replace(best.cluster, devices=side_by_side)), profiles, OPTIONS)
    assert "forwards and backwards side by side" in (outside_of(pinned.certificate) or "")
    assert pinned.certificate.lower_bound_ns <= pinned.prediction.step_ns


def test_a_plan_along_another_order_of_the_layers_lies_outside() -> None:
    profiles, cluster = {"a": towers()}, devices(2, memory_bytes=10**6)
    apart = plan(profiles, cluster, minibatch_size=4, num_stages=2, replicas=False, schedules=["1f1b"])
    assert [stage.layers for stage in apart.stages] == [("a0", "a1"), ("b0", "b1", "join")]
    pinned = certify_pinned(apart, profiles, OPTIONS)
    assert outside_of(pinned.certificate) == ", which lies outside (its layers in another order)"


def test_constraints_that_another_order_of_the_layers_keeps_are_no_error_beside_its_plan() -> None:
    profile, cluster = towers(), devices(2, memory_bytes=10**6)
    options = PlanOptions(minibatch_size=4, replicas=False, constraints=("a0 with a1", "a0 without b0"))
    best = plan(profile, cluster, options)
    assert [stage.layers for stage in best.stages] == [("a0", "a1"), ("b0", "b1", "join")]
    pinned = certify_pinned(best, {"a": profile}, options)
    assert pinned.certificate.lower_bound_ns <= pinned.prediction.step_ns
    assert explain(best, {"a": profile}, options)
    assert [point.plan for point in pareto({"a": profile}, cluster, options, known=best)] == [best]
    goal = plan(profile, cluster, dataclasses.replace(options, goal=Goal(least="devices"))).certificate.goal
    assert goal == ReachedGoal(quantity="devices", value=2, bound=2)
    never = dataclasses.replace(options, constraints=("a0 with a1", "a0 without b0", "a0 without a1"))
    with pytest.raises(ConstraintsUnmet, match=r"^along .* of the layers \(there are more\) the constraint ") as caught:
        plan(profile, cluster, never)
    assert not caught.value.is_proven


def test_a_plan_for_throughput_is_pinned_with_a_bound_on_its_step() -> None:
    profiles = {"a": chain([1, 1, 1, 1])}
    plan = make_plan(solve_throughput(profiles, devices(2), PlanOptions(minibatch_size=4, objective="throughput")))
    pinned = certify_pinned(plan, profiles, OPTIONS)
    assert pinned.prediction.objective_ns == pinned.prediction.step_ns >= pinned.certificate.lower_bound_ns
    assert decode(encode(pinned)) == pinned
