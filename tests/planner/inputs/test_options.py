"""Options and results of planning: constraints, pinned plans, explanations, the Pareto front, cached plans."""

from collections.abc import Callable
from dataclasses import replace as replace_options
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError, Infeasible, InvalidFile
from bapipe.formats.certificate import MemoryLimit
from bapipe.formats.cluster import Cluster, Link
from bapipe.formats.host_times import HostTimes
from bapipe.formats.measurement import Measurement
from bapipe.formats.plan import Objective, Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.analysis.critical_path import critical_path, time_shares
from bapipe.planner.analysis.explain import explain
from bapipe.planner.analysis.pareto import pareto
from bapipe.planner.analysis.pinned import certify_pinned
from bapipe.planner.analysis.sensitivity import sensitivity
from bapipe.planner.compute.deadline import deadline_of
from bapipe.planner.inputs.options import PlanOptions, limit_that_leaves
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes
from bapipe.planner.plan import cached_plan_path, plan_cached
from bapipe.planner.stages.constraints import Constraints, parse_constraints
from bapipe.report.plans import proof
from bapipe.simulator.simulate import simulate
from tests.builders import MS, chain, devices
from tests.step_time import plan_step_time


def test_data_parallelism_is_a_point_of_the_space() -> None:
    plan = plan_step_time({"a": chain([1, 1])}, devices(2), PlanOptions(minibatch_size=4))
    assert [stage.devices for stage in plan.stages] == [("d0", "d1")]
    assert plan.prediction.step_ns == 2 * 2 * 3 * MS
    assert plan.certificate.proven_optimal


def test_parameters_that_cost_more_than_they_save_make_a_pipeline() -> None:
    """1 ms of all-reduce for each layer, 1F1B over 2: (4 + 1) 3 ms."""
    profile = chain([1, 1], param_bytes=10**6)
    plan = plan_step_time({"a": profile}, devices(2, bytes_per_s=10**8), PlanOptions(minibatch_size=4))
    assert [stage.devices for stage in plan.stages] == [("d0",), ("d1",)]
    assert plan.prediction.step_ns == 15 * MS
    assert plan_step_time(
        {"a": profile}, devices(2, bytes_per_s=10**8), PlanOptions(minibatch_size=4, replicas=False)
    ).stages == (plan.stages)


def test_a_stage_recomputes_if_it_does_not_fit_otherwise() -> None:
    """GPipe on one device stashes 4 x 400 bytes, and 4 (4 - n) 100 + n 100 if n layers recompute: 4 (4 + n + 8) ms."""
    profile = chain([1, 1, 1, 1], stash_bytes=100)
    steps_ms = {1600: 48, 1599: 52, 1300: 52, 1299: 56, 1000: 56, 999: 60, 700: 60, 699: 64, 400: 64}
    for limit, step_ms in steps_ms.items():
        recompute = limit < 1600
        options = PlanOptions(minibatch_size=4, schedules=("gpipe",), memory_limit_bytes=limit)
        plan = plan_step_time({"a": profile}, devices(1), options)
        assert (plan.stages[0].recompute, plan.prediction.step_ns) == (recompute, step_ms * MS)
        assert plan.prediction.ranks[0].peak_bytes <= limit
    with pytest.raises(Infeasible, match=r"d0 needs 400 bytes for 'l0' to 'l3' and has 399 \(1 bytes short\)"):
        plan_step_time({"a": profile}, devices(1), PlanOptions(minibatch_size=4, memory_limit_bytes=399))


@pytest.mark.parametrize("tenths", range(10))
def test_margins_are_the_decimals_that_are_given(tenths: int) -> None:
    limit = MemoryLimit(margin=tenths / 10)
    for num_bytes in range(50):
        assert limit.usable_bytes(num_bytes) == num_bytes * (10 - tenths) // 10
        assert limit.usable_bytes(limit_that_leaves(num_bytes, limit.margin)) == num_bytes
        assert limit.usable_bytes(limit_that_leaves(num_bytes, limit.margin) + 1) == num_bytes + 1


