"""Bounds by what a micro-batch takes before and behind stages: every plan is feasible in them at its own step time."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import combinations, count, product
from math import inf
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.compute import threads
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.device_line import (
    prefix_bound,
    replica_classes,
    ring_goals,
    ring_ranges,
    tracked,
    trip_bound,
    trips_before,
)
from bapipe.planner.device_line.around_stages import join_levels, limit_known, limit_rest, note_levels, note_row_ns
from bapipe.planner.device_line.behind import Behind
from bapipe.planner.device_line.early_waits import early_waits
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.plan_range import PlanRange
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_bound import RingBound
from bapipe.planner.device_line.ring_goals import RingGoals
from bapipe.planner.device_line.ring_ranges import RingRanges
from bapipe.planner.device_line.stage_limits import least_again
from bapipe.planner.device_line.tracked import tracked_microbatches
from bapipe.planner.device_line.trip_bound import BY_COARSE, BY_TRIPS, TripBound
from bapipe.planner.device_line.trip_limits import NUM_KNOWN, OfClass, excess, stage_of
from bapipe.planner.device_line.trip_sums import Sums, first_begins, last_ends
from bapipe.planner.device_line.trip_tables import FLAT_AROUND, STEEP_AROUND, Tables, Window
from bapipe.planner.device_line.trips_apart import note_apart
from bapipe.planner.device_line.trips_before import _note_stages, _note_trips
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.device_orders import device_orders
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans
from tests.planner.device_line.test_ring_bound import alike_line
from tests.planner.device_line.test_unlike_devices import unlike_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS = 8
SMALL_NS, LONG_NS = 1e-5, 1e8
waits = tracked._waits


def sorted_line(num_devices: int, *, output_bytes: int = 0, num_microbatches: int | None = None) -> DeviceLine:
    """Twelve layers on devices with speeds from 1 to 0.5, as many micro-batches unless they are given."""
    cluster = devices(num_devices, bytes_per_s=10**10)
    speeds = [1 - 0.5 * i / (num_devices - 1) for i in range(num_devices)]
    unlike = tuple(replace(device, speed=speed) for device, speed in zip(cluster.devices, speeds, strict=True))
    profile = chain([2, 1, 3, 1, 2, 2, 1, 3, 1, 2, 1, 2], param_bytes=4 * 10**6, output_bytes=output_bytes)
    return DeviceLine(
        {"a": profile}, replace(cluster, devices=unlike), PlanOptions(minibatch_size=num_microbatches or num_devices)
    )


def without_waits(prefix: PrefixBound, before: Any) -> "NDArray[np.void]":
    """As if no first B waited for F but its own."""
    return np.zeros_like(waits(prefix, before))


def without_replicas(prefix: PrefixBound, few: int, most: int, left: int) -> Iterator[tuple[int, int, int]]:
    yield from ()


def best_of_two_or_three_stages(line: DeviceLine, schedule: str) -> TimedPlan:
    timed = [line.time(plan) for plan in plans(line, schedule) if len(plan.counts) in (2, 3)]
    return min((each for each in timed if each is not None), key=lambda each: each.step_ns)


@pytest.mark.parametrize("those", ["unlike", "alike", "many alike"])
@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_plan_is_feasible_among_those_like_it_at_its_step_time(
    schedule: str, is_coarse: bool, those: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if those == "many alike":  # stages are told apart by the micro-batches of a replica alone
        monkeypatch.setattr(replica_classes, "MAX_ALIKE", 1)
    if is_coarse:  # as of more than 32 devices of a stage, more than 128 stages, and large tables
        monkeypatch.setattr(replica_classes, "MAX_SINGLE", 1)
        monkeypatch.setattr(replica_classes, "CLASS_GROWTH", 3)
        monkeypatch.setattr(trip_bound, "FIRST_COUNTED", ((0, 5), (1, 2), (2, 2)))
        monkeypatch.setattr(trip_bound, "MAX_TABLES", 3)
        monkeypatch.setattr(trip_bound, "MAX_BYTES", 20_000)
        monkeypatch.setattr(trip_bound, "WIDE", 0)
    infeasible = checked = 0
    for seed in range(3):
        given = (unlike_line if those == "unlike" else alike_line)(seed, schedule, buckets=seed > 1)
        for order in device_orders(given.profiles, given.cluster, given.options):
            line = given.in_order(order.ranks)
            prefix = PrefixBound(line, schedule, 1, len(line.cluster.devices))
            bound, timed = TripBound(prefix), [each for each in map(line.time, plans(line, schedule)) if each]
            of_all = bound.within(prefix.kind, max(each.step_ns for each in timed), UNLIMITED, BY_COARSE)
            assert of_all is not None
            for number, each in enumerate(timed):
                cuts, first, last = len(each.plan.counts) - 1, each.plan.counts[0], each.plan.counts[-1]
                like_it = PlanKind(cuts, cuts, last, last, first, first), PlanKind(0, cuts, 1, 12, 1, 12), prefix.kind
                questions = [*product(like_it, (None, of_all), (False, True))]
                for kind, earlier, counts_cuts in questions[number % 3 :: 3]:  # by turns, as each takes long
                    known = bound.within(kind, each.step_ns, UNLIMITED, ROUNDS, earlier, counts_cuts=counts_cuts)
                    assert known is not None, (seed, order.words, each.plan, kind)
            checked += len(timed)
            best_ns = min(each.step_ns for each in timed)
            infeasible += bound.within(prefix.kind, best_ns * 3 // 4, UNLIMITED, ROUNDS) is None
    assert checked > 36
    assert infeasible >= 2


def test_every_plan_is_feasible_where_turns_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each end and number of replicas of the first stage, and with all rows; three devices count as many."""
    monkeypatch.setattr(prefix_bound, "MANY_DEVICES", 1)
    monkeypatch.setattr(prefix_bound, "FEW_MICROBATCHES", 0)
    monkeypatch.setattr(tracked, "FINE", 0)
    checked = infeasible = 0
    for seed in range(12):
        line = unlike_line(seed, "1f1b", buckets=seed > 1)
        prefix = PrefixBound(line, "1f1b", 1, len(line.cluster.devices))
        bound, timed = TripBound(prefix), [each for each in map(line.time, plans(line, "1f1b")) if each]
        for each in timed[:: 1 + len(timed) // 60]:
            cuts, first, end = len(each.plan.counts) - 1, each.plan.counts[0], line.cuts.index(each.plan.cuts[1])
            kind = PlanKind(cuts, cuts, 1, 12, first, first, end, end)
            for is_fine in (False, True):
                known = bound.within(kind, each.step_ns, UNLIMITED, ROUNDS, counts_cuts=True, is_fine=is_fine)
                assert known is not None, (seed, each.plan)
            infeasible += bound.within(kind, each.step_ns * 9 // 10, UNLIMITED, ROUNDS, counts_cuts=True) is None
            checked += prefix.tells_turns
    assert checked > 100
    assert infeasible > 10


def test_parts_where_turns_are_told_apart_have_every_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for goals above those that they were divided for; and what is proven of them is proven of their plans."""
    monkeypatch.setattr(prefix_bound, "MANY_DEVICES", 1)
    monkeypatch.setattr(tracked, "FINE", 0)
    line = sorted_line(6, num_microbatches=24)
    timed = [each for each in map(line.time, plans(line, "1f1b")) if each is not None]
    best = min(timed, key=lambda each: each.step_ns)
    prefix = PrefixBound(line, "1f1b", 1, 6)
    assert prefix.tells_turns
    ranges = RingRanges([prefix], 0, best)
    for percent in (85, 95, 100):
        assert not ranges.is_refuted(best.step_ns * percent // 100, UNLIMITED, lambda: inf) or percent < 100
        for each in timed:
            cuts, first, end = len(each.plan.counts) - 1, each.plan.counts[0], line.cuts.index(each.plan.cuts[1])
            those = [
                part
                for part in ranges.ranges
                if part.cuts[0] <= cuts <= part.cuts[1]
                and part.first_replicas[0] <= first <= part.first_replicas[1]
                and part.first_ends[0] <= end <= part.first_ends[1]
            ]
            assert len(those) == 1, each.plan
            assert those[0].bound_ns <= each.step_ns, each.plan
    assert {part.is_fine for part in ranges.ranges} == {False, True}


def test_several_ranges_of_a_problem_are_asked_about_at_once_where_turns_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a look not the whole is asked about, but its parts, each alone in a thread of its own."""
    monkeypatch.setattr(tracked, "FINE", 0)
    line = sorted_line(6, num_microbatches=24)
    best = min(filter(None, map(line.time, plans(line, "1f1b"))), key=lambda each: each.step_ns)
    asked_at_once = {}
    for many in (1, 128):
        monkeypatch.setattr(prefix_bound, "MANY_DEVICES", many)
        ranges, asked = RingRanges([PrefixBound(line, "1f1b", 1, 6)], 0, best), list[list[tuple[int, int]]]()

        def ask(several: list[PlanRange], *others: Any, ask: Any = ranges.ask, asked: Any = asked) -> None:
            asked.append([each.first_replicas for each in several])
            ask(several, *others)

        monkeypatch.setattr(ranges, "ask", ask)
        ranges.ask(ranges.open_of(best.step_ns), best.step_ns, UNLIMITED, BY_COARSE)
        assert not ranges.is_refuted(best.step_ns, UNLIMITED, lambda: inf)
        asked_at_once[many] = asked
    whole, parts = asked_at_once[128], asked_at_once[1]
    assert whole[:2] == [[(1, 6)], [(1, 6)]]
    assert max(map(len, whole)) == 1
    assert parts[0] == [(1, 6)]
    assert len(parts[1]) > 1
    assert all(replicas != (1, 6) for several in parts[1:] for replicas in several)


def test_a_begin_where_micro_batches_arrive_late_does_not_hide_an_earlier_one() -> None:
    """Transfers over some cuts take a hundred times as long as over others, and longer than any stage."""
    given, slow = unlike_line(93061, "gpipe", buckets=True), Bandwidth(bytes_per_s=10**6, latency_ns=5)
    speeds = 1.0, 0.9, 1.0, 1.0, 0.3
    unlike = tuple(replace(device, speed=speed) for device, speed in zip(given.cluster.devices, speeds, strict=True))
    cluster = replace(given.cluster, devices=unlike, intra_host=slow, inter_host=replace(slow, latency_ns=0))
    line = DeviceLine(given.profiles, cluster, PlanOptions(minibatch_size=12, schedules=["gpipe"]))
    timed = [each for each in map(line.time, plans(line, "gpipe")) if each]
    bound = TripBound(PrefixBound(line, "gpipe", 1, len(cluster.devices)))
    kind, steps_ns = bound.prefix.kind, sorted({each.step_ns for each in timed})
    of_all = bound.within(kind, steps_ns[-1], UNLIMITED, BY_COARSE)
    assert all(bound.within(kind, ns, UNLIMITED, ROUNDS, of_all) is not None for ns in steps_ns[:20])


def test_a_begin_that_a_short_stage_may_not_have_is_tried_for_a_longer_one() -> None:
    """With one micro-batch for each replica a longer stage may be done sooner: its B begins sooner."""
    profile = chain([5] * 5, param_bytes=13_107_200)  # two layers fill a bucket, and the ring of one takes 4 ms
    cluster = devices(4, memory_bytes=90 * 10**6, bytes_per_s=3_276_800_000)
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=2, constraints=["l0 with l1"]))
    timed = line.time(LinePlan(cuts=(0, 3, 5), counts=(2, 2), schedule="1f1b", microbatch_size=1))
    assert timed is not None
    bound = TripBound(PrefixBound(line, "1f1b", 1, 4))
    assert bound.within(bound.prefix.kind, timed.step_ns, UNLIMITED, ROUNDS) is not None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_whatever_is_known_a_stage_with_more_layers_exceeds_the_limits_no_less(schedule: str) -> None:
    """What the queues of begins and ends need: of random tables, lowered as those that are filled are. Within a long time
    all limits are looked at."""
    checked = 0
    for seed in range(60):
        line = (alike_line if seed % 3 == 0 else unlike_line)(seed, schedule, buckets=seed % 4 > 0)
        prefix = PrefixBound(line, schedule, 1, len(line.cluster.devices))
        problem, kind = prefix.programme, prefix.kind
        microbatches = tracked.tracked_microbatches(prefix, 8)
        end, (num, num_classes) = problem.layers.shape[1] - 1, problem.stages.shape
        random = np.random.default_rng(seed)
        for p, g in product(range(num), range(num_classes)):
            own, columns = problem.stages[p, g], problem.columns[problem.stages[p, g]["own"]]
            stage = stage_of(problem, microbatches, kind, early_waits(problem, kind), LONG_NS, True, p, g)
            known, rest = (
                random.uniform(0, random.choice([1e-3, 1e2, 1e4]), (rows, end + 1)) for rows in (NUM_KNOWN, 4)
            )
            rest[:, end] = 0.0
            rest[STEEP_AROUND] = rest[FLAT_AROUND]
            num_late, num_levels = microbatches.num_gradients, microbatches.num_levels
            late = random.uniform(0, random.choice([1e-3, 1e2, 1e4]), (end + 1, num_late * num_levels))
            late[end] = 0.0
            lower = rest.copy()
            lower_late = late.copy()
            limit_rest(columns, microbatches, own, stage, 0, end, lower, lower_late)
            for levels in (late, lower_late):
                join_levels(num_late, num_levels, levels)
            of_class = of_class_of(microbatches, lower_late, p, g)
            exceeds = partial(excess, problem.layers, problem.savings, problem.max_bucket, own, stage, of_class)
            for i, j in combinations(range(end), 2):
                assert exceeds(known, lower, i, j) <= exceeds(known, lower, i, j + 1) + SMALL_NS, (seed, p, g, i, j)
            of_class = of_class_of(microbatches, late, p, g)
            exceeds = partial(excess, problem.layers, problem.savings, problem.max_bucket, own, stage, of_class)
            limit_known(columns, own, stage, of_class, 0, end, np.empty((3, NUM_KNOWN)), known)
            for i, j in combinations(range(1, end + 1), 2):
                assert exceeds(known, rest, i, j) <= exceeds(known, rest, i - 1, j) + SMALL_NS, (seed, p, g, i, j)
                checked += 1
    assert checked > 300


