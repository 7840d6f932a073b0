"""Loads of devices with two stages: no cuts are faster than the bound, which equals a search of all cuts."""

from itertools import combinations, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.fixed_placements import device_loads
from bapipe.planner.fixed_placements.device_loads import LOAD_PRECISION, DeviceLoads
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.intervals import MAX_TIME
from bapipe.planner.stages.placements import StagePlacement
from bapipe.schedules import LOOPED
from bapipe.schedules.table import Phase
from tests.builders import MS, chain, devices
from tests.oracles.exhaustive_layouts import pipelines
from tests.planner.fixed_placements.test_path_bound import random_cuts, random_placements

NUM_MICROBATCHES = 6


@pytest.mark.parametrize("schedule", LOOPED)
def test_no_cuts_beat_the_bound(schedule: str) -> None:
    num_checked = 0
    for random, problem, placements in random_placements(12, (schedule,)):
        bound_ns, _ = DeviceLoads(problem, placements).least(0, MAX_TIME)
        for cuts in random_cuts(random, problem, len(placements), 25):
            assert bound_ns <= problem.simulate(problem.layout(cuts, tuple(placements))).step_ns
            num_checked += 1
    assert num_checked > 30


def random_layers(seed: int) -> list[int]:
    """F of six to ten layers, in ms."""
    random = Random(seed)
    return [random.randint(1, 9) for _ in range(random.randint(6, 10))]


def random_problem(seed: int, schedule: str, *, overlaps: bool = True) -> tuple[Problem, tuple[StagePlacement, ...]]:
    """Those layers on two or three devices, all of them in use, of different speeds."""
    random = Random(seed)
    profile = chain(random_layers(seed), output_bytes=10**6)
    cluster = devices(random.randint(2, 3), overlaps=overlaps)
    speeds = [replace(device, speed=random.choice([1.0, 0.5, 0.25])) for device in cluster.devices]
    options = PlanOptions(minibatch_size=NUM_MICROBATCHES, schedules=[schedule])
    (problem,) = build_space({"a": profile}, replace(cluster, devices=tuple(speeds)), options, sizes=[1]).problems
    root = max(problem.roots, key=lambda root: root.num_devices)
    return problem, next(iter(pipelines(root.first_placements)))


def largest_load_ns(
    seed: int, problem: Problem, placements: tuple[StagePlacement, ...], cuts: Cuts, *, knows_order: bool = True
) -> float:
    """What some device has to do, with what comes before and behind; a layer's backward takes twice its F.

    If not `knows_order`, all F may come before the first backward. Each tensor takes a millisecond from device to device. If no backward is split, each waits for the later
    stages', and those of earlier stages follow.
    """
    speeds = [problem.classes[placement.device_classes[0]].device.speed for placement in placements]
    stages = [MS * sum(random_layers(seed)[begin:end]) for begin, end in pairwise(cuts)]
    is_split = problem.schedule not in ("interleaved-1f1b", "looped-bfs")
    waits = 0 if is_split else 2 / max(speeds)
    sent = [MS * (one.position != other.position) for one, other in pairwise(placements)]
    table = LOOPED[problem.schedule](len(placements) // 2, NUM_MICROBATCHES)
    loads = []
    for k in range(len(placements) // 2):
        first, second = (s for s, placement in enumerate(placements) if placement.position == k)
        before_ns = sum(stages[:first]) / max(speeds) + sum(sent[:first])
        behind_ns = 0 if is_split else sum(stages[:first]) * waits + sum(sent[:first])
        work_ns = NUM_MICROBATCHES * 3 * (stages[first] + stages[second]) / speeds[k]
        kinds = [action.phase is Phase.FORWARD for action in table.order[k]]
        early = [stages[action.stage] / speeds[k] for action in table.order[k][: kinds.index(False)]]
        if not knows_order:
            early = [(stages[first] + stages[second]) / speeds[k]] * NUM_MICROBATCHES
        trip_ns = sum(stages) / max(speeds) + sum(sent) + sum(stages[second + 1 :]) * waits + sum(sent[second:])
        loads.append(max(before_ns + work_ns, trip_ns + work_ns - sum(early)) + behind_ns)
    return max(loads)


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("knows_order", [True, False])
def test_the_bound_is_the_least_of_all_cuts(schedule: str, knows_order: bool) -> None:
    for seed in range(12):
        problem, placements = random_problem(seed, schedule)
        last = len(problem.cuts) - 1
        every = [(0, *inner, last) for inner in combinations(range(1, last), len(placements) - 1)]
        loads_ns = [largest_load_ns(seed, problem, placements, cuts, knows_order=knows_order) for cuts in every]
        least_ns, loads = min(loads_ns), DeviceLoads(problem, placements, knows_order=knows_order)
        bound_ns, cuts = loads.least(0, MAX_TIME)
        assert (1 - 2 / LOAD_PRECISION) * least_ns - 1000 <= bound_ns <= least_ns
        assert loads_ns[every.index(cuts)] <= (1 + 2 / LOAD_PRECISION) * least_ns + 1000
        assert loads.least(0, int(least_ns * 0.99)) == (int(least_ns * 0.99), ())


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("max_middles", [1, 64])
def test_few_states_of_long_chains_leave_a_bound(
    monkeypatch: pytest.MonkeyPatch, schedule: str, max_middles: int
) -> None:
    """Then stages may have no layers, and with ranges between first and second stages some layers may be missing."""
    shares = []
    for seed in range(12):
        problem, placements = random_problem(seed, schedule)
        bound_ns, _ = DeviceLoads(problem, placements).least(0, MAX_TIME)
        with monkeypatch.context() as patch:
            patch.setattr(device_loads, "MAX_STEPS", 0 if max_middles == 1 else 150)
            patch.setattr(device_loads, "MAX_MIDDLES", max_middles)
            relaxed_ns, cuts = DeviceLoads(problem, placements).least(0, MAX_TIME)
        assert relaxed_ns <= 1.002 * bound_ns
        assert all(begin < end for begin, end in pairwise(cuts))
        assert (cuts[0], cuts[-1], len(cuts)) == (0, len(problem.cuts) - 1, len(placements) + 1)
        shares.append(relaxed_ns / bound_ns)
    assert sorted(shares)[6] > 0.6


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_transfers_count_on_devices_that_cannot_compute_meanwhile(schedule: str) -> None:
    """A tensor of a megabyte takes a millisecond; a device between others has four cuts, each crossed both ways.

    The first transfer to a device and the last one from it count as what passes before and behind its actions.
    """
    for seed in range(12):
        problem, placements = random_problem(seed, schedule, overlaps=False)
        num = len(placements) // 2
        own = [2 if k in (0, num - 1) else 4 for k in range(num)]
        if schedule == "interleaved-1f1b":
            own = [3 if k in (0, num - 1) else 4 for k in range(num)]
        want = [2 * MS * (NUM_MICROBATCHES * crossings - (k > 0)) for k, crossings in enumerate(own)]
        assert DeviceLoads(problem, placements)._stalls.tolist() == want