def test_the_error_that_nothing_fits_names_the_devices_that_lack_most() -> None:
    """Stage s of 8 holds 8 - s stashes: 7 devices lack memory for one of them or more."""
    profile = chain([1] * 8, stash_bytes=100)
    options = PlanOptions(
        minibatch_size=8, replicas=False, recompute=False, num_stages=8, schedules=("1f1b",), memory_limit_bytes=100
    )
    with pytest.raises(Infeasible) as caught:
        plan_step_time({"a": profile}, devices(8), options)
    named = "; ".join(
        f"d{rank} needs {800 - 100 * rank} bytes for 'l{rank}' to 'l{rank}' and has 100 ({700 - 100 * rank} bytes short)"
        for rank in range(4)
    )
    assert f"micro-batches of 1: {named}; 3 other devices lack memory, too. " in str(caught.value)


def test_the_error_that_nothing_fits_names_remedies() -> None:
    profile = chain([1, 1, 1, 1], stash_bytes=100, output_bytes=1)
    options = PlanOptions(
        minibatch_size=4, replicas=False, recompute=False, num_stages=1, schedules=("gpipe",), memory_limit_bytes=500
    )
    with pytest.raises(Infeasible) as caught:
        plan_step_time({"a": profile}, devices(2), options)
    assert str(caught.value) == (
        "no plan fits in memory; the closest is gpipe with 1 stage and micro-batches of 1: d0 needs 1,600 bytes for "
        "'l0' to 'l3' and has 500 (1,100 bytes short). With recomputation it would fit; with stages on several "
        "devices 300 bytes would be lacking; with another number of stages 304 bytes would be lacking. Try more "
        "devices, devices with more memory, or a smaller mini-batch"
    )


def test_nothing_fits_where_fewer_stages_than_devices_were_asked_for() -> None:
    """Of three devices that differ, two stages of one device each leave one over."""
    profile = chain([1, 1, 1], stash_bytes=100, output_bytes=1)
    unlike = tuple(replace(d, speed=speed) for d, speed in zip(devices(3).devices, (1.0, 1.5, 2.0), strict=True))
    options = PlanOptions(
        minibatch_size=4, replicas=False, num_stages=2, schedules=("eager-1f1b",), memory_limit_bytes=100
    )
    with pytest.raises(Infeasible, match="no plan fits in memory; the closest is eager-1f1b with 2 stages"):
        plan_step_time({"a": profile}, replace(devices(3), devices=unlike), options)


def test_the_warm_up_is_as_deep_as_memory_allows() -> None:
    """Stage 0 of 3 stashes 3 x 100 bytes in 1F1B, one more in 1f1b+1, two in eager 1F1B; a transfer takes 1 ms."""
    profile = chain([1, 1, 1], stash_bytes=100, output_bytes=1)

    def plan(*schedules: str) -> Plan:
        options = PlanOptions(minibatch_size=8, schedules=schedules, replicas=False, recompute=False, num_stages=3)
        return plan_step_time({"a": profile}, devices(3, memory_bytes=450, bytes_per_s=1000), options)

    deeper = plan("1f1b", "1f1b+1", "eager-1f1b")
    assert deeper.schedule == "1f1b+1"
    assert [rank.memory.stash for rank in deeper.prediction.ranks] == [400, 300, 100]
    assert deeper.prediction.step_ns < plan("1f1b", "eager-1f1b").prediction.step_ns


def test_a_margin_leaves_memory_free() -> None:
    profile = chain([1, 1], stash_bytes=100)
    assert plan_step_time(
        {"a": profile}, devices(1, memory_bytes=200), PlanOptions(minibatch_size=1, schedules=("1f1b",))
    )
    with pytest.raises(Infeasible, match=r"has 180 \(20 bytes short\)"):
        plan_step_time(
            {"a": profile},
            devices(1, memory_bytes=200),
            PlanOptions(minibatch_size=1, schedules=("1f1b",), memory_margin=0.1),
        )


AT_MOST, FREE = "with at most 1,300 bytes on each device", "with 50% of each device's memory left free"


