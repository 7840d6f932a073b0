"""Deadlines: wherever one passes, a search has a plan that fits and a bound that holds, or says that it has none."""

import dataclasses
import signal
from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.cli.progress import stops_on_interrupt
from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.planner import exact_search
from bapipe.planner.analysis.pareto import pareto
from bapipe.planner.baselines import BASELINES, baseline_alternatives
from bapipe.planner.branch_and_bound.partition_space import line_space
from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.compare import INTERRUPTED, NO_TIME_LEFT, compare
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, NothingFoundError, OutOfTime
from bapipe.planner.compute.pace import ACTIONS_PER_S, FEW_ACTIONS, TIMES_SIMULATED, Pace
from bapipe.planner.device_line import best_naive as best_naive_module
from bapipe.planner.device_line.best_naive import best_naive
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.device_line.timed_plans import TimedPlans
from bapipe.planner.exact_search import find_best_layout
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan_step import NUM_PLANS_AFTER
from bapipe.planner.results.searched_space import PartitionSpace
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.stages.intervals import INF
from bapipe.planner.throughput.search import explore_throughput
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices
from tests.oracles.exhaustive_layouts import exhaustive
from tests.problems import random_problems
from tests.random_profiles import random_cluster, random_profile
from tests.step_time import plan_step_time

PROFILES = {"a": chain([3, 1, 4, 1, 5, 9, 2, 6], param_bytes=10**5, output_bytes=10**5)}


def passing_after(num_looks: int) -> Deadline:
    """A deadline whose clock ticks when it is read, so that it passes at a certain place of a search."""
    ticks = count()
    return Deadline(num_looks, clock=lambda: next(ticks))


def test_a_deadline_passes_with_its_time_when_stopped_and_with_a_longer_one() -> None:
    now = 0.0
    whole = Deadline(8.0, clock=lambda: now)
    half, unlimited = whole.share(2), Deadline(None).share(3)
    now = 4.0
    assert (whole.is_over, half.is_over, unlimited.is_over) == (False, True, False)
    assert (whole.remaining_s, half.remaining_s, unlimited.remaining_s) == (4.0, 0.0, None)
    assert [whole.earlier(seconds).remaining_s for seconds in (0.5, 1.0, 3.0)] == [3.5, 3.0, 1.0]
    assert unlimited.earlier(1.0).remaining_s is None
    assert (whole.has_time_for(39.0, 10.0), whole.has_time_for(40.0, 10.0)) == (True, False)
    assert unlimited.has_time_for(10**9, 1.0)
    not_chosen = Deadline(8.0, is_given=False, clock=lambda: now)
    assert [each.share_of_limit(4).remaining_s for each in (whole, not_chosen)] == [1.0, 8.0]
    third = whole.share(1)
    whole.stop()
    assert third.is_over
    assert whole.remaining_s == 0.0
    with pytest.raises(OutOfTime):
        third.check()


def test_a_deadline_ends_earlier_by_what_was_left_last() -> None:
    now = 0.0
    whole = Deadline(8.0, clock=lambda: now)
    part = whole.share(2)
    whole.leave(1.0)
    assert whole.remaining_s == 7.0
    whole.leave(6.5)
    assert (whole.remaining_s, part.remaining_s) == (1.5, 1.5)
    whole.leave(0.0)
    assert (whole.remaining_s, part.remaining_s) == (8.0, 4.0)
    Deadline(None).leave(1.0)


def test_wherever_a_search_is_ended_its_bound_holds() -> None:
    ended = 0
    for seed in range(12):
        best = exhaustive(random_problems(seed))
        for num_looks in (1, 4, 16, 64):
            step_ns, bound_ns = ended_search(random_problems(seed), num_looks)
            if best is not None:
                assert bound_ns <= best.step_ns
                assert step_ns is None or best.step_ns <= step_ns
            ended += step_ns is None or bound_ns < step_ns
    assert ended > 12


def ended_search(problems: Sequence[Problem], num_looks: int) -> tuple[int | None, int]:
    """The step time of the plan of a search that is ended, if it has one by then, and its bound."""
    try:
        found = best_first(problems, deadline=passing_after(num_looks))
    except OutOfTime as error:
        return None, error.lower_bound_ns
    return (None, 0) if found is None else (found.step_ns, found.lower_bound_ns)


