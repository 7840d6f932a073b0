"""The exact search equals the exhaustive one, and its bounds never exceed the simulated step time."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations, pairwise, permutations, product
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.host_times import HostTimes
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.branch_and_bound.infeasible import least_infeasible
from bapipe.planner.branch_and_bound.partial_plan import PartialPlan
from bapipe.planner.branch_and_bound.problem import Layout, Problem
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.compute.deadline import NothingFoundError
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.intervals import INF
from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.schedules.placement import merge_stages
from bapipe.simulator.simulate import simulate, simulate_schedule
from bapipe.simulator.stage_cost import build_stages
from tests.oracles.exhaustive_layouts import exhaustive, layouts
from tests.problems import heavy, heavy_duty, problems_of, random_problems
from tests.random_profiles import random_cluster, random_profile
from tests.step_time import plan_step_time
from tests.strategies import examples


def assert_exact(problems: Sequence[Problem], name: object = None, *, may_miss: bool = False) -> bool:
    """Compares the searches; returns whether a plan fits.

    Args:
        may_miss: whether better layers to recompute may exist than those of a layout; then the bound may stay below.
    """
    want, found = exhaustive(problems), best_first(problems)
    assert (found and found.step_ns) == (want and want.step_ns), name
    if found is not None and may_miss and not all(layout.is_best for each in problems for layout in layouts(each)):
        assert found.lower_bound_ns <= found.step_ns, name
    else:
        assert found is None or found.lower_bound_ns == found.step_ns, name
    return want is not None


def assert_all_exact(strategy: st.SearchStrategy[tuple[Problem, ...]], count: int, *, may_miss: bool = False) -> float:
    """Compares the searches on so many cases; returns the share of them in which a plan fits."""
    feasible: list[bool] = []

    @examples(count)
    @given(strategy)
    def check(problems: tuple[Problem, ...]) -> None:
        feasible.append(assert_exact(problems, may_miss=may_miss))

    check()
    return sum(feasible) / len(feasible)


@pytest.mark.parametrize("splits_badly", [False, True])
def test_branch_and_bound_equals_exhaustive_search(splits_badly: bool) -> None:
    assert assert_all_exact(problems_of(splits_badly=splits_badly), 40) > 0.6


def test_branch_and_bound_is_exact_if_all_reduces_take_several_buckets() -> None:
    assert assert_all_exact(problems_of(buckets=True), 20) == 1


@pytest.mark.parametrize("buckets", [False, True])
def test_branch_and_bound_is_exact_if_devices_sum_gradients_over_the_host(buckets: bool) -> None:
    assert assert_all_exact(problems_of(buckets=buckets, host_sum_link=True), 20) > 0.6


def test_branch_and_bound_is_exact_if_some_parameters_are_not_trained() -> None:
    assert assert_all_exact(problems_of(buckets=True, frozen=True), 12) == 1


@pytest.mark.parametrize("schedules", [["1f1b", "gpipe"], ["zb-h1"], ["1f1b-2bp"]])
def test_branch_and_bound_is_exact_if_the_host_can_be_slower_than_the_device(schedules: list[str]) -> None:
    strategy = problems_of(schedules, splits_badly=None, buckets=None, host_times=True, max_layers=5)
    # Which layers to recompute is chosen by the device's time; only without recomputation the proof is complete.
    assert assert_all_exact(strategy, 16, may_miss=True) > 0.5


@pytest.mark.parametrize("schedules", [["1f1b", "gpipe"], ["zb-h1"], ["1f1b-2bp"]])
def test_branch_and_bound_is_exact_if_members_exchange_data_whatever_their_speed(schedules: list[str]) -> None:
    strategy = problems_of(schedules, splits_badly=None, buckets=None, exchanges=True, max_layers=5)
    # Which layers to recompute is chosen by their times at the profile's speed.
    assert assert_all_exact(strategy, 16, may_miss=True) > 0.5


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("1f1b", "gpipe")])
def test_branch_and_bound_is_exact_for_every_schedule(schedule: str) -> None:
    assert_all_exact(problems_of([schedule], max_layers=5), 12)


@pytest.mark.parametrize("schedule", LOOPED)
def test_branch_and_bound_is_exact_if_devices_have_two_stages(schedule: str) -> None:
    seen = 0
    for seed in range(40):
        problems = [p for p in random_problems(seed, [schedule], splits_badly=seed % 2 == 1) if p.roots]
        seen += assert_exact(problems, seed, may_miss=True)
    assert seen > 10


class Prefixes:
    """The bounds of all prefixes of the layouts of a problem, each of which is extended once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._children: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}
        self._extended: dict[tuple[int, ...], PartialPlan] = {}

    def bounds_of(self, layout: Layout) -> Iterator[int]:
        """The bounds of all prefixes of a layout, up to one that does not fit."""
        bounds = self._problem.lower_bound
        boundaries = [self._problem.cuts.index(cut) for cut in layout.cuts]
        num_positions = next(
            start.num_positions for start in self._problem.roots if layout.placements[0] in start.first_placements
        )
        for bound_ns, root in bounds.roots(layout.placements[:1], num_positions):
            yield bound_ns
            prefix, path = root, [id(layout.placements[0])]
            for end, placement in zip(boundaries[1:], (*layout.placements[1:], None), strict=True):
                number = prefix.placements[-1].successors.index(placement) if placement else -1
                if tuple(path) not in self._children:
                    bounds_ns, ends, numbers = (found.tolist() for found in bounds.children(prefix))
                    self._children[tuple(path)] = dict(zip(zip(ends, numbers, strict=True), bounds_ns, strict=True))
                child_bound_ns = self._children[tuple(path)].get((end, number), INF)
                if child_bound_ns >= INF:
                    return
                yield child_bound_ns
                path += end, number
                if tuple(path) not in self._extended:
                    self._extended[tuple(path)] = bounds.extend(prefix, end, number)
                    assert self._extended[tuple(path)].bound_ns <= child_bound_ns
                prefix = self._extended[tuple(path)]


