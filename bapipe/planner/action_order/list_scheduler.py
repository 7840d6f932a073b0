"""A list scheduler: runs the step on paper and gives each device that falls idle its most urgent action.

A device looks ahead to the inputs that are already on their way. It prefers I, or F while its stage has few
micro-batches in flight; W fills the time until the next input comes, and goes first where memory leaves no room for F.
A W that would end after the next input's arrival is run only by an impatient rule. An action starts only if, after it,
the device could still end the micro-batches in flight one after another, oldest first. All devices can then do so
together, so the scheduler never deadlocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from bapipe.planner.action_order.problem import F, I, OrderProblem, Orders, W

PATIENCE = (0, 50, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What makes an action urgent.

    Attributes:
        depths: by stage, most micro-batches between F and I.
        forward_first: whether F goes before I while its stage may have more in flight.
        patience: a W is left for later when the next input comes within this many percent of its time.
        late_first: whether the latest stage of a device goes first among its F, and the earliest among its I.
    """

    depths: tuple[int, ...]
    forward_first: bool
    patience: int
    late_first: bool = True


def rules(problem: OrderProblem) -> Iterator[Rule]:
    """Yields rules from shallow to deep, in an order that depends on nothing but the problem."""
    alone = len(set(problem.rank_of)) == problem.num_stages
    seen = set()
    for depths in _depths(problem):
        if depths not in seen:
            seen.add(depths)
            for late, forward_first, patience in product([True] if alone else [True, False], [False, True], PATIENCE):
                yield Rule(depths=depths, forward_first=forward_first, patience=patience, late_first=late)


