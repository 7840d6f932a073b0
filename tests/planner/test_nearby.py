"""Short searches of neighbouring points: their bounds hold, and their plans are as near them as they say."""

from random import Random

import pytest
from msgspec.structs import replace

from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner import nearby
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.make import judge
from bapipe.planner.nearby import MAX_GAP, Point, can_plan_nearby, plans_nearby
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices
from tests.random_profiles import random_cluster, random_profile
from tests.step_time import plan_step_time


def points_of(random: Random) -> list[Point]:
    """Returns the same devices with links of three bandwidths."""
    cluster = random_cluster(random, random.randrange(2, 4)).sequential
    options = PlanOptions(minibatch_size=4)
    links = [replace(cluster.intra_host, bytes_per_s=cluster.intra_host.bytes_per_s * factor) for factor in (1, 3, 9)]
    return [Point(cluster=replace(cluster, intra_host=link), options=options) for link in links]


def test_plans_and_bounds_enclose_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    num_plans = num_near = 0
    for seed in range(6):
        random = Random(seed)
        profiles, points = {"a": random_profile(random, 6)}, points_of(random)
        best_ns = [_best_ns(profiles, point) for point in points]
        for max_nodes in (0, 3, 10_000):
            monkeypatch.setattr(nearby, "MAX_NODES", max_nodes)
            for best, plan in zip(best_ns, plans_nearby(profiles, points, lambda number, plan: None), strict=True):
                if plan is None:
                    assert best is None or max_nodes < 10_000
                    continue
                assert isinstance(plan, Plan)
                assert best is not None
                assert plan.certificate.lower_bound_ns <= best <= plan.prediction.step_ns
                timeline = simulate(plan, profiles)
                assert timeline.step_ns == plan.prediction.step_ns
                assert judge(plan, profiles, timeline) == plan
                num_plans += 1
                num_near += plan.certificate.gap <= MAX_GAP
                assert max_nodes < 10_000 or plan.certificate.gap <= MAX_GAP
    assert num_plans > num_near >= 18


def _best_ns(profiles: dict[str, ModelProfile], point: Point) -> int | None:
    """The step of the best plan, None if nothing fits."""
    try:
        return plan_step_time(profiles, point.cluster, point.options).prediction.step_ns
    except Infeasible:
        return None


def test_the_plan_of_a_neighbour_with_more_micro_batches_leaves_no_replica_without_one() -> None:
    """With one micro-batch a second, slower replica takes no time, and the line of devices begins with the slower."""
    slow, fast = devices(2).devices
    cluster = replace(devices(2), devices=(slow, replace(fast, speed=1.1)))
    points = [Point(cluster=cluster, options=PlanOptions(minibatch_size=size)) for size in (2, 1)]
    plans = plans_nearby({"a": chain([1])}, points, lambda number, plan: None)
    assert [plan.stages[0].devices for plan in plans if isinstance(plan, Plan)] == [("d1", "d0"), ("d1",)]


def test_why_a_point_has_no_plan_is_said_beside_the_plans_of_the_others() -> None:
    profiles = {"a": random_profile(Random(5), 6)}
    cluster = devices(2)
    unknown = replace(cluster, devices=(replace(cluster.devices[0], kind="b"),))
    options = PlanOptions(minibatch_size=8)
    points = [Point(cluster=each, options=options) for each in (cluster, unknown, cluster)]
    first, refused, second = plans_nearby(profiles, points, lambda number, plan: None)
    assert isinstance(first, Plan)
    assert first == second
    assert isinstance(refused, BapipeError)
    assert "'b'" in str(refused)


@pytest.mark.parametrize(("schedule", "is_searched"), [("1f1b", True), ("interleaved-1f1b", False), ("search", False)])
def test_other_searches_are_left_to_the_planner(schedule: str, is_searched: bool) -> None:
    point = Point(cluster=devices(2), options=PlanOptions(minibatch_size=8, schedules=[schedule]))
    assert can_plan_nearby({"a": random_profile(Random(5), 6)}, [point]) == is_searched


@pytest.mark.parametrize(("num_layers", "is_searched"), [(1_000, True), (1_001, False)])
def test_long_models_are_left_to_the_planner(num_layers: int, is_searched: bool) -> None:
    """Of 5,000 layers a point took 100 s and 5 GB, and a plan takes 38 s and 0.3 GB."""
    point = Point(cluster=devices(8), options=PlanOptions(minibatch_size=8))
    assert can_plan_nearby({"a": chain([1] * num_layers)}, [point]) == is_searched
