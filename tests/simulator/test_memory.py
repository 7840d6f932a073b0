"""The searches' forms of the memory rule against the simulator's `peak_memory`."""

from random import Random

from hypothesis import given

from bapipe.planner.action_order.problem import order_problem, orders_of
from bapipe.schedules import SCHEDULES
from bapipe.simulator.memory import peak_memory
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
        assert max(fitting, default=0) == max(0, problem.max_in_flight(stage))