def _depths(problem: OrderProblem) -> Iterator[tuple[int, ...]]:
    last, most = problem.num_stages - 1, problem.num_microbatches
    stages = range(problem.num_stages)
    for halves, more in product([2, 3, 4], [1, 2, 3]):  # 1F1B is (2, 1), eager 1F1B (4, 1)
        yield tuple(min(most, halves * (last - s) // 2 + more) for s in stages)
    cycle_ns = max(1, *(sum(problem.ns[3 * s : 3 * s + 3]) for s in stages))
    for more in (1, 2, 3):
        yield tuple(min(most, round_trip_ns(problem, s) // cycle_ns + more) for s in stages)
    yield (most,) * problem.num_stages


def round_trip_ns(problem: OrderProblem, stage: int) -> int:
    """Returns the least time from the end of a micro-batch's F to the start of its I."""
    beyond = range(stage + 1, problem.num_stages)
    return sum(
        problem.send_ns[s - 1] + problem.ns[3 * s + F] + problem.ns[3 * s + I] + problem.return_ns[s - 1]
        for s in beyond
    )


def schedule(problem: OrderProblem, rule: Rule) -> Orders:
    """Returns the orders that a rule gives; the problem must have some order that fits."""
    state = _State(problem, rule)
    while state.events:
        now, rank = heappop(state.events)
        if state.free_at[rank] <= now and (code := state.choose(rank, now)) is not None:
            state.start(rank, code, now)
    orders = tuple(tuple(codes) for codes in state.orders)
    assert sum(map(len, orders)) == problem.num_actions
    return orders


class _State:
    """The step at one instant."""

    def __init__(self, problem: OrderProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        self.own = [problem.stages_on(rank) for rank in range(problem.num_ranks)]
        self.alone = [len(own) == 1 for own in self.own]
        self.done = [0] * (3 * problem.num_stages)
        self.arrived: list[list[int]] = [[] for _ in problem.ns]
        self.link_free = [0] * len(problem.ns)
        self.free_at = [0] * problem.num_ranks
        self.held = [0] * problem.num_ranks
        self.orders: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        self.events = [(0, rank) for rank in range(problem.num_ranks) if self.own[rank]]

    def start(self, rank: int, code: int, now: int) -> None:
        stage, phase = divmod(code, 3)
        problem = self.problem
        self.orders[rank].append(code)
        self.done[code] += 1
        self.held[rank] += self.more_bytes(stage, phase)
        end = self.free_at[rank] = now + problem.ns[code]
        heappush(self.events, (end, rank))
        if phase == F and stage + 1 < problem.num_stages:
            self.send(code, code + 3, end, problem.send_ns[stage])
        elif phase == I and stage > 0:
            self.send(code, code - 3, end, problem.return_ns[stage - 1])

    def send(self, code: int, to: int, ready: int, transfer: int) -> None:
        end = ready
        if transfer:
            end = self.link_free[code] = max(ready, self.link_free[code]) + transfer
        self.arrived[to].append(end)
        heappush(self.events, (end, self.problem.rank_of[to // 3]))

    def more_bytes(self, stage: int, phase: int) -> int:
        """What a device holds more once the action has run."""
        kept, whole = self.problem.kept_bytes[stage], self.problem.whole_bytes[stage]
        return (kept, whole, -kept - whole)[phase]

    def arrival(self, code: int) -> int | None:
        """When the input of the next such action is here; None while it is not known, or where none is left."""
        stage, phase = divmod(code, 3)
        k = self.done[code]
        if k >= self.problem.num_microbatches or (phase == I and k >= self.done[code - 1]):
            return None
        if stage == (0 if phase == F else self.problem.num_stages - 1):
            return 0
        return self.arrived[code][k] if k < len(self.arrived[code]) else None

    def choose(self, rank: int, now: int) -> int | None:
        """Returns the most urgent action that can start, or None to wait for the next input."""
        own = self.own[rank]
        late = own if len(own) == 1 else own[::-1] if self.rule.late_first else own
        forwards = [3 * s + F for s in late if self.done[3 * s] - self.done[3 * s + 1] < self.rule.depths[s]]
        backwards = [3 * s + I for s in reversed(late)]
        soonest, crowded = None, False
        for code in [*forwards, *backwards] if self.rule.forward_first else [*backwards, *forwards]:
            here = self.arrival(code)
            if here is None:
                continue
            if not self.safe(rank, code):
                crowded = True
            elif here <= now:
                return code
            elif soonest is None or here < soonest:
                soonest = here
        for stage in own:
            code = 3 * stage + W
            if self.done[code] < self.done[code - 1] and self.fits(rank, stage):
                free_ns = 100 * (soonest - now) if soonest is not None else None
                if crowded or free_ns is None or free_ns >= self.rule.patience * self.problem.ns[code]:
                    return code
        return None

    def fits(self, rank: int, stage: int) -> bool:
        """Whether a W of the stage has room to run; one of another stage, which needs less, may have to go before."""
        return self.held[rank] + self.problem.workspace_bytes[stage] <= self.problem.room_bytes[rank]

    def safe(self, rank: int, code: int) -> bool:
        """Whether the action fits, and its device could afterwards end all it began, the oldest micro-batch first."""
        problem, (stage, phase) = self.problem, divmod(code, 3)
        held, room = self.held[rank] + self.more_bytes(stage, phase), problem.room_bytes[rank]
        if held + problem.workspace_bytes[stage] > room:
            return False
        if phase != F:
            return self.alone[rank] or self.can_end(rank, code, held)
        if self.alone[rank]:
            return held + problem.whole_bytes[stage] + problem.workspace_bytes[stage] <= room
        return self.can_end(rank, code, held)

    def can_end(self, rank: int, code: int, held: int) -> bool:
        problem, room = self.problem, self.problem.room_bytes[rank]
        done = {c: self.done[c] + (c == code) for s in self.own[rank] for c in (3 * s, 3 * s + 1, 3 * s + 2)}
        pending = [s for s in self.own[rank] if done[3 * s + I] > done[3 * s + W]]
        for s in sorted(pending, key=lambda s: problem.workspace_bytes[s]):
            if held + problem.workspace_bytes[s] > room:
                return False
            held -= (done[3 * s + I] - done[3 * s + W]) * (problem.kept_bytes[s] + problem.whole_bytes[s])
        oldest = min(done[3 * s + I] for s in self.own[rank])
        newest = max(done[3 * s + F] for s in self.own[rank])
        for k in range(oldest, newest):
            for s in self.own[rank]:
                if done[3 * s + F] <= k:
                    held += problem.kept_bytes[s]
                    if held + problem.workspace_bytes[s] > room:
                        return False
            for s in reversed(self.own[rank]):
                if done[3 * s + I] <= k:
                    if held + problem.whole_bytes[s] + problem.workspace_bytes[s] > room:
                        return False
                    held -= problem.kept_bytes[s]
        return True
