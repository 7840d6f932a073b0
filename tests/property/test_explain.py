"""The effects that a plan's explanation predicts for measured models equal those that the simulator gives."""

from functools import cache

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.codec import read
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.analysis.explain import explain
from bapipe.planner.analysis.sensitivity import sensitivity
from bapipe.planner.analysis.time_balanced import time_balanced_plan
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan import plan_once
from bapipe.simulator.simulate import simulate
from tests import ROOT

PROFILES = ROOT / "profiles" / "v100"
NO_GAP = "Gap: none; the plan is proven optimal in the searched space."

INTRA_LAYER = (
    "Intra-layer split: not searched; every device computes whole layers. To share layers among devices of a host, "
    "plan with the profile of such a group too (`bapipe estimate`)."
)


def slow_links(num_devices: int) -> Cluster:
    """V100s, two a host, on links of 10 Gb/s."""
    link = Bandwidth(bytes_per_s=1_250_000_000, latency_ns=50_000)
    devices = (
        Device(name=f"gpu{i}", host=f"host{i // 2}", kind="cuda", memory_bytes=17_179_869_184)
        for i in range(num_devices)
    )
    return Cluster(devices=tuple(devices), intra_host=link, inter_host=link)


@cache
def planned(model: str) -> tuple[Plan, dict[str, ModelProfile], PlanOptions, tuple[str, ...]]:
    profiles = {"cuda": read(PROFILES / f"{model}.json", ModelProfile)}
    options = PlanOptions(minibatch_size=512)
    plan = plan_once(profiles, slow_links(4), options)
    assert plan.certificate.proven_optimal
    return plan, profiles, options, explain(plan, profiles, options)


def test_data_parallelism_wins_for_resnet_50() -> None:
    plan, _, _, words = planned("resnet50")
    assert [stage.devices for stage in plan.stages] == [("gpu0", "gpu1", "gpu2", "gpu3")]
    assert words == (
        "Data parallelism: 4 devices run all layers and sum their gradients.",
        "Critical path of a step: compute of stage 0 (95%).",
        "Inter-layer partition: none; all layers are in one stage.",
        "Coarse-grained cuts: none; all layers are in one stage.",
        "Memory fine-tuning: not needed; no plan found is faster with more memory. gpu0 is the fullest device, with 35% of "
        "its limit.",
        INTRA_LAYER,
        "Fallback to data parallelism: used; no pipeline in the searched space is faster.",
        "Step time saved by 10 % more of one resource: speed of the 4 devices of stage 0 8.7%.",
        NO_GAP,
    )


def test_replicas_on_the_convolutions_win_for_vgg_16() -> None:
    plan, profiles, _, words = planned("vgg16")
    kind = {layer.name: layer.kind for layer in profiles["cuda"].layers}
    convolutions, dense = plan.stages
    assert (len(convolutions.devices), len(dense.devices)) == (3, 1)
    assert all("Linear" not in kind[name] for name in convolutions.layers)
    assert sum("Linear" in kind[name] for name in dense.layers) == 3
    assert words == (
        "A pipeline of 2 stages with replicas: stage 0 ('node2' to 'node18') on 3 devices, the other stage on one "
        "device.",
        "Critical path of a step: compute of stage 0 (98%).",
        "Inter-layer partition: the devices of stage 0 are busy longest (687.0 ms per step), those of stage 1 shortest "
        "(633.2 ms).",
        "Coarse-grained cuts: used; each micro-batch sends 0.803 MB over the cuts. Cuts that balance compute alone would "
        "send 3.21 MB over the cuts, and a step would be 30.7% slower.",
        "Memory fine-tuning: not needed; no plan found is faster with more memory. gpu3 is the fullest device, with 12% of "
        "its limit.",
        INTRA_LAYER,
        "Fallback to data parallelism: not used; 900.8 ms per step, 29.2% slower.",
        "Step time saved by 10 % more of one resource: speed of the 3 devices of stage 0 7.4%.",
        NO_GAP,
    )