@pytest.mark.parametrize("num_layers", [8, 310])
def test_wherever_planning_is_ended_there_is_a_plan_and_its_bound_holds(num_layers: int) -> None:
    random = Random(0)
    profiles = {"a": chain([random.randint(1, 9) for _ in range(num_layers)], output_bytes=10**4)}
    options = PlanOptions(minibatch_size=4, schedules=["1f1b"], replicas=False)
    patient = plan_step_time(profiles, devices(3), options)
    for num_looks in (1, 9, 30, 100):
        hurried = plan_step_time(profiles, devices(3), options, deadline=passing_after(num_looks))
        assert hurried.certificate.lower_bound_ns <= patient.prediction.step_ns <= hurried.prediction.step_ns
        assert simulate(hurried, profiles).step_ns == hurried.prediction.step_ns


def test_wherever_planning_is_ended_the_most_promising_naive_plan_is_no_faster() -> None:
    random = Random(1)
    profiles = {"a": chain([random.randint(1, 9) for _ in range(310)], param_bytes=10**6, output_bytes=10**4)}
    cluster = devices(6)
    slow_first = tuple(replace(device, speed=0.3 if i == 0 else 1.0) for i, device in enumerate(cluster.devices))
    cluster, options = replace(cluster, devices=slow_first), PlanOptions(minibatch_size=32)
    line = DeviceLine(profiles, cluster, options)
    timed = line.time(naive_plans(line, options.schedules, [1])[0][1])
    assert timed is not None
    for num_looks in (1, 20, 60):
        hurried = plan_step_time(profiles, cluster, options, deadline=passing_after(num_looks))
        assert hurried.prediction.step_ns <= timed.step_ns


def test_wherever_a_search_for_throughput_is_ended_its_bound_holds() -> None:
    found = 0
    for seed in range(12):
        random = Random(seed)
        profile, cluster = random_profile(random, 6), random_cluster(random, 3)
        given = {"minibatch_size": 4, "microbatch_sizes": [1, 2], "limits": [2**40] * 3}
        best = explore_throughput({"a": profile}, cluster, **given).objective_ns  # type: ignore[arg-type]
        for num_looks in (2, 10, 50):
            deadline = passing_after(num_looks)
            try:
                hurried = explore_throughput({"a": profile}, cluster, **given, deadline=deadline)  # type: ignore[arg-type]
            except OutOfTime:
                continue
            found += 1
            assert hurried.lower_bound_ns <= best <= hurried.objective_ns
    assert found > 5


def test_a_limit_of_no_time_gives_a_plan_of_many_layers_on_many_devices() -> None:
    profile, cluster = chain([1] * 100, output_bytes=10**4), devices(64)
    made = bapipe.plan({"a": profile}, cluster, minibatch_size=64, time_limit_s=0.0)
    work_ns = 64 * sum(m.forward_backward_ns for m in profile.at(1))
    assert work_ns // 64 - 10**6 <= made.certificate.lower_bound_ns <= made.prediction.step_ns


@pytest.mark.parametrize("num_devices", [4, 64])
@pytest.mark.parametrize("fastest", [0, 2])
def test_a_limit_of_no_time_gives_no_plan_that_is_slower_than_one_device(num_devices: int, fastest: int) -> None:
    """Over links this slow every plan on several devices takes longer, though their bounds are smaller."""
    profiles = {"a": chain([1] * 12, param_bytes=10**6, output_bytes=10**6)}
    cluster = devices(num_devices, bytes_per_s=10**6)
    if fastest > 0:
        unlike = (replace(each, speed=1.0 if i == fastest else 0.5) for i, each in enumerate(cluster.devices))
        cluster = replace(cluster, devices=tuple(unlike))
    for schedules in (["1f1b"], ["interleaved-1f1b", "zb-h1", "gpipe"]):
        made = bapipe.plan(profiles, cluster, minibatch_size=8, schedules=schedules, time_limit_s=0.0)
        assert made.prediction.step_ns == 8 * 12 * 3 * 10**6


def test_a_limit_of_no_time_says_that_nothing_was_found_if_no_naive_plan_fits() -> None:
    options = PlanOptions(minibatch_size=1, schedules=["1f1b"], constraints=["l0 on d2"])
    assert plan_step_time(PROFILES, devices(3), options).stages[0].devices == ("d2",)
    with pytest.raises(OutOfTime, match=r"does not prove that there is none; .*: choose a longer `time_limit_s`"):
        plan_step_time(PROFILES, devices(3), options, deadline=Deadline(0.0))


