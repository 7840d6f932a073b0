"""Cuts of tight memory, against every choice of cuts, and searches that only such cuts give a plan."""

from dataclasses import replace as with_fields
from itertools import combinations, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.errors import Infeasible
from bapipe.formats.profile import ModelProfile
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.fitting_cuts import fitting_cuts, fitting_plans
from bapipe.planner.device_line.fitting_replicas import fitting_replicas
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.line_memory import LineMemory
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.inputs.options import PlanOptions
from bapipe.schedules import SCHEDULES
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import compositions
from tests.step_time import plan_step_time

NUM_MICROBATCHES = 8


def uneven_chain(random: Random, num_layers: int, outputs: tuple[int, ...]) -> ModelProfile:
    """Layers of many sizes: state, stashes and workspace, and what passes between them."""
    profile = chain([random.randint(1, 9) for _ in range(num_layers)], output_bytes=1)
    (measured,) = profile.measurements
    layers = tuple(
        replace(layer, param_bytes=random.choice([0, 5, 20, 90]), optimizer_state_bytes=random.choice([0, 10]))
        for layer in profile.layers
    )
    times = tuple(
        replace(times, stash_bytes=random.choice([1, 4, 15]), workspace_bytes=random.choice([0, 0, 30]))
        for times in measured.layers
    )
    times = tuple(replace(each, output_bytes=(random.choice(outputs),)) for each in times)
    return replace(profile, layers=layers, measurements=(replace(measured, layers=times),))


def uneven_line(
    seed: int, *, recompute: bool, outputs: tuple[int, ...] = (1,), speeds: tuple[float, ...] = (1.0,)
) -> DeviceLine:
    """Six to nine layers on two to five devices with memory for about as much as they must hold."""
    random = Random(seed)
    profile, num_devices = uneven_chain(random, random.randint(6, 9), outputs), random.randint(2, 5)
    held = sum(2 * layer.param_bytes + layer.optimizer_state_bytes for layer in profile.layers)
    cluster = devices(num_devices)
    limits = [int(held * random.uniform(0.9, 2.0) / num_devices) + random.randint(100, 250) for _ in cluster.devices]
    unlike = tuple(
        replace(device, memory_bytes=limit, speed=random.choice(speeds))
        for device, limit in zip(cluster.devices, limits, strict=True)
    )
    options = PlanOptions(
        minibatch_size=NUM_MICROBATCHES, microbatch_size=1, schedules=["1f1b", "gpipe"], recompute=recompute
    )
    return DeviceLine({"a": profile}, replace(cluster, devices=unlike), options)