def test_a_pipeline_wins_for_gnmt_8() -> None:
    plan, _, _, words = planned("gnmt8")
    assert [len(stage.devices) for stage in plan.stages] == [1, 1, 1, 1]
    assert words == (
        "A pipeline of 4 stages, one device each.",
        "Critical path of a step: compute of stage 3 (64%), compute of stage 1 (36%).",
        "Inter-layer partition: the devices of stage 3 are busy longest (417.9 ms per step), those of stage 2 shortest "
        "(277.7 ms).",
        "Coarse-grained cuts: used; each micro-batch sends 0.197, 0.197, 0.197 MB over the cuts. Cuts that balance compute "
        "alone would send 0.393, 0.197, 0.389 MB over the cuts, and a step would be 6.6% slower.",
        "Memory fine-tuning: not needed; no plan found is faster with more memory. gpu3 is the fullest device, with 25% of "
        "its limit.",
        INTRA_LAYER,
        "Fallback to data parallelism: not used; 1,251.7 ms per step, 2.9 times as long.",
        "Step time saved by 10 % more of one resource: speed of gpu3 5.8%, speed of gpu1 3.3%.",
        NO_GAP,
    )


@pytest.mark.parametrize("model", ["vgg16", "gnmt8"])
def test_the_time_balanced_baseline_has_its_stated_step_time(model: str) -> None:
    """The minimal largest stage time over all cuts, tried one by one, and its simulated step time."""
    plan, profiles, _, words = planned(model)
    other = time_balanced_plan(plan, profiles)
    assert other is not None
    measured = {
        layer.name: m.forward_ns + m.whole_backward_ns
        for layer, m in zip(profiles["cuda"].layers, profiles["cuda"].at(plan.microbatch_size), strict=True)
    }
    loads = [sum(measured[name] for name in stage.layers) / len(stage.devices) for stage in other.stages]
    assert max(loads) == min_max_load(list(measured.values()), [len(stage.devices) for stage in plan.stages])
    slower = simulate(other, profiles).step_ns / plan.prediction.step_ns - 1
    assert words[3].endswith(f"and a step would be {slower:.1%} slower.")


def min_max_load(times: list[int], counts: list[int]) -> float:
    if len(counts) == 1:
        return sum(times) / counts[0]
    ends = range(1, len(times) - len(counts) + 2)
    if len(counts) == 2:
        return min(max(sum(times[:end]) / counts[0], sum(times[end:]) / counts[1]) for end in ends)
    return min(max(sum(times[:end]) / counts[0], min_max_load(times[end:], counts[1:])) for end in ends)


@pytest.mark.parametrize("model", ["vgg16", "resnet50", "gnmt8"])
def test_suggested_changes_help(model: str) -> None:
    """With the named devices or links 10 % faster, the same plan is faster by the stated amount."""
    plan, profiles, options, _ = planned(model)
    cluster = plan.cluster

    def step_ns(changed: Cluster) -> int:
        return simulate(replace(plan, cluster=changed), profiles).step_ns

    def faster(*names: str) -> int:
        speeds = dict.fromkeys(names, 1.1)
        devices = tuple(replace(d, speed=speeds.get(d.name, 1.0)) for d in cluster.devices)
        return step_ns(replace(cluster, devices=devices))

    effects = {effect.resource: effect.step_ns for effect in sensitivity(plan, profiles, options)}
    wider = replace(cluster.intra_host, bytes_per_s=1_375_000_000)
    want = {f"speed of gpu{i}": faster(f"gpu{i}") for i in range(4)} | {
        f"speed of the {len(stage.devices)} devices of stage {s}": faster(*stage.devices)
        for s, stage in enumerate(plan.stages)
        if len(stage.devices) > 1
    }
    want["bandwidth of links within hosts"] = step_ns(replace(cluster, intra_host=wider))
    want["bandwidth of links between hosts"] = step_ns(replace(cluster, inter_host=wider))
    assert {name: ns for name, ns in effects.items() if "memory" not in name} == want
    rich = replace(cluster, devices=tuple(replace(d, memory_bytes=2**50) for d in cluster.devices))
    assert effects["unlimited memory"] == plan_once(profiles, rich, options).prediction.step_ns


def test_memory_limits_a_plan_exactly_when_more_of_it_makes_a_faster_one() -> None:
    profiles = {"cuda": read(PROFILES / "vgg16.json", ModelProfile)}
    seen = set()
    for limit in (1_600_000_000, 2_000_000_000, 4_000_000_000):
        options = PlanOptions(minibatch_size=64, memory_limit_bytes=limit)
        plan = plan_once(profiles, slow_links(2), options)
        rich = plan_once(profiles, slow_links(2), PlanOptions(minibatch_size=64))
        words = explain(plan, profiles, options)[4]
        limited = rich.prediction.step_ns < plan.prediction.step_ns
        text = f"Memory fine-tuning: used; with unlimited memory a step would take {rich.prediction.step_ns / 1e6:,.1f} ms. "
        assert words.startswith(text if limited else "Memory fine-tuning: not needed; no plan found is faster"), words
        seen.add(limited)
    assert seen == {True, False}
