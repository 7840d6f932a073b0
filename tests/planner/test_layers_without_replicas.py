"""Layers that keep values between forwards: their stages get no replicas from any search, nor by hand."""

from itertools import combinations, pairwise, product

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices

CLUSTER = devices(3, bytes_per_s=10**6)
NAMES = ("l0", "l1", "l2", "l3", "l4")


def profile(without: str | None) -> ModelProfile:
    """Five layers of unequal times; one may allow no replicas."""
    made = chain([2, 3, 9, 2, 1], param_bytes=10, stash_bytes=10, output_bytes=100)
    layers = (replace(layer, no_replicas=True) if layer.name == without else layer for layer in made.layers)
    return replace(made, layers=tuple(layers))


def num_devices(plan: Plan, layer: str) -> int:
    return next(len(stage.devices) for stage in plan.stages if layer in stage.layers)


def by_hand(without: str) -> list[int]:
    """The step time of every plan of up to three stages in which the stage of one layer has one device."""
    steps = []
    for num_stages in (1, 2, 3):
        for cuts in combinations(range(1, len(NAMES)), num_stages - 1):
            for sizes in product((1, 2, 3), repeat=num_stages):
                ends = [sum(sizes[:s]) for s in range(num_stages + 1)]
                groups = [[f"d{i}" for i in range(a, b)] for a, b in pairwise(ends)]
                bounds = (0, *cuts, len(NAMES))
                has_layer = [without in NAMES[a:b] for a, b in pairwise(bounds)]
                if ends[-1] > 3 or any(h and len(group) > 1 for h, group in zip(has_layer, groups, strict=True)):
                    continue
                made = bapipe.make(
                    profile(without), CLUSTER, minibatch_size=6, microbatch_size=1, cuts=cuts, devices=groups,
                    schedule="1f1b",
                )  # fmt: skip
                steps.append(made.prediction.step_ns)
    return steps


@pytest.mark.parametrize("without", ["l0", "l2"])
def test_the_best_plan_without_replicas_of_a_layer_is_found(without: str) -> None:
    plan = bapipe.plan(profile(without), CLUSTER, minibatch_size=6, microbatch_size=1, schedules=["1f1b"])
    assert num_devices(plan, without) == 1
    assert plan.prediction.step_ns == min(by_hand(without))
    assert plan.certificate.proven_optimal
    assert "data-parallel" not in [alternative.name for alternative in plan.alternatives]


def test_a_layer_has_no_replicas_among_many_devices() -> None:
    options = PlanOptions(minibatch_size=64, schedules=["1f1b"])
    on_all = LinePlan(cuts=(0, 5), counts=(40,), schedule="1f1b", microbatch_size=1)
    alone = LinePlan(cuts=(0, 2, 3, 5), counts=(20, 1, 19), schedule="1f1b", microbatch_size=1)
    for without, is_allowed in ((None, True), ("l2", False)):
        line = DeviceLine({"a": profile(without)}, devices(40), options)
        assert (line.time(on_all) is not None) == is_allowed
        assert line.time(alone) is not None


def test_searches_for_throughput_give_a_layer_no_replicas() -> None:
    assert num_devices(bapipe.plan(profile(None), CLUSTER, minibatch_size=6, objective="throughput"), "l2") > 1
    slow = replace(CLUSTER, devices=(*CLUSTER.devices[:2], replace(CLUSTER.devices[2], speed=0.9)))
    for cluster in (CLUSTER, slow):
        plan = bapipe.plan(profile("l2"), cluster, minibatch_size=6, microbatch_size=1, objective="throughput")
        assert num_devices(plan, "l2") == 1
        assert plan.prediction.load_ns == 6 * 9 * 3 * 10**6  # F and B of six micro-batches of the slowest layer


def test_a_plan_by_hand_with_replicas_of_such_a_layer_is_refused() -> None:
    with pytest.raises(BapipeError, match="stage 1 has 2 replicas and layer 'l2', in which a forward leaves values"):
        bapipe.make(profile("l2"), CLUSTER, minibatch_size=6, microbatch_size=1, cuts=[2], devices=["d0", ["d1", "d2"]])