@pytest.mark.parametrize(
    ("objective", "limit", "words"),
    [
        ("step", {"memory_limit_bytes": 1300}, AT_MOST),
        ("step", {"memory_margin": 0.5}, FREE),
        ("step", {"memory_limit_bytes": 1300, "memory_margin": 0.5}, f"{AT_MOST}, of which 50% stay free"),
        ("throughput", {"memory_limit_bytes": 1300}, AT_MOST),
        ("throughput", {"memory_margin": 0.5}, FREE),
    ],
)
def test_the_certificate_names_the_memory_limit(objective: Objective, limit: dict[str, Any], words: str) -> None:
    """The space of a plan without the limit has the same words but these."""
    profile, cluster = chain([1, 1, 1, 1], stash_bytes=100), devices(2, memory_bytes=2600, bytes_per_s=10**3)
    options: dict[str, Any] = {"minibatch_size": 4, "schedules": ("1f1b", "gpipe"), "objective": objective}
    free, limited = bapipe.plan(profile, cluster, **options), bapipe.plan(profile, cluster, **options, **limit)
    assert limited.certificate.space == f"{free.certificate.space}; {words}"
    assert limited.certificate.memory == PlanOptions(**options, **limit).memory
    assert free.certificate.memory is msgspec.UNSET
    assert words in proof(limited.certificate)


def test_a_constraint_is_named_after_the_memory_limit() -> None:
    constraints = ("l0 with l1",)
    plan = bapipe.plan(chain([1, 1]), devices(2), minibatch_size=4, memory_limit_bytes=100, constraints=constraints)
    assert plan.certificate.space.endswith("; with at most 100 bytes on each device; where l0 with l1")


def test_pinning_and_explaining_name_the_memory_limit() -> None:
    profiles = {"a": chain([3, 1, 1, 1], stash_bytes=100)}
    options = PlanOptions(minibatch_size=4, memory_limit_bytes=1600)
    plan = plan_step_time(profiles, devices(2), options)
    assert plan.certificate.proven_optimal
    said = explain(plan, profiles, options)
    assert "of its limit, 1,600 bytes" in said[4]
    assert said[-1].endswith("proven optimal in the searched space, with at most 1,600 bytes on each device.")
    pinned = certify_pinned(plan, profiles, options)
    assert pinned.certificate.memory == options.memory
    assert pinned.certificate.space.endswith("; with at most 1,600 bytes on each device")


def test_points_of_the_front_keep_the_margin_on_every_device() -> None:
    cluster = devices(2, memory_bytes=1000)
    small = replace(cluster.devices[1], memory_bytes=300)
    cluster = replace(cluster, devices=(cluster.devices[0], small))
    front = pareto(
        {"a": chain([1, 1, 1, 1], stash_bytes=100)}, cluster, PlanOptions(minibatch_size=4, memory_margin=0.5)
    )
    assert front
    for point in front:
        for rank, limit in zip(point.plan.prediction.ranks, (500, 150), strict=True):
            assert rank.peak_bytes <= limit


@pytest.mark.parametrize(
    ("schedules", "searched"),
    [
        (("1f1b",), "recomputation where a stage does not fit without"),
        (("1f1b", "zb-v"), "recomputation where the stages of a device do not fit without"),
        (("zb-v",), "recomputation where the stages of a device do not fit without"),
    ],
)
def test_the_certificate_says_when_stages_recompute(schedules: tuple[str, ...], searched: str) -> None:
    plan = bapipe.plan(chain([1, 1, 1, 1]), devices(2), minibatch_size=4, schedules=schedules)
    assert plan.certificate.space.endswith(f", {searched}")


def test_constraints_hold() -> None:
    profile = chain([3, 1, 1, 1, 2])

    def stages(*constraints: str) -> list[tuple[int, tuple[str, ...]]]:
        options = PlanOptions(minibatch_size=4, constraints=constraints)
        plan = plan_step_time({"a": profile}, devices(3), options)
        assert plan.certificate.proven_optimal
        assert all(text in plan.certificate.space for text in constraints)
        return [(len(stage.layers), stage.devices) for stage in plan.stages]

    assert len(stages("l0 without l4")) > 1
    assert [count for count, _ in stages("l0 without l1", "l1 with l4")] == [1, 4]
    assert stages("l0 without l4", "l4 on d0", "l0 on d2,d1")[-1][1] == ("d0",)
    assert set(stages("l0 without l4", "l4 on d0", "l0 on d2,d1")[0][1]) <= {"d1", "d2"}