def test_bounds_hold_if_stages_recompute_and_the_host_is_slower_than_the_device() -> None:
    """The host needs nothing for the repeated F, and so long for a backward that the device's F adds nothing to it."""
    host = HostTimes(forward_ns=0, input_grad_ns=300, weight_grad_ns=200, backward_ns=400)
    num_recomputing = 0
    for seed in range(30):
        random = Random(seed)
        profile, cluster = random_profile(random, 4, sizes=(1,)), random_cluster(random, 2)
        layers = tuple(replace(layer, host=host) for layer in profile.measurements[0].layers)
        profile = replace(profile, measurements=(replace(profile.measurements[0], layers=layers),))
        options = PlanOptions(
            minibatch_size=4, schedules=("1f1b", "zb-h1"), memory_limit_bytes=random.randrange(150, 400)
        )
        for problem in build_space({"a": profile}, cluster, options, sizes=[1]).problems:
            prefixes = Prefixes(problem)
            for layout in layouts(problem):
                if any(layout.recompute) and all(lack <= 0 for lack in problem.shortfall_bytes(layout).values()):
                    num_recomputing += 1
                    step_ns = problem.step_ns(layout)
                    assert all(bound_ns <= step_ns for bound_ns in prefixes.bounds_of(layout)), seed
    assert num_recomputing > 10


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved-1f1b", "zb-v"])
def test_bounds_never_exceed_the_simulated_step(schedule: str) -> None:
    num_checked = 0

    @examples(36 if schedule in LOOPED else 18)  # chains of few layers have no looped plan
    @given(problems_of([schedule], max_layers=5, buckets=None))
    def check(problems: tuple[Problem, ...]) -> None:
        nonlocal num_checked
        for problem in problems:
            prefixes = Prefixes(problem)
            for layout in layouts(problem):
                if all(lack <= 0 for lack in problem.shortfall_bytes(layout).values()):
                    step_ns = problem.simulate(layout).step_ns
                    assert problem.step_ns(layout) == step_ns
                    assert all(bound_ns <= step_ns for bound_ns in prefixes.bounds_of(layout)), layout.cuts
                    num_checked += 1

    check()
    assert num_checked > 60


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved-1f1b", "zb-v"])
def test_bounds_never_exceed_the_simulated_step_of_many_microbatches(schedule: str) -> None:
    checked = late = 0
    for seed in range(15):
        random = Random(seed)
        problem = random_pipeline(random, schedule)
        if not problem.roots:
            continue
        for _ in range(6):
            start = random.choice(problem.roots)
            bound_ns, prefix = random.choice(
                [*problem.lower_bound.roots(start.first_placements, start.num_positions)] or [(0, None)]
            )
            bounds_ns = [bound_ns]
            while prefix is not None and not prefix.is_complete:
                children = [
                    child for child in zip(*problem.lower_bound.children(prefix), strict=True) if child[0] < 2**60
                ]
                if not children:
                    prefix = None
                    break
                bound_ns, end, number = random.choice(children)
                prefix = problem.lower_bound.extend(prefix, int(end), int(number))
                bounds_ns.append(int(bound_ns))
            if prefix is not None:
                step_ns = problem.simulate(problem.layout(prefix.boundaries, prefix.placements)).step_ns
                assert max(bounds_ns) <= step_ns, (
                    seed,
                    prefix.boundaries,
                    [placement.device_classes for placement in prefix.placements],
                )
                checked += 1
                late += max(bounds_ns) > 0.98 * step_ns
    assert checked > 45
    assert late > 5


