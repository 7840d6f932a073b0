"""The planner's step time is the minimum over all pipelines, for chains of up to 12 layers and 5 devices."""

from random import Random

import pytest
from msgspec.structs import replace

from bapipe.errors import Infeasible
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.inputs.options import PlanOptions
from bapipe.simulator.simulate import simulate
from tests.oracles.all_pipelines import Question, least_step
from tests.random_profiles import random_cluster, random_profile
from tests.step_time import plan_step_time

NAMED = "gpipe", "1f1b", "1f1b+1", "eager-1f1b", "2f2b", "zb-h1", "zb-h2", "gpipe-2bp", "1f1b-2bp"


def random_question(seed: int, most_layers: int, most_devices: int) -> tuple[Question, list[int], list[str]]:
    """Unequal layers, devices and links; memory from too little to plenty; a third of the chains split badly."""
    random = Random(seed)
    measured = random.choice([(1, 2), (2, 4), (2,), (4,)])
    profile = random_profile(
        random, random.randint(max(1, most_layers - 4), most_layers), measured, splits_badly=seed % 3 == 1
    )
    cluster = random_cluster(random, random.randint(most_devices - 2, most_devices))
    stalls = seed % 4 == 0 and most_layers < 10
    plenty = random.random() < 0.3
    devices = tuple(
        replace(
            device,
            overlaps_transfers=device.overlaps_transfers or not stalls,
            memory_bytes=2**40 if plenty else random.randrange(15, 90) * len(profile.layers),
        )
        for device in cluster.devices
    )
    num_samples = 4 * random.randint(1, 2)
    question = Question(
        profile=profile,
        cluster=replace(cluster, devices=devices),
        limits=[device.memory_bytes for device in devices],
        minibatch_size=num_samples,
        replicas=random.random() < 0.8,
        recompute=random.random() < 0.7,
    )
    sizes = [size for size in range(measured[0], measured[-1] + 1) if num_samples % size == 0]
    return question, sizes, ["1f1b", "gpipe"] if seed % 2 else random.sample(NAMED, 2)


def planned(question: Question, schedules: list[str]) -> Plan | None:
    options = PlanOptions(
        minibatch_size=question.minibatch_size,
        schedules=schedules,
        replicas=question.replicas,
        recompute=question.recompute,
    )
    try:
        return plan_step_time({"a": question.profile}, question.cluster, options)
    except Infeasible:
        return None


@pytest.mark.parametrize(
    ("first", "count", "most_layers", "most_devices"),
    [(0, 30, 6, 3), (1000, 30, 6, 3), (2000, 7, 9, 4), (2500, 7, 9, 4), (3000, 3, 12, 5), (3500, 4, 12, 5)],
)
def test_no_pipeline_is_faster(first: int, count: int, most_layers: int, most_devices: int) -> None:
    seen = bound_by_memory = 0
    for seed in range(first, first + count):
        question, sizes, schedules = random_question(seed, most_layers, most_devices)
        best, plan = least_step(question, sizes, schedules), planned(question, schedules)
        assert (plan and plan.prediction.step_ns) == (best and best.step_ns), seed
        if plan is None or best is None:
            continue
        assert plan.certificate.proven_optimal
        assert simulate(plan, {"a": question.profile}).prediction(plan.minibatch_size) == plan.prediction
        seen += best.num_fitting
        bound_by_memory += best.num_fitting < best.num_pipelines / 2
    assert seen > 20 * count
    assert bound_by_memory > count / 8


def _with_large_stashes(profile: ModelProfile) -> ModelProfile:
    (measured,) = profile.measurements
    layers = tuple(replace(layer, stash_bytes=10 * layer.stash_bytes) for layer in measured.layers)
    return replace(profile, measurements=(replace(measured, layers=layers),))


def test_no_pipeline_with_other_recomputed_layers_is_faster() -> None:
    """Memory for a part of the stashes only, so that most of the best plans recompute some layers."""
    partly = 0
    for seed in range(24):
        random = Random(seed)
        profile, cluster = _with_large_stashes(random_profile(random, 6, (1,))), random_cluster(random, 2)
        stash = sum(m.stash_bytes for m in profile.at(1))
        static = sum(2 * layer.param_bytes + layer.optimizer_state_bytes for layer in profile.layers)
        devices = tuple(
            replace(device, memory_bytes=static + int(stash * random.uniform(1, 3))) for device in cluster.devices
        )
        question = Question(
            profile=profile,
            cluster=replace(cluster, devices=devices),
            limits=[device.memory_bytes for device in devices],
            minibatch_size=6,
        )
        schedules = random.sample(NAMED, 1)
        best, plan = least_step(question, [1], schedules), planned(question, schedules)
        assert (plan and plan.prediction.step_ns) == (best and best.step_ns), seed
        if plan is not None:
            assert plan.certificate.proven_optimal
            assert simulate(plan, {"a": profile}).prediction(6) == plan.prediction
            partly += any(0 < len(stage.recomputed) < len(stage.layers) for stage in plan.stages)
    assert partly >= 6