def test_names_in_constraints_may_have_spaces() -> None:
    texts = ["Encoder layer 3 without head", "conv2 with 空白 1", "x on gpu 0, gpu 1,cuda"]
    assert parse_constraints(texts) == Constraints(
        together=(("conv2", "空白 1"),),
        separate=(("Encoder layer 3", "head"),),
        on=(("x", ("gpu 0", "gpu 1", "cuda")),),
    )


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (
            ["l0 beside l1"],
            "'l0 beside l1' is not a constraint: want 'LAYER with LAYER', 'LAYER without LAYER' or 'LAYER on DEVICE,DEVICE'",
        ),
        (["l9 with l1"], "a constraint names the layer 'l9', which chain does not have; its 3 layers are 'l0' to 'l2'"),
        (
            ["l0 on gpu"],
            "the constraint 'l0 on gpu' names the device 'gpu', which the cluster does not have; it has d0, d1",
        ),
        (["l0 without l0"], "the constraint 'l0 without l0' separates a layer from itself; drop it"),
        (
            ["l0 with l2", "l0 without l1"],
            "the constraint 'l0 without l1' contradicts the others: no cut is allowed between these layers (layers that "
            "share parameters stay together too); drop one of them",
        ),
        (
            ["l0 with l1", "l0 on d0", "l1 on d1"],
            "the constraints contradict one another: 'l0' and 'l1' must share a stage, and no device is allowed for "
            "both; drop one of them",
        ),
    ],
)
def test_contradictory_constraints_are_named(constraint: list[str], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        plan_step_time({"a": chain([1, 1, 1])}, devices(2), PlanOptions(minibatch_size=2, constraints=constraint))
    assert str(caught.value) == message


def test_unknown_layers_are_named_also_where_a_line_of_devices_is_searched_first() -> None:
    with pytest.raises(BapipeError, match="names the layer 'l99', which chain does not have"):
        plan_step_time({"a": chain([1] * 40)}, devices(8), PlanOptions(minibatch_size=2, constraints=["l0 with l99"]))


def test_a_pinned_plan_is_simulated_and_bounded() -> None:
    profiles = {"a": chain([3, 1, 1, 1])}
    best = plan_step_time(profiles, devices(2), PlanOptions(minibatch_size=4, replicas=False))
    stages = (
        StagePlan(layers=("l0",), devices=("d0",)),
        StagePlan(layers=("l1", "l2", "l3"), devices=("d1",)),
    )
    assert best.stages == stages
    worse = (
        StagePlan(layers=("l0", "l1"), devices=("d0",)),
        StagePlan(layers=("l2", "l3"), devices=("d1",)),
    )
    pinned = certify_pinned(replace(best, stages=worse), profiles, PlanOptions(minibatch_size=4, replicas=False))
    assert pinned.stages == worse
    assert pinned.prediction.step_ns == simulate(pinned, profiles).step_ns > best.prediction.step_ns
    assert pinned.certificate.lower_bound_ns == best.prediction.step_ns
    assert not pinned.certificate.proven_optimal
    assert [a.name for a in pinned.alternatives] == ["best found"]
    held = pinned.prediction.ranks[0].peak_bytes
    assert held == 0
    heavy = {"a": chain([3, 1, 1, 1], stash_bytes=100)}
    with pytest.raises(Infeasible) as caught:
        certify_pinned(replace(best, stages=worse), heavy, PlanOptions(minibatch_size=4, memory_limit_bytes=300))
    assert str(caught.value) == (
        "the pinned plan does not fit: d0 needs 400 bytes and has 300 (100 bytes short). Plan without `pin` for one "
        "that does"
    )


def test_the_critical_path_is_without_a_pause() -> None:
    profiles = {"a": chain([3, 1, 2, 1], param_bytes=10**5, output_bytes=10**5)}
    for options in (PlanOptions(minibatch_size=4), PlanOptions(minibatch_size=4, replicas=False)):
        timeline = simulate(plan_step_time(profiles, devices(3), options), profiles)
        path = critical_path(timeline)
        assert path[0].start_ns == 0
        assert path[-1].end_ns == timeline.step_ns
        assert all(a.end_ns == b.start_ns for a, b in pairwise(path))
        assert sum(time_ns for _, time_ns in time_shares(timeline)) == timeline.step_ns


def test_an_explanation_names_what_limits_the_plan() -> None:
    profiles = {"a": chain([3, 1, 1, 1], output_bytes=10**6)}
    options = PlanOptions(minibatch_size=4, replicas=False)
    plan = plan_step_time(profiles, devices(2), options)
    words = explain(plan, profiles, options)
    assert words[0] == "A pipeline of 2 stages, one device each."
    assert words[1].startswith("Critical path of a step: compute of stage 1 (") or words[1].startswith(
        "Critical path of a step: compute of stage 0 ("
    )
    assert words[2].startswith("Inter-layer partition: the devices of stage ")
    assert words[3] == (
        "Coarse-grained cuts: not needed; the plan's cuts balance compute, and each micro-batch sends 1 MB over "
        "the cuts."
    )
    assert words[4] == (
        "Memory fine-tuning: not needed; no plan found is faster with more memory. d0 is the fullest device, with 0% of "
        "its limit."
    )
    assert words[5].startswith("Intra-layer split: not searched")
    assert words[6].startswith("Fallback to data parallelism: ")
    assert "speed of d" in words[7]
    alone = plan_step_time(profiles, devices(1), options)
    assert explain(alone, profiles, options)[0] == "One device: d0 runs all layers."


def test_ten_percent_more_speed_of_the_only_device_saves_a_tenth() -> None:
    profiles = {"a": chain([11])}
    plan = plan_step_time(profiles, devices(1), PlanOptions(minibatch_size=2))
    effects = {effect.resource: effect.step_ns for effect in sensitivity(plan, profiles, PlanOptions(minibatch_size=2))}
    assert plan.prediction.step_ns == 66 * MS
    assert effects == {
        "speed of d0": 60 * MS,
        "bandwidth of links within hosts": 66 * MS,
        "bandwidth of links between hosts": 66 * MS,
        "memory of every device": 66 * MS,
        "unlimited memory": 66 * MS,
    }


def test_more_memory_helps_if_memory_was_short() -> None:
    """Two replicas hold 2 x 100 bytes each; a pipeline is slower, and holds less."""
    profiles = {"a": chain([1, 1], param_bytes=100)}
    options = PlanOptions(minibatch_size=4, memory_limit_bytes=380, schedules=("1f1b",))
    plan = plan_step_time(profiles, devices(2), options)
    assert len(plan.stages) == 2
    effects = {e.resource: e for e in sensitivity(plan, profiles, options)}
    assert effects["memory of every device"].step_ns < plan.prediction.step_ns
    assert effects["memory of every device"].is_replanned


def test_more_memory_is_not_suggested_if_replicas_help() -> None:
    """Two replicas would be faster than any pipeline here, with as much memory as there is."""
    profiles = {"a": chain([5, 1])}
    fast = plan_step_time(profiles, devices(2), PlanOptions(minibatch_size=4))
    for options in (
        PlanOptions(minibatch_size=4, replicas=False),
        PlanOptions(minibatch_size=4, schedules=("1f1b", "search"), search_effort=0.1, replicas=False),
    ):
        plan = plan_step_time(profiles, devices(2), options)
        assert plan.prediction.step_ns > fast.prediction.step_ns
        assert explain(plan, profiles, options)[4].startswith("Memory fine-tuning: not needed; no plan found is faster")


def test_the_front_has_the_fastest_the_smallest_and_no_dominated_point() -> None:
    profiles = {"a": chain([2, 1, 1, 2], param_bytes=1000, stash_bytes=100, output_bytes=10)}
    points = pareto(profiles, devices(3), PlanOptions(minibatch_size=4))
    figures = [(p.step_ns, p.peak_bytes, p.num_devices) for p in points]
    assert figures == sorted(figures)
    assert figures[0][0] == plan_step_time(profiles, devices(3), PlanOptions(minibatch_size=4)).prediction.step_ns
    assert 1 in {count for _, _, count in figures}
    for a in figures:
        assert not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in figures)
    for point in points:
        assert point.plan.prediction.step_ns == simulate(point.plan, profiles).step_ns == point.step_ns


