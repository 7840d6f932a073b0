"""Cuts that no default order of the layers allows."""

from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import msgspec
import pytest

import bapipe
from bapipe.errors import Infeasible
from bapipe.formats.certificate import ReachedGoal
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile, ProfilesByKind
from bapipe.graph.downsets import downsets
from bapipe.planner.analysis.explain import explain
from bapipe.planner.analysis.pinned import certify_pinned
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.goal import Goal
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.linearizations import _bound_ns, solve_over_linearizations
from bapipe.planner.plan_step import solve_partition, solve_step_time
from bapipe.planner.results.decision import Decision, simulate_decision
from bapipe.planner.results.searched_space import ActionOrderSpace, PartitionSpace
from bapipe.planner.results.solution import Solution
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.throughput.contracted_graph import contracted_graph
from bapipe.planner.throughput.lightest_cuts import lightest_cuts
from bapipe.simulator.interval_costs import cut_bytes
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices, profile_of
from tests.random_graphs import branching_profile
from tests.random_profiles import random_cluster
from tests.step_time import plan_step_time

TOWERS = {"a0": ("x",), "b0": ("y",), "a1": ("a0",), "b1": ("b0",), "join": ("a1", "b1")}
"""Two towers with alternating layers, as traced from a module that runs a layer of each in turn."""


def towers() -> ModelProfile:
    """Every layer takes 100 ns forward and 100 back; within a tower 1,000 bytes are passed on, to the join 10."""
    return profile_of(
        "towers",
        [
            LayerProfile(
                name=name, kind="Layer", inputs=inputs, outputs=(name,), param_bytes=0, optimizer_state_bytes=0
            )
            for name, inputs in TOWERS.items()
        ],
        [
            LayerMeasurement(
                forward_ns=100 if name != "join" else 0,
                input_grad_ns=50 if name != "join" else 0,
                weight_grad_ns=50 if name != "join" else 0,
                stash_bytes=0,
                output_bytes=(1000 if name.endswith("0") else 10,),
            )
            for name in TOWERS
        ],
        memory_bytes=10**6,
    )


def test_two_towers_with_interleaved_layers_go_to_two_devices() -> None:
    """GPipe of M = 8, F = B = 200 ns a stage, 10 ns each way between them: (M + 1)(F + B) + 2 * 10.

    Along the profile's order a cut that halves the work carries 2,000 bytes.
    """
    profile, cluster = towers(), devices(2, memory_bytes=10**6)
    plan = bapipe.plan(profile, cluster, minibatch_size=8, schedules=["gpipe"], num_stages=2, replicas=False)
    assert [stage.layers for stage in plan.stages] == [("a0", "a1"), ("b0", "b1", "join")]
    assert plan.prediction.step_ns == (8 + 1) * 400 + 2 * 10
    assert plan.certificate.proven_optimal
    assert plan.certificate.space.startswith(
        "2 orders of the layers, the profile's and those of the best cuts of their graph, in which the bound has the layers of each stage; along each: every cut of 5 "
    )
    in_turn = plan_step_time(
        {"a": profile}, cluster, PlanOptions(minibatch_size=8, schedules=["gpipe"], num_stages=2, replicas=False)
    )
    assert in_turn.prediction.step_ns > 1.5 * plan.prediction.step_ns
    assert simulate(plan, {"a": profile}).step_ns == plan.prediction.step_ns


@pytest.mark.parametrize("is_joined", [False, True])
def test_tied_layers_that_alternate_are_cut_along_another_order(is_joined: bool) -> None:
    """Two towers a1 a2 and b1 b2 that share parameters each; the profile's order has no cut between them.

    1F1B of M = 8, F + B = 2 * 300 ns a stage: (M + 1) 600, and if b2 reads a2 the transfers of one micro-batch.
    """
    inputs = {"a1": ("x",), "b1": ("x",), "a2": ("a1",), "b2": ("b1", "a2") if is_joined else ("b1",)}
    tied = {"a1": "a2", "a2": "a1", "b1": "b2", "b2": "b1"}
    layers = [
        LayerProfile(
            name=name,
            kind="Layer",
            inputs=read,
            outputs=(name,),
            param_bytes=10,
            optimizer_state_bytes=0,
            shares=(tied[name],),
        )
        for name, read in inputs.items()
    ]
    measured = LayerMeasurement(
        forward_ns=100, input_grad_ns=100, weight_grad_ns=100, stash_bytes=10, output_bytes=(10,)
    )
    profile = profile_of("tied", layers, [measured] * 4, memory_bytes=10**6)
    cluster = devices(2, bytes_per_s=10**10)  # 10 bytes take 1 ns
    for num_stages in (None, 2):
        plan = bapipe.plan(profile, cluster, minibatch_size=8, replicas=False, num_stages=num_stages)
        assert [stage.layers for stage in plan.stages] == [("a1", "a2"), ("b1", "b2")]
        assert plan.prediction.step_ns == (8 + 1) * 600 + 2 * is_joined
        assert "2 orders of the layers" in plan.certificate.space


