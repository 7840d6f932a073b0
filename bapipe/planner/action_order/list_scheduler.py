"""A list scheduler: simulates the step and gives each idle device its action of highest priority.

A device knows which inputs are already on their way. It prefers I, or F while its stage has few micro-batches in
flight; W fills the time until the next input arrives, and goes first if memory leaves no room for F. A rule's patience
decides whether a W may run that would end after the next input arrives.

*No deadlock.* An action starts only if, after it, its device could still finish the micro-batches in flight one after
another, oldest first, within its memory. All devices can then do so together, so some device can always proceed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from bapipe.planner.action_order.problem import F, I, OrderProblem, Orders, W

PATIENCE_PERCENTS = (0, 50, 100)
"""0 runs a W whenever nothing else can start, 100 only if it ends before the next input arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRule:
    """A priority rule.

    Attributes:
        max_in_flight: by stage, the most micro-batches between F and I.
        forward_first: whether F goes before I while its stage may have more micro-batches in flight.
        patience: a W waits if the next input arrives within this many percent of its time.
        late_first: whether the latest stage of a device goes first among its F, and the earliest among its I.
    """

    max_in_flight: tuple[int, ...]
    forward_first: bool
    patience: int
    late_first: bool = True


def priority_rules(problem: OrderProblem) -> Iterator[PriorityRule]:
    """Yields rules from few to many micro-batches in flight, in a deterministic order."""
    is_alone = len(set(problem.rank_of)) == problem.num_stages
    seen = set()
    for limits in _limits_in_flight(problem):
        if limits not in seen:
            seen.add(limits)
            for late_first, forward_first, patience in product(
                [True] if is_alone else [True, False], [False, True], PATIENCE_PERCENTS
            ):
                yield PriorityRule(
                    max_in_flight=limits, forward_first=forward_first, patience=patience, late_first=late_first
                )