def test_a_plan_whose_search_was_ended_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = {"a": chain([1, 2])}, devices(2), PlanOptions(minibatch_size=4)
    plan_cached(*given, deadline=deadline_of(0.0))
    assert not cached_plan_path(*given).exists()
    plan_cached(*given, deadline=deadline_of(100.0))
    assert cached_plan_path(*given).exists()


def test_a_step_may_have_1024_micro_batches_and_no_more() -> None:
    profiles, cluster = {"a": chain([1])}, devices(1)
    assert microbatch_sizes(profiles, cluster, PlanOptions(minibatch_size=1024)) == [1]
    with pytest.raises(BapipeError, match=r"1025 is 1025 micro-batches of 1; want at most 1024"):
        microbatch_sizes(profiles, cluster, PlanOptions(minibatch_size=1025))


def test_kinds_that_do_not_agree_on_what_is_trained_are_refused_before_a_search() -> None:
    one, frozen = chain([1, 2], param_bytes=8), chain([1, 2], param_bytes=8)
    frozen = replace(
        frozen,
        device=replace(frozen.device, kind="b"),
        layers=(replace(frozen.layers[0], param_bytes=4), frozen.layers[1]),
    )
    cluster = devices(2)
    cluster = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], kind="b")))
    with pytest.raises(BapipeError, match="l0"):
        check_inputs({"a": one, "b": frozen}, cluster, PlanOptions(minibatch_size=4))