def test_every_order_has_its_share_of_a_time_limit() -> None:
    now, shares = 0.0, []

    def solve(profiles: ProfilesByKind, deadline: Deadline) -> Solution:
        nonlocal now
        shares.append(deadline.remaining_s)
        now += deadline.remaining_s or 0.0  # uses all of it
        raise OutOfTime("nothing found")

    deadline = Deadline(8.0, clock=lambda: now)
    with pytest.raises(OutOfTime):
        solve_over_linearizations({"a": towers()}, devices(2), [PlanOptions(minibatch_size=8)], solve, deadline)
    assert shares == [4.0, 4.0]


def test_an_order_that_was_not_searched_for_lack_of_time_leaves_the_plan_without_a_proof() -> None:
    options, cluster = PlanOptions(minibatch_size=8, replicas=False), devices(2, memory_bytes=10**6)
    solved: list[Solution] = []

    def solve(profiles: ProfilesByKind, deadline: Deadline) -> Solution:
        if solved:
            raise OutOfTime("nothing found", lower_bound_ns=7)
        solved.append(solve_step_time(SearchRequest(profiles=profiles, cluster=cluster, options=options)))
        return solved[0]

    found = solve_over_linearizations({"a": towers()}, cluster, [options], solve)
    assert solved[0].lower_bound_ns == solved[0].prediction.step_ns
    assert found.lower_bound_ns == 7


@pytest.mark.parametrize(("is_proven", "is_optimal"), [(True, True), (False, False)])
def test_an_order_along_which_no_plan_was_found_proves_nothing_unless_none_fits(
    is_proven: bool, is_optimal: bool
) -> None:
    options, cluster = PlanOptions(minibatch_size=8, replicas=False), devices(2, memory_bytes=10**6)
    solved: list[Solution] = []

    def solve(profiles: ProfilesByKind, deadline: Deadline) -> Solution:
        if solved:
            raise Infeasible("nothing found", is_proven=is_proven)
        solved.append(solve_step_time(SearchRequest(profiles=profiles, cluster=cluster, options=options)))
        return solved[0]

    found = solve_over_linearizations({"a": towers()}, cluster, [options], solve)
    assert (found.lower_bound_ns == found.prediction.step_ns) == is_optimal


def test_what_is_proven_of_fewer_orders_of_the_devices_is_not_said_of_any() -> None:
    """Work of 8 * 4 * 200 ns on two devices; along one order an interrupted search proved 3,500 for the cluster's order of them."""
    cluster, options = devices(2, memory_bytes=10**6), PlanOptions(minibatch_size=8, replicas=False)

    def solve(profiles: ProfilesByKind, _deadline: Deadline) -> Solution:
        found = solve_step_time(SearchRequest(profiles=profiles, cluster=cluster, options=options))
        if next(iter(profiles.values())).layers != towers().layers:
            assert isinstance(found.space, PartitionSpace)
            return replace(
                found, space=replace(found.space, device_order=", in the cluster's order"), lower_bound_ns=3500
            )
        return replace(found, lower_bound_ns=3600)

    found = solve_over_linearizations({"a": towers()}, cluster, [options], solve)
    assert found.lower_bound_ns == 8 * 4 * 200 // 2


def test_the_orders_do_not_depend_on_which_device_is_named_first() -> None:
    """They are those for the fastest device; the slow kind's outputs are small, so it has no use for another order."""
    (measured,) = towers().measurements
    layers = tuple(
        msgspec.structs.replace(m, forward_ns=10 * m.forward_ns, output_bytes=(10,)) for m in measured.layers
    )
    slow = msgspec.structs.replace(towers(), measurements=(msgspec.structs.replace(measured, layers=layers),))
    first, second = devices(2, memory_bytes=10**6).devices
    kinds = (first, msgspec.structs.replace(second, kind="b"))
    tried: list[list[tuple[str, ...]]] = []
    for both in (kinds, kinds[::-1]):
        cluster = msgspec.structs.replace(devices(2), devices=both)

        def solve(profiles: ProfilesByKind, _deadline: Deadline) -> Solution:
            tried[-1].append(tuple(layer.name for layer in profiles["a"].layers))
            raise Infeasible("not searched", is_proven=False)

        tried.append([])
        with pytest.raises(Infeasible):
            solve_over_linearizations({"a": towers(), "b": slow}, cluster, [PlanOptions(minibatch_size=8)], solve)
    assert tried[0] == tried[1]
    assert len(tried[0]) == 2


