"""The search of an order: known optima, starts, memory, refused arguments, and the search without a solver."""

from functools import partial
from itertools import count
from random import Random

import pytest

from bapipe.planner.action_order.bounds import Job, preemptive_one_machine_ns
from bapipe.planner.action_order.fuse_backward import fuse_backward
from bapipe.planner.action_order.problem import sequential_schedule
from bapipe.planner.action_order.search import OrderSolution, search_order
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.schedules import SCHEDULES
from bapipe.schedules.table import Phase, Schedule, parse_action
from bapipe.simulator.simulate import simulate_columns, simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from tests.builders import devices
from tests.oracles.all_action_orders import fastest_ns
from tests.random_pipelines import Pipeline, random_pipeline


def equal(p: int, m: int, f: int, i: int, w: int, stashes: int, wire_ns: int = 0) -> Pipeline:
    """Equal stages whose devices have memory for some stashes."""
    cost = StageCost(forward_ns=f, input_grad_ns=i, weight_grad_ns=w, stash_bytes=1000)
    num_bytes = 1 if wire_ns else 0
    stages = tuple(
        Stage(costs=(cost,), send_bytes=num_bytes * (s < p - 1), grad_bytes=num_bytes * (s < p - 1)) for s in range(p)
    )
    cluster = devices(p, memory_bytes=0, latency_ns=max(0, wire_ns - 1))
    memory = [1000 * stashes + 2 * m * num_bytes] * p
    return Pipeline(stages, tuple((s,) for s in range(p)), cluster, m, memory)


def search(
    p: Pipeline,
    start: tuple[Schedule, ...] = (),
    effort: float = 1.0,
    seed: int = 0,
    use_solver: bool = True,
    deadline: Deadline = UNLIMITED,
) -> OrderSolution:
    return search_order(
        p.stages, p.devices, p.cluster, num_microbatches=p.num_microbatches, memory_bytes=p.memory_bytes,
        start=start, effort=effort, seed=seed, use_solver=use_solver, deadline=deadline,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("p", "m", "f", "i", "w", "stashes", "bubble"),
    [
        (2, 2, 10, 10, 10, 2, 10),  # ZB-H1: (p - 1)(F + I - W)
        (4, 8, 10, 10, 10, 4, 30),
        (8, 16, 10, 10, 10, 8, 70),
        (4, 8, 10, 10, 10, 7, 30),  # ZB-H2's memory; the first F and the last stage's wait for it remain: (p - 1) F
        (3, 6, 10, 12, 8, 3, 28),
        (1, 5, 10, 10, 10, 1, 0),
    ],
)
def test_zero_bubble_steps_are_found_and_proven(p: int, m: int, f: int, i: int, w: int, stashes: int, bubble: int) -> None:  # fmt: skip
    found = search(equal(p, m, f, i, w, stashes))
    assert (found.status, found.step_ns) == ("optimal", m * (f + i + w) + bubble)


def test_the_complete_order_of_a_small_problem() -> None:
    found = search(equal(2, 2, 10, 10, 10, 2))
    assert found.schedule is not None
    assert [" ".join(map(str, actions)) for actions in found.schedule.order] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1I0 1F1 1I1 1W0 1W1",
    ]


def test_never_slower_than_a_start_that_fits() -> None:
    kept = 0
    for seed in range(30):
        p = random_pipeline(Random(seed), (0, 1, 2), 4, overlaps=seed % 2 == 0)
        starts = tuple(
            Schedule(devices=p.devices, num_microbatches=4, order=(*table.order, *[()] * (len(p.cluster.devices) - 3)))
            for table in (SCHEDULES["1f1b"](3, 4), SCHEDULES["gpipe"](3, 4))
        )
        found = search(p, starts, effort=0)
        for start in starts:
            timeline = simulate_schedule(start, p.stages, p.cluster)
            if all(m.total <= most for m, most in zip(timeline.memory, p.memory_bytes, strict=True)):
                assert found.step_ns is not None, seed
                assert found.step_ns <= timeline.step_ns, seed
                kept += 1
        if found.schedule is not None:
            held = simulate_schedule(found.schedule, p.stages, p.cluster).memory
            assert all(m.total <= most for m, most in zip(held, p.memory_bytes, strict=True)), seed
    assert kept > 10


@pytest.mark.parametrize("seed", range(3))
def test_the_same_arguments_give_the_same_answer(seed: int) -> None:
    p = random_pipeline(Random(seed), (0, 1, 2, 0), 5)
    assert search(p, seed=seed) == search(p, seed=seed)


def test_without_the_solver_the_bound_still_holds() -> None:
    p = equal(4, 8, 7, 11, 5, 3, wire_ns=2)
    with_solver = search(p)
    without = search(p, use_solver=False)
    assert without.status in ("optimal", "feasible")
    assert without.step_ns is not None
    assert without.lower_bound_ns is not None
    assert with_solver.step_ns is not None
    assert without.lower_bound_ns <= with_solver.step_ns <= without.step_ns


