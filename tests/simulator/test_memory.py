"""The searches' forms of the memory rule against the simulator's `peak_memory`."""

from functools import cache
from random import Random

from hypothesis import given

from bapipe.planner.action_order.problem import order_problem, orders_of, relaxation
from bapipe.schedules import SCHEDULES
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.stage import Stage, StageCost
from tests.builders import devices
from tests.random_pipelines import Pipeline, random_pipeline
from tests.strategies import examples, pipelines

SPLIT = ("zb-h1", "zb-h2")
"""Schedules that split every backward, as orders of codes do."""


def test_an_order_fits_if_the_peaks_of_its_schedule_do() -> None:
    outcomes = set()
    for seed in range(200):
        random = Random(seed)
        pipeline = random_pipeline(random, (0, 1, 2), 4)
        schedule = SCHEDULES[random.choice(SPLIT)](3, 4)
        num_ranks = len(pipeline.cluster.devices)
        problem = order_problem(
            pipeline.stages, pipeline.devices, pipeline.cluster, pipeline.num_microbatches, pipeline.memory_bytes
        )
        orders = (*orders_of(schedule), *[()] * (num_ranks - 3))
        peaks = peak_memory(schedule, pipeline.stages)
        for rank, peak in enumerate(peaks):
            fits = problem.rank_fits(rank, orders[rank])
            assert fits == (peak.total <= pipeline.memory_bytes[rank])
            outcomes.add(fits)
    assert outcomes == {True, False}


@examples(200)
@given(pipelines((0, 1), 5))
def test_the_number_that_fits_in_flight_equals_the_simulator_s(pipeline: Pipeline) -> None:
    problem = order_problem(
        pipeline.stages, pipeline.devices, pipeline.cluster, pipeline.num_microbatches, pipeline.memory_bytes
    )
    for stage in (s for s in (0, 1) if problem.stash_bytes[s]):  # stashes of no bytes need no limit
        # F of n micro-batches, then I and W of each: n stashes in flight.
        fitting = [
            n for n in range(1, 6) if problem.rank_fits(stage, [3 * stage] * n + [3 * stage + 1, 3 * stage + 2] * n)
        ]
        assert max(fitting, default=0) == problem.max_in_flight(stage)


def test_the_number_in_flight_is_the_largest_of_all_orders_of_a_stage() -> None:
    """Of I and W, and of B, I and W for the relaxation; what I leaves for W, and workspace, of all sizes."""
    only_with_b = fewer = 0
    for seed in range(2000):
        random = Random(seed)
        num, most = random.randint(1, 5), random.choice([5, 60])
        stash, left, workspace = random.randint(1, 20), random.randrange(most), random.randrange(most)
        part, kept_tensor_bytes = random.randint(0, stash), random.randint(1, 20)
        recomputes = random.random() < 0.5
        cost = StageCost(
            forward_ns=1, input_grad_ns=1, weight_grad_ns=1,
            stash_bytes=stash, recomputed_bytes=part, gradient_stash_bytes=left, workspace_bytes=workspace,
        )  # fmt: skip
        stages = (Stage(costs=(cost,), recompute=recomputes, kept_tensor_bytes=kept_tensor_bytes),)
        room = random.randrange(150)
        problem = order_problem(stages, ((0,),), devices(1), num, [room])
        kept, recomputed = (stash - part + kept_tensor_bytes, part) if recomputes else (stash, 0)
        split = most_in_flight(num, room - workspace, kept, recomputed, left, with_b=False)
        all_orders = most_in_flight(num, room - workspace, kept, recomputed, left, with_b=True)
        assert problem.max_in_flight(0) == split, seed
        assert relaxation(problem, stages).max_in_flight(0) == all_orders, seed
        only_with_b += split == 0 < all_orders
        fewer += 0 < split < all_orders
    assert only_with_b > 100
    assert fewer > 100


def most_in_flight(num: int, room: int, kept: int, recomputed: int, left_for_w: int, *, with_b: bool) -> int:
    """The most micro-batches between F and the end of B or W in any order of one stage that fits; 0 if none does.

    It tries every order, by how many F and I have run, and how many micro-batches have ended.
    """
    in_backward = recomputed + left_for_w

    @cache
    def most_from(forwards: int, input_grads: int, ended: int) -> int | None:
        """The most from here to the end of the step, None if no order gets there."""
        if ended == num:
            return 0
        held = (forwards - ended) * kept + (input_grads - ended) * in_backward
        following = []
        if forwards < num and held + kept <= room:
            following.append(most_from(forwards + 1, input_grads, ended))
        if input_grads < forwards and held + in_backward <= room:
            following.append(most_from(forwards, input_grads + 1, ended))
        if ended < input_grads and held <= room:
            following.append(most_from(forwards, input_grads, ended + 1))
        if with_b and input_grads < forwards and held + recomputed <= room:
            following.append(most_from(forwards, input_grads + 1, ended + 1))
        found = [most for most in following if most is not None]
        return max(forwards - ended, *found) if found else None

    return most_from(0, 0, 0) or 0