def random_pipeline(random: Random, schedule: str) -> Problem:
    """Up to five devices on two hosts, many micro-batches, and at times slow links, all-reduces or devices that stall."""
    profile = random_profile(random, random.randint(3, 7), splits_badly=random.random() < 0.3)
    cluster = random_cluster(random, random.randint(2, 5))
    stalls = random.random() < 0.5
    devices = tuple(replace(d, overlaps_transfers=not stalls, memory_bytes=2**32) for d in cluster.devices)
    cluster = replace(cluster, devices=devices)
    if random.random() < 0.4:  # two equal hosts
        devices = tuple(replace(devices[0], name=f"d{i}", host=f"h{i // 3}") for i in range(6))
        cluster = replace(cluster, devices=devices, links=())
    if random.random() < 0.4:
        profile, cluster = heavy(profile), heavy_duty(cluster)
    num = random.randint(1, 24)
    (problem,) = build_space(
        {"a": profile},
        cluster,
        PlanOptions(minibatch_size=num, schedules=[schedule], recompute=False),
        sizes=[1],
    ).problems
    return problem


def test_stages_fit_exactly_if_they_fit_in_the_simulator() -> None:
    seen = [0, 0]
    for seed in range(60):
        for problem in random_problems(seed, ["1f1b", "zb-h1", "2f2b"], max_layers=4, splits_badly=seed % 2 == 1):
            for layout in layouts(problem):
                candidates = problem.lower_bound.costs
                boundaries = [problem.cuts.index(cut) for cut in layout.cuts]
                may_fit = all(
                    candidates.candidates_from(placement, start).fits[stop - start - 1]
                    for placement, (start, stop) in zip(layout.placements, pairwise(boundaries), strict=True)
                )
                fits = all(lack <= 0 for lack in problem.shortfall_bytes(layout).values())
                assert problem.fits(layout) == fits
                assert may_fit or not fits
                seen[fits] += 1
    assert min(seen) > 200


def every_plan(profile: ModelProfile, cluster: Cluster) -> Iterator[tuple[StagePlan, ...]]:
    """All stages on all devices in any order, written apart, any recomputation."""
    names = [layer.name for layer in profile.layers]
    for count in range(1, len(cluster.devices) + 1):
        for ranks in permutations(range(len(cluster.devices)), count):
            for splits in product((False, True), repeat=count - 1):
                ends = [i + 1 for i, split in enumerate(splits) if split]
                groups = [ranks[a:b] for a, b in pairwise([0, *ends, count])]
                for inner in combinations(range(1, len(names)), len(groups) - 1):
                    for again in product((False, True), repeat=len(names)):
                        yield tuple(
                            _recomputing(names[start:stop], again[start:stop], [cluster.devices[r].name for r in group])
                            for group, (start, stop) in zip(groups, pairwise([0, *inner, len(names)]), strict=True)
                        )


