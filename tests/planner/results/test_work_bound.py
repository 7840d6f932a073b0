"""Bounds without a search: never above the simulated step of any plan, and what they add to one another."""

from collections.abc import Sequence
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.work_bound import has_gradient_to_the_end, step_bound_ns, work_bound_ns
from bapipe.schedules import LOOPED
from tests.builders import MS, chain, devices
from tests.oracles.exhaustive_layouts import layouts
from tests.random_graphs import branching_profile
from tests.random_profiles import random_cluster, random_profile, with_host_times, with_tensors_of
from tests.step_time import plan_step_time

SPLIT = ("zb-h1", "zb-h2", "gpipe-2bp", "zb-v", "dualpipe-v", "v-min")


def without_gradients(random: Random, profile: ModelProfile, share: float) -> ModelProfile:
    """The profile with that share of the tensors not having gradients."""
    layers = tuple(
        replace(layer, no_gradient=tuple(name for name in layer.outputs if random.random() < share))
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def random_profiles(random: Random) -> dict[str, ModelProfile]:
    """Profiles of one small model on two kinds of devices."""
    num_layers = random.randint(2, 5)
    if random.random() < 0.3:
        first = branching_profile(random, num_layers, (1, 2, 4))
    else:
        first = random_profile(random, num_layers, splits_badly=random.random() < 0.5)
    first = without_gradients(random, first, random.choice([0, 0.2, 0.6]))
    others = random_profile(random, num_layers, splits_badly=random.random() < 0.5)
    measurements = with_tensors_of(others.measurements, first.measurements)
    second = replace(first, device=replace(first.device, kind="b"), measurements=measurements)
    return {"a": first, "b": with_host_times(random, second) if random.random() < 0.3 else second}


def simulated_ns(random: Random, options: PlanOptions, sizes: Sequence[int]) -> tuple[int, int, int]:
    """The shortest step of all layouts of a random problem, fitting or not; the bound of all plans; that of the work."""
    profiles = random_profiles(random)
    cluster = random_cluster(random, random.randint(1, 3), kinds=("a", "b"))
    problems = build_space(profiles, cluster, options, sizes=sizes).problems
    steps = [problem.simulate(layout).step_ns for problem in problems for layout in layouts(problem)]
    bounds = step_bound_ns(profiles, cluster, options), work_bound_ns(profiles, cluster, options.minibatch_size)
    return min(steps, default=2**62), *bounds


@pytest.mark.parametrize("schedules", [("1f1b", "gpipe"), SPLIT, tuple(LOOPED), ("1f1b", "zb-h1")])
def test_no_layout_is_faster_than_the_bound_of_all_plans(schedules: tuple[str, ...]) -> None:
    larger = met = 0
    for seed in range(36):
        random = Random(seed)
        sizes = random.choice([(4,), (2, 4), (1,), (1, 2)])
        size = sizes[0] if len(sizes) == 1 else None
        options = PlanOptions(minibatch_size=4, microbatch_size=size, schedules=schedules)
        step_ns, bound_ns, work_ns = simulated_ns(random, options, (1, 2, 4) if size is None else sizes)
        assert bound_ns <= step_ns
        assert bound_ns >= work_ns
        larger += bound_ns > work_ns
        met += bound_ns == step_ns
    assert larger > 6
    assert met > 0


def test_one_micro_batch_on_devices_alike_takes_its_trip() -> None:
    """F and B of 3 + 1 + 4 layers, 3 ms for each ms of F, on devices of speed 2 and 1."""
    profiles, cluster = {"a": chain([3, 1, 4])}, devices(3)
    faster = replace(cluster, devices=(replace(cluster.devices[0], speed=2.0), *cluster.devices[1:]))
    options = PlanOptions(minibatch_size=1)
    assert step_bound_ns(profiles, cluster, options) == plan_step_time(profiles, cluster, options).prediction.step_ns
    assert step_bound_ns(profiles, cluster, options) == 24 * MS
    assert 12 * MS - 5 <= step_bound_ns(profiles, faster, options) <= 12 * MS


def test_of_split_backwards_only_what_earlier_layers_wait_for_is_on_the_way_back() -> None:
    """Of B, which takes twice as long as F, I is the half; no gradient leaves l1, so nothing waits for those before."""
    whole = chain([3, 1, 4])
    frozen = replace(whole, layers=tuple(replace(x, no_gradient=x.outputs * (x.name == "l1")) for x in whole.layers))
    one_f1b, split = (PlanOptions(minibatch_size=1, schedules=names) for names in (("1f1b",), ("1f1b", "zb-h1")))
    cluster = devices(3)
    assert step_bound_ns({"a": whole}, cluster, one_f1b) == step_bound_ns({"a": frozen}, cluster, one_f1b) == 24 * MS
    assert step_bound_ns({"a": whole}, cluster, split) == (8 + 8) * MS
    assert step_bound_ns({"a": frozen}, cluster, split) == (8 + 4) * MS
    searched = PlanOptions(minibatch_size=1, schedules=("1f1b", "search"))
    assert step_bound_ns({"a": frozen}, cluster, searched) == (8 + 4) * MS


def test_gradients_come_from_every_end_or_the_layer_may_lie_before_a_cut_without_them() -> None:
    profile = chain([1] * 4)
    ends = {"l0": ("x",), "l1": ("l0",), "l2": ("l0",), "l3": ("l1",)}  # l2 and l3 are used by none
    layers = [replace(layer, inputs=ends[layer.name], outputs=(layer.name,)) for layer in profile.layers]
    assert has_gradient_to_the_end(layers) == [True, False, False, False]
    layers[1] = replace(layers[1], no_gradient=("l1",))
    assert has_gradient_to_the_end(layers) == [False, False, False, False]
    in_turn = [replace(layer, outputs=(f"t{i}",), inputs=(f"t{i - 1}",)) for i, layer in enumerate(profile.layers)]
    assert has_gradient_to_the_end(in_turn) == [True] * 4


def test_every_search_proves_at_least_the_bound_of_all_plans() -> None:
    many = devices(64)
    for schedules in (("1f1b", "gpipe"), ("1f1b", "search"), ("zb-v",), ("zb-h1",)):
        for cluster in (devices(2), devices(3), many):
            options = PlanOptions(minibatch_size=4, schedules=schedules, time_limit_s=0.0)
            profiles = {"a": chain([3, 1, 4, 1, 5, 9], output_bytes=10**4)}
            plan = plan_step_time(profiles, cluster, options, deadline=Deadline(0.0))
            bound_ns = step_bound_ns(profiles, cluster, options)
            assert bound_ns <= plan.certificate.lower_bound_ns <= plan.prediction.step_ns


@pytest.mark.parametrize(
    ("replicas", "minibatch_size", "step_ms"), [(False, 6, 6 * 6 / 4), (True, 2, 2 * 6 / (4 + 2)), (True, 3, 3 * 6 / 7)]
)
def test_the_work_of_few_layers_is_shared_by_as_many_devices_as_a_plan_can_have(
    replicas: bool, minibatch_size: int, step_ms: float
) -> None:
    """One layer of 6 ms on devices of speed 4, 2, 1, 1 and 1: without replicas on one, else on one a micro-batch."""
    speeds = [1.0, 2.0, 4.0, 1.0, 1.0]
    unlike = tuple(replace(device, speed=v) for device, v in zip(devices(5).devices, speeds, strict=True))
    options = PlanOptions(minibatch_size=minibatch_size, schedules=("gpipe",), replicas=replicas)
    bound_ns = step_bound_ns({"a": chain([2])}, replace(devices(5), devices=unlike), options)
    lost_ns = 3 * minibatch_size  # rounding
    assert step_ms * MS - lost_ns <= bound_ns <= step_ms * MS
