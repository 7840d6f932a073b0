"""Improves a plan's order of actions: searches orders for its stages, and for stages with a layer moved.

A local search over partitions, around the order search: the neighbours of a partition move one layer over one cut. A
neighbour is searched only if its lower bound is below the best step so far, the lowest bound first, and the search
continues from the first neighbour that is faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from bapipe.formats.plan import Alternative
from bapipe.formats.profile import ProfilesByKind
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.action_order.bounds import lower_bound_ns
from bapipe.planner.action_order.problem import order_problem, sequential_schedule
from bapipe.planner.action_order.search import OrderSolution, search_order
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.compute.pace import ACTIONS_PER_S
from bapipe.planner.inputs.options import SEARCH
from bapipe.planner.results.decision import stage_plan
from bapipe.planner.results.searched_space import ActionOrderSpace
from bapipe.planner.results.solution import Solution
from bapipe.schedules import ALL
from bapipe.schedules.placement import permute_ranks
from bapipe.schedules.table import Schedule
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage_cost import build_stages

MIN_SIMULATED = 4
"""No order is searched if so many simulations take longer than what is left of a given time."""

EFFORT_SHARE_PER_PARTITION = 0.1
"""Effort for each neighbouring partition, relative to the effort for the plan's own stages."""


def improve_plan(
    plan: Solution,
    profiles: ProfilesByKind,
    limits: Sequence[int],
    effort: float,
    *,
    may_move: bool = True,
    others: Sequence[tuple[StagePlan, ...]] = (),
    deadline: Deadline = UNLIMITED,
) -> Solution:
    """Returns the plan with the fastest order found for its stages or neighbouring ones; itself if none is faster.

    Each order search starts from every named schedule that suits the stages. Nothing is searched if devices run forward
    and backward side by side, because the order problem has one lane per device.

    Args:
        limits: the memory that each device may use, in bytes.
        effort: of the search for the plan's own stages; see `search_order`. Neighbouring partitions get a share each.
        may_move: whether layers may move between stages.
        others: further stages on the same devices to try, as neighbours are.
        deadline: ends the search with the best order so far.
    """
    num_actions = sum(map(len, plan.table.order))
    has_time = not deadline.is_given or deadline.has_time_for(MIN_SIMULATED * num_actions, ACTIONS_PER_S)
    if not has_time or deadline.is_over or any(device.side_by_side for device in plan.cluster.devices):
        return plan
    # The plan's own partition gets the full effort.
    best = _Partition(plan.stages, plan, profiles)
    solution = best.search(limits, effort, deadline)
    searched, searches_left = {plan.stages}, round(1 / EFFORT_SHARE_PER_PARTITION) if may_move else 0
    while searches_left and not deadline.is_over:
        neighbours = [
            _Partition(stages, plan, profiles)
            for stages in (*others, *_neighbours(best.stages, profiles))
            if stages not in searched
        ]
        # Each takes as long as a few simulations.
        in_time = takewhile(lambda _: not deadline.is_over, enumerate(neighbours))
        bounds = [(partition.bound_ns(limits), i) for i, partition in in_time]
        faster = None
        for bound_ns, i in sorted((bound_ns, i) for bound_ns, i in bounds if bound_ns is not None):
            if not searches_left or solution.step_ns is None or bound_ns >= solution.step_ns:
                break  # bounds ascend: no later neighbour can be faster either
            searches_left -= 1
            searched.add(neighbours[i].stages)
            other = neighbours[i].search(limits, EFFORT_SHARE_PER_PARTITION * effort, deadline)
            if other.step_ns is not None and other.step_ns < solution.step_ns:
                faster = neighbours[i], other
                break
        if faster is None:
            break  # a local optimum
        # First improvement: continue from the first neighbour that is faster.
        best, solution = faster
    return _with_solution(plan, best, solution, len(searched) - 1)


