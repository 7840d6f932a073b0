"""The order search over neighbouring partitions."""

from dataclasses import replace as replace_data
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Bandwidth
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan, check_stages
from bapipe.planner.action_order.improve_plan import _neighbours, improve_plan
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan_step import _with_searched_order, solve_partition
from bapipe.planner.results.searched_space import in_words
from bapipe.planner.results.solution import Solution
from bapipe.planner.search_request import SearchRequest
from bapipe.simulator.simulate import simulate, simulate_columns
from bapipe.simulator.stage_cost import build_stages
from tests.builders import MS, chain, devices
from tests.planner.results.test_work_bound import random_profiles
from tests.random_profiles import random_cluster, random_profile
from tests.step_time import plan_step_time


def leaves_for_w(profile: ModelProfile, name: str, num_bytes: int) -> ModelProfile:
    """The profile with what I of one layer leaves for W."""
    (measured,) = profile.measurements
    layers = tuple(
        replace(figures, gradient_stash_bytes=num_bytes) if layer.name == name else figures
        for layer, figures in zip(profile.layers, measured.layers, strict=True)
    )
    return replace(profile, measurements=(replace(measured, layers=layers),))


def with_layers(solution: Solution, profile: ModelProfile, *parts: tuple[str, ...]) -> Solution:
    """The plan with these layers in its stages."""
    stages = tuple(replace(stage, layers=names) for stage, names in zip(solution.stages, parts, strict=True))
    costs = build_stages(stages, {"a": profile}, solution.cluster, solution.microbatch_size)
    timeline = simulate_columns(solution.table, costs, solution.cluster)
    return replace_data(solution, stages=stages, prediction=timeline.prediction(solution.minibatch_size))


@pytest.mark.parametrize("left_bytes", [0, 1, 200, 201, 10**6])
def test_a_neighbour_that_fits_as_well_only_with_b_is_searched(left_bytes: int) -> None:
    """Layers of 3, 2, 2 and 3 ms, stashes of 100 bytes, room for 3 on the first device and for 4 on the second.

    With l2 in the second stage two micro-batches fit with B. What I of l2 leaves for W makes that one, or none, with I
    and W: one at a time takes 3 + 4 (4 + 3 + 3 + 4 + 4) = 75 ms and more, as long as 1F1B with l2 in the third stage.
    """
    profile = leaves_for_w(chain([3, 2, 2, 3], stash_bytes=100), "l2", left_bytes)
    options = PlanOptions(minibatch_size=4, num_stages=3, schedules=("1f1b",), replicas=False)
    solution = solve_partition(SearchRequest(profiles={"a": profile}, cluster=devices(3), options=options))
    limits = (300, 400, 10**9)
    start = with_layers(solution, profile, ("l0",), ("l1",), ("l2", "l3"))
    better = with_layers(solution, profile, ("l0",), ("l1", "l2"), ("l3",))
    assert better.prediction.step_ns < start.prediction.step_ns == 75 * MS
    assert better.prediction.ranks[1].peak_bytes == limits[1]
    improved = improve_plan(start, {"a": profile}, limits, 0.1)
    assert [stage.layers for stage in improved.stages] == [("l0",), ("l1", "l2"), ("l3",)]
    assert improved.prediction.step_ns <= better.prediction.step_ns
    assert improved.prediction.ranks[1].peak_bytes <= limits[1]


def test_stages_that_take_equally_long_are_tried_too() -> None:
    """No layer that moves alone leads there: the tensor at the cut in between takes a second."""
    profile = chain([1] * 6)
    (measured,) = profile.measurements
    layers = (replace(figures, output_bytes=(10**9 * (i == 1),)) for i, figures in enumerate(measured.layers))
    profile = replace(profile, measurements=(replace(measured, layers=tuple(layers)),))
    slow = Bandwidth(bytes_per_s=10**9, latency_ns=0)
    cluster = replace(devices(2), intra_host=slow, inter_host=slow)
    options = PlanOptions(minibatch_size=4, num_stages=2, schedules=("1f1b",), replicas=False, search_effort=0.1)
    request = SearchRequest(profiles={"a": profile}, cluster=cluster, options=options)
    names = tuple(layer.name for layer in profile.layers)
    start = with_layers(solve_partition(request), profile, names[:1], names[1:])
    improved = _with_searched_order(start, request)
    assert [stage.layers for stage in improved.stages] == [names[:3], names[3:]]
    assert improved.prediction.step_ns < start.prediction.step_ns
    assert "from equally long ones or from the best found for 1f1b" in in_words(improved.space)