def test_a_cached_plan_is_loaded_only_for_the_same_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profiles = {"a": chain([1, 2])}
    options = PlanOptions(minibatch_size=4)
    first = plan_cached(profiles, devices(2), options)
    monkeypatch.setattr("bapipe.planner.plan._over_linearizations", None)  # a search would fail
    assert plan_cached(profiles, devices(2), options) == first
    for other in (options, PlanOptions(minibatch_size=8)):
        with pytest.raises(TypeError):
            plan_cached(profiles, devices(3 if other is options else 2), other)
    with pytest.raises(TypeError):
        plan_cached(profiles, devices(2), replace_options(options, time_limit_s=1.0))
    (kept,) = (tmp_path / "bapipe").glob("*.plan.json")
    kept.write_text("damaged")
    with pytest.raises(TypeError):
        plan_cached(profiles, devices(2), options)


def test_absurd_sizes_are_named() -> None:
    with pytest.raises(InvalidFile) as caught:
        plan_step_time({"a": chain([1, 10**10, 1])}, devices(2), PlanOptions(minibatch_size=100))
    assert str(caught.value) == (
        "the profile of chain on a: 10,000,000,000,000,000 is too much to add up over a mini-batch of 100; check the "
        "unit - at `$.measurements[0].layers[1].forward_ns`"
    )
    for speed, step_ns in ((1e-9, 6 * 10**15), (1e-12, None)):
        slow = replace(devices(1), devices=(replace(devices(1).devices[0], speed=speed),))
        if step_ns is not None:
            assert plan_step_time({"a": chain([1])}, slow, PlanOptions(minibatch_size=2)).prediction.step_ns == step_ns
            continue
        with pytest.raises(BapipeError) as refused:
            plan_step_time({"a": chain([1])}, slow, PlanOptions(minibatch_size=2000))
        assert str(refused.value) == (
            "device 'd0' of speed 1e-12 would take more than four years for a step: check its speed, and the profile's "
            "times"
        )


@pytest.mark.parametrize("speed", [1e-12, 5e-324])
def test_plans_with_absurd_figures_are_not_simulated(speed: float) -> None:
    """A step takes 18 ms on one device, which is 2 ** 57 ns at a speed of about 1e-10."""
    profile = chain([1, 2])
    plan = bapipe.plan(profile, devices(2), minibatch_size=2)
    slow = replace(plan.cluster, devices=(plan.cluster.devices[0], replace(plan.cluster.devices[1], speed=speed)))
    with pytest.raises(BapipeError, match=r"^device 'd1' of speed \S+ would take more than four years for a step"):
        bapipe.simulate(replace(plan, cluster=slow), profile)
    other_kind = replace(slow, devices=(*plan.cluster.devices, replace(slow.devices[1], name="d2", kind="unused")))
    assert bapipe.simulate(replace(plan, cluster=other_kind, order=()), profile).step_ns == plan.prediction.step_ns