def test_tables_of_many_layers_on_many_unlike_devices_are_not_made() -> None:
    """Tables of two million intervals at 36 speeds would take 6 GB."""
    profiles, alike = {"a": chain([1, 2] * 1000)}, devices(36)
    unlike = tuple(replace(device, speed=1 + i / 100) for i, device in enumerate(alike.devices))
    cluster = replace(alike, devices=unlike)
    options = PlanOptions(minibatch_size=2, schedules=["interleaved-1f1b"])
    plan = plan_step_time(profiles, cluster, options)
    assert plan.certificate.lower_bound_ns == step_bound_ns(profiles, cluster, options) <= plan.prediction.step_ns
    with pytest.raises(BapipeError, match="constraint"):
        plan_step_time(
            profiles,
            cluster,
            PlanOptions(minibatch_size=2, schedules=["interleaved-1f1b"], constraints=["l0 with l9999"]),
        )


def test_naive_plans_are_cut_evenly_and_timed_as_the_simulator_times_them() -> None:
    options = PlanOptions(minibatch_size=4, schedules=["1f1b", "interleaved-1f1b"])
    line = DeviceLine(PROFILES, devices(4), options)
    bounded = naive_plans(line, options.schedules, [1])
    plans = [plan for _, plan in bounded]
    shapes = {(plan.schedule, plan.counts, len(plan.cuts) - 1) for plan in plans}
    assert {("1f1b", (4,), 1), ("1f1b", (1, 1, 1, 1), 4), ("1f1b", (2, 2), 2)} <= shapes
    assert ("interleaved-1f1b", (1, 1), 4) in shapes
    assert (0, 5, 8) in {plan.cuts for plan in plans}  # 3 + 1 + 4 + 1 + 5 and 9 + 2 + 6, of 31
    for bound_ns, plan in bounded:
        timed = line.time(plan)
        assert timed is not None
        assert bound_ns <= timed.step_ns
        solution = line.solution(timed, 0, line_space(PROFILES, devices(4), options))
        assert solution.prediction.step_ns == timed.step_ns


def test_a_comparison_and_a_front_end_with_their_deadline() -> None:
    options = PlanOptions(minibatch_size=4, schedules=["1f1b", "gpipe", "interleaved-1f1b"])
    compared = compare(PROFILES, devices(3), options, deadline=Deadline(0.0))
    assert [*compared.plans] == ["1f1b"]
    assert [*compared.failed] == ["gpipe", "interleaved-1f1b"]
    assert set(compared.failed.values()) == {NO_TIME_LEFT}
    assert pareto(PROFILES, devices(3), options, deadline=Deadline(0.0)) == ()


def test_a_comparison_without_time_has_the_rows_that_need_no_search() -> None:
    options = PlanOptions(minibatch_size=4, schedules=["1f1b", "gpipe"])
    in_full = {other.name: other for other in compare(PROFILES, devices(3), options).others}
    ended = {other.name: other for other in compare(PROFILES, devices(3), options, deadline=Deadline(0.0)).others}
    assert ended.keys() == in_full.keys() == {*BASELINES}
    for name in ("one-device", "data-parallel"):  # equal layers are on as many devices as the best plan
        assert ended[name].step_ns == in_full[name].step_ns


def test_no_baseline_begins_that_would_take_longer_than_is_left() -> None:
    """Forty stages with 1,024 micro-batches are 81,920 actions; on one device they are a fortieth of that."""
    profiles, cluster = {"a": chain([1] * 40)}, devices(40)
    made = plan_step_time(profiles, cluster, PlanOptions(minibatch_size=1024, num_stages=40), deadline=Deadline(0.0))
    for left_s, names in ((10, {*BASELINES}), (1, {"one-device", "data-parallel"})):
        deadline = Deadline(left_s, clock=lambda: 0.0)
        found = baseline_alternatives(made, profiles, [1], ["1f1b"], [10**9] * 40, deadline)
        assert {each.name for each in found.alternatives} == names
        assert {*found.left_out} == {*BASELINES} - names


@pytest.mark.parametrize(("schedule", "num_stages"), [("zb-v", 8), ("interleaved-1f1b", 8), ("1f1b", 4)])
def test_an_exact_search_leaves_time_for_what_follows_if_a_limit_is_given(
    monkeypatch: pytest.MonkeyPatch, schedule: str, num_stages: int
) -> None:
    options = PlanOptions(minibatch_size=256, schedules=[schedule])
    left_s = []

    def find(request: SearchRequest) -> tuple[PartitionSpace, SearchResult]:
        left_s.append(request.deadline.remaining_s)
        return find_best_layout(request)

    monkeypatch.setattr(exact_search, "find_best_layout", find)
    chain_of_8 = {"a": chain([1] * 8)}
    for deadline in (Deadline(1.0, clock=lambda: 0.0), Deadline(1.0, clock=lambda: 0.0, is_given=False)):
        plan_step_time(chain_of_8, devices(4), options, deadline=deadline)
    num_actions = 3 * num_stages * 256
    assert left_s == [pytest.approx(1.0 - NUM_PLANS_AFTER * num_actions / ACTIONS_PER_S), 1.0]