@pytest.mark.parametrize("size", [None, 1])
def test_neighbours_whose_i_leaves_more_than_fits(size: int | None) -> None:
    random = Random(76)
    profiles = random_profiles(random)
    cluster = random_cluster(random, random.randint(2, 3), kinds=("a", "b"))
    options = PlanOptions(minibatch_size=4, microbatch_size=size, schedules=("1f1b", "search"), search_effort=0.1)
    plan = plan_step_time(profiles, cluster, options)
    assert simulate(plan, profiles).prediction(4) == plan.prediction
    assert plan.certificate.lower_bound_ns <= plan.prediction.step_ns


def test_a_named_schedule_with_replicas_is_kept_where_it_is_faster_than_any_order_without() -> None:
    """Two replicas take 2 (5 + 1) 3 = 36 ms; of stages with one device each, the first alone takes 4 x 15 = 60."""
    profiles = {"a": chain([5, 1])}
    for schedules in (("1f1b", "search"), ("search",)):
        options = PlanOptions(minibatch_size=4, schedules=schedules, search_effort=0.1)
        plan = plan_step_time(profiles, devices(2), options)
        assert [stage.devices for stage in plan.stages] == [("d0", "d1")]
        assert plan.prediction.step_ns == 36 * MS
        assert plan.certificate.proven_optimal
        assert "; any replicas, each with a micro-batch, " in plan.certificate.space
    said: list[int] = []
    plan_step_time(profiles, devices(2), options, progress=lambda _, best_ns, bound_ns: said.append(best_ns))
    assert said == sorted(said, reverse=True)  # not that of the search without replicas, which follows
    without = plan_step_time(profiles, devices(2), replace_data(options, replicas=False))
    assert without.prediction.step_ns >= 60 * MS
    assert "; no replicas, " in without.certificate.space


def test_a_searched_order_is_compared_with_named_schedules_with_replicas() -> None:
    """Never slower than the named schedules; what is slower is an alternative, and the space says which won."""
    won = {"search": 0, "named": 0}
    for seed in range(12):
        random = Random(seed)
        profiles = {"a": random_profile(random, 6)}
        cluster = random_cluster(random, 3)
        named, searched = (
            PlanOptions(minibatch_size=4, schedules=schedules, search_effort=0.1)
            for schedules in (("1f1b",), ("1f1b", "search"))
        )
        try:
            best = plan_step_time(profiles, cluster, named)
        except Infeasible:
            continue
        plan = plan_step_time(profiles, cluster, searched)
        assert plan.prediction.step_ns <= best.prediction.step_ns
        names = {a.name: a.step_ns for a in plan.alternatives}
        if plan.schedule == "search":
            assert plan.certificate.space.startswith("every order of F, B, I and W for these stages")
            assert best.prediction.step_ns in (names.get("1f1b"), names.get("1f1b with replicas"))
        else:
            # Of equally fast plans each search keeps the one that is preferred of those it has met.
            assert (plan.prediction.step_ns, plan.certificate.lower_bound_ns, plan.certificate.space) == (
                best.prediction.step_ns,
                best.certificate.lower_bound_ns,
                best.certificate.space,
            )
            assert names.get("search without replicas", plan.prediction.step_ns) >= plan.prediction.step_ns
        won["search" if plan.schedule == "search" else "named"] += 1
    assert min(won.values()) > 1


def test_neighbours_recompute_layers_that_they_have() -> None:
    """A layer that leaves a stage is not one of those that it recomputes; if these are all that is left, all are."""
    profile = chain([1, 1, 1, 1])
    stages = (
        StagePlan(layers=("l0", "l1", "l2"), devices=("d0",), recompute=True, recompute_layers=("l0", "l2")),
        StagePlan(layers=("l3",), devices=("d1",)),
    )
    (first, second), *others = _neighbours(stages, {"a": profile})
    assert not others
    assert (first.layers, first.recomputed, second.layers, second.recomputed) == (
        ("l0", "l1"),
        ("l0",),
        ("l2", "l3"),
        (),
    )
    for neighbour in _neighbours((first, second), {"a": profile}):
        check_stages(neighbour, devices(2))
        assert neighbour[0].recomputed == ("l0",)
