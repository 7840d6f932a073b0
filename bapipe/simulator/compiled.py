"""A legal table as lists of integers, compiled once and timed many times, and the times that come out.

An action gives one thing and needs at most one: what it gives fills a slot, what it needs is a slot that another action
of the same micro-batch fills. The slot of what stage s of S sends on, forwards and backwards, of M micro-batches:

    F of stage s gives 2s * M + m; F of stage s + 1 needs it, or where s is the last stage, its own B or I
    B or I of stage s gives (2s + 1) * M + m; B or I of stage s - 1 needs it

So slots ascend as transfers take precedence on a link: lower stage, then forward first, then lower micro-batch.
Everything else that an action needs comes before it in the order of its line: a device that runs one action at a time
is one line, and one that runs forward and backward side by side is two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from bapipe.errors import InvalidSchedule
from bapipe.schedules.table import Action, Phase, Schedule, check

_PHASE = {phase: i for i, phase in enumerate(Phase)}
NUM_PHASES = len(_PHASE)


class Flow(NamedTuple):
    """The transfers of one stage, in one direction, between two ranks."""

    source: int
    target: int
    stage: int
    forward: bool


class Row(NamedTuple):
    """An action of a line as the clockworks read it.

    Attributes:
        place: its place in the program.
        cost: the place of its time among those of every phase of every device of every stage.
        need, give: slots.
        flow: the flow that carries what it gives, -1 where it stays or nothing is given.
        taker: the line that needs what it gives; -1 where none does, or its own.
    """

    place: int
    cost: int
    need: int
    give: int
    flow: int
    taker: int


class Sent(NamedTuple):
    """All transfers: the flow of each, the slot it fills, and the first five fields of a `Transfer`, in columns."""

    flows: tuple[int, ...]
    gives: tuple[int, ...]
    columns: tuple[Sequence[Any], ...]


@dataclass(frozen=True, kw_only=True)
class CompiledSchedule:
    """A legal table in an order in which every action comes after what it needs.

    Attributes:
        actions, ranks: the actions, and where each runs.
        costs, needs, gives, flows: as in `Row`, of each action.
        all_flows: what the flows are.
        num_ranks: ranks; line r is rank r's.
        beside: the ranks whose backwards have a line of their own, in the order of those, which come behind.
        lines_beside: the line of each action where there are such ranks, else empty.
        num_slots: slots; the last three are always filled, never filled, and never looked at.
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
    beside: tuple[int, ...] = ()
    lines_beside: tuple[int, ...] = ()

    @property
    def lines(self) -> tuple[int, ...]:
        """The line of each action."""
        return self.lines_beside or self.ranks

    @property
    def line_ranks(self) -> tuple[int, ...]:
        """The rank of each line."""
        return (*range(self.num_ranks), *self.beside)

    @cached_property
    def flow_links(self) -> tuple[int, ...]:
        """The link of each flow, numbered as in `links`."""
        return tuple(self.links.index((flow.source, flow.target)) for flow in self.all_flows)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The ordered pairs of ranks between which something flows."""
        return tuple(dict.fromkeys((flow.source, flow.target) for flow in self.all_flows))

    @cached_property
    def shared(self) -> tuple[bool, ...]:
        """For each flow, whether its transfers may have to queue behind others.

        Those of a flow alone on its link become ready in the order of its line; if micro-batches ascend there, ties
        fall so too, and nothing can change places.
        """
        latest: dict[int, int] = {}
        descends = set()
        for flow, give in zip(self.flows, self.gives, strict=True):
            if flow >= 0 and give < latest.get(flow, 0):
                descends.add(flow)
            latest[flow] = give
        return tuple(self.flow_links.count(link) > 1 or flow in descends for flow, link in enumerate(self.flow_links))

    @cached_property
    def shared_costs(self) -> frozenset[int]:
        """The costs of the actions whose transfers may have to queue."""
        return frozenset(
            cost for cost, flow in zip(self.costs, self.flows, strict=True) if flow >= 0 and self.shared[flow]
        )

    @cached_property
    def slot_flows(self) -> list[int]:
        """The flow that fills each slot, -1 where none does."""
        flows = [-1] * self.num_slots
        for flow, give in zip(self.flows, self.gives, strict=True):
            flows[give] = flow
        return flows

    @cached_property
    def takers(self) -> list[int]:
        """The line that needs each slot, -1 where none does."""
        takers = [-1] * self.num_slots
        for line, need in zip(self.lines, self.needs, strict=True):
            takers[need] = line
        return takers

    @cached_property
    def rows(self) -> tuple[tuple[Row, ...], ...]:
        """The actions of each line; a last one that nothing ever lets start."""
        always, never, nowhere = range(self.num_slots - 3, self.num_slots)
        rows: list[list[Row]] = [[] for _ in self.line_ranks]
        columns = zip(self.lines, self.costs, self.needs, self.gives, self.flows, strict=True)
        for place, (line, cost, need, give, flow) in enumerate(columns):
            taker = self.takers[give] if give < always else -1
            rows[line].append(Row(place, cost, need, give, flow, taker if taker != line else -1))
        return tuple((*line, Row(-1, 0, never, nowhere, -1, -1)) for line in rows)

    @cached_property
    def line_costs(self) -> tuple[tuple[int, ...], ...]:
        """The costs of each line, in its order."""
        return tuple(tuple(row.cost for row in line[:-1]) for line in self.rows)

    @cached_property
    def sent(self) -> Sent:
        """What flows, in columns."""
        rows = zip(self.flows, self.gives, self.actions, strict=True)
        columns = [(flow, give, *self.all_flows[flow], action.microbatch) for flow, give, action in rows if flow >= 0]
        flows, gives, sources, targets, stages, forward, microbatches = (
            zip(*columns, strict=True) if columns else ((),) * 7
        )
        phases = tuple(Phase.FORWARD if ahead else Phase.BACKWARD for ahead in forward)
        return Sent(flows, gives, (sources, targets, stages, phases, microbatches))

    @cached_property
    def by_place(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """For each action its line, its slot, its transfer's link (-1 without), and the lines that its end wakes."""
        rows = sorted((row.place, line, row) for line, rows in enumerate(self.rows) for row in rows[:-1])
        return [
            (
                line,
                row.give,
                self.flow_links[row.flow] if row.flow >= 0 else -1,
                (line,) if row.taker < 0 else (line, row.taker),
            )
            for _, line, row in rows
        ]

    @cached_property
    def slot_links(self) -> list[tuple[int, tuple[int, ...]]]:
        """For each slot the link of the transfer that fills it, and the lines that this wakes."""
        return [
            (self.flow_links[flow], (taker, self.all_flows[flow].source)) if flow >= 0 else (-1, ())
            for flow, taker in zip(self.slot_flows, self.takers, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Times:
    """When each action of a program ends, each slot is filled, and each line has run its actions."""

    ends_ns: list[int]
    arrivals_ns: list[int]
    lines_ns: list[int]

    def ranks_ns(self, program: CompiledSchedule) -> list[int]:
        """Returns when each rank has run its actions."""
        ranks = self.lines_ns[:]
        for line in range(len(ranks) - 1, -1, -1):
            rank = program.line_ranks[line]
            if rank != line:
                ranks[rank] = max(ranks[rank], ranks.pop())
        return ranks


_Entry = tuple[Action, int, int, int, int, int]
"""An action, its line, cost, need, give and flow."""


@lru_cache(maxsize=8)
def compile_schedule(schedule: Schedule, side_by_side: tuple[int, ...] = ()) -> CompiledSchedule:
    """Returns the program of a schedule on ranks of which those named run forward and backward side by side.

    O(n) for n actions.

    Raises:
        InvalidSchedule: the table is incomplete, misplaced, or deadlocks.
    """
    check(schedule)
    num_ranks = len(schedule.order)
    beside = {rank: num_ranks + i for i, rank in enumerate(sorted(side_by_side))}
    line_ranks = (*range(num_ranks), *beside)
    num_slots = 2 * schedule.num_stages * schedule.num_microbatches + 3
    flows: dict[Flow, int] = {}
    lines: list[list[_Entry]] = [[] for _ in range(num_ranks + len(beside))]
    for rank in range(num_ranks):
        for entry in _entries(schedule, rank, beside.get(rank, rank), flows):
            lines[entry[1]].append(entry)
    entries = _in_sequence(lines, line_ranks, num_slots)
    columns = tuple(zip(*entries, strict=True)) if entries else ((),) * 6
    return CompiledSchedule(
        actions=columns[0],
        ranks=tuple(map(line_ranks.__getitem__, columns[1])),
        costs=columns[2],
        needs=columns[3],
        gives=columns[4],
        flows=columns[5],
        all_flows=tuple(flows),
        num_ranks=num_ranks,
        beside=tuple(beside),
        lines_beside=columns[1] if beside else (),
        num_slots=num_slots,
    )


def _entries(schedule: Schedule, rank: int, backward_line: int, flows: dict[Flow, int]) -> Iterator[_Entry]:
    """Yields what a rank runs, and numbers the flows it meets."""
    num, last, devices = schedule.num_microbatches, schedule.num_stages - 1, schedule.devices
    always, nowhere = 2 * num * (last + 1), 2 * num * (last + 1) + 2
    first_cost = list(accumulate((NUM_PHASES * len(ranks) for ranks in devices), initial=0))
    place = {s: first_cost[s] + NUM_PHASES * ranks.index(rank) for s, ranks in enumerate(devices) if rank in ranks}
    for action in schedule.order[rank]:
        s, phase, m = action
        if phase is Phase.FORWARD:
            need, give, to, line, cost = (2 * s - 2) * num + m if s else always, 2 * s * num + m, s + 1, rank, 0
        elif phase is Phase.WEIGHT_GRAD:
            need, give, to, line, cost = always, nowhere, -1, backward_line, _PHASE[phase]
        else:
            need, give, to = (2 * s + 3 if s < last else 2 * s) * num + m, (2 * s + 1) * num + m, s - 1
            line, cost = backward_line, _PHASE[phase]
        flow = -1
        if 0 <= to <= last:
            ranks = devices[to]
            target = ranks[m % len(ranks)]
            if target != rank:
                flow = flows.setdefault(Flow(rank, target, s, to > s), len(flows))
        yield action, line, place[s] + cost, need, give, flow


def _in_sequence(lines: Sequence[Sequence[_Entry]], ranks: Sequence[int], num_slots: int) -> list[_Entry]:
    """Returns the entries of all lines, each after what it needs.

    Raises:
        InvalidSchedule: they deadlock.
    """
    filled = bytearray(num_slots)
    filled[num_slots - 3] = 1
    waiting: dict[int, int] = {}
    rest = [iter(line) for line in lines]
    heads = [next(line, None) for line in rest]
    ready = list(range(len(lines)))
    entries: list[_Entry] = []
    while ready:
        line = ready.pop()
        head = heads[line]
        while head is not None:
            if not filled[head[3]]:
                waiting[head[3]] = line
                break
            entries.append(head)
            filled[head[4]] = 1
            if head[4] in waiting:
                ready.append(waiting.pop(head[4]))
            head = next(rest[line], None)
        heads[line] = head
    if waiting:
        stuck = ", ".join(f"rank {ranks[line]} at {head[0]}" for line, head in enumerate(heads) if head is not None)
        raise InvalidSchedule(f"deadlock: each waits for another: {stuck}")
    return entries