def of_class_of(rows: Any, late: Any, p: int, g: int) -> OfClass:
    return OfClass(
        rows.replicas[g], rows.replica_ns[p, g], rows.rounds[g], rows.of_kinds[p, g], rows.gradients[g], late
    )


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_begin_and_end_where_the_limits_one_by_one_say(schedule: str, is_tight: bool) -> None:
    """By all limits or trips alone, of random tables. With less memory some layers of GPipe run again, or do not fit."""
    num_stages = num_again = 0
    for seed in range(40):
        line = (alike_line if seed % 3 == 0 else unlike_line)(seed, schedule, buckets=seed % 4 > 0)
        prefix = PrefixBound(line, schedule, 1, len(line.cluster.devices))
        if is_tight:
            all_layers = prefix.programme.layers[0, -1]
            prefix.programme.stages["limit_bytes"] = all_layers["state"] + 1.5 * all_layers["stash"]
            prefix.programme.stages["num_stashes"] = 8 if schedule == "gpipe" else 1
        problem, kind, rows = prefix.programme, prefix.kind, tracked_microbatches(prefix, 3)
        end, (num, num_classes) = problem.layers.shape[1] - 1, problem.stages.shape
        random, scratch = np.random.default_rng(seed), TripBound(prefix)._scratch(2, 0, 1)
        sums = Sums(scratch.weights, scratch.begin_sums, scratch.end_sums)
        limit_ns = float(random.uniform(0.1, 1.0) * problem.layers[0, -1]["trip"] * problem.num_microbatches)
        for p, g in product(range(num), range(num_classes)):
            own, columns = problem.stages[p, g], problem.columns[problem.stages[p, g]["own"]]
            stage = stage_of(problem, rows, kind, early_waits(problem, kind), limit_ns, False, p, g)
            known, rest = (random.uniform(0, limit_ns / 4, (count, end + 1)) for count in (NUM_KNOWN, 4))
            known[:, random.random(end + 1) < 0.1] = np.inf
            rest[:, random.random(end + 1) < 0.1] = np.inf
            rest[:, end] = 0.0
            rest[STEEP_AROUND] = rest[FLAT_AROUND]
            limit_rest(columns, rows, own, stage, 0, end, rest, scratch.late)
            of_class = of_class_of(rows, scratch.late, p, g)
            are_reached = known[0] < np.inf
            limit_known(columns, own, stage, of_class, 0, end, scratch.slopes, known)
            np.testing.assert_array_equal(known[0] < np.inf, are_reached)
            given = problem.layers, problem.savings, problem.max_bucket, own, stage, of_class
            within = np.array([[excess(*given, known, rest, i, j) <= 0 for j in range(end + 1)] for i in range(end)])
            agains = [least_again(problem.layers, problem.savings, own, i, end) for i in range(end)]
            num_again += sum(0 < again < inf for again in agains)
            asked = problem, columns, own, stage, of_class, known, rest, sums, Window(0, end - 1, 1, end)
            starts = np.empty(end + 1, dtype=np.int64)
            firsts = [next((i for i in range(j) if within[i, j]), j) for j in range(1, end + 1)]
            lasts = [next((j for j in range(end, i, -1) if within[i, j]), i) for i in range(end)]
            for is_full in (False, True):
                _, has_any = first_begins(*asked, starts, is_full)
                assert starts[1:].tolist() == firsts, (seed, p, g)
                assert has_any == any(i < j for j, i in enumerate(firsts, 1))
                last_ends(*asked, starts, is_full)
                assert starts[:end].tolist() == lasts, (seed, p, g)
            num_stages += int(np.triu(within, 1).sum())
    assert num_stages > 1000
    assert (num_again > 100) == (is_tight and schedule == "gpipe")