def _recomputing(layers: Sequence[str], again: Sequence[bool], devices: Sequence[str]) -> StagePlan:
    named = tuple(layer for layer, flag in zip(layers, again, strict=True) if flag)
    only_some = 0 < len(named) < len(layers)
    return StagePlan(
        layers=tuple(layers),
        devices=tuple(devices),
        recompute=bool(named),
        recompute_layers=named if only_some else msgspec.UNSET,
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_space_leaves_no_plan_out(seed: int) -> None:
    """Devices of a class are exchangeable, and recomputing what fits without never helps."""
    random = Random(seed)
    profile = random_profile(random, 4)
    cluster = random_cluster(random, 3)
    limits = [min(device.memory_bytes, random.randrange(150, 500)) for device in cluster.devices]
    devices = tuple(
        replace(device, overlaps_transfers=True, memory_bytes=limit)
        for device, limit in zip(cluster.devices, limits, strict=True)
    )
    cluster = replace(cluster, devices=devices)
    problems = build_space(
        {"a": profile},
        cluster,
        PlanOptions(minibatch_size=4, schedules=["1f1b"]),
        sizes=[1],
    ).problems
    best = None
    for stages in every_plan(profile, cluster):
        ranks = tuple(tuple(cluster.index[name] for name in stage.devices) for stage in stages)
        used = sum(map(len, ranks))
        table = merge_stages(SCHEDULES["1f1b"](used, 4), ranks, len(cluster.devices))
        timeline = simulate_schedule(table, build_stages(stages, {"a": profile}, cluster, 1), cluster)
        if all(held.total <= limit for held, limit in zip(timeline.memory, limits, strict=True)):
            best = timeline.step_ns if best is None else min(best, timeline.step_ns)
    found = best_first(problems)
    assert (found and found.step_ns) == best


@pytest.mark.parametrize("seed", range(6))
def test_the_space_leaves_no_plan_out_if_hosts_are_equal(seed: int) -> None:
    random = Random(seed)
    profile, cluster = random_profile(random, 3), random_cluster(random, 4)
    device = replace(cluster.devices[0], speed=1.0, memory_bytes=2**40, overlaps_transfers=seed % 2 == 0)
    devices = tuple(replace(device, name=f"d{i}", host=f"h{i % 2}") for i in range(4))
    slow = replace(cluster.inter_host, bytes_per_s=cluster.intra_host.bytes_per_s // 3)
    cluster = replace(cluster, devices=devices, links=(), inter_host=slow)
    problems = build_space(
        {"a": profile},
        cluster,
        PlanOptions(minibatch_size=4, schedules=["1f1b"], recompute=False),
        sizes=[1],
    ).problems
    assert [cls.type_number for cls in problems[0].classes] == [0, 0]
    want = []
    for stages in every_plan(profile, cluster):
        if not any(stage.recompute for stage in stages):
            ranks = tuple(tuple(cluster.index[name] for name in stage.devices) for stage in stages)
            table = merge_stages(SCHEDULES["1f1b"](sum(map(len, ranks)), 4), ranks, 4)
            want.append(simulate_schedule(table, build_stages(stages, {"a": profile}, cluster, 1), cluster).step_ns)
    found, every = best_first(problems), exhaustive(problems)
    assert found is not None
    assert every is not None
    assert found.step_ns == found.lower_bound_ns == every.step_ns == min(want)


def test_a_stopped_search_gives_a_valid_bound() -> None:
    stopped = 0
    for seed in range(60):
        problems = random_problems(seed, max_layers=5)
        best, found = exhaustive(problems), None
        with suppress(NothingFoundError):
            found = best_first(problems, max_nodes=3)
        if found is not None and best is not None:
            assert found.lower_bound_ns <= best.step_ns <= found.step_ns
            stopped += found.lower_bound_ns < found.step_ns
    assert stopped > 10


def least_lack(problem: Problem, layout: Layout) -> int:
    """What the worst device lacks, each stage with or without recomputation of all of it, whichever lacks less."""
    nothing = (frozenset[int](),) * len(layout.placements)
    every = tuple(frozenset(range(begin, end)) for begin, end in pairwise(layout.cuts))
    may = [nothing, every] if problem.lower_bound.costs.memory.may_recompute else [nothing]
    lacks = [problem.shortfall_bytes(dataclasses.replace(layout, recompute=recompute)) for recompute in may]
    return max(min(max(found[rank] for rank in ranks) for found in lacks) for ranks in problem.ranks(layout.placements))


def test_nothing_fits_if_and_only_if_the_least_infeasible_plan_lacks_memory() -> None:
    seen = 0
    for seed in range(60):
        problems = random_problems(seed, max_layers=4, limit=100 + seed)
        found = least_infeasible(problems)
        assert found is not None
        least = min(least_lack(p, layout) for p in problems for layout in layouts(p))
        lack = found.worst_bytes
        best = best_first(problems)
        assert lack == least if least > 0 and lack > 0 else lack <= 0  # what fits does not recompute to lack even less
        assert best is not None or least > 0
        if best is not None and least > 0:  # some layers recompute, which lacks less than all or none
            sizes = [end - begin for begin, end in pairwise(best.layout.cuts)]
            assert any(0 < len(of) < size for of, size in zip(best.layout.recompute, sizes, strict=True))
        seen += best is None
    assert 10 < seen < 50


def test_the_planned_prediction_equals_the_simulation() -> None:
    seen = 0
    for seed in range(18):
        random = Random(seed)
        profile = random_profile(random, 6)
        other = random_profile(random, 6, kind="b")
        other = type(other)(**{f: getattr(other, f) for f in other.__struct_fields__} | {"layers": profile.layers})
        cluster = random_cluster(random, 3, ("a", "b"))
        profiles = {"a": profile, "b": other}
        try:
            plan = plan_step_time(profiles, cluster, PlanOptions(minibatch_size=4))
        except Infeasible:
            continue
        seen += 1
        assert simulate(plan, profiles).prediction(4) == plan.prediction
        assert plan_step_time(profiles, cluster, PlanOptions(minibatch_size=4)) == plan
    assert seen > 9


def test_layers_that_share_parameters_of_unknown_size_stay_together() -> None:
    profile = random_profile(Random(7), 8)
    tied = {1: "l4", 4: "l1"}
    layers = tuple(replace(layer, shares=(tied[i],) if i in tied else ()) for i, layer in enumerate(profile.layers))
    profile = replace(profile, layers=layers)
    cluster = random_cluster(Random(1), 3)
    plan = plan_step_time({"a": profile}, cluster, PlanOptions(minibatch_size=4, num_stages=3))
    assert any({"l1", "l2", "l3", "l4"} <= set(stage.layers) for stage in plan.stages)
    with pytest.raises(
        BapipeError,
        match=r"^6 stages asked for; 6 devices, 8 layers and 1f1b, gpipe allow 1, 2, 3, 4, 5; layers that share .*",
    ):
        plan_step_time({"a": profile}, random_cluster(Random(1), 6), PlanOptions(minibatch_size=4, num_stages=6))


def test_hundreds_of_devices_are_planned_with_a_proof() -> None:
    profile = random_profile(Random(7), 5)
    one = random_cluster(Random(1), 1)
    device = replace(one.devices[0], memory_bytes=10**9)
    many = replace(one, devices=tuple(replace(device, name=f"d{i}") for i in range(500)), links=())
    assert plan_step_time({"a": profile}, many, PlanOptions(minibatch_size=8)).certificate.proven_optimal


def test_the_certificate_names_device_choices_left_out() -> None:
    profile = random_profile(Random(7), 5)
    device = replace(random_cluster(Random(1), 1).devices[0], memory_bytes=10**9)
    devices = tuple(replace(device, name=f"d{i}", speed=1.0 + i) for i in range(60))
    many = replace(random_cluster(Random(1), 1), devices=devices, links=())
    assert (
        "only the first devices"
        in plan_step_time({"a": profile}, many, PlanOptions(minibatch_size=2)).certificate.space
    )


def test_a_searched_order_is_never_slower_and_is_labelled_search() -> None:
    searched = moved = 0
    for seed in range(25):
        random = Random(seed)
        profile, cluster = random_profile(random, 6), random_cluster(random, 3)
        try:
            named = plan_step_time(
                {"a": profile}, cluster, PlanOptions(minibatch_size=4, schedules=("1f1b",), replicas=False)
            )
        except Infeasible:
            continue
        plan = plan_step_time(
            {"a": profile}, cluster, PlanOptions(minibatch_size=4, schedules=("1f1b", "search"), search_effort=1)
        )
        assert plan.prediction.step_ns <= named.prediction.step_ns
        assert simulate(plan, {"a": profile}).prediction(4) == plan.prediction
        assert plan.certificate.lower_bound_ns <= plan.prediction.step_ns
        assert all(
            rank.peak_bytes <= d.memory_bytes for rank, d in zip(plan.prediction.ranks, cluster.devices, strict=True)
        )
        if plan.schedule == "search":
            searched += 1
            layers = [[name for stage in p.stages for name in stage.layers] for p in (plan, named)]
            assert layers[0] == layers[1]
            other = plan.stages != named.stages
            assert ("the stages were made, a layer at a time, from" in plan.certificate.space) == other
            moved += other
            assert ("1f1b", named.prediction.step_ns) in [(a.name, a.step_ns) for a in plan.alternatives]
    assert searched > 5
    assert 0 < moved < searched
