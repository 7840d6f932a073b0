"""The relaxation of many devices: every plan on consecutive devices is feasible in it at its own step time."""

import dataclasses
import math
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.measurement import LayerMeasurement
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.search import LineSearch
from bapipe.planner.device_line.stage_limits import least_again
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.work_bound import work_bound_ns
from bapipe.schedules import SCHEDULES
from bapipe.simulator.cuts import kept_tensor_bytes
from bapipe.simulator.interval_costs import cut_bytes
from bapipe.simulator.simulate import simulate
from tests.builders import MS, chain, devices, profile_of
from tests.problems import heavy
from tests.random_profiles import random_profile
from tests.step_time import plan_step_time


def random_line(seed: int, schedule: str, *, buckets: bool = False) -> DeviceLine:
    """Two to six layers on two to four devices, half of the clusters with unlike ones, some on two hosts.

    With `buckets`, the gradients of a stage are several, whose rings take as long as layers do.
    """
    random = Random(seed)
    num_layers, num_devices = random.randint(2, 6), random.randint(2, 4)
    num_hosts, alike = random.choice([1, 2]), random.random() < 0.5
    cluster = Cluster(
        devices=tuple(
            Device(
                name=f"d{i}",
                host=f"h{i * num_hosts // num_devices}",
                kind="a",
                memory_bytes=2**40,
                speed=1.0 if alike else random.choice([1.0, 0.5, 0.75]),
                overlaps_transfers=random.random() < 0.8,
            )
            for i in range(num_devices)
        ),
        intra_host=Bandwidth(bytes_per_s=10**9, latency_ns=0),
        inter_host=Bandwidth(bytes_per_s=random.choice([10**6, 10**8, 10**9]), latency_ns=random.choice([0, 5, 1000])),
    )
    options = PlanOptions(minibatch_size=random.choice([2, 4, 8]), schedules=[schedule])
    profile = random_profile(random, num_layers)
    if buckets:
        profile = heavy(profile)
        inside = Bandwidth(bytes_per_s=random.choice([10**15, 10**16]), latency_ns=random.choice([0, 5, 20]))
        between = Bandwidth(bytes_per_s=random.choice([10**15, 10**16]), latency_ns=random.choice([0, 5, 20]))
        cluster = replace(cluster, intra_host=inside, inter_host=between)
    return DeviceLine({"a": profile}, cluster, options)


def plans(line: DeviceLine, schedule: str) -> Iterator[LinePlan]:
    """Every plan on the first devices of a line, with micro-batches of one sample."""
    for counts in compositions(len(line.cluster.devices)):
        for inner in combinations(line.cuts[1:-1], len(counts) - 1):
            if max(counts) <= line.options.minibatch_size:
                cuts = (0, *inner, line.cuts[-1])
                yield LinePlan(cuts=cuts, counts=counts, schedule=schedule, microbatch_size=1)


def compositions(most: int) -> Iterator[tuple[int, ...]]:
    for first in range(1, most + 1):
        yield (first,)
        yield from ((first, *rest) for rest in compositions(most - first))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("buckets", [False, True])
