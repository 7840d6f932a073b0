"""The schedule with the least memory among those in which a plan's stages take equally long."""

from dataclasses import replace

from bapipe.errors import BapipeError
from bapipe.planner.compute.pace import ACTIONS_PER_S
from bapipe.planner.results.solution import Solution
from bapipe.planner.search_request import SearchRequest
from bapipe.schedules import ALL
from bapipe.schedules.placement import place_schedule
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage_cost import build_stages

MAX_FORWARDS = 2**14
"""Forwards of all schedules together up to which they are tried: a quarter of a second."""


def with_least_memory(solution: Solution, request: SearchRequest) -> Solution:
    """Returns the solution in the named schedule that is preferred, with the same stages and micro-batches.

    Searches drop what cannot be faster than the best plan, so one that is as fast with less memory is not seen: equal
    stages take as long in GPipe as in 1F1B, which keeps fewer micro-batches in flight.
    """
    names = [name for name in request.schedules if name in ALL and name != solution.schedule]
    num_forwards = len(names) * len(solution.stages) * solution.table.num_microbatches
    is_too_long = num_forwards > MAX_FORWARDS or not request.deadline.has_time_for(3 * num_forwards, ACTIONS_PER_S)
    if solution.schedule not in ALL or is_too_long:
        return solution
    others = [other for name in names if (other := _in_schedule(name, solution, request)) is not None]
    return min([solution, *others], key=lambda each: each.preference)


def _in_schedule(name: str, solution: Solution, request: SearchRequest) -> Solution | None:
    """Returns the same stages in another schedule; None if it cannot have them, or they do not fit."""
    cluster = solution.cluster
    try:
        table = place_schedule(name, solution.table.devices, solution.table.num_microbatches, len(cluster.devices))
    except BapipeError:
        return None
    costs = build_stages(solution.stages, solution.profiles, cluster, solution.microbatch_size)
    timeline = simulate_columns(table, costs, cluster)
    limits = request.options.limits(cluster)
    if any(memory.total > limit for memory, limit in zip(timeline.memory, limits, strict=True)):
        return None
    return replace(solution, schedule=name, table=table, prediction=timeline.prediction(solution.minibatch_size))
