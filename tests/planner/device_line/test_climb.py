"""Estimates of steps are the simulator's, but for rounding; climbs by them end at a plan that is no slower."""

from dataclasses import replace as replaced
from itertools import count
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from bapipe.planner.compute import threads
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.device_line import climb as climb_module
from bapipe.planner.device_line.climb import Climbs
from bapipe.planner.device_line.estimate import StepEstimate
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.device_line.neighbourhood import Neighbourhood
from bapipe.planner.device_line.search import LineSearch
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans, random_line


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("buckets", [False, True])
def test_estimates_are_the_simulated_steps_where_transfers_take_no_compute_and_below_them_elsewhere(
    schedule: str, buckets: bool
) -> None:
    equal = checked = 0
    for seed in range(5):
        line = random_line(seed, schedule, buckets=buckets)
        overlaps = [device.overlaps_transfers for device in line.cluster.devices]
        estimate = StepEstimate(line, schedule, 1)
        for plan in plans(line, schedule):
            timed = line.time(plan)
            assert timed is not None
            estimated_ns = estimate.step_ns(plan)
            rounding_ns = 4 * line.options.minibatch_size * len(plan.counts)
            assert estimated_ns <= timed.step_ns + rounding_ns, plan
            score_ns = estimate.score_ns(plan)
            assert estimated_ns < score_ns == estimate.score_ns(plan, score_ns)
            assert estimate.score_ns(plan, 0.9 * score_ns) > 0.9 * score_ns
            is_equal = estimated_ns >= timed.step_ns - rounding_ns
            assert is_equal or not all(overlaps)
            equal += is_equal
            checked += 1
    assert checked > 60
    assert equal > checked // 2


def test_a_link_carries_one_transfer_at_a_time_in_estimates() -> None:
    """Eight micro-batches, F of 1 ms and B of 2 ms on each of two stages, 5 ms each way.

    The last input arrives at 1 + 8 * 5 ms, so B of the first one ends at 44, and the last gradient arrives 8 * 5 later.
    """
    profile = chain([1, 1], output_bytes=5 * 10**6)
    line = DeviceLine({"a": profile}, devices(2), PlanOptions(minibatch_size=8))
    plan = LinePlan(cuts=(0, 1, 2), counts=(1, 1), schedule="gpipe", microbatch_size=1)
    assert StepEstimate(line, "gpipe", 1).step_ns(plan) == 86 * 10**6


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_plans_that_lack_memory_have_no_estimate_and_recomputed_ones_that_of_the_simulator(
    schedule: str, recompute: bool
) -> None:
    profiles = {"a": chain([3, 1, 4, 1, 5, 9], param_bytes=10**6, stash_bytes=10**6, output_bytes=10**5)}
    outcomes = set()
    for megabytes in range(2, 24, 7):
        cluster = devices(4, memory_bytes=megabytes * 10**6, bytes_per_s=10**12)
        line = DeviceLine(profiles, cluster, PlanOptions(minibatch_size=8, recompute=recompute))
        estimate = StepEstimate(line, schedule, 1)
        for plan in plans(line, schedule):
            timed, estimated_ns = line.time(plan), estimate.step_ns(plan)
            assert (timed is None) == (estimated_ns == float("inf"))
            if timed is not None:
                assert estimated_ns == pytest.approx(timed.step_ns, abs=100)
            outcomes.add(None if timed is None else any(timed.recompute))
    assert outcomes == ({None, False, True} if recompute else {None, False})


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_estimates_do_not_depend_on_the_plans_before(schedule: str) -> None:
    """A walk of 400 moves, some to plans that do not fit: what is known of stages is that of the same ones."""
    profiles = {"a": chain([3, 1, 4, 1, 5, 9] * 4, param_bytes=10**6, stash_bytes=10**6, output_bytes=10**5)}
    line = DeviceLine(profiles, devices(8, memory_bytes=45 * 10**6), PlanOptions(minibatch_size=24))
    estimate, near = StepEstimate(line, schedule, 1), Neighbourhood(line, schedule, 1)
    plan = LinePlan(cuts=(0, 8, 16, 24), counts=(3, 3, 2), schedule=schedule, microbatch_size=1)
    random, steps_ns = near.random(1), set[float]()
    for _ in range(400):
        plan = near.draw(plan, random)
        steps_ns.add(estimate.step_ns(plan))
        assert estimate.step_ns(plan) == StepEstimate(line, schedule, 1).step_ns(plan), plan
    assert inf in steps_ns
    assert len(steps_ns) > 80