def test_every_plan_is_feasible_at_its_step_time_and_far_below_the_best_nothing_is(
    schedule: str, buckets: bool
) -> None:
    infeasible = checked = 0
    for seed in range(5):
        line = random_line(seed, schedule, buckets=buckets)
        num_devices = len(line.cluster.devices)
        every = PrefixBound(line, schedule, 1, num_devices)
        steps_ns = []
        for plan in plans(line, schedule):
            timed = line.time(plan)
            assert timed is not None
            last = plan.counts[-1]
            of_last = PrefixBound(line, schedule, 1, num_devices, last_replicas=(last, last))
            assert every.path(timed.step_ns, UNLIMITED) is not None, plan
            assert of_last.path(timed.step_ns, UNLIMITED) is not None, plan
            steps_ns.append(timed.step_ns)
        checked += len(steps_ns)
        infeasible += every.path(min(steps_ns) * 3 // 4, UNLIMITED) is None
    assert checked > 60
    assert infeasible >= 3


@pytest.mark.parametrize("schedule", ["1f1b-2bp", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_weights_that_are_done_during_the_last_trip_are_not_counted_behind_it(schedule: str, num_replicas: int) -> None:
    """Two stages over transfers of 100 us each way; W of 50 us on the first one, which has time for two in a trip."""
    first, second = (
        LayerMeasurement(forward_ns=1000, input_grad_ns=i, weight_grad_ns=w, stash_bytes=0, output_bytes=(100_000,))
        for i, w in ((50_000, 0), (1000, 1000))
    )
    profile = profile_of("two", chain([1, 1]).layers, [first, second])
    for num_microbatches in range(num_replicas, 12):
        options = PlanOptions(minibatch_size=num_microbatches, schedules=[schedule], num_stages=2)
        line = DeviceLine({"a": profile}, devices(2 * num_replicas, bytes_per_s=10**9), options)
        counts = (num_replicas, num_replicas)
        timed = line.time(LinePlan(cuts=(0, 1, 2), counts=counts, schedule=schedule, microbatch_size=1))
        assert timed is not None
        problem = PrefixBound(line, schedule, 1, sum(counts), only_replicas=num_replicas)
        assert problem.path(timed.step_ns, UNLIMITED) is not None


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_all_backwards_come_behind_the_first_round_trip(num_replicas: int) -> None:
    """The first replicas run F, wait for F and I of the second stage, and then run 4 I + W, and 2 F between them."""
    options = PlanOptions(minibatch_size=4 * num_replicas, microbatch_size=1, schedules=["zb-h1"], num_stages=2)
    line = DeviceLine({"a": chain([3, 2])}, devices(2 * num_replicas), options)
    problem = PrefixBound(line, "zb-h1", 1, 2 * num_replicas, only_replicas=num_replicas)
    least_ns = (3 + (2 + 2) + 4 * 6 + 2 * 3) * MS
    rounding_ns = 100
    assert problem.path(least_ns - rounding_ns, UNLIMITED) is None
    assert problem.path(least_ns, UNLIMITED) is not None


def test_the_search_for_many_devices_finds_a_plan_near_its_bound_and_nothing_below_it() -> None:
    profiles = {"a": chain([3, 1, 4, 1, 5, 9, 2, 6] * 5, param_bytes=10**6, output_bytes=10**5)}
    cluster = devices(36, memory_bytes=10**12)
    made = plan_step_time(profiles, cluster, PlanOptions(minibatch_size=16))
    bound_ns = made.certificate.lower_bound_ns
    assert work_bound_ns(profiles, cluster, 16) < bound_ns <= made.prediction.step_ns < 1.3 * bound_ns
    assert simulate(made, profiles).step_ns == made.prediction.step_ns
    assert made == plan_step_time(profiles, cluster, PlanOptions(minibatch_size=16))


def test_data_parallelism_is_proven_best_up_to_its_last_bucket() -> None:
    """Eight layers of 20 MB: every bucket's ring has its latency, and none begins before its layers' backward."""
    profiles = {"a": chain([1] * 8, param_bytes=20 * 10**6, output_bytes=10**9)}
    cluster = devices(40, bytes_per_s=10**11)
    link = Bandwidth(bytes_per_s=10**11, latency_ns=20_000)
    line = DeviceLine(profiles, replace(cluster, intra_host=link, inter_host=link), PlanOptions(minibatch_size=40))
    on_all = line.time(LinePlan(cuts=(0, 8), counts=(40,), schedule="1f1b", microbatch_size=1))
    assert on_all is not None
    problem = PrefixBound(line, "1f1b", 1, 40)
    assert problem.path(on_all.step_ns, UNLIMITED) is not None
    assert problem.path(on_all.step_ns * 98 // 100, UNLIMITED) is None


def test_a_bucket_does_not_wait_for_first_layers_without_gradients() -> None:
    """The ring of the second layer takes 50 ms, while the backward of the first, 200 ms, runs."""
    profile = chain([100, 1], param_bytes=37_500_000)
    layers = (replace(profile.layers[0], param_bytes=0), profile.layers[1])
    options = PlanOptions(minibatch_size=3, constraints=["l0 with l1"])
    line = DeviceLine({"a": replace(profile, layers=layers)}, devices(3), options)
    on_all = line.time(LinePlan(cuts=(0, 2), counts=(3,), schedule="1f1b", microbatch_size=1))
    assert on_all is not None
    assert on_all.step_ns == 303 * 10**6
    assert PrefixBound(line, "1f1b", 1, 3, last_replicas=(3, 3)).path(on_all.step_ns, UNLIMITED) is not None


def test_no_gradient_is_sent_back_between_hosts_where_none_crosses_the_cut() -> None:
    """F of both stages, 10 ms of latency in between, and B of both: 10 ms more there and back would be too much.

    A device has memory for one of the two layers.
    """
    profile = chain([2, 2], output_bytes=1, param_bytes=10**6)
    frozen = (replace(profile.layers[0], no_gradient=profile.layers[0].outputs), profile.layers[1])
    two, slow = devices(2, memory_bytes=3 * 10**6), Bandwidth(bytes_per_s=10**9, latency_ns=10**7)
    hosts = tuple(replace(device, host=device.name) for device in two.devices)
    cluster = replace(two, devices=hosts, inter_host=slow)
    options = PlanOptions(minibatch_size=1)
    line = DeviceLine({"a": replace(profile, layers=frozen)}, cluster, options)
    apart = line.time(LinePlan(cuts=(0, 1, 2), counts=(1, 1), schedule="1f1b", microbatch_size=1))
    assert apart is not None
    assert apart.step_ns == 22 * 10**6 + 1
    path = PrefixBound(line, "1f1b", 1, 2).path(apart.step_ns, UNLIMITED)
    assert path is not None
    assert path.cuts == (0, 1, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_round_trips_and_the_rings_behind_them_bound_a_pipeline(schedule: str) -> None:
    """Two stages of 20 devices; a ring of their gradients takes as long as two forwards."""
    profiles = {"a": chain([1] * 8, param_bytes=20 * 10**6, output_bytes=10**5)}
    line = DeviceLine(profiles, devices(40, bytes_per_s=2 * 10**10), PlanOptions(minibatch_size=80))
    two = line.time(LinePlan(cuts=(0, 4, 8), counts=(20, 20), schedule=schedule, microbatch_size=1))
    assert two is not None
    problem = PrefixBound(line, schedule, 1, 40, only_replicas=20)
    assert problem.path(two.step_ns, UNLIMITED) is not None
    assert problem.path(two.step_ns * 98 // 100, UNLIMITED) is None


def test_wherever_the_search_for_many_devices_is_ended_its_bound_holds() -> None:
    for seed in range(4):
        line = random_line(seed, "1f1b")
        best_ns = min(timed.step_ns for timed in map(line.time, plans(line, "1f1b")) if timed is not None)
        for num_looks in (1, 10, 40):
            ticks = iter(range(10**9))
            deadline = Deadline(num_looks, clock=lambda ticks=ticks: next(ticks))  # type: ignore[misc]
            search = LineSearch([line], ["1f1b"], [1], bound_ns=0, deadline=deadline)
            search.run()
            assert search.bound_ns <= best_ns
            assert search.best is None or search.best.step_ns >= best_ns


@pytest.mark.parametrize("replicas", [False, True])
def test_the_stages_of_the_relaxation_are_a_plan_of_the_space(replicas: bool) -> None:
    """Also if its first devices are idle, as slow ones are."""
    found = 0
    for seed in range(8):
        line = random_line(seed, "1f1b")
        line.options = dataclasses.replace(line.options, replicas=replicas)
        bound = PrefixBound(line, "1f1b", 1, len(line.cluster.devices))
        one_ns = sum(m.forward_ns + m.whole_backward_ns for m in line.profiles["a"].at(1))
        for share in (1, 2, 4, 8, 16):
            path = bound.path(share * one_ns * line.options.minibatch_size // 8, UNLIMITED)
            if path is not None:
                found += 1
                assert list(path.cuts) == sorted(set(path.cuts))
                assert max(path.counts) <= (line.options.minibatch_size if replicas else 1)
                assert line.time(path) is not None
    assert found > 8


def test_the_relaxation_ends_at_the_deadline() -> None:
    line = random_line(0, "1f1b")
    with pytest.raises(OutOfTime):
        PrefixBound(line, "1f1b", 1, len(line.cluster.devices)).path(10**12, Deadline(0.0))


@pytest.mark.parametrize(("schedule", "num_devices", "num_microbatches"), [("gpipe", 5, 8), ("1f1b", 7, 5)])
def test_more_stages_may_be_asked_for_than_there_are_layers(
    schedule: str, num_devices: int, num_microbatches: int
) -> None:
    profile = chain([1, 5], param_bytes=10**6, output_bytes=10**6)
    cluster, options = devices(num_devices, bytes_per_s=10**8), PlanOptions(minibatch_size=num_microbatches)
    line = DeviceLine({"a": profile}, cluster, options)
    of_two = [
        line.time(LinePlan(cuts=(0, 1, 2), counts=(1, count), schedule=schedule, microbatch_size=1))
        for count in range(1, num_devices)
    ]
    best_ns = min(timed.step_ns for timed in of_two if timed is not None)
    programme = PrefixBound(line, schedule, 1, num_devices).programme
    up_to_four = PlanKind(0, 3, 1, num_microbatches, 1, num_microbatches)
    assert FurthestPrefixes(programme, up_to_four, best_ns).find(UNLIMITED) is not None


def test_more_devices_may_leave_fewer_cuts_between_hosts() -> None:
    """Of two devices before two cuts each is on another host; of three before two, two may be on one."""
    profile = chain([1] * 3, stash_bytes=2 * 10**6, output_bytes=1)
    four = devices(4, memory_bytes=3 * 10**6)
    hosts = tuple(replace(device, host=host) for device, host in zip(four.devices, "abcc", strict=True))
    cluster = replace(four, devices=hosts, inter_host=Bandwidth(bytes_per_s=10**9, latency_ns=10**8))
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=2))
    timed = line.time(LinePlan(cuts=(0, 1, 2, 3), counts=(2, 1, 1), schedule="1f1b", microbatch_size=1))
    assert timed is not None
    bound = PrefixBound(line, "1f1b", 1, 4)
    assert bound.path(timed.step_ns, UNLIMITED) is not None
    assert bound.path(timed.step_ns - 10**8, UNLIMITED) is None


def tight_line(seed: int) -> DeviceLine:
    """A random line of GPipe whose devices cannot hold all stashes of all micro-batches."""
    random, line = Random(seed), random_line(seed, "gpipe")
    layers = line.profiles["a"].layers
    state = sum(layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes for layer in layers)
    stash = sum(measured.stash_bytes for measured in line.profiles["a"].at(1))
    limit = int(state * random.choice([0.5, 0.8, 1.0]) + stash * random.choice([1.0, 2.0, 3.0])) + 60
    tight = tuple(replace(device, memory_bytes=limit) for device in line.cluster.devices)
    return DeviceLine(line.profiles, replace(line.cluster, devices=tight), line.options)


def timed_with_any_recomputed(line: DeviceLine, plan: LinePlan) -> Iterator[TimedPlan]:
    """A plan with all choices of layers that are recomputed, of the stages that do not fit without.

    First all layers, if they fit so: a part of them may need less, as what a stage receives is not kept then.
    """
    timed = line.time(plan)
    if timed is None:
        return
    stages = zip(pairwise(plan.cuts), timed.recompute, strict=True)
    every = [list(range(*layers)) if recomputed else [] for layers, recomputed in stages]
    whole = line.time_with(plan, [frozenset(layers) for layers in every])
    if whole is not None:
        yield whole
    if any(every):
        chosen = [powerset(layers) for layers in every]
        others = (line.time_with(plan, [frozenset(layers) for layers in each]) for each in product(*chosen))
        yield from (other for other in others if other is not None)


def powerset(layers: list[int]) -> list[tuple[int, ...]]:
    return [some for size in range(len(layers) + 1) for some in combinations(layers, size)]


def test_a_stage_that_does_not_fit_need_not_recompute_all_of_its_layers() -> None:
    """Every plan is feasible at its step time with the best choice of layers, and many at less than without any."""
    faster = infeasible = 0
    for seed in range(24):
        line = tight_line(seed)
        bound = PrefixBound(line, "gpipe", 1, len(line.cluster.devices))
        steps_ns = []
        for plan in plans(line, "gpipe"):
            of_plan = [timed.step_ns for timed in timed_with_any_recomputed(line, plan)]
            if of_plan:
                steps_ns.append(min(of_plan))
                faster += min(of_plan) < of_plan[0]
                assert bound.path(min(of_plan), UNLIMITED) is not None, (seed, plan)
        infeasible += bool(steps_ns) and bound.path(min(steps_ns) * 3 // 4, UNLIMITED) is None
    assert faster > 10
    assert infeasible > 8


def test_what_recomputation_takes_at_least_raises_the_bound() -> None:
    """Two of four micro-batches must be recomputed in part: by the closed form, 1 ms again in front of each B."""
    profile, cluster = chain([1, 1], stash_bytes=100), devices(1, memory_bytes=500)
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=4))
    # 3 s >= 4 * 200 - 500 bytes for the bytes s that are recomputed, each worth 2 ms / 200: 1 ms.
    bound = PrefixBound(line, "gpipe", 1, 1)
    step_ns = 4 * (2 + 4 + 1) * 10**6
    assert bound.path(step_ns, UNLIMITED) is not None
    assert bound.path(step_ns - 10**5, UNLIMITED) is None


def test_no_choice_of_recomputed_layers_takes_less_than_the_bound() -> None:
    """Of every stage of random lines, by the simulator's rule of what is kept; some need all that the bound says."""
    equal = larger = 0
    for seed in range(30):
        line = tight_line(seed)
        programme = PrefixBound(line, "gpipe", 1, len(line.cluster.devices)).programme
        profile, random = line.profiles["a"], Random(seed)
        rows, returned = list(zip(profile.layers, profile.at(1), strict=True)), cut_bytes(profile, 1)[1]
        for begin, end in combinations(range(len(line.cuts)), 2):
            own = rows[line.cuts[begin] : line.cuts[end]]
            stage, n = programme.stages[int(begin > 0), 0], random.choice([2, 3, 8])
            stage["num_stashes"], stage["limit_bytes"] = (
                n,
                random.uniform(0.3, 1.1) * n * sum(m.stash_bytes for _, m in own),
            )
            state = sum(x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x, _ in own)
            stash = sum(measured.stash_bytes for _, measured in own)
            back = int(returned[line.cuts[end]])
            least = math.inf
            for chosen in powerset(list(range(len(own)))):
                again = frozenset(own[k][0].name for k in chosen)
                run_again = sum(own[k][1].stash_bytes for k in chosen)
                kept = stash - run_again + kept_tensor_bytes(rows, [x.name for x, _ in own], again)
                if state + n * (kept + back) + run_again <= stage["limit_bytes"]:
                    least = min(least, sum(own[k][1].forward_ns for k in chosen))
            bound = least_again(programme.layers, programme.savings, stage, begin, end)
            assert bound <= least
            equal += 0 < least < math.inf and bound > 0.8 * least
            larger += 0 < bound < least
    assert (equal, larger) > (5, 5)


def test_recomputed_layers_are_worth_less_by_the_tensors_kept_between_them_and_others() -> None:
    """Four equal layers, of whose bytes one would be enough; but they pass on as much as two of them keep."""
    profile, cluster = chain([1, 1, 1, 1], stash_bytes=100, output_bytes=200), devices(2, memory_bytes=3_000)
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=8))
    programme = PrefixBound(line, "gpipe", 1, 2).programme

    def again_ms(first: int, end: int, limit_bytes: float) -> float:
        stage = programme.stages[int(first > 0), 0]
        stage["num_stashes"], stage["limit_bytes"] = 8, limit_bytes
        return least_again(programme.layers, programme.savings, stage, first, end) / 10**6

    # All of them keep nothing besides their bytes, as the model's inputs do not count: 7 / 8 of 3,200 bytes are saved.
    assert again_ms(0, 4, 2_500.0) == pytest.approx(1.0)
    # Two have 1,600, and as many in buffers for what comes back, of which those of seven count.
    assert again_ms(0, 2, 2_500.0) == pytest.approx((1_600 + 7 * 200 - 2_500) / 700)
    assert again_ms(0, 2, 3_200.0) == 0.0
    # Behind another stage what they receive is kept: of three layers, 700 bytes beyond 2,400, one is not enough.
    assert again_ms(1, 4, 1_700.0) == pytest.approx(3.0)
