"""The judge's fast clockwork: when actions end is a recurrence over the table, where no two flows share a link.

    start(a) = max(end of the action before it on its device, arrival of its input)
    arrival  = max(end of the action that sends, arrival of the flow's transfer before) + transfer time

A flow is what one device sends another for one stage in one direction. Its transfers become ready in the order of the
table, so a link that carries a single flow needs no queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bapipe.errors import InvalidSchedule
from bapipe.schedule import Action, Phase, Schedule, check

_PHASE = {phase: i for i, phase in enumerate(Phase)}
NUM_PHASES = len(_PHASE)


class Flow(NamedTuple):
    """The transfers of one stage, in one direction, between two ranks."""

    source: int
    target: int
    stage: int
    forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A legal table in an order in which every action comes after what it needs.

    Attributes:
        actions, ranks: the actions, and where each runs.
        costs: for each action the place of its time among `duration_ns(...)`.
        needs, gives: for each action the slot of its input and of what it gives; the last slot is always there, the
            one before it is never looked at.
        flows: for each action the flow that carries what it gives, -1 where it stays or nothing is given.
        all_flows: what the flows are.
        exact: whether the recurrence is the judge's rules, on devices that overlap transfers.
    """

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    costs: tuple[int, ...]
    needs: tuple[int, ...]
    gives: tuple[int, ...]
    flows: tuple[int, ...]
    all_flows: tuple[Flow, ...]
    num_ranks: int
    num_slots: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Times:
    """When each action of a program ends, each slot is filled, and each rank has run its actions."""

    ends_ns: list[int]
    arrivals_ns: list[int]
    ranks_ns: list[int]


def compile_table(schedule: Schedule) -> Program:
    """Returns the program of a schedule.

    Raises:
        InvalidSchedule: the table is incomplete, misplaced, or deadlocks.
    """
    check(schedule)
    num_micro, num_stages = schedule.num_microbatches, schedule.num_stages
    half = num_stages * num_micro  # slots: activations by stage and micro-batch, then gradients, then two more
    nowhere, always = 2 * half, 2 * half + 1
    flow_of: dict[Flow, int] = {}
    first_cost = _first_costs(schedule)
    rows: list[tuple[Action, int, int, int, int, int]] = []
    place = [0] * len(schedule.order)
    filled = [False] * (2 * half) + [False, True]
    waiting: dict[int, int] = {}
    ready = list(range(len(schedule.order)))
    while ready:
        rank = ready.pop()
        for action in schedule.order[rank][place[rank] :]:
            need = _need(action, num_stages, num_micro, half, always)
            if not filled[need]:
                waiting[need] = rank
                break
            place[rank] += 1
            give, to_stage = _give(action, num_stages, num_micro, half, nowhere)
            flow = -1
            if to_stage is not None:
                target = schedule.rank_of(to_stage, action.microbatch)
                if target != rank:
                    key = Flow(rank, target, action.stage, action.phase is Phase.FORWARD)
                    flow = flow_of.setdefault(key, len(flow_of))
                filled[give] = True
                if give in waiting:
                    ready.append(waiting.pop(give))
            replica = action.microbatch % len(schedule.devices[action.stage])
            cost = (first_cost[action.stage] + replica) * NUM_PHASES + _PHASE[action.phase]
            rows.append((action, rank, cost, need, give, flow))
    _check_all_ran(schedule, place)
    columns = tuple(zip(*rows, strict=True)) if rows else ((),) * 6
    return Program(
        actions=columns[0],
        ranks=columns[1],
        costs=columns[2],
        needs=columns[3],
        gives=columns[4],
        flows=columns[5],
        all_flows=tuple(flow_of),
        num_ranks=len(schedule.order),
        num_slots=2 * half + 2,
        exact=_is_exact(rows, tuple(flow_of)),
    )


def run(program: Program, duration_ns: Sequence[int], transfer_ns: Sequence[int]) -> Times:
    """Returns when everything ends; about a million actions a second.

    `duration_ns` holds the time of each phase of each replica of each stage, stage by stage; `transfer_ns` that of one
    transfer of each flow.
    """
    arrivals = [0] * program.num_slots
    ranks = [0] * program.num_ranks
    links = [0] * len(program.all_flows)
    ends: list[int] = []
    keep = ends.append
    for rank, cost, need, give, flow in zip(
        program.ranks, program.costs, program.needs, program.gives, program.flows, strict=True
    ):
        end = ranks[rank]
        arrival = arrivals[need]
        if arrival > end:
            end = arrival
        end += duration_ns[cost]
        ranks[rank] = end
        keep(end)
        if flow < 0:
            arrivals[give] = end
        else:
            link = links[flow]
            links[flow] = arrivals[give] = (link if link > end else end) + transfer_ns[flow]
    return Times(ends, arrivals, ranks)


def _need(action: Action, num_stages: int, num_micro: int, half: int, always: int) -> int:
    stage, phase, microbatch = action
    if phase is Phase.FORWARD:
        return stage * num_micro + microbatch if stage > 0 else always
    if phase is Phase.WEIGHT_GRAD or stage == num_stages - 1:  # what its own stage did before comes before in its order
        return always
    return half + stage * num_micro + microbatch


def _give(action: Action, num_stages: int, num_micro: int, half: int, nowhere: int) -> tuple[int, int | None]:
    stage, phase, microbatch = action
    if phase is Phase.FORWARD and stage + 1 < num_stages:
        return (stage + 1) * num_micro + microbatch, stage + 1
    if phase in (Phase.BACKWARD, Phase.INPUT_GRAD) and stage > 0:
        return half + (stage - 1) * num_micro + microbatch, stage - 1
    return nowhere, None


def _first_costs(schedule: Schedule) -> list[int]:
    first = [0]
    for ranks in schedule.devices:
        first.append(first[-1] + len(ranks))
    return first


def _is_exact(rows: Sequence[tuple[Action, int, int, int, int, int]], flows: Sequence[Flow]) -> bool:
    """Whether every link carries one flow, in ascending micro-batch order, so that ties in its queue fall so too."""
    if len({(flow.source, flow.target) for flow in flows}) < len(flows):
        return False
    latest: dict[int, int] = {}
    for action, _, _, _, _, flow in rows:
        if flow >= 0 and action.microbatch < latest.get(flow, 0):
            return False
        latest[flow] = action.microbatch
    return True


def _check_all_ran(schedule: Schedule, place: Sequence[int]) -> None:
    waiting = {
        rank: order[at] for rank, (order, at) in enumerate(zip(schedule.order, place, strict=True)) if at < len(order)
    }
    if waiting:
        stuck = ", ".join(f"rank {rank} at {action}" for rank, action in waiting.items())
        raise InvalidSchedule(f"deadlock: each waits for another: {stuck}")
