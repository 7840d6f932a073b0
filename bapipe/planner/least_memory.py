"""Plans that are as fast as the one that a search has found, and preferred to it."""

from collections.abc import Sequence
from dataclasses import replace

from bapipe.errors import BapipeError
from bapipe.formats.stage_plan import has_idle_replicas
from bapipe.planner.baselines import Baselines, Candidate, as_solution
from bapipe.planner.compute.pace import ACTIONS_PER_S
from bapipe.planner.results.searched_space import PartitionSpace, SearchedSpace
from bapipe.planner.results.solution import Solution, preference_of
from bapipe.planner.search_request import SearchRequest
from bapipe.schedules import ALL
from bapipe.schedules.placement import place_schedule
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage_cost import build_stages

MAX_FORWARDS = 2**14
"""Forwards of all schedules together up to which they are tried: 0.8 s, with three actions each at `ACTIONS_PER_S`."""


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


def or_baseline(solution: Solution, baselines: Baselines) -> Solution:
    """Returns the solution, or a baseline of its space that is as fast and preferred to it."""
    others = [
        as_solution(candidate, solution)
        for timed, candidate in zip(baselines.alternatives, baselines.candidates, strict=True)
        if timed.feasible
        and preference_of(timed.step_ns, timed.peak_bytes, candidate.stages) < solution.preference
        and timed.step_ns == solution.objective_ns  # a faster one is not of the space
        and _is_in(solution.space, candidate, solution)
    ]
    return min([solution, *others], key=lambda each: each.preference)


def _is_in(space: SearchedSpace, candidate: Candidate, solution: Solution) -> bool:
    """Returns whether a space certainly has a baseline, which fits."""
    if not isinstance(space, PartitionSpace) or not space.has_any_order:
        return False
    stages, num_microbatches = candidate.stages, solution.minibatch_size // candidate.microbatch_size
    num_replicas = [len(stage.devices) for stage in stages]
    return (
        candidate.schedule in space.schedules
        and _is_within(len(stages), space.stage_counts)
        and _is_within(sum(num_replicas), space.device_counts)
        and (space.replicas or max(num_replicas) == 1)
        and not has_idle_replicas(num_replicas, num_microbatches)
        and not (space.has_unlike_cuts and len(stages) > 1)
        and not _breaks(space.constraints, candidate, solution)
    )


def _is_within(number: int, counts: tuple[int, int]) -> bool:
    return counts[0] <= number <= counts[1]


def _breaks(constraints: Sequence[str], candidate: Candidate, solution: Solution) -> bool:
    from bapipe.planner.stages.constraints import parse_constraints  # loads numpy

    return bool(constraints and parse_constraints(constraints).broken_by(candidate.stages, solution.cluster))


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