def test_what_input_gradients_leave_is_too_much_to_add_up_as_other_bytes_are() -> None:
    profile = chain([1, 1])
    measured = profile.measurements[0]
    layers = tuple(replace(layer, gradient_stash_bytes=2**56) for layer in measured.layers)
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    with pytest.raises(InvalidFile) as caught:
        plan_step_time({"a": profile}, devices(2), PlanOptions(minibatch_size=1, schedules=["zb-h1"]))
    assert str(caught.value) == (
        "the profile of chain on a: 72,057,594,037,927,936 is too much to add up over a mini-batch of 1; check the unit "
        "- at `$.measurements[0].layers[0].gradient_stash_bytes`"
    )


def _with_update(profile: ModelProfile) -> ModelProfile:
    return replace(profile, layers=tuple(replace(layer, update_ns=10**9) for layer in profile.layers))


def _with_host_times(profile: ModelProfile) -> ModelProfile:
    host = HostTimes(forward_ns=10**9, input_grad_ns=0, weight_grad_ns=0, backward_ns=0)
    measured = profile.measurements[0]
    layers = tuple(replace(layer, host=host) for layer in measured.layers)
    return replace(profile, measurements=(replace(measured, layers=layers),))


def _with_a_slow_size_first(profile: ModelProfile) -> ModelProfile:
    measured = profile.measurements[0]
    slow = tuple(replace(layer, forward_ns=10**9) for layer in measured.layers)
    return replace(profile, measurements=(Measurement(microbatch_size=4, layers=slow), measured))


@pytest.mark.parametrize("with_times", [_with_update, _with_host_times, _with_a_slow_size_first])
def test_a_speed_is_absurd_by_any_time_of_the_profile(with_times: Callable[[ModelProfile], ModelProfile]) -> None:
    """A second at speed 1e-9 is 31 years, of 2 ** 57 ns; the times of the chain alone take 0."""
    slow = replace(devices(1), devices=(replace(devices(1).devices[0], speed=1e-9),))
    with pytest.raises(BapipeError, match=r"^device 'd0' of speed 1e-09 would take more than four years for a step"):
        plan_step_time({"a": with_times(chain([0]))}, slow, PlanOptions(minibatch_size=4))


@pytest.mark.parametrize(
    ("num_devices", "num_layers", "options", "message"),
    [
        (4097, 1, {}, "4,097 devices: want at most 4,096; plan for a part of them"),
        (
            1,
            20_001,
            {},
            "20,001 layers: want at most 20,000; profile with larger layers: name whole blocks with `leaf_modules`",
        ),
        (
            1,
            1,
            {"num_stages": 10**6},
            "1,000,000 stages of 16 micro-batches: want at most 2,097,152 forwards in a step; choose fewer stages, or "
            "larger micro-batches",
        ),
    ],
)
def test_too_many_devices_layers_or_stages_are_refused(
    num_devices: int, num_layers: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(BapipeError) as caught:
        plan_step_time(
            {"a": chain([1] * num_layers)},
            devices(num_devices),
            PlanOptions(minibatch_size=16, **options),  # type: ignore[arg-type]
        )
    assert str(caught.value) == message


def test_a_time_limit_returns_the_best_so_far_with_its_gap() -> None:
    profiles = {"a": chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], param_bytes=10**5, output_bytes=10**5)}
    cluster = devices(5, bytes_per_s=10**8)
    hurried = bapipe.plan(profiles, cluster, minibatch_size=8, time_limit_s=0.0)
    patient = bapipe.plan(profiles, cluster, minibatch_size=8)
    assert hurried.certificate.lower_bound_ns <= patient.prediction.step_ns <= hurried.prediction.step_ns