def test_what_comes_before_and_behind_a_stage_of_unlike_devices_raises_the_bound() -> None:
    line = sorted_line(9)
    best = best_of_two_or_three_stages(line, "1f1b")
    prefix = PrefixBound(line, "1f1b", 1, 9)
    by_rings = RingBound(prefix, best.step_ns / 2)
    limits_ns = [best.step_ns * part // 100 for part in range(60, 101)]
    num_by_rings = sum(by_rings.is_feasible(prefix.kind, limit_ns, UNLIMITED) for limit_ns in limits_ns)
    num_by_trips = num_feasible(line, "1f1b", limits_ns)
    assert 0 < num_by_trips < num_by_rings


def num_feasible(line: DeviceLine, schedule: str, limits_ns: list[int], *, counts_cuts: bool = False) -> int:
    """Returns how many of some step times may be reached by the bound."""
    prefix = PrefixBound(line, schedule, 1, len(line.cluster.devices))
    bound = TripBound(prefix)
    known = (bound.within(prefix.kind, ns, UNLIMITED, ROUNDS, counts_cuts=counts_cuts) for ns in limits_ns)
    return sum(each is not None for each in known)


def test_the_forwards_that_a_first_backward_waits_for_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the replica with the very first micro-batch, and of any."""
    line = sorted_line(9, num_microbatches=27)
    best_ns = best_of_two_or_three_stages(line, "gpipe").step_ns
    monkeypatch.setattr(tracked, "_places", without_replicas)
    limits_ns = [best_ns * part // 200 for part in range(140, 201)]
    num_with_waits = num_feasible(line, "gpipe", limits_ns, counts_cuts=True)
    monkeypatch.setattr(tracked, "_waits", without_waits)
    assert 0 < num_with_waits < num_feasible(line, "gpipe", limits_ns, counts_cuts=True)


def test_replicas_that_are_looked_at_one_by_one_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = devices(16, bytes_per_s=10**10)
    unlike = tuple(replace(device, speed=1 - i / 25) for i, device in enumerate(cluster.devices))
    profile = chain([2, 1, 3] * 8, param_bytes=4 * 10**6)
    line = DeviceLine({"a": profile}, replace(cluster, devices=unlike), PlanOptions(minibatch_size=64))
    limits_ns = [ms * 10**6 for ms in range(970, 1021, 2)]
    num_with_replicas = num_feasible(line, "1f1b", limits_ns)
    monkeypatch.setattr(tracked, "_places", without_replicas)
    assert 0 < num_with_replicas < num_feasible(line, "1f1b", limits_ns)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_earlier_rounds_than_the_last_one_raise_the_bound(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where 32 replicas of a stage have two micro-batches each, and 22 of a shorter one behind it have three."""
    cluster = devices(11, bytes_per_s=10**10)
    line = DeviceLine({"a": chain([2, 1, 3] * 4)}, cluster, PlanOptions(minibatch_size=13))
    best_ns = best_of_two_or_three_stages(line, schedule).step_ns
    limits_ns = [best_ns * part // 200 for part in range(140, 201)]
    monkeypatch.setattr(PrefixBound, "_may_tell_gradients", lambda *_: False)
    num_with_rounds = num_feasible(line, schedule, limits_ns)
    monkeypatch.setattr(tracked, "_has_rounds", lambda _: False)
    assert 0 < num_with_rounds < num_feasible(line, schedule, limits_ns)


def test_gradients_that_are_told_apart_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPipe: later stages run B of many micro-batches one after another, too."""
    cluster = devices(11, bytes_per_s=10**10)
    unlike = tuple(replace(device, speed=1 - i / 40) for i, device in enumerate(cluster.devices))
    profile = chain([2, 1, 3] * 4, param_bytes=4 * 10**7)
    line = DeviceLine({"a": profile}, replace(cluster, devices=unlike), PlanOptions(minibatch_size=40))
    best_ns = best_of_two_or_three_stages(line, "gpipe").step_ns
    limits_ns = [best_ns * part // 400 for part in range(300, 401)]
    num_with_gradients = num_feasible(line, "gpipe", limits_ns)
    monkeypatch.setattr(PrefixBound, "_may_tell_gradients", lambda *_: False)
    assert 0 < num_with_gradients < num_feasible(line, "gpipe", limits_ns)


def test_the_slowest_replica_of_each_kind_raises_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kinds each is slow where the other one is fast, so that the least times of both are of no device."""
    cluster = devices(8, bytes_per_s=10**10)
    mixed = tuple(replace(device, kind="ab"[i % 2]) for i, device in enumerate(cluster.devices))
    first, second = chain([1, 4] * 8), chain([4, 1] * 8)
    profiles = {"a": first, "b": replace(second, device=replace(second.device, kind="b"))}
    line = DeviceLine(profiles, replace(cluster, devices=mixed), PlanOptions(minibatch_size=16))
    best_ns = best_of_two_or_three_stages(line, "1f1b").step_ns
    limits_ns = [best_ns * part // 200 for part in range(60, 201, 2)]
    num_with_kinds = num_feasible(line, "1f1b", limits_ns)
    monkeypatch.setattr(tracked, "_slowest_of_kinds", lambda *_: [])
    assert 0 < num_with_kinds < num_feasible(line, "1f1b", limits_ns)


def test_cuts_that_are_counted_raise_the_bound() -> None:
    cluster = devices(16, bytes_per_s=10**10)
    unlike = tuple(replace(device, speed=1 - i / 40) for i, device in enumerate(cluster.devices))
    profile = chain([2, 1, 3] * 8, param_bytes=4 * 10**7, output_bytes=2 * 10**7)
    line = DeviceLine({"a": profile}, replace(cluster, devices=unlike), PlanOptions(minibatch_size=32))
    limits_ns = [ms * 10**6 for ms in range(480, 561)]
    num_counted = num_feasible(line, "gpipe", limits_ns, counts_cuts=True)
    assert 0 < num_counted < num_feasible(line, "gpipe", limits_ns)


@pytest.mark.parametrize("max_tables", [3, 128])
def test_more_threads_find_the_same(max_tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some stages are not told apart by the cuts before them."""
    monkeypatch.setattr(trip_bound, "FIRST_COUNTED", ((1, max_tables), (2, max_tables)))
    monkeypatch.setattr(trip_bound, "MAX_TABLES", max_tables)
    monkeypatch.setattr(trip_bound, "POSITIONS_AT_ONCE", 2)
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    monkeypatch.setattr(trip_bound, "num_cores", lambda: 3)
    prefix = PrefixBound(sorted_line(11, output_bytes=10**7), "1f1b", 1, 11)
    limit_ns = next(ns for ns in count(10**7, 10**7) if TripBound(prefix).within(prefix.kind, ns, UNLIMITED, 1))
    bounds = [TripBound(prefix) for _ in range(2)]
    one, three = (
        bound.within(prefix.kind, limit_ns, UNLIMITED, 2, counts_cuts=True, max_threads=partial(int, num))
        for bound, num in zip(bounds, (1, 3), strict=True)
    )
    assert one is not None
    assert three is not None
    assert (one.cuts, len(one.tables)) == (three.cuts, len(three.tables))
    assert bounds[0].num_tried == bounds[1].num_tried > 0
    for table, same in zip(one.tables, three.tables, strict=True):
        np.testing.assert_array_equal(table, same)


def test_threads_that_fill_one_table_add_to_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trip_bound, "POSITIONS_AT_ONCE", 2)
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    monkeypatch.setattr(trip_bound, "num_cores", lambda: 2)
    fill, ends = trips_before.fill_before, dict[int, Any]()

    def noting(problem: Any, tracked: Any, kind: Any, waits: Any, limit: float, tables: Any, *others: Any) -> int:
        ends[others[3]] = tables.before_ends  # by the first class of the stages
        return int(fill(problem, tracked, kind, waits, limit, tables, *others))

    monkeypatch.setattr(trips_before, "fill_before", noting)
    prefix = PrefixBound(sorted_line(11, output_bytes=10**7), "1f1b", 1, 11)
    TripBound(prefix).within(prefix.kind, 10**9, UNLIMITED, 1, max_threads=lambda: 2)
    assert len(ends) == 2
    assert not np.shares_memory(*ends.values())


@cache
def best_of_all(output_bytes: int) -> TimedPlan:
    """The fastest of all plans of the line with seven devices."""
    line = sorted_line(7, output_bytes=output_bytes)
    return min((each for each in map(line.time, plans(line, "1f1b")) if each), key=lambda each: each.step_ns)


@pytest.mark.parametrize("left", [1.0, inf])
@pytest.mark.parametrize("max_kept_bytes", [0, 2**29])
@pytest.mark.parametrize("output_bytes", [0, 4 * 10**7])
def test_the_bound_of_all_ranges_is_near_the_best_plan_and_not_above_it(
    output_bytes: int, max_kept_bytes: int, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With short transfers, where all plans are asked about first, and with long ones; also where nothing is kept.

    With and without a look at the plans within the last goal first.
    """
    monkeypatch.setattr(ring_ranges, "MAX_KEPT_BYTES", max_kept_bytes)
    line, best = sorted_line(7, output_bytes=output_bytes), best_of_all(output_bytes)
    ranges = RingRanges([PrefixBound(line, "1f1b", 1, 7)], 0, best)
    RingGoals(ranges=ranges, high_ns=best.step_ns, deadline=UNLIMITED, left=lambda: left).raise_bound()
    assert 0.9 * best.step_ns < ranges.bound_ns <= best.step_ns


@pytest.mark.parametrize(
    ("left", "tried", "seen"),
    [
        (66, 17, [0.6, 0.8]),  # a look is too much, ...
        (67, 17, [0.93, 0.6, 0.8]),  # ... one at the last goal, ...
        (121, 17, [0.95, 0.6, 0.8]),  # ... another one at that, ...
        (171, 86, [0.95, 0.95, 0.6, 0.8]),  # ... what that leaves open, ...
        (171, 17, [0.95, 0.95, 0.95, 0.6, 0.8]),  # ... or nothing
    ],
)
def test_the_work_of_a_look_decides_about_the_next(
    left: int, tried: int, seen: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By trips alone it would be 60 or 50, and is 17."""
    asked: list[float] = []
    best = best_of_two_or_three_stages(sorted_line(7), "1f1b")

    def ask(ranges: RingRanges, goal_ns: int, *_: object) -> bool:
        asked.append(round(goal_ns / best.step_ns, 2))
        ranges._trips[0].num_tried += 17
        return True

    def look(ranges: RingRanges, _: object, goal_ns: int, deadline: Deadline, num_rounds: int) -> None:
        asked.append(round(goal_ns / best.step_ns, 2))
        ranges._trips[0].num_tried += {BY_TRIPS: 17, BY_COARSE: tried}[num_rounds]

    monkeypatch.setattr(RingRanges, "is_refuted", ask)
    monkeypatch.setattr(RingGoals, "_raise_soon", lambda _: None)
    monkeypatch.setattr(RingRanges, "ask", look)
    monkeypatch.setattr(TripBound, "look_work", lambda _, kind, ns, deadline: 60 if ns > 0.94 * best.step_ns else 50)
    ranges = RingRanges([PrefixBound(sorted_line(7), "1f1b", 1, 7)], 0, best)
    goals = RingGoals(ranges=ranges, high_ns=best.step_ns, deadline=UNLIMITED, left=lambda: left)
    assert goals._raise_first() == 17
    assert asked == seen


def test_the_work_of_a_look_is_known_before_it() -> None:
    prefix = PrefixBound(sorted_line(40, num_microbatches=80), "1f1b", 1, 40)
    bound = TripBound(prefix)
    limit_ns = next(ns for ns in (2**k for k in count()) if bound.look_work(prefix.kind, ns, UNLIMITED))
    expected = bound.look_work(prefix.kind, limit_ns, UNLIMITED)
    tried: list[int] = []
    bound.within(prefix.kind, limit_ns, UNLIMITED, BY_COARSE, keep=lambda _: tried.append(bound.num_tried))
    assert 0.4 * expected < tried[0] < 1.5 * expected  # less where there are few layers


def test_what_is_answered_and_known_when_the_time_is_over_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    line = sorted_line(7)
    best = best_of_two_or_three_stages(line, "1f1b")
    ranges = RingRanges([PrefixBound(line, "1f1b", 1, 7), PrefixBound(line, "gpipe", 1, 7)], 0, best)
    first, goal_ns = ranges.ranges[0], best.step_ns
    passes: list[Behind] = []
    TripBound(first.problem.prefix).within(first.kind, goal_ns, UNLIMITED, BY_COARSE, keep=passes.append)

    def answer(self: RingRanges, asked: PlanRange, *others: Any) -> bool:
        if asked is not first:
            is_answered.set()
            return True
        assert is_answered.wait(60)
        keep = others[-2]
        for known in passes:
            keep(known)
        raise OutOfTime("over")

    is_answered = Event()
    monkeypatch.setattr(RingRanges, "_answer", answer)
    with pytest.raises(OutOfTime):
        ranges.ask(ranges.ranges, goal_ns, UNLIMITED)
    assert [each.bound_ns > goal_ns for each in ranges.ranges] == [False, True]
    assert first.known_within(goal_ns) is passes[-1]
    assert first.open_ns == 0  # it has not been answered


def test_what_is_asked_behind_a_look_goes_on_where_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int | None] = []
    fill = TripBound._fill_before

    def noting(bound: TripBound, asked: Any, known: Any) -> Any:
        filled.append(asked.steps)
        return fill(bound, asked, known)

    monkeypatch.setattr(TripBound, "_fill_before", noting)
    line = sorted_line(7)
    limit_ns, prefix = best_of_two_or_three_stages(line, "1f1b").step_ns, PrefixBound(line, "1f1b", 1, 7)
    bound, passes = TripBound(prefix), list[Behind]()
    seen = bound.within(prefix.kind, limit_ns, UNLIMITED, BY_TRIPS, keep=passes.append)
    assert filled == [None]
    seen = bound.within(prefix.kind, limit_ns, UNLIMITED, BY_COARSE, seen, keep=passes.append)
    assert filled == [None, 0, 2]
    assert [known.num_passes for known in passes] == [1, 2, 3]
    whole = bound.within(prefix.kind, limit_ns, UNLIMITED, 1, seen)
    assert filled[3:] == [3]
    assert bound.within(prefix.kind, limit_ns - 1, UNLIMITED, 1, whole) is not None
    assert filled[4:] == [None, 0, 2, 3]  # of fewer plans more is known
    cut_off = bound.within(prefix.kind, limit_ns, UNLIMITED, 1, passes[0])
    assert filled[8:] == [0, 2, 3]
    assert whole is not None
    assert cut_off is not None
    assert all(map(np.array_equal, whole.tables, cut_off.tables))


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_goal_out_of_reach_leaves_a_bound_and_time_for_lower_ones(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is counted in looks at the clock; the last of the goals, and then the first one, take all they are given."""
    monkeypatch.setattr(ring_goals, "MOST", num_parts)
    line, ticks, asked = sorted_line(7), count(), []
    best = best_of_two_or_three_stages(line, "1f1b")

    def ask(ranges: RingRanges, goal_ns: int, deadline: Deadline, left: Callable[[], float]) -> bool:
        asked.append(round(goal_ns / best.step_ns, 2))
        while goal_ns > 0.86 * best.step_ns:
            deadline.check()
        ranges.ranges[0].bound_ns = goal_ns + 1
        return True

    monkeypatch.setattr(RingRanges, "is_refuted", ask)
    monkeypatch.setattr(RingRanges, "ask", lambda *_: None)
    ranges = RingRanges([PrefixBound(line, "1f1b", 1, 7)], 0, best)
    deadline = Deadline(10**4, clock=lambda: float(next(ticks)))
    with pytest.raises(OutOfTime):
        RingGoals(ranges=ranges, high_ns=best.step_ns, deadline=deadline, left=lambda: inf).raise_bound()
    assert asked[:4] == [0.95, 0.6, 0.8, 0.9]
    assert (0.85 in asked) == (num_parts == 2)
    assert ranges.bound_ns > (0.8 if num_parts == 1 else 0.84) * best.step_ns


def test_it_ends_at_the_deadline() -> None:
    prefix = PrefixBound(sorted_line(5), "1f1b", 1, 5)
    with pytest.raises(OutOfTime):
        TripBound(prefix).within(prefix.kind, 10**9, Deadline(0.0), ROUNDS)


@pytest.mark.parametrize(("is_full", "is_apart"), [(False, False), (True, False), (True, True)])
def test_behind_stages_each_row_is_the_least_over_all_their_begins(is_full: bool, is_apart: bool) -> None:
    """Whatever is before them: compared with the sums of docs/many_devices.md, without any begin left out.

    Taken apart, a row is the longest of what each of its sums is at least.
    """
    prefix = PrefixBound(sorted_line(4, output_bytes=10**7, num_microbatches=9), "1f1b", 1, 4)
    problem, rows, random, checked = prefix.programme, tracked_microbatches(prefix, 16), np.random.default_rng(0), 0
    end, num_behind = problem.layers.shape[1] - 1, rows.behind.size * is_full
    num_rows = 2 + num_behind + rows.before.size * is_full
    for p, g, flatness in product(range(1, 4), range(prefix.classes.fewest.size), (0.0, 0.5, 1.0, 2.0)):
        own = problem.stages.view(np.recarray)[p, g]
        if own.few > 4 - p:
            continue
        at = problem.layers.view(np.recarray)[own.own]
        rising = flatness * np.stack(
            [at.critical if 1 <= row < 2 + num_behind else at.forward for row in range(num_rows)], 1
        )
        before = rising * own.fastest + random.uniform(0, 0.3 * float(at.forward[-1]) / end, (end + 1, num_rows))
        before[random.random(end + 1) < 0.2] = np.inf
        tables = Tables(
            np.zeros(5, dtype=np.int64),
            np.stack([before] * 5),
            np.full((5, end + 1, num_rows), np.inf),
            *[np.zeros((3, 5, end + 1))] * 2,
            *[np.zeros((5, end + 1, 0))] * 2,
        )
        scratch = TripBound(prefix)._scratch(num_rows, 0, rows.num_levels)
        scratch.starts[:] = np.minimum(np.arange(end + 1), np.sort(random.integers(0, end, end + 1)) // 2)
        window = Window(0, end - 1, 1, end)
        note_levels(before, rows.num_levels if is_full else 1, scratch.levels)
        if is_full:
            note_row_ns(rows, own, p, g, 0, scratch)
        if is_apart:
            note_apart(problem, rows, tables, scratch, num_behind, p, g, own.few, window)
        elif is_full:
            _note_stages(problem, rows, tables, scratch, num_behind, p, g, own.few, window)
        else:
            _note_trips(problem.columns[own.own], rows, problem.stages[p, g], tables, scratch, p, own.few, window)
        for j, row in product(range(1, end + 1), range(num_rows)):
            stages = [(i, at[i], at[j]) for i in range(scratch.starts[j], j)]
            found = [
                _row_behind(prefix, rows, before[i], p, g, row, num_behind, first, last, is_apart=is_apart)
                for i, first, last in stages
            ]
            sent = (rows.back if 1 <= row < 2 + num_behind else rows.send)[rows.at_host[p + own.few], j]
            least = min(map(max, found), default=inf)
            if is_apart and found:
                least = max(map(min, zip(*found, strict=True)))
            assert tables.before_ends[p + own.few, j, row] == pytest.approx(least + sent)
            checked += len(found) > 1
    assert checked > 300


def _row_behind(
    prefix: PrefixBound,
    rows: Any,
    here: Any,
    p: int,
    g: int,
    row: int,
    num_behind: int,
    begin: Any,
    end: Any,
    *,
    is_apart: bool,
) -> list[float]:
    """The sums of which a row says the longest behind the stage between two boundaries, without the cut."""
    problem = prefix.programme
    own = problem.stages.view(np.recarray)[p, g]
    f, r, b = (getattr(end, each) - getattr(begin, each) for each in ("forward", "critical", "backward"))
    if row < 2:
        return [here[row] + (f, r)[row] * own.fastest]
    is_before = row >= 2 + num_behind
    numbers, first = (rows.before, 2 + num_behind) if is_before else (rows.behind, 2)
    those = range(numbers[row - first], np.append(numbers, problem.num_microbatches)[row - first + 1])
    k = those[0] // own.most
    found = [m - k * replicas for m in those for replicas in range(own.few, own.most + 1)]
    at = np.searchsorted(numbers, [min(found), max(found)], side="right") - 1
    there = here[first + at[0] : first + at[1] + 1].min()
    ns = own.fastest
    if not is_apart:  # the speed of the fastest replica that has one of them
        orders = those if is_before else [problem.num_microbatches - 1 - y for y in those]
        places = {m % replicas for m in orders for replicas in range(own.few, own.most + 1)}
        speeds = sorted(prefix.speeds[p : p + own.most].tolist(), reverse=True)
        ns = max(ns, min(1 / speeds[min(place, len(speeds) - 1)] for place in places))
    if is_before:
        short = f * ns - problem.rounding_ns
        return [here[row] + short, there + (k + 1) * short]
    bucket = min(max(end.backward - begin.before_gradients, 0.0), end.first_bucket) * own.fastest
    num_buckets = np.ceil((end.gradients - begin.gradients) / problem.max_bucket)
    rings = own.ring_latency * num_buckets + own.ring_rate * (end.gradients - begin.gradients)
    update = end.update - begin.update
    return [here[row] + r * ns, there + (r + k * b) * ns, k * b * ns + bucket + rings + update]