@pytest.mark.parametrize("replicas", [True, False])
def test_neighbours_are_plans_that_differ_in_cuts_and_devices(replicas: bool) -> None:
    line = random_line(3, "1f1b")
    profile = chain([1] * 12)
    line = DeviceLine({"a": profile}, line.cluster, PlanOptions(minibatch_size=8, replicas=replicas))
    num_devices = len(line.cluster.devices)
    plan = LinePlan(cuts=(0, 4, 12), counts=(1, 1), schedule="1f1b", microbatch_size=1)
    near, found = Neighbourhood(line, "1f1b", 1), set()
    random = near.random(0)
    for _ in range(200):
        other = near.draw(plan, random)
        assert other.cuts[0] == 0
        assert other.cuts[-1] == 12
        assert list(other.cuts) == sorted(set(other.cuts))
        assert len(other.counts) == len(other.cuts) - 1
        assert min(other.counts) >= 1
        assert sum(other.counts) <= num_devices
        found.add((len(other.cuts), other.counts))
    assert {each for each in found if max(each[1]) > 1} if replicas else found == {(3, (1, 1))}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_climbs_make_uneven_plans_faster_always_in_the_same_way(schedule: str) -> None:
    """By estimates, or by the simulator for a schedule without any."""
    profiles = {"a": chain([3, 1, 4, 1, 5, 9, 2, 6] * 2)}
    line = DeviceLine(profiles, devices(6), PlanOptions(minibatch_size=12))
    start = line.time(LinePlan(cuts=(0, 1, 16), counts=(3, 3), schedule=schedule, microbatch_size=1))
    assert start is not None
    steps_ns = [_climbed_ns(line, start), _climbed_ns(line, start)]
    assert steps_ns[0] == steps_ns[1] < 0.8 * start.step_ns


def uneven(seed: int) -> tuple[DeviceLine, TimedPlan]:
    """Forty layers on twelve unlike devices, and a plan that is far from a good one."""
    random = Random(seed)
    profiles = {"a": chain([random.randint(1, 9) for _ in range(40)], param_bytes=4 * 10**7, output_bytes=10**7)}
    alike = devices(12, memory_bytes=10**13, bytes_per_s=10**10)
    unlike = tuple(replace(device, speed=random.choice([1.0, 0.8, 0.6])) for device in alike.devices)
    line = DeviceLine(profiles, replace(alike, devices=unlike), PlanOptions(minibatch_size=24))
    start = line.time(LinePlan(cuts=(0, 1, 2, 40), counts=(4, 4, 4), schedule="1f1b", microbatch_size=1))
    assert start is not None
    return line, start


def test_longer_climbs_by_other_moves_end_lower_from_some_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_module, "MAX_ACTIONS", 12_500)
    steps_ns = []
    for seed in range(6):
        line, start = uneven(seed)
        steps_ns.append((_climbed_ns(line, start), _climbed_ns(line, start, num_doublings=3)))
    assert min(longer / shorter for shorter, longer in steps_ns) < 1
    assert any(longer == shorter for shorter, longer in steps_ns)


def test_a_race_ends_at_the_same_plans_in_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_module, "MAX_ACTIONS", 12_500)
    line, start = uneven(1)
    others = [replaced(start.plan, cuts=(0, middle, 2 * middle, 40)) for middle in (5, 8, 12, 15)]
    ends = []
    for number in (1, 3):
        monkeypatch.setattr(climb_module, "num_cores", lambda number=number: number)
        monkeypatch.setattr(threads, "num_cores", lambda number=number: number)
        timed = list[LinePlan]()

        def time(line: DeviceLine, plan: LinePlan, timed: list[LinePlan] = timed) -> TimedPlan | None:
            timed.append(plan)
            return line.time(plan)

        Climbs(time).race([(line, plan) for plan in (start.plan, *others)], UNLIMITED, lambda: False)
        ends.append(timed)
    assert ends[0] == ends[1]
    assert len(ends[0]) == 3


def test_a_plan_is_followed_for_as_long_as_that_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk ends at a faster plan but the last one, and none begins after the deadline."""
    monkeypatch.setattr(climb_module, "MIN_ACTIONS", 100)
    monkeypatch.setattr(climb_module, "MAX_ACTIONS", 100)
    steps_ns = list[int]()

    def time(line: DeviceLine, plan: LinePlan) -> TimedPlan | None:
        timed = line.time(plan)
        assert timed is not None
        steps_ns.append(timed.step_ns)
        return timed

    _, start = uneven(3)
    Climbs(time).walk_on(start, Deadline(0.0), lambda: False)
    Climbs(time).walk_on(start, UNLIMITED, lambda: True)
    assert steps_ns == []
    Climbs(time).walk_on(start, UNLIMITED, lambda: False)
    assert len(steps_ns) >= 2
    assert sorted(steps_ns, reverse=True) == steps_ns
    assert steps_ns[-1] < 0.8 * start.step_ns


def test_what_is_left_of_a_time_limit_is_for_climbs_that_end_where_they_help_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first climbs are short. Time is counted in looks at the clock; nothing is left if another search follows."""
    monkeypatch.setattr(climb_module, "MAX_ACTIONS", 200)
    steps_ns, looks = {}, {}
    line, _ = uneven(5)
    for is_last in (False, True):
        ticks = count()
        deadline = Deadline(10**7, clock=lambda ticks=ticks: next(ticks))  # type: ignore[misc]
        search = LineSearch([line], ["1f1b"], [1], bound_ns=0, deadline=deadline, is_last=is_last)
        search.run()
        assert search.best is not None
        assert search.bound_ns <= search.best.step_ns
        steps_ns[is_last], looks[is_last] = search.best.step_ns, next(ticks)
    assert steps_ns[True] < steps_ns[False]
    assert looks[False] < looks[True] < 10**6