def test_memory_counts_in_a_backward_of_no_length() -> None:
    """Orders in which both micro-batches meet in the first stage's backward do not fit, however short it is."""
    costs = (
        StageCost(forward_ns=6, input_grad_ns=0, weight_grad_ns=0, update_ns=2, param_bytes=4, optimizer_bytes=1,
                  stash_bytes=4),
        StageCost(forward_ns=4, input_grad_ns=4, weight_grad_ns=7, param_bytes=1, optimizer_bytes=4, stash_bytes=7),
        StageCost(forward_ns=6, input_grad_ns=8, weight_grad_ns=0, param_bytes=3, optimizer_bytes=1, stash_bytes=4,
                  workspace_bytes=2),
    )  # fmt: skip
    stages = tuple(Stage(costs=(cost,), recompute=s == 0) for s, cost in enumerate(costs))
    p = Pipeline(stages, ((0,), (1,), (0,)), devices(2, memory_bytes=0, latency_ns=0), 2, [22, 22])
    best_ns = fastest_ns(p.stages, p.devices, p.cluster, p.num_microbatches, p.memory_bytes)
    found = search(p)
    assert (found.step_ns, found.lower_bound_ns) == (best_ns, best_ns) == (51, 51)


def test_one_stash_is_enough_and_none_is_not() -> None:
    assert (
        search(equal(2, 3, 10, 10, 10, 1)).step_ns == 3 * 50
    )  # F, F I, I W on the first device; the other W is beside
    found = search(equal(2, 3, 10, 10, 10, 0))
    assert (found.status, found) == ("infeasible", OrderSolution())


def test_replicas_and_starts_of_other_sizes_are_refused() -> None:
    p = equal(2, 2, 1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"stage 0 has devices \(0, 1\); an order is searched for one device a stage"):
        search_order(p.stages, ((0, 1), (1,)), p.cluster, num_microbatches=2, memory_bytes=p.memory_bytes)
    with pytest.raises(ValueError, match=r"a start with devices .* and 3 micro-batches; want .* and 2$"):
        search(p, (SCHEDULES["gpipe"](2, 3),))
    with pytest.raises(ValueError, match="2 stages, 2 lists of devices; 2 devices, 1 memories"):
        search_order(p.stages, p.devices, p.cluster, num_microbatches=2, memory_bytes=[5])


def test_a_search_whose_time_is_over_has_the_best_of_what_it_tried() -> None:
    """And no bound: that is one of what is searched."""
    p = random_pipeline(Random(0), (0, 1), 3)
    start = sequential_schedule(p.devices, p.num_microbatches, len(p.cluster.devices))
    found = search(p, (start,), deadline=Deadline(0.0))
    assert (found.schedule, found.lower_bound_ns) == (start, 0)
    assert found.step_ns == simulate_columns(start, p.stages, p.cluster).step_ns


def test_fusing_i_and_w_happens_only_if_it_costs_nothing() -> None:
    p = equal(2, 1, 10, 10, 10, 1)
    order = tuple(tuple(parse_action(f"{s}{phase}0") for phase in "FIW") for s in range(2))
    joined = fuse_backward(Schedule(devices=p.devices, num_microbatches=1, order=order), p.stages, p.cluster)
    assert [" ".join(map(str, actions)) for actions in joined.order] == ["0F0 0B0", "1F0 1I0 1W0"]


def test_fusing_i_and_w_ends_with_the_deadline() -> None:
    """What has been fused by then costs nothing; with enough looks at the deadline all is fused that can be."""
    p = equal(2, 10, 10, 10, 10, 1)
    order = tuple(tuple(parse_action(f"{s}{phase}{m}") for m in range(10) for phase in "FIW") for s in range(2))
    split = Schedule(devices=p.devices, num_microbatches=10, order=order)
    step_ns = simulate_columns(split, p.stages, p.cluster).step_ns
    whole = fuse_backward(split, p.stages, p.cluster)
    fused = []
    for num_looks in range(100):
        deadline = Deadline(num_looks, clock=partial(next, count()))
        joined = fuse_backward(split, p.stages, p.cluster, deadline)
        assert simulate_columns(joined, p.stages, p.cluster).step_ns <= step_ns
        fused.append(sum(action.phase is Phase.BACKWARD for actions in joined.order for action in actions))
        if joined == whole:
            break
    assert fused == sorted(fused)
    assert fused[0] == 0
    assert joined == whole


def test_one_machine() -> None:
    assert preemptive_one_machine_ns([]) == 0
    assert preemptive_one_machine_ns([Job(0, 4, 0), Job(1, 2, 9)]) == 12  # the second interrupts the first
    assert preemptive_one_machine_ns([Job(0, 4, 0), Job(9, 2, 1)]) == 12
