"""The search of fixed placements: never worse than naive cuts, its bounds hold, and small problems are solved."""

import pytest
from msgspec.structs import replace

from bapipe.planner import layout_search
from bapipe.planner.branch_and_bound.problem import SearchResult
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.fixed_placements.device_loads import LOAD_PRECISION, DeviceLoads
from bapipe.planner.fixed_placements.naive_cuts import naive_cuts
from bapipe.planner.fixed_placements.search import search_fixed_placements
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.layout_search import search_layouts
from bapipe.planner.stages.intervals import MAX_TIME
from bapipe.schedules import LOOPED
from tests.builders import chain, devices
from tests.oracles.exhaustive_layouts import exhaustive, pipelines
from tests.planner.fixed_placements.test_path_bound import looped_problem
from tests.problems import random_problems


@pytest.mark.parametrize("schedule", LOOPED)
def test_bounds_hold_and_most_plans_are_optimal(schedule: str) -> None:
    found = []
    for seed in range(6):
        problems = [
            problem for problem in random_problems(seed, [schedule], splits_badly=seed % 2 == 1) if problem.roots
        ]
        raised, best = search_fixed_placements(problems, max_actions=60_000)
        want = exhaustive(problems)
        assert (best is None) == (want is None)
        if best is None or want is None:
            continue
        assert best.lower_bound_ns <= want.step_ns <= best.step_ns
        assert best.problem.simulate(best.layout).step_ns == best.step_ns
        assert all(root.bound_ns <= best.step_ns for problem in raised for root in problem.roots)
        found.append(best.step_ns == want.step_ns)
    assert len(found) > 1
    assert sum(found) >= 0.6 * len(found)


def test_raised_bounds_of_roots_leave_the_branch_and_bound_exact() -> None:
    num_checked = 0
    for seed in range(16):
        problems = [problem for problem in random_problems(seed, ["zb-v", "interleaved-1f1b"]) if problem.roots]
        raised, best = search_fixed_placements(problems, max_actions=5_000)
        found, want = best_first(raised, incumbent=best), exhaustive(problems)
        assert (found and found.step_ns) == (want and want.step_ns)
        if found is not None:
            # In which of a device's stages rounded times of repeated forwards lie is not known to the nanosecond.
            assert found.step_ns - found.lower_bound_ns <= (2 if any(found.layout.recompute) else 0)
            num_checked += 1
    assert num_checked > 6


def test_a_search_begins_with_its_incumbent() -> None:
    problem = looped_problem("zb-v", 40, 3, 6)
    _, best = search_fixed_placements([problem], max_actions=200_000)
    assert best is not None
    _, again = search_fixed_placements([problem], max_actions=0, incumbent=best)
    assert again is not None
    assert again.step_ns == best.step_ns
    # Loads, which take no simulated action, are bisected between other numbers.
    assert again.lower_bound_ns <= (1 + 1 / LOAD_PRECISION) * best.lower_bound_ns


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs", "zb-v"])
def test_long_chains_on_devices_with_two_stages_come_near_their_bound(schedule: str) -> None:
    problem = looped_problem(schedule, 120, 4, 12)
    _, best = search_fixed_placements([problem], max_actions=1_500_000)
    assert best is not None
    assert best.step_ns <= 1.04 * best.lower_bound_ns
    for root in problem.roots:
        (placements,) = pipelines(root.first_placements)
        naive_ns = [problem.step_ns(problem.layout(cuts, placements)) for cuts in naive_cuts(problem, placements)]
        assert best.step_ns <= min(naive_ns)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_the_bound_is_at_least_what_devices_have_to_do_in_any_number(schedule: str) -> None:
    problem = looped_problem(schedule, 30, 8, 12)
    _, best = search_fixed_placements([problem], max_actions=400_000)
    assert best is not None
    least_ns = []
    for root in problem.roots:
        (placements,) = pipelines(root.first_placements)
        least_ns.append(DeviceLoads(problem, placements, knows_order=False).least(root.bound_ns, MAX_TIME)[0])
    assert min(least_ns) > 1.01 * min(root.bound_ns for root in problem.roots)
    assert best.lower_bound_ns >= (1 - 2 / LOAD_PRECISION) * min(least_ns)


def test_naive_cuts_come_first_on_all_devices_half_of_them_and_so_on() -> None:
    profile = chain([3 + i % 4 for i in range(300)], output_bytes=40_000_000)  # transfers take longer than the layers
    cluster = devices(6, bytes_per_s=10**9)
    speeds = (0.3, 0.9, 1.0, 0.7, 0.8, 0.6)
    unlike = tuple(replace(device, speed=speed) for device, speed in zip(cluster.devices, speeds, strict=True))
    options = PlanOptions(minibatch_size=4, schedules=["zb-v"])
    (problem,) = build_space({"a": profile}, replace(cluster, devices=unlike), options, sizes=[1]).problems
    _, best = search_fixed_placements([problem], max_actions=10_000)
    assert best is not None
    naive_ns = []
    in_cluster_order = next(root for root in problem.roots if root.num_devices == 6)
    for root in problem.roots:
        if root is in_cluster_order or root.num_devices in (3, 1):
            (placements,) = pipelines(root.first_placements)
            naive_ns += [problem.step_ns(problem.layout(cuts, placements)) for cuts in naive_cuts(problem, placements)]
    assert best.layout.placements[-1].position is not None
    assert best.step_ns <= min(naive_ns)
    assert best.problem.simulate(best.layout).step_ns == best.step_ns


def test_schedules_of_both_kinds_share_one_bound_on_long_chains() -> None:
    profile = chain([3 + i % 4 for i in range(120)], output_bytes=100_000)
    options = PlanOptions(minibatch_size=8, schedules=["1f1b", "interleaved-1f1b"], replicas=False)
    problems = build_space({"a": profile}, devices(3), options, sizes=[1]).problems
    both = search_layouts(problems, max_nodes=600)
    alone = [search_layouts([problem], max_nodes=600) for problem in problems]
    assert both is not None
    steps = [each.step_ns for each in alone if each is not None]
    bounds = [each.lower_bound_ns for each in alone if each is not None]
    assert both.step_ns <= max(steps)
    assert min(bounds) <= both.step_ns
    assert both.lower_bound_ns <= min(steps)


def test_the_branch_and_bound_leaves_most_of_a_time_limit_to_the_search_of_pipelines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0

    def take_all_time(problems: object, *, deadline: Deadline, incumbent: SearchResult | None, **_: object) -> object:
        nonlocal now_s
        now_s += deadline.remaining_s or 0.0
        if incumbent is None:
            raise OutOfTime("no plan yet")
        return incumbent

    monkeypatch.setattr(layout_search, "best_first", take_all_time)
    found = search_layouts([looped_problem("zb-v", 40, 3, 6)], max_nodes=60, deadline=Deadline(8, clock=lambda: now_s))
    assert found is not None
    assert found.step_ns <= 1.1 * found.lower_bound_ns
