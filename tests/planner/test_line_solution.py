"""Lines of devices searched before exact searches: plans and bounds of both, joined, against every plan of a line."""

from dataclasses import replace as with_fields

import pytest
from msgspec.structs import replace

from bapipe.planner import exact_search, line_solution
from bapipe.planner.branch_and_bound import roots
from bapipe.planner.branch_and_bound.partition_space import line_space
from bapipe.planner.branch_and_bound.space import has_sorted_devices
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.device_line import search
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.search import LineSearch
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.line_solution import LineSolution, solve_first, solve_on_line
from bapipe.planner.plan_step import solve_partition
from bapipe.planner.results.searched_space import GIVEN_ORDER, PartitionSpace, on_first_devices
from bapipe.planner.search_request import SearchRequest
from bapipe.planner.stages.device_orders import device_orders
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices
from tests.planner.device_line.test_prefix_bound import plans
from tests.planner.device_line.test_unlike_devices import unlike_line
from tests.step_time import plan_step_time


@pytest.fixture(autouse=True)
def _small_problems_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches a line first for problems of any size, and the exact search takes devices in one order."""
    monkeypatch.setattr(line_solution, "MIN_FIRST", 1)
    monkeypatch.setattr(roots, "MAX_DEVICE_GROUPS", 1)


def request_of(line: DeviceLine, options: PlanOptions | None = None, deadline: Deadline = UNLIMITED) -> SearchRequest:
    return SearchRequest(
        profiles=line.profiles, cluster=line.cluster, options=options or line.options, deadline=deadline
    )


def solved_on_line(line: DeviceLine) -> LineSolution:
    found = solve_on_line(request_of(line))
    assert found is not None
    return found


def single_samples(seed: int, schedule: str) -> DeviceLine:
    """A random line of unlike devices, planned with micro-batches of one sample."""
    line = unlike_line(seed, schedule, buckets=seed % 4 > 1)
    line.options = with_fields(line.options, microbatch_size=1)
    return line


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_plans_are_the_best_of_the_orders_that_the_certificate_names(schedule: str) -> None:
    num_reordered = 0
    for seed in range(5):
        line = single_samples(seed, schedule)
        plan = plan_step_time(line.profiles, line.cluster, line.options)
        step_ns, bound_ns, space = plan.prediction.step_ns, plan.certificate.lower_bound_ns, plan.certificate.space
        assert simulate(plan, line.profiles).step_ns == step_ns
        orders = device_orders(line.profiles, line.cluster, line.options)
        best_ns = {
            order.words: min(
                timed.step_ns
                for timed in map(line.in_order(order.ranks).time, plans(line, schedule))
                if timed is not None
            )
            for order in orders
        }
        are_sorted = has_sorted_devices(line.profiles, line.cluster, line.options)
        assert on_first_devices([*best_ns], are_sorted=are_sorted) in space
        assert bound_ns <= step_ns == min(best_ns.values()), seed
        num_reordered += step_ns < best_ns.get(GIVEN_ORDER, step_ns)
    assert num_reordered >= 1


def test_the_better_bound_and_the_better_plan_are_kept() -> None:
    line = single_samples(0, "1f1b")
    first = solved_on_line(line)
    step_ns = first.solution.prediction.step_ns
    exact = first.solution

    def joined(
        *,
        step: int,
        bound: int,
        own_bound: int,
        order: str,
        has_every_order: bool = False,
        has_every_schedule: bool = True,
    ) -> tuple[int, int, str]:
        assert isinstance(exact.space, PartitionSpace)
        other = with_fields(
            exact,
            prediction=replace(exact.prediction, step_ns=step),
            lower_bound_ns=bound,
            space=with_fields(exact.space, device_order=order),
        )
        own = with_fields(first.solution, lower_bound_ns=own_bound)
        made = with_fields(
            first, solution=own, has_every_order=has_every_order, has_every_schedule=has_every_schedule
        ).joined(other)
        assert isinstance(made.space, PartitionSpace)
        return made.prediction.step_ns, made.lower_bound_ns, made.space.device_order

    assert isinstance(exact.space, PartitionSpace)
    some, any_order = exact.space.device_order, ", in any order"
    assert some != any_order
    # The same orders: the better bound holds.
    assert joined(step=step_ns + 5, bound=10, own_bound=20, order=some) == (step_ns, 20, some)
    assert joined(step=step_ns - 5, bound=20, own_bound=10, order=some) == (step_ns - 5, 20, some)
    # Any order: plans in other orders may be below the bound for some.
    assert joined(step=step_ns + 5, bound=10, own_bound=20, order=any_order) == (step_ns, 10, any_order)
    assert joined(step=step_ns, bound=10, own_bound=20, order=any_order, has_every_order=True) == (
        step_ns,
        20,
        any_order,
    )
    assert joined(step=step_ns + 5, bound=step_ns + 5, own_bound=20, order=any_order) == (step_ns, step_ns, any_order)
    # Other schedules than those of the first search may be below its bound.
    assert joined(step=step_ns + 5, bound=10, own_bound=20, order=some, has_every_schedule=False) == (step_ns, 10, some)


def test_schedules_with_several_stages_per_device_are_searched_after_the_others() -> None:
    line = single_samples(3, "1f1b")
    both = with_fields(line.options, schedules=["1f1b", "interleaved-1f1b"], replicas=False)
    first = solve_first(request_of(line, both))
    assert first is not None
    assert not first.has_every_schedule
    alone = solve_first(request_of(line, with_fields(both, schedules=["1f1b"])))
    assert alone is not None
    assert alone.has_every_schedule
    assert alone.solution.prediction == first.solution.prediction
    assert solve_first(request_of(line, with_fields(both, schedules=["interleaved-1f1b"]))) is None
    found = solve_partition(request_of(line, both))
    assert found.lower_bound_ns <= found.prediction.step_ns <= first.solution.prediction.step_ns


def test_without_time_for_an_exact_search_the_first_plan_is_kept() -> None:
    """The slow devices are last in the cluster; the plan has its bound wherever the search ends."""
    line = single_samples(3, "1f1b")
    best_ns = min(timed.step_ns for timed in map(line.time, plans(line, "1f1b")) if timed is not None)
    for num_looks in (1, 10, 100, 1000):
        ticks = iter(range(10**9))
        deadline = Deadline(num_looks, clock=lambda ticks=ticks: next(ticks))  # type: ignore[misc]
        found = solve_partition(request_of(line, deadline=deadline))
        assert found.lower_bound_ns <= min(best_ns, found.prediction.step_ns)


def test_progress_never_shows_a_slower_plan_than_the_first_one() -> None:
    line = single_samples(2, "gpipe")
    shown: list[tuple[int, int]] = []
    solve_partition(
        with_fields(request_of(line), progress=lambda _, best_ns, bound_ns: shown.append((best_ns, bound_ns)))
    )
    assert shown
    assert [best for best, _ in shown] == sorted((best for best, _ in shown), reverse=True)
    assert all(bound <= best for best, bound in shown)


@pytest.mark.parametrize(
    ("schedules", "speeds", "is_of_part"),
    [
        (("gpipe",), (1.0, 1.0, 1.0), False),
        (("gpipe", "zb-v"), (1.0, 1.0, 1.0), True),  # a line has one stage a device
        (("gpipe",), (1.0, 2.0, 1.0), True),  # and devices in some orders, where the exact search tries any
    ],
)
def test_a_first_solution_alone_says_whether_its_bound_is_of_a_part(
    schedules: tuple[str, ...], speeds: tuple[float, ...], is_of_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(_: SearchRequest) -> None:
        raise OutOfTime("ended")

    monkeypatch.setattr(exact_search, "find_best_layout", cut_off)
    monkeypatch.setattr(roots, "MAX_DEVICE_GROUPS", 1000)  # any order of three devices
    cluster = devices(3)
    unlike = tuple(replace(device, speed=speed) for device, speed in zip(cluster.devices, speeds, strict=True))
    request = SearchRequest(
        profiles={"a": chain([2, 1, 2, 1])},
        cluster=replace(cluster, devices=unlike),
        options=PlanOptions(minibatch_size=4, schedules=schedules, replicas=False),
    )
    found = solve_partition(request)
    assert found.bound_of_all_ns == (request.step_bound_ns if is_of_part else found.lower_bound_ns)
    assert request.step_bound_ns < found.lower_bound_ns


@pytest.mark.parametrize("schedules", [("gpipe",), ("gpipe", "zb-v")])
@pytest.mark.parametrize("has_many_devices", [False, True])
def test_what_a_deadline_ends_after_its_first_plan_is_no_slower_than_naive_plans(
    schedules: tuple[str, ...], has_many_devices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(_: SearchRequest) -> None:
        raise OutOfTime("ended")

    def time_one_device(self: LineSearch) -> None:
        self._plans.time(self.lines[0], LinePlan(cuts=(0, 4), counts=(1,), schedule="gpipe", microbatch_size=1))

    monkeypatch.setattr(exact_search, "find_best_layout", cut_off)
    monkeypatch.setattr(LineSearch, "run", time_one_device)
    monkeypatch.setattr(search, "MIN_DEVICES", 1 if has_many_devices else 99)
    monkeypatch.setattr(search, "MAX_LAYER_REPLICAS", 1)
    options = PlanOptions(minibatch_size=8, schedules=schedules)
    request = SearchRequest(
        profiles={"a": chain([3, 1, 2, 1])}, cluster=devices(4), options=options, deadline=Deadline(1, clock=lambda: 0)
    )
    found = solve_partition(request)
    # Data parallelism without parameters: two of the eight micro-batches on each device, a third of them forwards.
    assert found.prediction.step_ns == 2 * 3 * (3 + 1 + 2 + 1) * 1_000_000


@pytest.mark.parametrize(("schedules", "most"), [(("gpipe",), 3), (("gpipe", "zb-v"), 6), (("interleaved-1f1b",), 6)])
def test_a_line_has_as_many_stages_as_its_schedules_allow(schedules: tuple[str, ...], most: int) -> None:
    options = PlanOptions(minibatch_size=4, schedules=schedules, replicas=False)
    assert line_space({"a": chain([1] * 9)}, devices(3), options).stage_counts == (1, most)