class _Partition:
    """A partition of the layers for the devices of a plan, and what its stages cost."""

    def __init__(self, stages: tuple[StagePlan, ...], plan: Solution, profiles: ProfilesByKind) -> None:
        self.stages, self.table, self.cluster = stages, plan.table, plan.cluster
        self.costs = build_stages(stages, profiles, plan.cluster, plan.microbatch_size)

    def bound_ns(self, limits: Sequence[int]) -> int | None:
        """Returns a lower bound on the step of every order of these stages, None if none fits in memory."""
        devices, num = self.table.devices, self.table.num_microbatches
        # No table needs less memory than the sequential schedule.
        peaks = peak_memory(sequential_schedule(devices, num, len(limits)), self.costs)
        if any(peak.total > limit for peak, limit in zip(peaks, limits, strict=True)):
            return None
        return lower_bound_ns(order_problem(self.costs, devices, self.cluster, num, limits), self.costs)

    def search(self, limits: Sequence[int], effort: float, deadline: Deadline) -> OrderSolution:
        return search_order(
            self.costs,
            self.table.devices,
            self.cluster,
            num_microbatches=self.table.num_microbatches,
            memory_bytes=limits,
            start=[self.table, *_named_schedules_for(self.table, deadline)],
            effort=effort,
            deadline=deadline,
        )


def _neighbours(stages: tuple[StagePlan, ...], profiles: ProfilesByKind) -> Iterator[tuple[StagePlan, ...]]:
    """Yields the stages with one layer moved over a cut; layers that share parameters stay together."""
    shares = {layer.name: set(layer.shares) for layer in next(iter(profiles.values())).layers}
    for s in range(len(stages) - 1):
        here, there = stages[s].layers, stages[s + 1].layers
        for first, second, moved in (
            (here[:-1], (here[-1], *there), here[-1]),
            ((*here, there[0]), there[1:], there[0]),
        ):
            # No stage may become empty, and a layer with tied weights cannot leave its partners.
            if first and second and not shares[moved]:
                yield (*stages[:s], _of(stages[s], first), _of(stages[s + 1], second), *stages[s + 2 :])


def _of(stage: StagePlan, layers: tuple[str, ...]) -> StagePlan:
    """Returns a stage with other layers, of which it recomputes those that it did; all if none of these is left."""
    again = frozenset(stage.recompute_layers or ())
    return stage_plan(layers, stage.devices, recompute=stage.recompute, recompute_layers=again)


def _with_solution(plan: Solution, best: _Partition, solution: OrderSolution, num_others: int) -> Solution:
    """Returns the plan with the stages and the order found; the plan itself if they are not faster."""
    assert solution.schedule is not None
    assert solution.step_ns is not None
    assert solution.lower_bound_ns is not None
    if solution.step_ns >= plan.prediction.step_ns:
        return plan
    before = plan.prediction
    is_same = best.stages == plan.stages
    named = Alternative(
        name=plan.schedule,
        step_ns=before.step_ns,
        peak_bytes=plan.prediction.peak_bytes,
        feasible=True,
        why_not=f"{before.step_ns / solution.step_ns - 1:.1%} slower, with {'the same' if is_same else 'other'} stages",
    )
    return replace(
        plan,
        schedule=SEARCH,
        stages=best.stages,
        table=solution.schedule,
        prediction=simulate_columns(solution.schedule, best.costs, plan.cluster).prediction(plan.minibatch_size),
        lower_bound_ns=solution.lower_bound_ns,
        space=ActionOrderSpace(
            schedule=plan.schedule,
            has_same_stages=is_same,
            num_other_partitions=num_others,
            named_bound_ns=plan.lower_bound_ns,
            stages_from=plan.space,
        ),
        alternatives=(named,),
    )


def _named_schedules_for(table: Schedule, deadline: Deadline) -> list[Schedule]:
    """Returns the named schedules whose stages run on the same devices as those of a table, made before a deadline."""
    ranks = list(dict.fromkeys(devices[0] for devices in table.devices))
    in_time = takewhile(lambda _: not deadline.is_over, ALL.values())
    built = (build(len(ranks), table.num_microbatches) for build in in_time)
    placed = (permute_ranks(schedule, ranks, len(table.order)) for schedule in built)
    return [schedule for schedule in placed if schedule.devices == table.devices]