@pytest.mark.parametrize("seed", range(8))
def test_what_a_search_has_found_is_kept_where_another_one_follows_that_has_no_time(seed: int) -> None:
    """Schedules with one stage a device and with several are searched one after another; the first plan ends it."""
    random = Random(seed)
    profile, cluster = random_profile(random, random.randint(4, 9)), devices(4)
    unlike = (replace(device, speed=speed) for device, speed in zip(cluster.devices, (1.0, 2.3, 0.6, 1.7), strict=True))
    deadline, found = Deadline(None), list[int]()

    def stop(_: int, best_ns: int, __: int) -> None:
        if best_ns < INF:
            found.append(best_ns)
            deadline.stop()

    plan = bapipe.plan(
        profile,
        replace(cluster, devices=tuple(unlike)),
        PlanOptions(minibatch_size=8, schedules=["1f1b", "zb-v"]),
        deadline=deadline,
        progress=stop,
    )
    assert found
    assert plan.prediction.step_ns <= min(found)


@pytest.mark.parametrize(("limit_s", "kept_s"), [(0.1, 0.2), (10.0, 1.0), (100.0, 2.0)])
def test_a_comparison_keeps_a_part_of_its_limit_for_baselines(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, kept_s: float
) -> None:
    shares: list[float | None] = []

    def once(*_: object, deadline: Deadline) -> Plan:
        shares.append(deadline.remaining_s)
        raise BapipeError("no plan")

    monkeypatch.setattr("bapipe.planner.compare.plan_once", once)
    options = PlanOptions(minibatch_size=4, schedules=["1f1b", "gpipe"])
    with pytest.raises(BapipeError, match="no plan"):
        compare(PROFILES, devices(3), options, deadline=Deadline(limit_s, clock=lambda: 0.0))
    assert shares == [pytest.approx(max(0.0, limit_s - kept_s) / 2), pytest.approx(max(0.0, limit_s - kept_s))]


def test_an_interruption_is_not_said_to_be_a_time_limit() -> None:
    options = PlanOptions(minibatch_size=4, schedules=["1f1b", "gpipe"])
    stopped = Deadline(None, is_given=False)
    stopped.stop()
    assert set(compare(PROFILES, devices(3), options, deadline=stopped).failed.values()) == {INTERRUPTED}
    with pytest.raises(OutOfTime, match=r"let it go on for longer \(it was interrupted\)"):
        stopped.share(2).check()
    with pytest.raises(OutOfTime, match=r"choose a longer `time_limit_s`"):
        Deadline(0.0).check()


def test_a_plan_that_would_take_longer_than_is_left_is_not_timed() -> None:
    """Ten stages with 1,024 micro-batches are 20,480 actions, which have no pace yet."""
    line = DeviceLine({"a": chain([1] * 10)}, devices(10), PlanOptions(minibatch_size=1024))
    plan = LinePlan(cuts=tuple(range(11)), counts=(1,) * 10, schedule="1f1b", microbatch_size=1)
    assert line.num_actions(plan) == 20_480
    takes_s = TIMES_SIMULATED * 20_480 / ACTIONS_PER_S
    for part, is_given, is_timed in ((0.9, True, False), (1.1, True, True), (0.9, False, True)):
        left_s = part * takes_s
        deadline = Deadline(left_s, clock=lambda: 0.0, is_given=is_given)
        plans = TimedPlans(0, 10**9, deadline, None)
        assert (plans.time(line, plan) is not None) == is_timed
        assert (deadline.remaining_s == left_s) != (is_given and is_timed)  # the result is left its time


