"""Goals: the least memory, the fewest devices and the most copies of a block equal those over all plans."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

import bapipe
from bapipe.cli import main
from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.certificate import Certificate, MemoryLimit, ReachedGoal, certify
from bapipe.formats.cluster import Cluster
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.plan import Plan, with_certificate
from bapipe.formats.profile import DeviceKind, ModelProfile, ProfilesByKind
from bapipe.formats.settings import Settings
from bapipe.planner.baselines import compared_with
from bapipe.planner.branch_and_bound.space import search_space
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.goal_question import Answer, Question, has_same_plans
from bapipe.planner.goal_search import fewest_with_plan, first_with_plan, reach_goal
from bapipe.planner.inputs.goal import Goal
from bapipe.planner.inputs.options import SEARCH, PlanOptions
from bapipe.planner.inputs.profiles import by_kind
from bapipe.planner.inputs.repeat_block import block_layers, repeat_block
from bapipe.planner.inputs.sub_clusters import sub_clusters
from bapipe.planner.results.searched_space import (
    IF_ALL_LATER,
    MOST_AT_CUTS,
    ActionOrderSpace,
    ChosenDevicesSpace,
    GroupingsSpace,
    LinearizationsSpace,
    ParetoSpace,
    PartitionSpace,
    SearchedSpace,
    ThroughputSpace,
    in_words,
    left_out,
    memory_limit,
)
from bapipe.planner.results.solution import Solution
from bapipe.report.plans import proof
from bapipe.simulator.simulate import simulate
from bapipe.units import decimal
from tests.builders import MS, chain, devices
from tests.oracles.exhaustive_layouts import exhaustive, layouts
from tests.random_profiles import random_cluster, random_profile
from tests.step_time import plan_step_time, step_time_solution

SEEDS = range(6)


PARTITIONS = PartitionSpace(
    num_layers=2,
    num_devices=2,
    stage_counts=(1, 2),
    device_counts=(1, 2),
    device_order=", in any order",
    microbatch_sizes=(1,),
    schedules=("1f1b",),
    replicas=True,
    recompute=True,
    constraints=(),
)
LOADS = ThroughputSpace(
    num_layers=2,
    num_devices=2,
    num_downsets=3,
    max_downsets=10,
    has_all_device_counts=True,
    has_gaps=True,
    counts_later=False,
    is_fastest_first=False,
    keeps_tied=False,
    microbatch_sizes=(1,),
)


def search(profiles: Any, cluster: Cluster, options: PlanOptions, deadline: Deadline, progress: Any) -> Solution:
    """The search along the profile's order alone, which is what the enumeration has."""
    return step_time_solution(by_kind(profiles), cluster, options, deadline=deadline, progress=progress)


def found(plan: Plan, *, space: SearchedSpace = PARTITIONS, asked_bound_ns: int | None = None) -> Solution:
    """What a search has found whose plan this is, and whose bound is that of the plan's certificate."""
    return Solution(
        profiles={"a": chain([1])},  # any: a plan has no more of it than its name
        cluster=plan.cluster,
        minibatch_size=plan.minibatch_size,
        microbatch_size=plan.microbatch_size,
        schedule=plan.schedule,
        table=plan.table,
        stages=plan.stages,
        prediction=plan.prediction,
        lower_bound_ns=plan.certificate.lower_bound_ns,
        space=space,
        asked_bound_ns=asked_bound_ns,
        alternatives=plan.alternatives,
    )


def reached(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions, goal: Goal) -> Plan:
    return reach_goal(profiles, cluster, options, goal, search=search, deadline=UNLIMITED)


def small_problem(seed: int) -> tuple[dict[str, ModelProfile], Cluster, PlanOptions]:
    random = Random(seed)
    profiles = {"a": random_profile(random, random.randint(2, 4))}
    return (
        profiles,
        random_cluster(random, random.randint(2, 3)),
        PlanOptions(minibatch_size=4, schedules=("1f1b",), recompute=False),
    )