def _climbed_ns(line: DeviceLine, start: TimedPlan, num_doublings: int = 0) -> int:
    """The shortest step of the plans that a climb times."""
    steps_ns, tries = [start.step_ns], iter(range(100))

    def time(line: DeviceLine, plan: LinePlan) -> TimedPlan | None:
        timed = line.time(plan)
        steps_ns.extend([] if timed is None else [timed.step_ns])
        return timed

    climbs = Climbs(time, num_doublings)
    climbs.from_plans([start], UNLIMITED, lambda: next(tries, None) is None)
    assert climbs.has(start)
    return min(steps_ns)


def test_walks_end_with_their_time_and_differ_by_their_seeds() -> None:
    line, start = uneven(2)
    estimate = StepEstimate(line, "1f1b", 1)
    parts = iter([0.0, 0.3, 1.0])
    assert estimate.walk(start.plan, 10**6, lambda: 1.0, 0) == start.plan
    assert estimate.walk(start.plan, 10**9, lambda: next(parts), 0) != start.plan
    assert next(parts, None) is None
    found = [estimate.walk(start.plan, 3000, lambda: 0.0, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "options", [{}, {"num_stages": 4}, {"constraints": ["l3 without l4"]}, {"constraints": ["l9 on d0,d1"]}]
)
def test_climbs_keep_constraints(options: dict[str, Any]) -> None:
    """Without any, other plans are faster."""
    profiles = {"a": chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])}
    line = DeviceLine(profiles, devices(6), PlanOptions(minibatch_size=12, **options))
    start = line.time(LinePlan(cuts=(0, 1, 2, 4, 10), counts=(1, 1, 1, 1), schedule="1f1b", microbatch_size=1))
    if options == {"constraints": ["l9 on d0,d1"]}:
        start = line.time(LinePlan(cuts=(0, 10), counts=(1,), schedule="1f1b", microbatch_size=1))
    assert start is not None
    assert line.allows_all == (not options)
    timed: list[LinePlan] = []

    def time(line: DeviceLine, plan: LinePlan) -> TimedPlan | None:
        timed.append(plan)
        return line.time(plan)

    Climbs(time).from_plan(start, UNLIMITED, lambda: True)
    found = line.time(timed[0])
    assert found is not None
    assert found.step_ns < start.step_ns
    free = DeviceLine(profiles, devices(6), PlanOptions(minibatch_size=12))
    assert line.allows(timed[0])
    assert found.step_ns >= _climbed_ns(free, start)


def test_plans_that_break_a_constraint_are_left_out() -> None:
    profiles = {"a": chain([1] * 6)}
    rules = ["l0 with l1", "l2 without l3"]
    line = DeviceLine(profiles, devices(4), PlanOptions(minibatch_size=8, constraints=rules))
    for cuts, is_allowed in (((0, 3, 6), True), ((0, 2, 6), False)):
        plan = LinePlan(cuts=cuts, counts=(2, 2), schedule="1f1b", microbatch_size=1)
        assert line.allows(plan) == is_allowed == (line.time(plan) is not None)


def test_the_fastest_naive_plan_is_timed_first_not_the_one_with_the_smallest_bound() -> None:
    """A transfer takes as long as 40 layers, which is not in the bound of many short stages."""
    random = Random(1)
    profile = chain([random.randint(1, 4) for _ in range(40)], output_bytes=3 * 10**9, param_bytes=3 * 10**8)
    cluster = devices(32, bytes_per_s=10**10, memory_bytes=10**12)
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=32))
    naive = [line.time(plan) for _, plan in naive_plans(line, ["1f1b", "gpipe"], [1])]
    steps_ns = [timed.step_ns for timed in naive if timed is not None]
    shown: list[tuple[int, int, int]] = []
    search = LineSearch(
        [line], ["1f1b", "gpipe"], [1], bound_ns=0, deadline=UNLIMITED, progress=lambda *figures: shown.append(figures)
    )
    search.run()
    assert min(steps_ns) < 0.9 * steps_ns[0]
    assert shown[0][1] <= min(steps_ns)
