"""The searched order equals the best of all tables, and its bounds never exceed it."""

from random import Random

import pytest
from hypothesis import given

from bapipe.errors import InvalidSchedule
from bapipe.planner.action_order import cp_sat, list_scheduler
from bapipe.planner.action_order.bounds import lower_bound_ns, split_lower_bound_ns
from bapipe.planner.action_order.evaluate import evaluate_order
from bapipe.planner.action_order.problem import OrderProblem, order_problem, orders_of, sequential_schedule
from bapipe.planner.action_order.search import OrderSolution, search_order
from bapipe.simulator.simulate import simulate_schedule
from tests.oracles.all_action_orders import every_table, fastest_ns
from tests.random_pipelines import Pipeline, random_pipeline
from tests.strategies import examples, pipelines


def problem_of(p: Pipeline) -> OrderProblem:
    return order_problem(p.stages, p.devices, p.cluster, p.num_microbatches, p.memory_bytes)


def search(p: Pipeline, effort: float = 1.0) -> OrderSolution:
    return search_order(
        p.stages, p.devices, p.cluster, num_microbatches=p.num_microbatches, memory_bytes=p.memory_bytes, effort=effort
    )


def check(p: Pipeline, found: OrderSolution, want: int | None, seed: int | None = None) -> None:
    if want is None:
        assert found == OrderSolution(), seed
        assert found.status == "infeasible"
        return
    assert found.schedule is not None, seed
    assert found.lower_bound_ns is not None, seed
    timeline = simulate_schedule(found.schedule, p.stages, p.cluster)
    assert timeline.step_ns == found.step_ns, seed
    assert all(m.total <= most for m, most in zip(timeline.memory, p.memory_bytes, strict=True)), seed
    assert found.lower_bound_ns <= want <= timeline.step_ns, seed


@pytest.mark.parametrize(
    ("ranks", "num_microbatches", "wires", "tight", "count"),
    [
        ((0, 1), 2, True, False, 60),
        ((0, 1), 2, True, True, 30),
        ((0, 1), 3, True, False, 8),
        ((0, 1), 3, True, True, 8),
        ((0, 1, 2), 2, True, False, 20),
        ((0, 0), 2, True, False, 40),
        ((0, 0), 2, True, True, 20),
        ((0, 1, 0), 2, False, False, 15),
        ((0, 1, 1, 0), 1, False, False, 25),
    ],
)
def test_monotone_problems_equal_brute_force(
    ranks: tuple[int, ...], num_microbatches: int, wires: bool, tight: bool, count: int
) -> None:
    feasible = []

    @examples(count)
    @given(pipelines(ranks, num_microbatches, wires=wires, tight=tight))
    def equals_brute_force(p: Pipeline) -> None:
        assert problem_of(p).is_monotone
        want = fastest_ns(p.stages, p.devices, p.cluster, num_microbatches, p.memory_bytes)
        found = search(p)
        check(p, found, want)
        assert found.step_ns == want
        sequential = orders_of(sequential_schedule(p.devices, num_microbatches, len(p.cluster.devices)))
        if cp_sat.is_installed() and problem_of(p).fits(
            sequential
        ):  # else backwards are not split, nor orders searched
            assert found.lower_bound_ns == want
        if want is not None:
            assert lower_bound_ns(problem_of(p), p.stages) <= want
        feasible.append(want is not None)

    equals_brute_force()
    assert any(feasible)


@pytest.mark.parametrize(
    ("ranks", "num_microbatches", "num_seeds"), [((0, 1), 2, 50), ((0, 1, 2), 2, 20), ((0, 0), 2, 50)]
)
def test_bounds_hold_if_splitting_the_backward_costs_time(
    ranks: tuple[int, ...], num_microbatches: int, num_seeds: int
) -> None:
    equal = 0
    for seed in range(num_seeds):
        p = random_pipeline(Random(seed), ranks, num_microbatches, splits_badly=True)
        want = fastest_ns(p.stages, p.devices, p.cluster, num_microbatches, p.memory_bytes)
        found = search(p)
        check(p, found, want, seed)
        equal += found.step_ns == want
    assert equal > num_seeds * 0.3


