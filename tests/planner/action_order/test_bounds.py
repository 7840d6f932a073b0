"""The bounds on action orders, by name: hand cases, never above a real timeline, and equal to it in a stated share."""

from random import Random

import pytest

from bapipe.planner.action_order.bounds import _work_bounds, heads_and_tails, split_lower_bound_ns
from bapipe.planner.action_order.evaluate import evaluate_order
from bapipe.planner.action_order.list_scheduler import list_schedule, priority_rules
from bapipe.planner.action_order.problem import F, I, OrderProblem, W, order_problem, orders_of, sequential_schedule
from bapipe.planner.action_order.search import search_order
from tests.random_pipelines import random_pipeline


def problem(
    times: tuple[int, ...],
    num_microbatches: int,
    *,
    send_ns: tuple[int, ...] = (),
    return_ns: tuple[int, ...] = (),
    stashes: int = 100,
) -> OrderProblem:
    """One stage per device; each device has memory for some stashes of one byte."""
    num_stages = len(times) // 3
    none = (0,) * num_stages
    return OrderProblem(
        rank_of=tuple(range(num_stages)),
        num_ranks=num_stages,
        num_microbatches=num_microbatches,
        action_ns=times,
        send_ns=send_ns or none,
        return_ns=return_ns or none,
        update_ns=none,
        stash_bytes=(1,) * num_stages,
        weight_grad_stash_bytes=none,
        workspace_bytes=none,
        available_bytes=(stashes,) * num_stages,
        overlaps_transfers=(True,) * num_stages,
    )


def test_chain() -> None:
    """One micro-batch: F 1, F 2, I 2, I 1, W 1 with transfers of 5 and 7 between; tails mirror the heads."""
    heads, tails = heads_and_tails(problem((10, 20, 30, 11, 21, 31), 1, send_ns=(5, 0), return_ns=(7, 0)))
    assert [heads[s][p][0] for s, p in ((0, F), (1, F), (1, I), (0, I), (0, W))] == [10, 26, 47, 74, 104]
    # Backwards in time the parts are W, I, F.
    assert [tails[s][p][0] for s, p in ((0, 0), (0, 1), (1, 1), (1, 2), (0, 2))] == [30, 50, 78, 89, 104]


def test_link() -> None:
    """A link that takes longer than the stage that sends: the k-th arrival is k transfers after the first."""
    heads, _ = heads_and_tails(problem((1, 1, 1, 1, 1, 1), 4, send_ns=(10, 0)))
    assert heads[1][F] == [12, 22, 32, 42]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 7, 30])
def test_what_a_stage_must_run_before_an_end_is_counted_from_every_begin(max_in_flight: int) -> None:
    """Against each line of the rule, from every micro-batch, for begins at random."""
    random = Random(max_in_flight)
    a, b, c = random.sample(range(50), 3)
    begins = [sorted(random.randrange(2_000) for _ in range(20)) for _ in range(2)]
    bounds = _work_bounds((a, b, c), max_in_flight)
    for k in range(20):
        rules = [[0], [0], [0]]
        for i in range(k + 1):
            first, second, n = begins[0][i], begins[1][i], k - i + 1
            freed = max(0, n - max_in_flight)
            rules[0] += [first + n * a + freed * (b + c), (second + freed * (a + b + c)) * (freed > 0)]
            rules[1] += [first + n * (a + b) + freed * c, second + n * b + freed * (a + c)]
            rules[2] += [first + n * (a + b + c), second + n * (b + c) + freed * a]
        found = [max(each.earliest_end_ns(begins[each.part], k) for each in of_part) for of_part in bounds]
        assert found == list(map(max, rules))


def test_work() -> None:
    """A stage alone: the k-th W ends after k of all three phases, whatever their order."""
    heads, _ = heads_and_tails(problem((3, 4, 5), 3))
    assert heads[0][F] == [3, 6, 9]
    assert heads[0][I] == [7, 14, 21]
    assert heads[0][W] == [12, 24, 36]


def test_memory() -> None:
    """Room for one stash: the F of each micro-batch begins after the W of the one before it."""
    heads, _ = heads_and_tails(problem((3, 4, 5), 3, stashes=1))
    assert heads[0][F] == [3, 15, 27]
    assert split_lower_bound_ns(problem((3, 4, 5), 3, stashes=1)) == 36


def test_heads_and_tails_never_exceed_a_timeline_and_often_equal_one() -> None:
    """Of the best order found, at least a third of the actions end at their head, or begin at their tail."""
    seen = at_head = at_tail = 0
    for seed in range(60):
        random = Random(seed)
        p = random_pipeline(random, random.choice([(0, 1), (0, 1, 2), (0, 1, 0)]), random.randint(1, 4))
        made = order_problem(p.stages, p.devices, p.cluster, p.num_microbatches, p.memory_bytes)
        sequential = orders_of(sequential_schedule(p.devices, p.num_microbatches, made.num_ranks))
        if not made.is_monotone or not made.fits(sequential):
            continue
        heads, tails = heads_and_tails(made)
        candidates = [sequential, *(list_schedule(made, rule) for rule in list(priority_rules(made))[::5])]
        timings = [timing for orders in candidates if (timing := evaluate_order(made, orders)) is not None]
        best = min(timings, key=lambda timing: timing.step_ns)
        for timing in timings:
            for code, begins in enumerate(timing.begins_ns):
                stage, phase = divmod(code, 3)
                for k, begin in enumerate(begins):
                    end, remaining = begin + made.action_ns[code], timing.step_ns - begin
                    head, tail = heads[stage][phase][k], tails[stage][2 - phase][-1 - k]
                    assert head <= end, (seed, code, k)
                    assert tail <= remaining, (seed, code, k)
                    if timing is best:
                        seen += 1
                        at_head += head == end
                        at_tail += tail == remaining
    assert seen > 300
    assert at_head > seen / 3
    assert at_tail > seen / 3


def test_one_machine_bound_is_often_the_optimum() -> None:
    """The bound alone, without CP-SAT, proves at least half of the best orders found."""
    proven = tried = 0
    for seed in range(40):
        p = random_pipeline(Random(seed), (0, 1), 3)
        solution = search_order(
            p.stages,
            p.devices,
            p.cluster,
            num_microbatches=p.num_microbatches,
            memory_bytes=p.memory_bytes,
            effort=0.2,
            use_solver=False,
        )
        if solution.step_ns is None or solution.lower_bound_ns is None:
            continue
        assert solution.lower_bound_ns <= solution.step_ns, seed
        tried += 1
        proven += solution.status == "optimal"
    assert tried > 25
    assert proven >= tried / 2