def test_a_plan_that_fits_along_one_order_only_is_pinned_and_explained() -> None:
    profile = heavy_towers(Random(1))
    least = bapipe.plan(profile, devices(2, memory_bytes=10**6), minibatch_size=2, goal=Goal(least="memory"))
    options = PlanOptions(minibatch_size=2, memory_limit_bytes=least.prediction.peak_bytes)
    with pytest.raises(Infeasible):
        plan_step_time({"a": profile}, least.cluster, options)
    pinned = certify_pinned(least, {"a": profile}, options)
    assert 0 < pinned.certificate.lower_bound_ns <= pinned.prediction.step_ns
    assert explain(least, {"a": profile}, options)


def test_more_orders_never_give_a_slower_plan() -> None:
    better = tried = 0
    for seed in range(14):
        random = Random(seed)
        profile = branching_profile(random, random.randint(5, 10))
        cluster = random_cluster(random, random.randint(2, 3))
        try:
            along = plan_step_time({"a": profile}, cluster, PlanOptions(minibatch_size=4, replicas=False))
        except Infeasible:
            continue
        plan = bapipe.plan(profile, cluster, minibatch_size=4, replicas=False)
        assert plan.prediction.step_ns <= along.prediction.step_ns
        assert plan.certificate.lower_bound_ns <= along.certificate.lower_bound_ns
        assert simulate(plan, {"a": profile}).step_ns == plan.prediction.step_ns
        assert plan.profiles == along.profiles
        place = {layer.name: i for i, layer in enumerate(profile.layers)}
        assert all(list(stage.layers) == sorted(stage.layers, key=place.__getitem__) for stage in plan.stages)
        tried += 1
        better += plan.prediction.step_ns < along.prediction.step_ns
    assert tried > 10
    assert better > 1


@pytest.mark.parametrize(
    ("constraints", "first"),
    [
        (["a0 with a1", "b0 without a1"], {("a0", "a1"), ("b0", "b1")}),
        (["a0 with b0", "a1 without a0"], {("a0", "b0")}),
    ],
)
def test_constraints_need_cuts_along_one_of_the_orders_only(
    constraints: list[str], first: set[tuple[str, ...]]
) -> None:
    plan = bapipe.plan(towers(), devices(2), minibatch_size=8, num_stages=2, replicas=False, constraints=constraints)
    assert plan.stages[0].layers in first
    assert "2 orders of the layers" in plan.certificate.space


def test_the_orders_of_a_goal_are_those_of_its_options() -> None:
    """A goal asks under lower and lower limits; what it proves is of the same orders."""
    asked: list[list[str]] = []

    def solve(profiles: ProfilesByKind, deadline: Deadline) -> Solution:
        asked.append([layer.name for layer in profiles["a"].layers])
        raise Infeasible("no plan fits")

    cluster, options = devices(2, memory_bytes=10**6), PlanOptions(minibatch_size=8, replicas=False)
    with pytest.raises(Infeasible, match=r"along each of 2 orders of the layers \(there are more\) no plan fits"):
        solve_over_linearizations({"a": towers()}, cluster, [options], solve)
    assert len(asked) == 2
    least = bapipe.plan(heavy_towers(Random(1)), cluster, replace(options, goal=Goal(least="memory")))
    fastest = bapipe.plan(heavy_towers(Random(1)), cluster, options)
    assert least.prediction.peak_bytes < fastest.prediction.peak_bytes
    # One more for the least memory; the bound is that of the fastest of all of them, which has the devices' own memory.
    assert fastest.certificate.space.startswith("2 orders of the layers")
    assert least.certificate.space.startswith("3 orders of the layers")
    assert least.certificate.memory is msgspec.UNSET


def heavy_towers(random: Random) -> ModelProfile:
    """The towers with random times and stashes."""
    profile = towers()
    (measured,) = profile.measurements
    layers = [
        msgspec.structs.replace(
            m,
            forward_ns=random.randint(20, 200),
            stash_bytes=random.choice([10, 500]),
            output_bytes=(3 + 30 * (i < 4),),
        )
        for i, m in enumerate(measured.layers)
    ]
    measured = msgspec.structs.replace(measured, layers=tuple(layers))
    return msgspec.structs.replace(profile, measurements=(measured,))