def every_plan(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> list[tuple[int, int, int]]:
    """Returns step time, peak memory and number of devices of every plan that fits."""
    found = []
    for problem in search_space(profiles, cluster, options).problems:
        for layout in layouts(problem):
            if not problem.fits(layout):
                continue
            timeline = problem.simulate(layout)
            peak = max(memory.total for memory in timeline.memory)
            num_devices = len(
                {rank for placement in problem.compiled(layout.placements)[0].devices for rank in placement}
            )
            found.append((timeline.step_ns, peak, num_devices))
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_and_devices_are_the_least_of_all_plans_that_are_fast_enough(seed: int) -> None:
    profiles, cluster, options = small_problem(seed)
    plans = every_plan(profiles, cluster, options)
    if not plans:
        with pytest.raises(Infeasible):
            reached(profiles, cluster, options, Goal(least="memory"))
        return
    within = Random(seed).choice([0.0, 0.1, 0.5])
    fast = [plan for plan in plans if plan[0] <= min(plans)[0] * (1 + decimal(within))]
    light = reached(profiles, cluster, options, Goal(least="memory", within=within))
    few = reached(profiles, cluster, options, Goal(least="devices", within=within))
    for plan, least in ((light, min(peak for _, peak, _ in fast)), (few, min(num for _, _, num in fast))):
        goal = plan.certificate.goal
        assert goal is not msgspec.UNSET
        assert (goal.value, goal.bound) == (least, least)
        assert goal.limit_ns is not msgspec.UNSET
        assert plan.prediction.step_ns == simulate(plan, profiles).step_ns <= goal.limit_ns
    assert peak_bytes(light) == light.certificate.goal.value
    assert light.prediction.step_ns == min(step for step, peak, _ in fast if peak == light.certificate.goal.value)
    assert light.certificate.lower_bound_ns <= min(plans)[0]
    assert len({name for stage in few.stages for name in stage.devices}) == few.certificate.goal.value
    fastest = min(step for step, _, num in fast if num == few.certificate.goal.value)
    assert few.prediction.step_ns == few.certificate.lower_bound_ns == fastest


@pytest.mark.parametrize("memory_bytes", [40, 60, 95])
def test_one_copy_more_than_the_largest_model_fits_nowhere(memory_bytes: int) -> None:
    profile = chain([1, 2, 1], param_bytes=6, stash_bytes=4, output_bytes=2)
    cluster, options = devices(2, memory_bytes=memory_bytes), PlanOptions(minibatch_size=2)
    plan = reached({"a": profile}, cluster, options, Goal(largest="l1"))
    goal = plan.certificate.goal
    assert goal is not msgspec.UNSET
    assert goal.bound == goal.value
    for copies, fits in ((goal.value, True), (goal.value + 1, False)):
        problems = search_space({"a": repeat_block(profile, "l1", copies)}, cluster, options).problems
        assert (exhaustive(problems) is not None) == fits
    assert simulate(plan, {"a": repeat_block(profile, "l1", goal.value)}).step_ns == plan.prediction.step_ns


def test_the_largest_model_says_if_no_larger_one_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 12 bytes, half of them gradients, of which a model may have 5."""
    monkeypatch.setattr("bapipe.planner.goal_search.MAX_LAYERS", 5)
    profile, options = {"a": chain([1, 1, 1], param_bytes=6)}, PlanOptions(minibatch_size=1)

    def largest(memory_bytes: int) -> Certificate:
        return reached(profile, devices(1, memory_bytes=memory_bytes), options, Goal(largest="l1")).certificate

    many, few = largest(10**6), largest(4 * 12)
    assert many.goal == ReachedGoal(quantity="copies", value=3, bound=0, of="l1", max_layers=5)
    assert "3 x l1 (no more were tried: models of more than 5 layers are not searched)" in proof(many)
    assert few.goal == ReachedGoal(quantity="copies", value=2, bound=2, of="l1")
    assert "2 x l1 (proven: 3 do not fit)" in proof(few)


def test_a_model_with_a_repeated_block_is_planned_like_one_written_out() -> None:
    profile, written = chain([1, 2, 3, 4], output_bytes=8), chain([1, 2, 3, 2, 3, 4], output_bytes=8)
    shape = LayerShape(in_channels=4, out_channels=4, elementwise_inputs=("t1",))
    layers = tuple(msgspec.structs.replace(x, shape=shape) if x.name == "l1" else x for x in profile.layers)
    repeated = repeat_block(msgspec.structs.replace(profile, layers=layers), "l1..l2", 2)
    assert [x.shape.elementwise_inputs for x in repeated.layers if x.shape is not msgspec.UNSET] == [("t1",), ("t3",)]
    assert [layer.name for layer in repeated.layers] == ["l0", "l1", "l2", "l1#2", "l2#2", "l3"]
    assert [layer.inputs for layer in repeated.layers[3:]] == [("t3",), ("t2#2",), ("t3#2",)]
    options = PlanOptions(minibatch_size=4)
    steps = [bapipe.plan(one, devices(2), options).prediction.step_ns for one in (repeated, written)]
    assert steps[0] == steps[1]
    assert block_layers(written, "l1..l3") == range(1, 4)


def test_the_ends_of_a_block_may_be_what_names_begin_with() -> None:
    profile = chain([1] * 7)
    names = ["embed", "b0.l0", "b0.l1", "b1.l0", "b1.l1", "b10", "head"]
    layers = zip(profile.layers, names, strict=True)
    profile = msgspec.structs.replace(
        profile, layers=tuple(msgspec.structs.replace(x, name=name) for x, name in layers)
    )
    for block, wanted in {
        "b0": range(1, 3),
        "b0..b1": range(1, 5),
        "b0..b0": range(1, 3),
        "b0.l1..b1": range(2, 5),
        "embed..b1.l0": range(4),
        "b1..b10": range(3, 6),
    }.items():
        assert block_layers(profile, block) == wanted
    with pytest.raises(BapipeError, match=r"ends before it begins: layer 'b0.l1' comes before 'b1.l0'; want 'b0..b1'"):
        block_layers(profile, "b1..b0")


def test_a_fast_enough_model_is_the_largest_by_the_work_that_it_adds() -> None:
    # One device: a step is the sum of all layers' F and B, 3 ms for each millisecond of F, four times.
    profile = chain([1, 2, 1])
    plan = bapipe.plan(profile, devices(1), minibatch_size=4, goal=Goal(largest="l1", min_throughput=25))
    goal = plan.certificate.goal
    assert goal is not msgspec.UNSET
    assert goal.limit_ns == 160 * MS
    assert (goal.value, goal.bound) == (5, 5)  # 4 * 3 * (2 + 2 * 5) = 144 ms, with a copy more 168 ms
    assert plan.prediction.step_ns == 144 * MS


@pytest.mark.parametrize("forward_ms", range(1, 20))
def test_plans_just_as_slow_as_may_be_are_fast_enough(forward_ms: int) -> None:
    def plan_for(goal: Goal | None) -> Plan:
        return bapipe.plan(chain([forward_ms]), devices(1), minibatch_size=7, goal=goal)

    def limit_ns(goal: Goal) -> object:
        return plan_for(goal).certificate.goal.limit_ns  # type: ignore[union-attr]

    fastest = plan_for(None).prediction
    assert limit_ns(Goal(least="devices", within=0.15)) == fastest.step_ns * 115 // 100
    assert limit_ns(Goal(least="devices", min_throughput=fastest.samples_per_s)) == fastest.step_ns
    with pytest.raises(Infeasible):
        plan_for(Goal(least="devices", min_throughput=fastest.samples_per_s * (1 + 1e-9)))


def test_a_throughput_that_every_plan_reaches_is_no_limit() -> None:
    plan = bapipe.plan(chain([1]), devices(1), minibatch_size=1, goal=Goal(least="devices", min_throughput=1e-300))
    assert plan.certificate.goal == ReachedGoal(quantity="devices", value=1, bound=1)


def test_the_memory_of_a_goal_is_what_the_plan_needs() -> None:
    """The searches under lower limits have ended too early; the last one, under the limit reached, finds less."""
    profile = chain([1, 1], stash_bytes=5000)
    heavy = bapipe.plan(profile, devices(1), minibatch_size=4, schedules="gpipe")
    light = bapipe.plan(profile, devices(2), minibatch_size=4)
    assert peak_bytes(light) < peak_bytes(heavy)

    def search(profiles: Any, cluster: Cluster, options: PlanOptions, *_: object) -> Solution:
        if options.memory_limit_bytes is None:
            return found(heavy)
        if options.memory_limit_bytes == peak_bytes(heavy):
            return found(light)
        raise OutOfTime("ended")

    options = PlanOptions(minibatch_size=4)
    plan = reach_goal(profile, devices(2), options, Goal(least="memory"), search=search, deadline=Deadline(None))
    assert plan.stages == light.stages
    assert plan.certificate.goal == ReachedGoal(quantity="memory", value=peak_bytes(light), bound=0)


def test_the_first_problem_with_a_plan_is_found_from_every_place() -> None:
    known = found(bapipe.plan(chain([1]), devices(1), minibatch_size=1))
    for first in range(20):
        for undecided in ((), (first - 1,), (first - 1, first - 2)):

            def ask(number: int, first: int = first, undecided: tuple[int, ...] = undecided) -> Answer:
                return Answer(solution=known) if number >= first else Answer(is_refuted=number not in undecided)

            for stride in (1, 10):
                _, value, bound = first_with_plan(range(20), known, ask, lambda _, asked: asked, first_stride=stride)
                assert value == first
                assert bound == first if not undecided else bound <= first
                assert bound - 1 not in undecided or not bound  # what comes before the bound is refuted


def on_devices(num: int) -> Solution:
    """A plan of one layer and stage for each of so many devices."""
    return found(bapipe.plan(chain([1] * num), devices(num), minibatch_size=1, num_stages=num, replicas=False))


@pytest.mark.parametrize(
    ("few", "undecided", "covering", "value", "bound"),
    [
        *(({9}, set(), covering, 9, 9) for covering in (0, 1, 6, 9)),
        *(({7, 9}, set(), covering, 7, 7) for covering in (0, 1, 6, 7, 9)),
        *(({3, 9}, set(), covering, 3, 3) for covering in (0, 2, 3, 6, 9)),
        *(({9}, {6}, covering, 9, 6) for covering in (0, 5, 6)),
        ({9}, {6}, 9, 9, 9),  # 8 devices are refuted with all fewer
        ({7, 9}, {6}, 7, 7, 5),  # 4 devices are refuted with all fewer, and 5 are not asked about
    ],
)
def test_more_devices_refute_fewer_only_where_they_have_all_plans_of_these(
    few: set[int], undecided: set[int], covering: int, value: int, bound: int
) -> None:
    few = few | {number for number in range(1, covering + 1) if number > min(few)}  # these have the plans of fewer

    def ask(number: int) -> Answer:
        return Answer(solution=on_devices(min(few))) if number in few else Answer(is_refuted=number not in undecided)

    _, fewest, not_refuted = fewest_with_plan(range(1, 10), covering, on_devices(9), ask)
    assert (fewest, not_refuted) == (value, bound)


def test_each_number_of_unlike_devices_that_are_too_many_for_all_orders_is_searched() -> None:
    """Nine unlike devices and eight are tried in some orders, seven in all: there the only other plan is."""
    unlike = tuple(
        msgspec.structs.replace(device, speed=1.0 + rank / 10) for rank, device in enumerate(devices(9).devices)
    )
    asked = set()

    def search(_: Any, cluster: Cluster, *__: object) -> Solution:
        asked.add(len(cluster.devices))
        if len(cluster.devices) in (7, 9):
            return on_devices(len(cluster.devices))
        raise Infeasible("none", is_proven=True)

    cluster, options = msgspec.structs.replace(devices(9), devices=unlike), PlanOptions(minibatch_size=1)
    plan = reach_goal(chain([1] * 9), cluster, options, Goal(least="devices"), search=search, deadline=Deadline(None))
    assert plan.certificate.goal == ReachedGoal(quantity="devices", value=7, bound=7)
    assert asked >= {6, 7, 8}


def test_what_is_not_decided_is_not_proven() -> None:
    plan = bapipe.plan(chain([1, 2, 1]), devices(2), minibatch_size=4, goal=Goal(least="devices", within=1))
    assert "proven" in proof(plan.certificate)
    ended = Deadline(0)
    with_naive = bapipe.plan(
        chain([1, 2, 1], param_bytes=9), devices(2), minibatch_size=4, goal=Goal(least="memory"), deadline=ended
    )
    assert with_naive.certificate.goal.bound == 0  # type: ignore[union-attr]
    assert "(it is not known whether one needs less)" in proof(with_naive.certificate)


@pytest.mark.parametrize(
    ("reached", "words"),
    [
        (
            ReachedGoal(quantity="memory", value=2**20, bound=2**20),
            "1.00 MiB a device (proven: no plan of the searched space needs less)",
        ),
        (
            ReachedGoal(quantity="memory", value=2**30, bound=2**20),
            "(proven: none of the searched space needs less than 1.00 MiB)",
        ),
        (ReachedGoal(quantity="memory", value=2**20, bound=5), "(it is not known whether one needs less)"),
        (ReachedGoal(quantity="devices", value=1, bound=1), "1 (proven: no plan of the searched space needs fewer)"),
        (
            ReachedGoal(quantity="devices", value=3, bound=2),
            "3 (proven: none of the searched space needs fewer than 2)",
        ),
        (ReachedGoal(quantity="devices", value=3, bound=1), "3 (it is not known whether one needs fewer)"),
    ],
)
def test_only_what_is_proven_of_a_goal_is_said(reached: ReachedGoal, words: str) -> None:
    certificate = bapipe.plan(chain([1]), devices(1), minibatch_size=1).certificate
    assert words in proof(msgspec.structs.replace(certificate, goal=reached))


@pytest.mark.parametrize(("num_stages", "fewest"), [(2, 1), (4, 2)])
def test_a_device_has_two_stages_of_a_looped_schedule(num_stages: int, fewest: int) -> None:
    options = PlanOptions(minibatch_size=4, schedules=("interleaved-1f1b",), num_stages=num_stages)
    plan = bapipe.plan(chain([1, 2, 1, 3, 1]), devices(3), replace(options, goal=Goal(least="devices")))
    goal = plan.certificate.goal
    assert goal is not msgspec.UNSET
    assert (goal.value, goal.bound) == (fewest, fewest)


@pytest.mark.parametrize("seed", range(6))
def test_every_choice_of_devices_is_like_one_of_those_tried(seed: int) -> None:
    random = Random(seed)
    cluster = replace_hosts(
        devices(5), [random.randrange(3) for _ in range(5)], [random.choice([1.0, 2.0]) for _ in range(5)]
    )
    for num in range(1, 6):
        parts = sub_clusters(cluster, num, [1.0] * 5)
        tried = [shape([cluster.index[d.name] for d in part.devices], cluster) for part in parts.clusters]
        assert parts.has_all
        assert len(set(tried)) == len(tried)
        assert set(tried) == {shape(ranks, cluster) for ranks in combinations(range(5), num)}


def replace_hosts(cluster: Cluster, hosts: list[int], speeds: list[float]) -> Cluster:
    changed = tuple(
        msgspec.structs.replace(device, host=f"h{host}", speed=speed)
        for device, host, speed in zip(cluster.devices, hosts, speeds, strict=True)
    )
    slow = msgspec.structs.replace(cluster.inter_host, latency_ns=99)
    return msgspec.structs.replace(cluster, devices=changed, inter_host=slow)


def shape(ranks: Any, cluster: Cluster) -> tuple[tuple[float, ...], ...]:
    """The speeds that a choice has on each host, which is all that tells it from others."""
    hosts: dict[str, list[float]] = {}
    for rank in ranks:
        hosts.setdefault(cluster.devices[rank].host, []).append(cluster.devices[rank].speed)
    return tuple(sorted(tuple(sorted(speeds)) for speeds in hosts.values()))


def test_of_too_many_choices_the_fastest_devices_are_tried() -> None:
    cluster = replace_hosts(devices(12), list(range(12)), [1.0 + i for i in range(12)])
    parts = sub_clusters(cluster, 6, [1000.0 / (1 + i) for i in range(12)])
    assert not parts.has_all
    assert [[device.name for device in part.devices] for part in parts.clusters] == [[f"d{i}" for i in range(6, 12)]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Goal(), "either `least` memory or devices, or `largest`"),
        (lambda: Goal(least="memory", largest="l1"), "give one of them"),
        (lambda: Goal(least="memory", within=0.1, min_throughput=3), "`within` and `min_throughput`"),
        (lambda: Goal(largest="l1", within=0.1), "use `min_throughput`"),
        (lambda: Goal(least="memory", within=-1), "`within` -1: want a share from 0 to 100"),
        (lambda: Goal(least="foo"), "`least` is 'foo': want 'memory' or 'devices' or None"),  # type: ignore[arg-type]
        (lambda: Goal(least="memory", min_throughput=0), "`min_throughput` 0: want a positive number"),
        (lambda: block_layers(chain([1, 2]), "x"), "no layers of chain have this name"),
        (lambda: block_layers(chain([1, 2]), "l0..x"), "no layer of chain is named 'x', and no name begins with it"),
        (
            lambda: block_layers(chain([1, 2]), "l1..l0"),
            "ends before it begins: layer 'l0' comes before 'l1'; want 'l0..l1'",
        ),
        (lambda: repeat_block(chain([1, 2]), "l1", 2), "gives one tensor to later layers; it gives 0"),
        (lambda: repeat_block(chain([1, 2]), "l0", 2), "reads no tensor as large as the one it gives"),
    ],
)
def test_goals_that_mean_nothing_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        make()
    assert message in str(caught.value)


def test_a_block_that_others_share_parameters_with_is_refused_whoever_says_so() -> None:
    profile = chain([1, 1, 1], param_bytes=10, output_bytes=10)
    head = msgspec.structs.replace(profile.layers[2], shares=("l1",), shared_bytes=10)
    profile = msgspec.structs.replace(profile, layers=(*profile.layers[:2], head))
    with pytest.raises(BapipeError, match="its layers share parameters with others"):
        repeat_block(profile, "l1", 2)


def test_a_comparison_has_no_goal() -> None:
    with pytest.raises(BapipeError, match="a comparison is of the fastest plans"):
        bapipe.compare(chain([1, 2]), devices(2), minibatch_size=4, goal=Goal(least="devices"))


def two_fast_apart_and_two_slow_together() -> tuple[ModelProfile, Cluster]:
    """Devices d0 and d1 are 10 % faster, each on a host of its own; the layers need two devices, without replicas."""
    profile = chain([1, 1, 1, 1], param_bytes=10**8, output_bytes=3 * 10**6)
    cluster = replace_hosts(devices(4, memory_bytes=6 * 10**8), [0, 1, 2, 2], [1.1, 1.1, 1.0, 1.0])
    fast = msgspec.structs.replace(cluster.intra_host, bytes_per_s=10**11)
    return profile, msgspec.structs.replace(cluster, intra_host=fast)


def test_the_fastest_plan_on_the_fewest_devices_may_be_on_slower_ones() -> None:
    profile, cluster = two_fast_apart_and_two_slow_together()
    plan = bapipe.plan(profile, cluster, minibatch_size=8, goal=Goal(least="devices"))
    assert [device.name for device in plan.cluster.devices] == ["d2", "d3"]
    # Two stages of 6 ms with 8 micro-batches, and 3 MB there and back at 100 GB/s.
    assert plan.prediction.step_ns == (8 + 1) * 6 * MS + 2 * 30_000
    assert plan.certificate.proven_optimal
    assert plan.certificate.space.startswith(
        "each choice of 2 of 4 devices, of which 3 differ; with those of the plan: "
    )
    assert plan.certificate.goal == ReachedGoal(quantity="devices", value=2, bound=2)


def test_what_was_not_searched_is_bounded_by_its_work() -> None:
    profile, cluster = two_fast_apart_and_two_slow_together()
    options = PlanOptions(minibatch_size=8)
    slow = msgspec.structs.replace(cluster, devices=cluster.devices[2:])

    def search(profiles: Any, cluster: Cluster, options: PlanOptions, *_: object) -> Solution:
        if cluster.devices[:2] == slow.devices or len(cluster.devices) == 4:
            return found(bapipe.plan(profiles, slow, options))
        raise OutOfTime("ended")

    plan = reach_goal(profile, cluster, options, Goal(least="devices"), search=search, deadline=Deadline(None))
    # At speeds of 1.1 all work takes 8 * 4 * 3 ms / 2.2, less at most half a nanosecond of rounding an action.
    assert 0 <= 8 * 12 * MS / 2.2 - plan.certificate.lower_bound_ns < 8 * 4 * 3
    assert not plan.certificate.proven_optimal


@pytest.mark.parametrize(("proven_ns", "num_searches"), [(150, 1), (50, 2)])
def test_a_search_of_slower_devices_ends_with_the_bound_that_says_so(proven_ns: int, num_searches: int) -> None:
    """A bound that is told while it runs may be of a part of the plans: then it is searched to its end."""
    tries = []

    def search(_: Any, __: Any, ___: Any, deadline: Deadline, progress: Callable[[int, int, int], None]) -> Solution:
        tries.append(deadline)
        progress(1, 300, 99)
        assert not deadline.is_over
        progress(2, 200, 150)
        assert deadline.is_over == (len(tries) == 1)
        raise OutOfTime("ended", lower_bound_ns=proven_ns)

    question = Question(
        profiles=(chain([1]),),
        cluster=devices(1),
        options=PlanOptions(minibatch_size=1, objective="throughput"),  # of which nothing is known without a search
        search=search,
        deadline=Deadline(None),
        progress=lambda *_: None,
    )
    assert question.faster_than(100) == (None, proven_ns)
    assert len(tries) == num_searches


def test_of_too_many_choices_the_certificate_says_which_were_tried() -> None:
    speeds = [1.0 + i / 10 for i in range(12)]
    cluster = replace_hosts(devices(12, memory_bytes=300), list(range(12)), speeds)
    profile = chain([1] * 12, param_bytes=75)
    plan = bapipe.plan(profile, cluster, minibatch_size=1, schedules="gpipe", goal=Goal(least="devices"))
    assert {device.name for device in plan.cluster.devices} == {f"d{i}" for i in range(6, 12)}
    which = "of too many choices of 6 of 12 devices only the fastest and those of the plan; with those of the plan: "
    assert plan.certificate.space.startswith(which)


def test_a_space_of_choices_says_what_any_of_them_leaves_out() -> None:
    for counts_later, words in ((True, ()), (False, (IF_ALL_LATER,)), (True, (IF_ALL_LATER,))):
        space = ChosenDevicesSpace(
            num_chosen=2,
            num_devices=3,
            num_choices=2,
            left_out=words,
            of_best=replace(LOADS, counts_later=counts_later),
        )
        assert in_words(space).count(IF_ALL_LATER) == 1


def test_groups_are_counted_as_devices() -> None:
    single = chain([1, 1, 1, 1], output_bytes=100)
    device = msgspec.structs.replace(single.device, members=2, split="spatial")
    grouped = msgspec.structs.replace(chain([1, 1, 1, 1], output_bytes=100), device=device)
    threads = msgspec.structs.replace(single, settings=Settings(dtype="float32", optimizer="sgd", threads=2))
    fewest = PlanOptions(minibatch_size=4, goal=Goal(least="devices", within=1.1))
    for size, num in ((1, 2), (2, 1)):
        best = bapipe.plan([single, grouped], devices(4), replace(fewest, group=size))
        goal = best.certificate.goal
        assert isinstance(goal, ReachedGoal)
        assert goal.value == goal.bound == num
        assert [each.num_members for each in best.cluster.devices] == [size] * num
    with pytest.raises(BapipeError, match=r"give one profile of each kind, or `group`$"):
        bapipe.plan([single, grouped], devices(4), fewest)
    with pytest.raises(BapipeError, match=r"give one profile of each kind$"):
        bapipe.plan([single, threads], devices(4), fewest)


def test_a_limit_under_which_plans_are_slow_says_nothing_of_lower_ones_where_recomputation_may_save_time() -> None:
    """Devices that do not overlap transfers: recomputing a stage changes which transfer occupies both devices first."""
    rows = [(61, 83, 62, 3000), (54, 23, 78, 3000), (15, 35, 47, 500)]
    profile = chain([1] * 3)
    measured = tuple(
        msgspec.structs.replace(
            m, forward_ns=f, input_grad_ns=i, weight_grad_ns=w, stash_bytes=stash, output_bytes=(400,)
        )
        for m, (f, i, w, stash) in zip(profile.at(1), rows, strict=True)
    )
    first = msgspec.structs.replace(profile.layers[0], param_bytes=100)
    profile = msgspec.structs.replace(
        profile,
        layers=(first, *profile.layers[1:]),
        measurements=(msgspec.structs.replace(profile.measurements[0], layers=measured),),
    )
    cluster = devices(2, bytes_per_s=10**11, latency_ns=20, overlaps=False)
    fast = msgspec.structs.replace(cluster.devices[0], speed=1.5)
    cluster = msgspec.structs.replace(cluster, devices=(fast, cluster.devices[1]))
    options = PlanOptions(minibatch_size=6, schedules=("gpipe",), replicas=False)
    fastest, tight = (bapipe.plan(profile, cluster, replace(options, memory_limit_bytes=n)) for n in (None, 20_600))
    assert tight.prediction.step_ns < fastest.prediction.step_ns
    best = bapipe.plan(profile, cluster, replace(options, goal=Goal(least="memory", within=0.05)))
    goal = best.certificate.goal
    assert isinstance(goal, ReachedGoal)
    assert isinstance(goal.limit_ns, int)
    assert tight.prediction.step_ns <= goal.limit_ns
    assert 0 < goal.bound <= tight.prediction.peak_bytes


def test_a_block_without_copies_is_refused_before_anything_is_searched() -> None:
    def never(*_: object) -> Solution:
        pytest.fail("searched")

    profile, options = chain([1, 2]), PlanOptions(minibatch_size=4)
    with pytest.raises(BapipeError, match="no layers of chain have this name"):
        reach_goal(profile, devices(2), options, Goal(largest="x"), search=never, deadline=UNLIMITED)


def test_what_no_plan_reaches_is_infeasible() -> None:
    with pytest.raises(Infeasible, match=r"the fastest has .* which is proven to be the most"):
        bapipe.plan(chain([1, 2]), devices(2), minibatch_size=4, goal=Goal(least="devices", min_throughput=10**9))
    constrained = PlanOptions(minibatch_size=4, goal=Goal(least="devices"), constraints=("l0 on d1",))
    with pytest.raises(BapipeError, match="`least` devices chooses the devices"):
        bapipe.plan(chain([1, 2]), devices(2), constrained)


def test_memory_margins_are_left_free() -> None:
    profile = chain([1, 2, 1], param_bytes=100)
    goal = Goal(least="memory", within=0.5)
    free = bapipe.plan(profile, devices(2), minibatch_size=4, goal=goal).certificate.goal
    assert bapipe.plan(profile, devices(2), minibatch_size=4, goal=goal, memory_margin=0.3).certificate.goal == free


def test_a_named_schedule_that_does_not_fit_proves_nothing_about_other_orders() -> None:
    """Micro-batches one after another need less than any named schedule: for 2 layers a stage 2 stashes, not 3."""
    profile = chain([1] * 4, param_bytes=1000, stash_bytes=5000, output_bytes=100)
    options = PlanOptions(
        minibatch_size=6, schedules=("1f1b", SEARCH), recompute=False, num_stages=2, search_effort=0.1
    )
    plan = bapipe.plan(profile, devices(2, memory_bytes=10**6), replace(options, goal=Goal(least="memory")))
    one_by_one = bapipe.make(profile, plan.cluster, minibatch_size=6, microbatch_size=1, cuts=[2], devices=["d0", "d1"])
    order = tuple(tuple(f"{stage}{phase}{m}" for m in range(6) for phase in "FB") for stage in range(2))
    one_by_one = msgspec.structs.replace(one_by_one, order=order, schedule=SEARCH)
    needed = max(memory.total for memory in simulate(one_by_one, {"a": profile}).memory)
    assert needed < peak_bytes(plan)
    assert plan.certificate.goal is not msgspec.UNSET
    assert plan.certificate.goal.bound <= needed
    # What is said of the orders of these stages is said within their memory.
    assert plan.certificate.memory == MemoryLimit(bytes_per_device=peak_bytes(plan))
    with pytest.raises(Infeasible, match="under 1f1b, whose stages `search` begins with, no plan fits") as caught:
        bapipe.plan(profile, plan.cluster, replace(options, memory_limit_bytes=needed))
    assert not caught.value.is_proven


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (PARTITIONS, ()),
        (LOADS, ()),
        (replace(PARTITIONS, has_unlike_cuts=True), (MOST_AT_CUTS,)),
        (replace(LOADS, counts_later=True), (IF_ALL_LATER,)),
        (replace(PARTITIONS, constraints=(f"{MOST_AT_CUTS} with {IF_ALL_LATER}",)), ()),  # such are names of layers
    ],
)
@pytest.mark.parametrize("schedules", [("1f1b",), ("1f1b", SEARCH)])
def test_a_bound_that_leaves_plans_out_refutes_nothing(
    schedules: tuple[str, ...], space: SearchedSpace, words: tuple[str, ...]
) -> None:
    plan = bapipe.plan(chain([10, 20]), devices(2), minibatch_size=4)  # of a model that needs a search to be refuted
    answer = found(plan, space=space)
    assert left_out(space) == words
    assert all(text in in_words(space) for text in words)
    question = Question(
        profiles=(chain([1, 2]),),
        cluster=devices(2),
        options=PlanOptions(minibatch_size=4, schedules=schedules),
        search=lambda *_: answer,
        deadline=UNLIMITED,
        progress=lambda *_: None,
        limit_ns=plan.certificate.lower_bound_ns - 1,
    )
    assert question.ask() == Answer(is_refuted=not words and SEARCH not in schedules)


def test_what_is_proven_does_not_depend_on_the_names_of_layers() -> None:
    """Certificates name constraints, and so layers, in the text that says what a space leaves out."""
    profile = chain([1, 2, 1], param_bytes=100, stash_bytes=50)
    goals = []
    for name in ("l1", IF_ALL_LATER):
        layers = tuple(
            msgspec.structs.replace(layer, name=name) if layer.name == "l1" else layer for layer in profile.layers
        )
        goal = Goal(least="memory", within=0.1)
        options = PlanOptions(minibatch_size=4, constraints=(f"l0 without {name}",), goal=goal)
        goals.append(bapipe.plan(msgspec.structs.replace(profile, layers=layers), devices(3), options).certificate.goal)
    assert goals[0] == goals[1]
    assert isinstance(goals[0], ReachedGoal)
    assert goals[0].bound == goals[0].value


def spaces_of(inner: PartitionSpace | ThroughputSpace) -> list[SearchedSpace]:
    """A space, and those that are made of it."""
    made: list[SearchedSpace] = [
        inner,
        ActionOrderSpace(
            schedule="1f1b", has_same_stages=True, num_other_partitions=1, named_bound_ns=5, stages_from=inner
        ),
        LinearizationsSpace(num_orders=2, along_each=inner),
        GroupingsSpace(names=("one", "two"), of_best=inner),
        ChosenDevicesSpace(num_chosen=2, num_devices=3, num_choices=2, left_out=left_out(inner), of_best=inner),
        GroupingsSpace(names=("one", "two"), of_best=LinearizationsSpace(num_orders=2, along_each=inner)),
    ]
    return made


@pytest.mark.parametrize("inner", [PARTITIONS, LOADS])
def test_spaces_have_the_same_plans_if_only_their_memory_limits_differ(inner: PartitionSpace | ThroughputSpace) -> None:
    own, limited = spaces_of(inner), spaces_of(replace(inner, memory=MemoryLimit(bytes_per_device=7)))
    fewer = spaces_of(replace(inner, num_layers=1))
    for i, space in enumerate(own):
        assert (memory_limit(space), memory_limit(limited[i])) == (msgspec.UNSET, MemoryLimit(bytes_per_device=7))
        assert [has_same_plans(space, other) for other in limited] == [i == j for j in range(len(own))]
        assert not any(has_same_plans(space, other) for other in fewer)


def test_what_a_space_leaves_out_so_do_those_made_of_it() -> None:
    made: list[SearchedSpace] = spaces_of(replace(PARTITIONS, has_unlike_cuts=True))
    made.append(ParetoSpace(num_devices=2, limit_bytes=7, all_counts=replace(PARTITIONS, has_unlike_cuts=True)))
    for space in made:
        assert left_out(space) == (MOST_AT_CUTS,)
        assert in_words(space).count(MOST_AT_CUTS) == 1


def test_kinds_that_disagree_about_a_cut_prove_no_least_memory() -> None:
    """Stages are counted with the most bytes of any kind; the simulator counts those of the sender's."""
    heavy = msgspec.structs.replace(chain([1, 1], output_bytes=1000, param_bytes=100), device=kind("b"))
    profiles = {"a": chain([1, 1], output_bytes=100, param_bytes=100), "b": heavy}
    cluster = devices(2, memory_bytes=10**6)
    cluster = msgspec.structs.replace(
        cluster, devices=(cluster.devices[0], msgspec.structs.replace(cluster.devices[1], kind="b"))
    )
    options = PlanOptions(minibatch_size=2, schedules=("1f1b",), replicas=False, recompute=False, num_stages=2)
    plan = bapipe.plan(tuple(profiles.values()), cluster, replace(options, goal=Goal(least="memory")))
    peaks = [
        peak_bytes(bapipe.make(profiles, cluster, minibatch_size=2, microbatch_size=1, cuts=[1], devices=list(ranks)))
        for ranks in (("d0", "d1"), ("d1", "d0"))
    ]
    assert plan.certificate.goal is not msgspec.UNSET
    assert plan.certificate.goal.bound <= min(peaks)
    with pytest.raises(Infeasible) as caught:
        bapipe.plan(tuple(profiles.values()), cluster, replace(options, memory_limit_bytes=min(peaks) - 1))
    assert not caught.value.is_proven


def kind(name: str) -> DeviceKind:
    return msgspec.structs.replace(chain([1]).device, kind=name)


def test_stages_of_looped_schedules_do_not_halve_those_of_others() -> None:
    options = PlanOptions(minibatch_size=4, schedules=("1f1b", "zb-v"), num_stages=3, goal=Goal(least="devices"))
    plan = bapipe.plan(chain([1] * 8), devices(3), options)
    assert plan.certificate.goal is not msgspec.UNSET
    assert (plan.certificate.goal.value, plan.certificate.goal.bound) == (3, 3)


@pytest.mark.parametrize(
    ("schedules", "factor", "is_proven"),
    [(("1f1b",), 2.0, True), (("1f1b", SEARCH), 2.0, False)],
)
def test_a_throughput_out_of_reach_is_refused_with_what_is_proven(
    schedules: tuple[str, ...], factor: float, is_proven: bool
) -> None:
    options = PlanOptions(minibatch_size=4, schedules=schedules, search_effort=0.1, replicas=False)
    fastest = bapipe.plan(chain([1, 2]), devices(2), options)
    goal = Goal(least="memory", min_throughput=factor * fastest.prediction.samples_per_s)
    with pytest.raises(Infeasible) as caught:
        bapipe.plan(chain([1, 2]), devices(2), replace(options, goal=goal))
    assert caught.value.is_proven == is_proven
    assert ("proven to be the most" in str(caught.value)) == is_proven


def test_an_unproven_bound_below_the_throughput_asked_for_refutes_nothing() -> None:
    plan = bapipe.plan(chain([1, 2]), devices(2), minibatch_size=4)
    step_ns = plan.prediction.step_ns
    unproven = with_certificate(plan, certify(step_ns, step_ns // 2, plan.certificate.space))
    for ns, is_proven in ((step_ns * 3 // 4, False), (step_ns // 4, True)):
        goal = Goal(least="memory", min_throughput=4e9 / ns)
        with pytest.raises(Infeasible, match="none has more than") as caught:
            reach_goal(
                (chain([1, 2]),),
                devices(2),
                PlanOptions(minibatch_size=4),
                goal,
                search=lambda *_: found(unproven),
                deadline=Deadline(None),
            )
        assert caught.value.is_proven == is_proven


def test_a_bound_of_a_part_of_the_plans_refutes_nothing() -> None:
    """The search was cut off before it had looked at all schedules: what is proven of some is not of all."""
    plan = bapipe.plan(chain([10, 20]), devices(2), minibatch_size=4)  # of a model that needs a search to be refuted
    step_ns = plan.prediction.step_ns
    assert plan.certificate.proven_optimal
    of_part = found(plan, asked_bound_ns=step_ns // 2)
    goal, options = Goal(least="memory", min_throughput=4e9 / (step_ns * 3 // 4)), PlanOptions(minibatch_size=4)
    with pytest.raises(Infeasible, match="none has more than") as caught:
        reach_goal((chain([1, 2]),), devices(2), options, goal, search=lambda *_: of_part, deadline=Deadline(None))
    assert not caught.value.is_proven
    question = Question(
        profiles=(chain([1, 2]),),
        cluster=devices(2),
        options=options,
        search=lambda *_: of_part,
        deadline=Deadline(None),
        progress=lambda *_: None,
        limit_ns=step_ns - 1,
    )
    assert not question.ask().is_refuted
    assert question.faster_than(step_ns)[1] < step_ns


def test_constraints_that_fewer_devices_cannot_keep_refute_those() -> None:
    plan = bapipe.plan(
        chain([1, 2, 1]), devices(3), minibatch_size=6, goal=Goal(least="devices"), constraints=["l0 without l1"]
    )
    assert plan.certificate.goal is not msgspec.UNSET
    assert (plan.certificate.goal.value, plan.certificate.goal.bound) == (2, 2)


def test_alternatives_to_the_least_memory_may_use_what_the_devices_have() -> None:
    profile = chain([1, 2, 1, 3], param_bytes=100)
    fastest = bapipe.plan(profile, devices(2), minibatch_size=4)
    light = bapipe.plan(profile, devices(2), minibatch_size=4, goal=Goal(least="memory", within=4.0))
    assert peak_bytes(light) < peak_bytes(fastest)
    figures = [{(a.name, a.step_ns, a.peak_bytes, a.feasible) for a in p.alternatives} for p in (light, fastest)]
    assert figures[0] == figures[1] | {("fastest", fastest.prediction.step_ns, peak_bytes(fastest), True)}
    for other in light.alternatives:
        is_faster = other.step_ns < light.prediction.step_ns
        assert other.why_not.endswith("faster, but needs more memory") == is_faster


def test_the_fastest_plan_is_listed_beside_one_that_saves_devices_if_it_is_another() -> None:
    profile = chain([1, 2, 1, 3], param_bytes=100)
    fastest = bapipe.plan(profile, devices(2), minibatch_size=4)
    saving = bapipe.plan(profile, devices(2), minibatch_size=4, goal=Goal(least="devices", within=4.0))
    (listed,) = [other for other in saving.alternatives if other.name == "fastest"]
    assert listed.step_ns == fastest.prediction.step_ns
    assert listed.why_not.endswith("faster, on 2 devices")
    exact = bapipe.plan(profile, devices(2), minibatch_size=4, goal=Goal(least="devices", within=0.0))
    assert "fastest" not in {other.name for other in exact.alternatives}


def peak_bytes(plan: Plan) -> int:
    return max(rank.peak_bytes for rank in plan.prediction.ranks)


def test_the_command_line_says_what_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bapipe.write(tmp_path / "p.json", chain([1, 2, 3], param_bytes=2**20, output_bytes=8))
    bapipe.write(tmp_path / "c.json", devices(3))
    common = ["plan", str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.json"), "--minibatch-size", "4"]

    def printed(*words: str) -> str:
        capsys.readouterr()
        assert main_code([*common, *words, "-o", str(tmp_path / "plan.json")]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "(proven: no plan of the searched space needs less)" in printed("--least", "memory", "--within", "5%")
    assert "fewest devices at no more than" in printed("--least", "devices", "--min-throughput", "100")
    assert "largest model" in printed("--largest", "l1", "--memory-limit", "20MB")
    for words, message in (
        (["--within", "5%"], "add --least memory"),
        (["--least", "memory", "--pareto"], "do not go with --pin"),
        (["--largest", "nothing"], "--largest 'nothing'"),
    ):
        assert main_code([*common, *words]) == 1
        assert message in capsys.readouterr().err


def main_code(words: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["bapipe", *words])
        try:
            main()
        except SystemExit as error:
            return int(error.code or 0)
    return 0


def test_the_fewest_devices_for_throughput_are_looked_for_in_every_order() -> None:
    """Loads depend on the order of unlike devices: of three alike ones behind a fast one, the first is not the last."""
    cluster = devices(4, memory_bytes=10**9)
    speeds = (0.5, 1.0, 0.5, 0.5)
    unlike = tuple(
        msgspec.structs.replace(device, speed=speed) for device, speed in zip(cluster.devices, speeds, strict=True)
    )
    cluster = msgspec.structs.replace(cluster, devices=unlike)
    profile = chain([8, 5, 3])
    two = msgspec.structs.replace(cluster, devices=unlike[1:3])
    load_ns = bapipe.plan(profile, two, minibatch_size=7, objective="throughput").prediction.objective_ns
    goal = Goal(least="devices", min_throughput=7e9 / (load_ns + 1))
    plan = bapipe.plan(profile, cluster, minibatch_size=7, objective="throughput", goal=goal)
    assert len(plan.used_devices) == 2
    reached = plan.certificate.goal
    assert reached is not msgspec.UNSET
    assert (reached.value, reached.bound) == (2, 2)
    assert {part.devices for part in sub_clusters(cluster, 2, [1.0] * 4, in_order=True).clusters} == set(
        combinations(unlike, 2)
    )
    assert not sub_clusters(devices(40), 20, [1.0] * 40, in_order=True).has_all


@pytest.mark.parametrize(
    ("schedules", "error"),
    [
        (("1f1b",), Infeasible("none of those tried fits", is_proven=False)),
        (("1f1b", SEARCH), OutOfTime("ended", lower_bound_ns=10**9)),  # the bound is of 1F1B only
    ],
)
def test_an_error_that_proves_nothing_of_all_plans_refutes_no_goal(
    schedules: tuple[str, ...], error: BapipeError
) -> None:
    def search(*_: object) -> Solution:
        raise error

    question = Question(
        profiles=(chain([1]),),
        cluster=devices(1),
        options=PlanOptions(minibatch_size=1, schedules=schedules),
        search=search,
        deadline=Deadline(None),
        progress=lambda *_: None,
        limit_ns=10**8,
    )
    assert question.ask() == Answer()


def test_a_faster_and_lighter_alternative_is_compared_with_the_plan_shown() -> None:
    plan = plan_step_time({"a": chain([1, 1, 1, 1])}, devices(2), PlanOptions(minibatch_size=4))
    this, outside = plan.prediction, ", but outside the searched space"
    for tail in (outside, ""):
        other = msgspec.structs.replace(
            plan.alternatives[0],
            feasible=True,
            step_ns=this.step_ns * 3 // 4,
            peak_bytes=this.peak_bytes,
            why_not=f"7.0% faster{tail}",
        )
        (compared,) = compared_with([other], this)
        assert compared.why_not == f"25.0% faster{tail}"