def test_faster_links_more_memory_and_more_devices_never_hurt() -> None:
    """A slower link never helps; more memory, or one more device, never hurts."""
    profiles = {"a": chain([3, 1, 4, 1, 5], param_bytes=10**5, stash_bytes=100, output_bytes=10**5)}

    def step_ns(cluster: Cluster) -> int:
        plan = plan_step_time(profiles, cluster, PlanOptions(minibatch_size=4))
        assert plan.certificate.proven_optimal
        return plan.prediction.step_ns

    speeds = [step_ns(devices(3, bytes_per_s=rate)) for rate in (10**7, 10**8, 10**9, 10**10)]
    assert speeds == sorted(speeds, reverse=True)
    sizes = [step_ns(devices(3, memory_bytes=size)) for size in (10**6 + 700, 10**6 + 900, 2 * 10**6)]
    assert sizes == sorted(sizes, reverse=True)
    counts = [step_ns(devices(num)) for num in (1, 2, 3, 4)]
    assert counts == sorted(counts, reverse=True)
    slow_link = Link(source="d0", target="d1", bytes_per_s=10**6, latency_ns=10**6)
    assert step_ns(replace(devices(3), links=(slow_link,))) >= step_ns(devices(3))


def test_schedules_are_given_by_one_name_or_all_at_once(tmp_path: Path) -> None:
    assert PlanOptions(minibatch_size=4, schedules="gpipe").schedules == ("gpipe",)
    every = PlanOptions(minibatch_size=4, schedules=["search", "all", "1f1b"]).schedules
    assert every[0] == "search"
    assert {"1f1b", "zb-v", "dualpipe-v"} < set(every)
    assert "fbp-as" not in every
    assert len(set(every)) == len(every)
    plan = bapipe.plan(chain([1, 2]), devices(2), minibatch_size=4, schedules="gpipe")
    bapipe.write(str(tmp_path / "plan.json"), plan)
    assert bapipe.read(str(tmp_path / "plan.json"), Plan) == plan


def test_a_single_constraint_may_be_given_as_a_text() -> None:
    assert PlanOptions(minibatch_size=4, constraints="l0 with l1").constraints == ("l0 with l1",)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"minibatch_size": 0}, "`minibatch_size` is 0: want at least 1"),
        ({"minibatch_size": 4.5}, "`minibatch_size` is 4.5: want int"),
        ({"microbatch_size": 0}, "`microbatch_size` is 0: want at least 1"),
        ({"num_stages": 0}, "`num_stages` is 0: want at least 1"),
        ({"num_stages": -1}, "`num_stages` is -1: want at least 1"),
        ({"group": 0}, "`group` is 0: want at least 1"),
        ({"memory_limit_bytes": -1}, "`memory_limit_bytes` is -1: want at least 0"),
        ({"memory_limit_bytes": 2**63}, f"`memory_limit_bytes` is {2**63}: want at most {2**63 - 1}"),
        ({"memory_margin": -1.0}, "`memory_margin` is -1.0: want at least 0"),
        ({"memory_margin": 1.0}, "`memory_margin` is 1.0: want less than 1"),
        ({"time_limit_s": -1}, "`time_limit_s` is -1: want at least 0"),
        ({"search_effort": -1}, "`search_effort` is -1: want at least 0"),
        ({"objective": "thruput"}, "`objective` is 'thruput': want 'step' or 'throughput'; did you mean 'throughput'?"),
        ({"goal": "memory"}, "`goal` is 'memory': want Goal or None"),
        ({"schedules": [1]}, "`schedules` is [1]: want a list of str"),
        ({"replicas": "no"}, "`replicas` is 'no': want True or False"),
    ],
)
def test_options_out_of_range_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        bapipe.plan(chain([1, 2]), devices(2), **({"minibatch_size": 4} | option))
    assert str(caught.value) == message


def test_a_memory_limit_may_be_a_whole_float(tmp_path: Path) -> None:
    plan = bapipe.plan(chain([1, 2]), devices(2), minibatch_size=4, memory_limit_bytes=2e9)
    bapipe.write(tmp_path / "plan.json", plan)
    assert bapipe.read(tmp_path / "plan.json", Plan) == plan
    assert plan == bapipe.plan(chain([1, 2]), devices(2), minibatch_size=4, memory_limit_bytes=2 * 10**9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": ("1f1b", "zb-h1")}, "runs 1f1b, not zb-h1: leave `schedules` out"),
        ({"schedules": "gpipe"}, "runs 1f1b, not gpipe: leave `schedules` out"),
        ({"search_effort": 3.0}, "does not know `search_effort`"),
    ],
)
def test_throughput_refuses_schedules_and_efforts_that_it_does_not_know(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError, match=message):
        bapipe.plan(chain([1, 1]), devices(2), objective="throughput", minibatch_size=4, **options)