def test_towers_apart_need_no_less_memory_than_is_proven() -> None:
    """Under a limit that neither tower keeps without recomputation, cuts between the two are searched too."""
    cluster, num_recomputed = devices(2, memory_bytes=10**6), 0
    for seed in range(7):
        profile = heavy_towers(Random(seed))
        plan = bapipe.plan(profile, cluster, minibatch_size=2, goal=Goal(least="memory"))
        apart = [
            max(memory.total for memory in simulate_decision(apart_on_two(recompute), {"a": profile}, cluster).memory)
            for recompute in product((False, True), repeat=2)
        ]
        assert isinstance(plan.certificate.goal, ReachedGoal)
        assert plan.certificate.goal.bound == plan.prediction.peak_bytes <= min(apart)
        within = bapipe.plan(profile, cluster, minibatch_size=2, memory_limit_bytes=min(apart))
        assert within.prediction.peak_bytes <= min(apart)
        num_recomputed += min(apart) < apart[0]
    assert num_recomputed > 3


def apart_on_two(recompute: tuple[bool, ...]) -> Decision:
    return Decision(
        layers=("a0", "a1", "b0", "b1", "join"),
        cuts=(2,),
        devices=(("d0",), ("d1",)),
        recompute=recompute,
        schedule="1f1b",
        minibatch_size=2,
        microbatch_size=1,
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_the_lightest_cuts_are_those_of_all_chains_of_downsets(recompute: bool) -> None:
    for seed in range(20):
        profile = branching_profile(Random(seed), 6)
        graph = contracted_graph(profile)
        every = graph.boundaries(downsets(graph.graph, 1000) or [])
        found = lightest_cuts(every, profile, 3, recompute=recompute, deadline=UNLIMITED)
        size = profile.microbatch_sizes[0]
        sent, back = cut_bytes(profile, size, every.inside)
        measured, least = profile.at(size), []
        for num_inner in range(3):
            for inner in combinations(range(1, every.num_boundaries - 1), num_inner):
                path = (0, *inner, every.num_boundaries - 1)
                if not all(every.nested[begin, end] for begin, end in pairwise(path)):
                    continue
                fullest = 0
                for number, (begin, end) in enumerate(pairwise(path)):
                    layers = every.layers(begin, end)
                    in_flight = len(path) - 1 - number
                    stash = sum(measured[i].stash_bytes for i in layers)
                    held = sum(
                        profile.layers[i].param_bytes
                        + profile.layers[i].gradient_bytes
                        + profile.layers[i].optimizer_state_bytes
                        for i in layers
                    )
                    held += 3 * int(sent[begin] + back[end])
                    held += stash + in_flight * int(sent[begin]) if recompute else in_flight * stash
                    fullest = max(fullest, held)
                least.append((fullest, path))
        assert found.num_bytes == min(least)[0]
        assert (found.num_bytes, found.boundaries) in least


def test_replicas_are_timed_with_the_layers_of_a_stage_in_the_order_in_which_they_run() -> None:
    """Of two towers by turns, the gradients of a stage are there at other times than along an order that is cut."""
    num_along_others = 0
    for seed in range(60):
        random = Random(seed)
        profile = towers()
        layers = [msgspec.structs.replace(layer, param_bytes=random.randrange(300)) for layer in profile.layers]
        (measured,) = profile.measurements
        times = [msgspec.structs.replace(m, weight_grad_ns=random.randrange(200)) for m in measured.layers]
        measured = msgspec.structs.replace(measured, layers=tuple(times))
        profile = msgspec.structs.replace(profile, layers=tuple(layers), measurements=(measured,))
        plan = bapipe.plan(profile, devices(3), minibatch_size=4, schedules=["gpipe"])
        assert simulate(plan, {"a": profile}).step_ns == plan.prediction.step_ns
        num_along_others += any("b0" not in stage.layers and "a1" in stage.layers for stage in plan.stages)
    assert num_along_others > 5


def test_a_bound_of_orders_does_not_count_for_named_schedules_along_another_order_of_the_layers() -> None:
    profiles = {"a": chain([5, 1])}
    solution = solve_partition(
        SearchRequest(profiles=profiles, cluster=devices(2), options=PlanOptions(minibatch_size=4))
    )
    space = ActionOrderSpace(
        schedule="1f1b", has_same_stages=True, num_other_partitions=0, named_bound_ns=7, stages_from=solution.space
    )
    searched = replace(solution, space=space, lower_bound_ns=9)
    assert _bound_ns(searched, solution, 0) == 7
    assert _bound_ns(searched, searched, 0) == 9
    assert _bound_ns(solution, searched, 0) == solution.lower_bound_ns