def _limits_in_flight(problem: OrderProblem) -> Iterator[tuple[int, ...]]:
    """Yields limits by stage: some that grow evenly towards the first stage, some by round-trip times, then none."""
    last, most = problem.num_stages - 1, problem.num_microbatches
    stages = range(problem.num_stages)
    for halves, extra in product([2, 3, 4], [1, 2, 3]):  # 1F1B is (2, 1), eager 1F1B (4, 1)
        yield tuple(min(most, halves * (last - s) // 2 + extra) for s in stages)
    # A stage never waits if it has work in flight for the time that a micro-batch is away.
    # The time between two micro-batches in the steady state is at least that of the slowest stage.
    cycle_ns = max(1, *(sum(problem.action_ns[3 * s : 3 * s + 3]) for s in stages))
    for extra in (1, 2, 3):
        yield tuple(min(most, round_trip_ns(problem, s) // cycle_ns + extra) for s in stages)
    yield (most,) * problem.num_stages


def round_trip_ns(problem: OrderProblem, stage: int) -> int:
    """Returns the minimal time from the end of a micro-batch's F to the start of its I."""
    return sum(
        problem.send_ns[s - 1] + problem.action_ns[3 * s + F] + problem.action_ns[3 * s + I] + problem.return_ns[s - 1]
        for s in range(stage + 1, problem.num_stages)
    )


def list_schedule(problem: OrderProblem, rule: PriorityRule) -> Orders:
    """Returns the orders that a rule gives; the problem must have an order that fits in memory."""
    state = _State(problem, rule)
    # Event driven: an event is a device that may be able to start an action.
    while state.events:  # a device has become idle, or an input has arrived
        now, rank = heappop(state.events)
        if state.free_at[rank] <= now and (code := state.choose(rank, now)) is not None:
            state.start(rank, code, now)
    orders = tuple(tuple(codes) for codes in state.orders)
    assert sum(map(len, orders)) == problem.num_actions
    return orders


class _State:
    """The step at one instant."""

    def __init__(self, problem: OrderProblem, rule: PriorityRule) -> None:
        self.problem, self.rule = problem, rule
        self.stages_of = [problem.stages_on(rank) for rank in range(problem.num_ranks)]  # by rank
        self.is_alone = [len(stages) == 1 for stages in self.stages_of]  # by rank
        self.num_started = [0] * (3 * problem.num_stages)  # by code
        self.arrived: list[list[int]] = [[] for _ in problem.action_ns]  # by code: when its k-th input arrives
        self.link_free = [0] * len(problem.action_ns)  # by sending code
        self.free_at = [0] * problem.num_ranks
        self.in_flight_bytes = [0] * problem.num_ranks
        self.orders: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        self.events = [(0, rank) for rank in range(problem.num_ranks) if self.stages_of[rank]]

    def start(self, rank: int, code: int, now: int) -> None:
        """Runs an action from now on, and sends what it produces when it ends."""
        stage, phase = divmod(code, 3)
        problem = self.problem
        self.orders[rank].append(code)
        self.num_started[code] += 1
        self.in_flight_bytes[rank] += self.growth_bytes(code)
        end = self.free_at[rank] = now + problem.action_ns[code]
        heappush(self.events, (end, rank))
        if phase == F and stage + 1 < problem.num_stages:
            self.send(code, code + 3, end, problem.send_ns[stage])
        elif phase == I and stage > 0:
            self.send(code, code - 3, end, problem.return_ns[stage - 1])

    def send(self, code: int, consumer: int, ready: int, transfer: int) -> None:
        arrival = ready
        if transfer:
            arrival = self.link_free[code] = max(ready, self.link_free[code]) + transfer
        self.arrived[consumer].append(arrival)
        heappush(self.events, (arrival, self.problem.rank_of[consumer // 3]))

    def growth_bytes(self, code: int) -> int:
        """Returns the change of the bytes in flight on an action's device once the action has run."""
        return self.problem.taken_bytes[code] - self.problem.returned_bytes[code]

    def arrival(self, code: int) -> int | None:
        """Returns when the input of a code's next action arrives; None if that is unknown, or no action is left."""
        stage, phase = divmod(code, 3)
        k = self.num_started[code]
        if k >= self.problem.num_microbatches or (phase == I and k >= self.num_started[code - 1]):
            return None
        if stage == (0 if phase == F else self.problem.num_stages - 1):
            return 0
        return self.arrived[code][k] if k < len(self.arrived[code]) else None

    def choose(self, rank: int, now: int) -> int | None:
        """Returns the action of highest priority that can start, or None to wait for the next input."""
        stages = self.stages_of[rank]
        by_priority = stages if len(stages) == 1 else stages[::-1] if self.rule.late_first else stages
        forwards = [
            3 * s + F
            for s in by_priority
            if self.num_started[3 * s + F] - self.num_started[3 * s + I] < self.rule.max_in_flight[s]
        ]
        backwards = [3 * s + I for s in reversed(by_priority)]
        next_arrival, lacks_memory = None, False
        # The first that can start wins; the earliest arrival of the others limits a W.
        for code in [*forwards, *backwards] if self.rule.forward_first else [*backwards, *forwards]:
            arrival = self.arrival(code)
            if arrival is None:
                continue
            # Starting it now could leave too little memory to finish what is in flight.
            if not self.is_safe(rank, code):
                lacks_memory = True
            elif arrival <= now:
                return code
            elif next_arrival is None or arrival < next_arrival:
                next_arrival = arrival
        # No F or I can start: fill the gap with a W, unless it would delay the next input by more than the rule allows.
        for stage in stages:
            code = 3 * stage + W
            if self.num_started[code] < self.num_started[code - 1] and self.weight_grad_fits(rank, stage):
                min_gap = self.rule.patience * self.problem.action_ns[code]
                if lacks_memory or next_arrival is None or 100 * (next_arrival - now) >= min_gap:
                    return code
        return None

    def weight_grad_fits(self, rank: int, stage: int) -> bool:
        """Whether a W of the stage fits now; if not, a W of another stage with a smaller workspace does."""
        return self.in_flight_bytes[rank] + self.problem.workspace_bytes[stage] <= self.problem.available_bytes[rank]

    def is_safe(self, rank: int, code: int) -> bool:
        """Whether an F or I fits, and its device could then finish its micro-batches in flight, the oldest first."""
        problem, (stage, phase) = self.problem, divmod(code, 3)
        num_bytes, available = self.in_flight_bytes[rank] + self.growth_bytes(code), problem.available_bytes[rank]
        if num_bytes + problem.workspace_bytes[stage] > available:
            return False
        if self.is_alone[rank]:  # its next I must fit too; after an I, its W does
            during_input_grad = num_bytes + problem.taken_bytes[3 * stage + I] + problem.workspace_bytes[stage]
            return phase != F or during_input_grad <= available
        return self.can_finish(rank, code, num_bytes)

    def can_finish(self, rank: int, code: int, num_bytes: int) -> bool:
        """Whether a device with several stages could finish its micro-batches in flight after one more action.

        The micro-batches in flight then take `num_bytes`.
        """
        problem, available = self.problem, self.problem.available_bytes[rank]
        stages = self.stages_of[rank]
        started = {c: self.num_started[c] + (c == code) for s in stages for c in (3 * s, 3 * s + 1, 3 * s + 2)}
        # First every W that is due, the smallest workspace first: each frees memory.
        pending = [s for s in stages if started[3 * s + I] > started[3 * s + W]]
        for s in sorted(pending, key=lambda s: problem.workspace_bytes[s]):
            if num_bytes + problem.workspace_bytes[s] > available:
                return False
            num_pending = started[3 * s + I] - started[3 * s + W]
            num_bytes -= num_pending * problem.returned_bytes[3 * s + W]
        # Then micro-batch by micro-batch: the F that have not run, forwards, and the I with their W, backwards.
        oldest = min(started[3 * s + I] for s in stages)
        newest = max(started[3 * s + F] for s in stages)
        for k in range(oldest, newest):
            for s in stages:
                if started[3 * s + F] <= k:
                    num_bytes += problem.taken_bytes[3 * s + F]
                    if num_bytes + problem.workspace_bytes[s] > available:
                        return False
            for s in reversed(stages):
                if started[3 * s + I] <= k:
                    num_bytes += problem.taken_bytes[3 * s + I]
                    if num_bytes + problem.workspace_bytes[s] > available:
                        return False
                    num_bytes -= problem.returned_bytes[3 * s + W]
        return True