def stage_fits(
    line: DeviceLine,
    plan: LinePlan,
    stage: int,
    begin: int,
    end: int,
    num_devices: int | None = None,
    *,
    recomputes: bool = False,
) -> bool:
    """Whether a stage with these layers fits, from their bytes, added here. (1F1B and GPipe)

    Args:
        num_devices: how many there are in all; without, those of the plan.
        recomputes: whether it recomputes if it does not fit without.
    """
    profile, count = line.profiles["a"], plan.counts[stage]
    first, num_devices = sum(plan.counts[:stage]), num_devices or sum(plan.counts)
    depth = NUM_MICROBATCHES if plan.schedule == "gpipe" else min(NUM_MICROBATCHES, num_devices - first)
    layers, measured = profile.layers[begin:end], profile.at(1)[begin:end]
    state = sum(2 * layer.param_bytes + layer.optimizer_state_bytes for layer in layers)
    stash, in_flight = sum(m.stash_bytes for m in measured), -(-depth // count)
    received = 0 if begin == 0 else profile.at(1)[begin - 1].output_bytes[0]
    returned = 0 if end == len(profile.layers) else measured[-1].output_bytes[0]
    buffers = -(-NUM_MICROBATCHES // count) * (received + returned)
    held = state + max(m.workspace_bytes for m in measured) + buffers
    limit = min(line.limits[first : first + count])
    return held + in_flight * stash <= limit or (recomputes and held + in_flight * received + stash <= limit)


def fits(line: DeviceLine, plan: LinePlan, num_devices: int | None = None) -> bool:
    may = line.options.recompute
    stages = enumerate(pairwise(plan.cuts))
    return all(stage_fits(line, plan, stage, *layers, num_devices, recomputes=may) for stage, layers in stages)


def each_layer_fits(line: DeviceLine, plan: LinePlan) -> bool:
    """Whether each layer alone fits on each stage that may have it."""
    last = len(line.cuts) - 1
    return all(
        stage_fits(line, plan, stage, layer, layer + 1)
        for stage in range(len(plan.counts))
        for layer in range(stage, last - len(plan.counts) + stage + 1)
    )


def all_cuts(line: DeviceLine, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, line.cuts[-1]) for inner in combinations(line.cuts[1:-1], num_stages - 1)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("outputs", [(1,), (1, 5, 40)])
def test_the_nearest_cuts_that_fit_are_found(schedule: str, outputs: tuple[int, ...]) -> None:
    """With the numbers of devices of every plan, from cuts at random, also where more layers need less memory."""
    num_found = num_none = num_moved = num_unpacked = 0
    for seed in range(40):
        random, line = Random(seed), uneven_line(seed, recompute=False, outputs=outputs)
        memory = LineMemory(line, 1)
        for counts in compositions(len(line.cluster.devices)):
            cuts = all_cuts(line, len(counts))
            wanted = LinePlan(cuts=random.choice(cuts), counts=counts, schedule=schedule, microbatch_size=1)
            found = fitting_cuts(line, wanted, memory)
            by_move = [moved(wanted.cuts, each) for each in cuts if fits(line, with_fields(wanted, cuts=each))]
            assert (found is not None) == bool(by_move), (seed, counts)
            if found is None:
                num_none += 1
                continue
            num_found += 1
            num_moved += found != wanted.cuts
            num_unpacked += not each_layer_fits(line, wanted)
            assert fits(line, with_fields(wanted, cuts=found))
            assert moved(wanted.cuts, found) == min(by_move)
    assert min(num_found, num_moved, num_none) > 20
    assert num_unpacked > 5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_groups_are_found_wherever_some_fit_and_their_busiest_replica_has_the_least_work(
    schedule: str, recompute: bool
) -> None:
    """Against every plan on all devices, or on fewer, which hold what they would if there were all."""
    num_found = num_none = 0
    for seed in range(60):
        line = uneven_line(seed, recompute=recompute, outputs=(1, 5, 40), speeds=(0.4, 0.7, 1.0))
        num_devices, found = len(line.cluster.devices), fitting_replicas(line, schedule, LineMemory(line, 1))
        busiest = [
            busiest_work(line, plan)
            for counts in compositions(num_devices)
            for cuts in all_cuts(line, len(counts))
            if fits(line, plan := LinePlan(cuts=cuts, counts=counts, schedule=schedule, microbatch_size=1), num_devices)
        ]
        assert (found is not None) == bool(busiest), seed
        if found is None:
            num_none += 1
        else:
            num_found += 1
            assert fits(line, found, num_devices)
            assert busiest_work(line, found) == pytest.approx(min(busiest))
    assert min(num_found, num_none) > 5


def busiest_work(line: DeviceLine, plan: LinePlan) -> float:
    """What the replica with the most to do runs, with F once more where a stage recomputes."""
    measured, found, num_devices = line.profiles["a"].at(1), 0.0, len(line.cluster.devices)
    for stage, (begin, end) in enumerate(pairwise(plan.cuts)):
        layers, first = measured[begin:end], sum(plan.counts[:stage])
        slowest = min(device.speed for device in line.cluster.devices[first : first + plan.counts[stage]])
        work = sum(m.forward_ns + m.whole_backward_ns for m in layers)
        if not stage_fits(line, plan, stage, begin, end, num_devices, recomputes=False):
            work += sum(m.forward_ns for m in layers)
        found = max(found, -(-NUM_MICROBATCHES // plan.counts[stage]) * work / slowest)
    return found


def moved(cuts: tuple[int, ...], others: tuple[int, ...]) -> int:
    """By how many layers some cuts are away from others in all."""
    return sum(abs(cut - other) for cut, other in zip(cuts, others, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_packed_cuts_are_found_wherever_some_fit(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Where the nearest ones would take long: each layer fits, and more layers need no less memory."""
    monkeypatch.setattr("bapipe.planner.device_line.fitting_cuts.MAX_TRIED", 0)
    num_found = num_none = num_moved = 0
    for seed in range(40):
        random, line = Random(seed), uneven_line(seed, recompute=False)
        memory = LineMemory(line, 1)
        for counts in compositions(len(line.cluster.devices)):
            cuts = all_cuts(line, len(counts))
            wanted = LinePlan(cuts=random.choice(cuts), counts=counts, schedule=schedule, microbatch_size=1)
            if not each_layer_fits(line, wanted):
                continue
            found = fitting_cuts(line, wanted, memory)
            some_fit = any(fits(line, with_fields(wanted, cuts=each)) for each in cuts)
            assert (found is not None) == some_fit, (seed, counts)
            if found is None:
                num_none += 1
                continue
            num_found += 1
            num_moved += found != wanted.cuts
            assert fits(line, with_fields(wanted, cuts=found))
            assert found == wanted.cuts or not fits(line, wanted)
    assert num_found > 50
    assert num_moved > 20
    assert num_none > 50


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_with_moved_cuts_fit_as_the_simulator_says(schedule: str, recompute: bool) -> None:
    """Plans of random lines, also with stages that recompute."""
    num_timed = num_yielded = 0
    for seed in range(60):
        line = uneven_line(seed, recompute=recompute, outputs=(1, 5))
        for plan in filter(None, fitting_plans(line, [schedule], [1])):
            num_yielded += 1
            num_timed += line.time(plan) is not None
    assert num_yielded > 60
    assert num_timed == num_yielded


def test_every_naive_plan_with_its_cuts_moved_comes_once_and_those_with_small_bounds_first() -> None:
    line = uneven_line(3, recompute=True)
    memory = LineMemory(line, 1)
    naive = naive_plans(line, ["1f1b", "gpipe"], [1], for_other_cuts=True)
    moved = [
        with_fields(plan, cuts=cuts) for _, plan in naive if (cuts := fitting_cuts(line, plan, memory)) is not None
    ]
    of_groups = [fitting_replicas(line, schedule, memory) for schedule in ("1f1b", "gpipe")]
    plans = list(fitting_plans(line, ["1f1b", "gpipe", "interleaved-1f1b"], [1]))
    assert plans[:2] == of_groups
    assert list(filter(None, plans[2:])) == moved
    assert len(moved) == len(set(moved)) > 2
    assert [bound_ns for bound_ns, _ in naive] == sorted(bound_ns for bound_ns, _ in naive)


@pytest.mark.parametrize("replicas", [True, False])
def test_plans_with_moved_cuts_are_on_any_number_of_devices(replicas: bool) -> None:
    """Of 48 devices each number of stages that differs by the replicas, or steps of a tenth of single devices."""
    options = PlanOptions(minibatch_size=48, microbatch_size=1, replicas=replicas)
    plans = naive_plans(DeviceLine({"a": chain([1] * 60)}, devices(48), options), ["1f1b"], [1], for_other_cuts=True)
    expected = {48 // number for number in range(1, 49)} if replicas else {48, 43, 38, 34, 30, 27, 24, 21, 18, 16, 14}
    assert expected <= {len(plan.counts) for _, plan in plans}


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_there_is_a_plan_where_even_shares_of_time_and_of_bytes_do_not_fit(limit_s: float) -> None:
    """Light layers with large stashes before heavy ones: equal bytes of one micro-batch put too many on the first devices,
    equal times too many on the last ones.
    """
    profile = chain([40] * 20 + [1] * 100, output_bytes=1)
    layers = tuple(replace(layer, param_bytes=10 if i < 60 else 100) for i, layer in enumerate(profile.layers))
    (measured,) = profile.measurements
    stashes = tuple(replace(times, stash_bytes=8 if i < 60 else 1) for i, times in enumerate(measured.layers))
    profile = replace(profile, layers=layers, measurements=(replace(measured, layers=stashes),))
    cluster = devices(40, memory_bytes=1100)
    options = PlanOptions(minibatch_size=64, schedules=["1f1b"], replicas=False, microbatch_size=1, recompute=False)
    line = DeviceLine({"a": profile}, cluster, options)
    assert all(line.time(plan) is None for _, plan in naive_plans(line, options.schedules, [1]))
    plan = plan_step_time({"a": profile}, cluster, options, deadline=Deadline(limit_s))
    assert max(rank.peak_bytes for rank in plan.prediction.ranks) <= 1100


def test_where_nothing_fits_on_many_devices_the_search_says_so() -> None:
    cluster = devices(40, memory_bytes=10**6)
    options = PlanOptions(minibatch_size=8, microbatch_size=1, schedules=["1f1b", "gpipe"])
    with pytest.raises(Infeasible, match="no plan fits in memory"):
        plan_step_time({"a": chain([1] * 40, param_bytes=10**6)}, cluster, options)