@pytest.mark.parametrize(
    ("ranks", "num_microbatches", "num_seeds"),
    [((0,), 3, 60), ((0,), 4, 40), ((0, 1), 2, 120), ((0, 1), 3, 15), ((0, 1, 2), 2, 20), ((0, 0), 2, 30)],
)
def test_no_table_is_faster_than_the_bound_if_memory_is_tight_and_b_needs_less(
    ranks: tuple[int, ...], num_microbatches: int, num_seeds: int
) -> None:
    """And the bound of orders of I and W alone is above the fastest table, or there is no such order, in many cases."""
    feasible = equal = above = only_with_b = 0
    for seed in range(num_seeds):
        p = random_pipeline(Random(seed), ranks, num_microbatches, splits_badly=True, tight=True)
        want = fastest_ns(p.stages, p.devices, p.cluster, num_microbatches, p.memory_bytes)
        if want is None:
            continue
        problem = problem_of(p)
        bound_ns = lower_bound_ns(problem, p.stages)
        assert bound_ns <= want, seed
        feasible += 1
        equal += bound_ns == want
        if problem.fits(orders_of(sequential_schedule(p.devices, num_microbatches, len(p.cluster.devices)))):
            split_ns = split_lower_bound_ns(problem)
            assert bound_ns <= split_ns, seed
            above += split_ns > want
        else:
            only_with_b += 1
    assert equal > feasible / 3
    assert above > 0
    assert only_with_b > feasible / 20


def test_bounds_hold_if_transfers_block_compute() -> None:
    equal = 0
    for seed in range(16):
        p = random_pipeline(Random(seed), (0, 1), 2, overlaps=False)
        steps = []
        for table in every_table(p.devices, 2, len(p.cluster.devices)):
            try:
                timeline = simulate_schedule(table, p.stages, p.cluster)
            except InvalidSchedule:
                continue
            if all(m.total <= most for m, most in zip(timeline.memory, p.memory_bytes, strict=True)):
                steps.append(timeline.step_ns)
        found = search(p)
        check(p, found, min(steps, default=None), seed)
        equal += found.step_ns == min(steps, default=None)
    assert equal >= 14


def test_a_bound_in_rounded_times_holds() -> None:
    """The solver counts in units of which the longest step has 20: its bound must still be below every order."""
    below = solved = 0
    for seed in range(40):
        p = random_pipeline(Random(seed), (0, 1), 2)
        want = fastest_ns(p.stages, p.devices, p.cluster, 2, p.memory_bytes)
        if want is None:
            continue
        problem = problem_of(p)
        hint = list_scheduler.list_schedule(problem, next(list_scheduler.priority_rules(problem)))
        hint_ns = simulate_schedule(problem.table(p.devices, hint), p.stages, p.cluster).step_ns
        result = cp_sat.solve(problem, hint, below_ns=hint_ns, effort=0.04, seed=0, max_units=20)
        assert result.lower_bound_ns <= want, seed
        if result.orders is not None and problem.fits(result.orders):
            table = problem.table(p.devices, result.orders)
            assert simulate_schedule(table, p.stages, p.cluster).step_ns >= want, seed
        solved += 1
        below += result.lower_bound_ns < want
    assert solved > 20
    assert below > 5


def test_the_list_scheduler_ends_and_fits_and_its_clock_equals_the_simulator() -> None:
    seen = monotone = 0
    for seed in range(100):
        random = Random(seed)
        ranks = random.choice([(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1), (2, 0, 1)])
        p = random_pipeline(random, ranks, random.randint(1, 5))
        problem = problem_of(p)
        if search(p, effort=0).status == "infeasible":
            continue
        for rule in list(list_scheduler.priority_rules(problem))[::7]:
            orders = list_scheduler.list_schedule(problem, rule)
            assert problem.fits(orders), seed
            timeline = simulate_schedule(problem.table(p.devices, orders), p.stages, p.cluster)
            assert all(m.total <= most for m, most in zip(timeline.memory, p.memory_bytes, strict=True)), seed
            assert timeline.step_ns >= lower_bound_ns(problem, p.stages), seed
            seen += 1
            if problem.is_monotone:
                monotone += 1
                timed = evaluate_order(problem, orders)
                assert timed is not None, seed
                assert timed.step_ns == timeline.step_ns, seed
    assert seen > 400
    assert monotone > 150
