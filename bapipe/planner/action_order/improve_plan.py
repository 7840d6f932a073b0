"""From the best plan of the named schedules to the best order found for its stages, and for stages near them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bapipe.formats.plan import Alternative, Plan, StagePlan, certify
from bapipe.formats.profile import ModelProfile
from bapipe.planner.action_order.bounds import lower_bound_ns
from bapipe.planner.action_order.problem import order_problem, sequential_schedule
from bapipe.planner.action_order.search import OrderSolution, search_order
from bapipe.planner.schedule_placement import permute_ranks
from bapipe.schedules import ALL
from bapipe.schedules.table import Schedule
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages

SEARCH = "search"
"""What a plan whose order was searched calls its schedule."""


EFFORT_SHARE_PER_PARTITION = 0.1
"""Effort spent on each neighbouring partition, as a share of that for the plan's own stages, which comes on top."""


def improve_plan(
    plan: Plan, profiles: Mapping[str, ModelProfile], limits: Sequence[int], effort: float, *, may_move: bool = True
) -> Plan:
    """Returns the plan with the fastest order found for its stages or stages near them, itself where none is faster.

    First the order of the plan's own stages is searched. Then, if it `may_move` and while effort is left, one layer
    moves from a stage to the next or back: of the cuts so made, those whose bound lies below the best step are
    searched, lowest bound first, and the first faster one is where the search goes on. It starts from every named
    schedule that suits the stages. Where devices run forward and backward side by side nothing is searched: no search
    knows of their lanes.
    """
    if any(device.side_by_side for device in plan.cluster.devices):
        return plan
    best = _Cut(plan.stages, plan, profiles)
    found = best.search(limits, effort)
    seen, left = {plan.stages}, round(1 / EFFORT_SHARE_PER_PARTITION) if may_move else 0
    while left:
        near = [_Cut(stages, plan, profiles) for stages in _near(best.stages, profiles) if stages not in seen]
        hopeful = sorted((bound_ns, i) for i, cut in enumerate(near) for bound_ns in [cut.bound_ns(limits)] if bound_ns)
        faster = None
        for bound_ns, i in hopeful:
            if not left or found.step_ns is None or bound_ns >= found.step_ns:
                break
            left -= 1
            seen.add(near[i].stages)
            other = near[i].search(limits, EFFORT_SHARE_PER_PARTITION * effort)
            if other.step_ns is not None and other.step_ns < found.step_ns:
                faster = near[i], other
                break
        if faster is None:
            break
        best, found = faster
    return _planned(plan, best, found, len(seen) - 1)


class _Cut:
    """Stages in place of a plan's own, and what they cost."""

    def __init__(self, stages: tuple[StagePlan, ...], plan: Plan, profiles: Mapping[str, ModelProfile]) -> None:
        self.stages, self.table, self.cluster = stages, plan.table, plan.cluster
        self.costs = build_stages(stages, profiles, plan.cluster, plan.microbatch_size)

    def bound_ns(self, limits: Sequence[int]) -> int | None:
        """Returns what no order of these stages beats, None where none fits."""
        devices, num = self.table.devices, self.table.num_microbatches
        held = peak_memory(sequential_schedule(devices, num, len(limits)), self.costs)
        if any(memory.total > limit for memory, limit in zip(held, limits, strict=True)):
            return None
        return lower_bound_ns(order_problem(self.costs, devices, self.cluster, num, limits))

    def search(self, limits: Sequence[int], effort: float) -> OrderSolution:
        return search_order(
            self.costs,
            self.table.devices,
            self.cluster,
            num_microbatches=self.table.num_microbatches,
            memory_bytes=limits,
            start=[self.table, *_suitable(self.table)],
            effort=effort,
        )


def _near(stages: tuple[StagePlan, ...], profiles: Mapping[str, ModelProfile]) -> Iterator[tuple[StagePlan, ...]]:
    """Yields the stages with one layer moved over a boundary; layers that share parameters stay together."""
    shares = {layer.name: set(layer.shares) for layer in next(iter(profiles.values())).layers}
    for s in range(len(stages) - 1):
        here, there = stages[s].layers, stages[s + 1].layers
        for first, second, moved in (
            (here[:-1], (here[-1], *there), here[-1]),
            ((*here, there[0]), there[1:], there[0]),
        ):
            if first and second and not shares[moved]:
                pair = (
                    msgspec.structs.replace(stages[s], layers=first),
                    msgspec.structs.replace(stages[s + 1], layers=second),
                )
                yield (*stages[:s], *pair, *stages[s + 2 :])


def _planned(plan: Plan, best: _Cut, found: OrderSolution, num_others: int) -> Plan:
    assert found.schedule is not None
    assert found.step_ns is not None
    assert found.lower_bound_ns is not None
    if found.step_ns >= plan.prediction.step_ns:
        return plan
    before = plan.prediction
    same = best.stages == plan.stages
    named = Alternative(
        name=plan.schedule,
        step_ns=before.step_ns,
        peak_bytes=max(rank.peak_bytes for rank in before.ranks),
        feasible=True,
        why_not=f"{before.step_ns / found.step_ns - 1:.1%} slower, with {'the same' if same else 'other'} stages",
    )
    whence = "the stages are" if same else "the stages were made, a layer at a time, from"
    return msgspec.structs.replace(
        plan,
        schedule=SEARCH,
        stages=best.stages,
        order=tuple(tuple(map(str, actions)) for actions in found.schedule.order),
        prediction=simulate_schedule(found.schedule, best.costs, plan.cluster).prediction(plan.minibatch_size),
        certificate=certify(
            found.step_ns,
            found.lower_bound_ns,
            f"every order of F, B, I and W for these stages; {whence} the best for {plan.schedule}, chosen from "
            f"{plan.certificate.space}; orders were searched for {num_others} other cuts too",
        ),
        alternatives=(named,),
    )


def _suitable(table: Schedule) -> list[Schedule]:
    """The named schedules for the same stages on the same devices."""
    ranks = list(dict.fromkeys(devices[0] for devices in table.devices))
    made = (permute_ranks(build(len(ranks), table.num_microbatches), ranks, len(table.order)) for build in ALL.values())
    return [schedule for schedule in made if schedule.devices == table.devices]