def test_the_pace_is_that_of_the_largest_plan() -> None:
    pace, second = Pace(), Deadline(1.0, clock=lambda: 0.0)
    at_first = int(ACTIONS_PER_S / TIMES_SIMULATED)
    assert pace.has_time_for_result(at_first - 1, second)
    assert not pace.has_time_for_result(at_first + 1, second)
    pace.note(10 * FEW_ACTIONS, 0.5)
    pace.note(FEW_ACTIONS, 5.0)
    now = int(10 * FEW_ACTIONS / 0.5 / TIMES_SIMULATED)
    assert pace.has_time_for_result(now - 1, second)
    assert not pace.has_time_for_result(now + 1, second)
    assert pace.has_time_for_result(FEW_ACTIONS - 1, Deadline(0.0))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_no_naive_plan_with_many_actions_is_timed_after_the_deadline_beside_a_smaller_one(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16 devices 256 micro-batches are 8,192 actions of 1F1B and twice as many in a V; on fewer they are fewer."""
    monkeypatch.setattr(best_naive_module, "MAX_LATE_ACTIONS", 5_000)
    profiles, options = {"a": chain([1] * 32)}, PlanOptions(minibatch_size=256, schedules=[schedule], replicas=False)
    line = DeviceLine(profiles, devices(16), options)
    late = best_naive([line], [schedule], [1], Deadline(0.0))
    assert late is not None
    assert line.num_actions(late.plan) <= 5_000
    timely = best_naive([line], [schedule], [1], UNLIMITED)
    assert timely is not None
    assert len(timely.plan.counts) == 16
    assert timely.step_ns < late.step_ns


def test_a_deadline_ends_the_search_for_an_order() -> None:
    options = PlanOptions(minibatch_size=4, schedules=["1f1b", "search"])
    made = plan_step_time(PROFILES, devices(3), options, deadline=Deadline(0.0))
    assert made.certificate.lower_bound_ns <= plan_step_time(PROFILES, devices(3), options).prediction.step_ns


@pytest.mark.parametrize("num_layers", [1, 8, 200])
def test_throughput_has_a_plan_without_any_time(num_layers: int) -> None:
    profiles = {"a": chain([1 + i % 5 for i in range(num_layers)], output_bytes=10**5)}
    options = PlanOptions(minibatch_size=4, objective="throughput")
    hurried = bapipe.plan(profiles, devices(3), dataclasses.replace(options, time_limit_s=0.0))
    patient = bapipe.plan(profiles, devices(3), options)
    assert hurried.certificate.lower_bound_ns <= patient.prediction.objective_ns <= hurried.prediction.objective_ns


def test_throughput_says_that_it_had_no_time_to_find_a_plan_that_fits() -> None:
    with pytest.raises(BapipeError, match="choose a longer `time_limit_s`"):
        bapipe.plan(
            PROFILES, devices(3), minibatch_size=4, objective="throughput", time_limit_s=0.0, memory_limit_bytes=1
        )


def test_the_first_interrupt_stops_the_deadline_and_the_second_one_interrupts() -> None:
    deadline, before = Deadline(None), signal.getsignal(signal.SIGINT)
    with stops_on_interrupt(deadline):
        signal.raise_signal(signal.SIGINT)
        assert deadline.is_over
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_tight_memory_that_dives_miss_is_met_by_the_layout_with_the_least() -> None:
    """With no budget for dives the search begins with that layout; that it does not fit proves nothing."""
    fitting = 0
    for seed in range(12):
        problems = random_problems(seed, limit=300)
        best = exhaustive(problems)
        if best is None:
            with pytest.raises(NothingFoundError):
                best_first(problems, max_nodes=0)
        else:
            found = best_first(problems, max_nodes=0)
            assert found is not None
            assert found.lower_bound_ns <= best.step_ns <= found.step_ns
            assert all(shortfall <= 0 for shortfall in found.problem.shortfall_bytes(found.layout).values())
            fitting += 1
    assert 3 < fitting < 12


def test_intervals_that_the_time_left_does_not_allow_for_are_not_tabulated() -> None:
    """Of 4,000 layers there are 8,002,000 intervals: too many for half a second, and a clock that stands still."""
    deadline = Deadline(0.5, clock=lambda: 0.0)
    options = PlanOptions(minibatch_size=4, schedules=["1f1b"], microbatch_size=1)
    request = SearchRequest(profiles={"a": chain([1] * 4_000)}, cluster=devices(2), options=options, deadline=deadline)
    with pytest.raises(OutOfTime, match="the time left is too short for the tables of a full search: choose a longer"):
        find_best_layout(request)
    assert find_best_layout(dataclasses.replace(request, profiles={"a": chain([1] * 40)}))


def test_tables_of_thousands_of_layers_are_not_made() -> None:
    """The gigabytes are those of tables, and the plan has its bound."""
    options = PlanOptions(minibatch_size=4, schedules=["1f1b"], microbatch_size=1)
    request = SearchRequest(profiles={"a": chain([1] * 6_000)}, cluster=devices(2), options=options, deadline=UNLIMITED)
    with pytest.raises(OutOfTime, match=r"would take 7 GB, more than 4\.3: profile larger layers"):
        find_best_layout(request)
    plan = plan_step_time(request.profiles, request.cluster, options)
    assert plan.certificate.lower_bound_ns <= plan.prediction.step_ns <= 1.001 * plan.certificate.lower_bound_ns
