"""V-shaped schedules from a building block: the slots of one micro-batch, repeated six slots later for the next.

A block is drawn in slots of equal F, I and W (Qi et al. 2024, arXiv:2405.15362). Micro-batch 0 on two ranks of two
stages each, one slot from rank to rank:

    slot      0    1    2    3    4    5    6    7
    rank 0   0F0            3F0  3I0            0I0
    rank 1        1F0  2F0            2I0  1I0
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bapipe.schedules.table import Action, Phase, Schedule

PERIOD = 6
"""Slots from one micro-batch to the next: F, I and W of a rank's two stages."""

MAX_KEPT = 50_000
"""Ranks times micro-batches of tables that are kept: each has 300,000 actions then, in 40 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The shape of one micro-batch's path: F down the V and back up, then I down and back up.

    The slots of each rank must differ modulo `PERIOD`, so that all micro-batches fit together.

    Attributes:
        down, up: slots from one rank to the next.
        wait_at_top: empty slots on rank 0 between F and I.
        wait_at_turn: empty slots on the last rank between I of its two stages.
    """

    down: int
    up: int
    wait_at_top: int = 0
    wait_at_turn: int = 0

    def slots(self, rank: int, num_ranks: int) -> tuple[int, int, int, int]:
        """Returns the slots of F of a rank's first and second stage, of I of the second and of the first."""
        down, up = self.down * rank, self.up * (num_ranks - 1 - rank)
        turn = self.down * (num_ranks - 1) + 1
        top = turn + self.up * (num_ranks - 1) + 1 + self.wait_at_top
        return down, turn + up, top + down, top + turn + self.wait_at_turn + up


def v_shaped(num_ranks: int, num_microbatches: int, block: Block) -> Schedule:
    """Returns the schedule that repeats the block for all micro-batches, then fills its start and its end.

    Rank r has the stages r and 2p-1-r. No rank keeps more stashes in flight than the repeated block's fullest rank.
    O(n) for n actions. The last tables are kept, unless they are very large.
    """
    is_small = num_ranks * num_microbatches <= MAX_KEPT
    make = _v_shaped if is_small else _v_shaped.__wrapped__
    return make(num_ranks, num_microbatches, block)


@lru_cache(maxsize=3)
def _v_shaped(num_ranks: int, num_microbatches: int, block: Block) -> Schedule:
    last = 2 * num_ranks - 1
    planned = [_repeat(rank, last - rank, num_microbatches, block.slots(rank, num_ranks)) for rank in range(num_ranks)]
    limit = max(_max_in_flight(actions) for actions in planned)
    return Schedule(
        devices=tuple((min(s, last - s),) for s in range(2 * num_ranks)),
        num_microbatches=num_microbatches,
        order=_squeeze(planned, limit, last),
    )


def _repeat(first: int, second: int, num_microbatches: int, slots: Sequence[int]) -> list[Action]:
    """Returns a rank's actions in the order of their slots; each W in the next empty slot after its I, oldest first."""
    f, i = Phase.FORWARD, Phase.INPUT_GRAD
    steps = list(zip(slots, [(first, f), (second, f), (second, i), (first, i)], strict=True))
    at = {slot + PERIOD * m: Action(*step, m) for slot, step in steps for m in range(num_microbatches)}
    assert len(at) == len(steps) * num_microbatches
    order: list[Action] = []
    waiting: deque[Action] = deque()
    for slot in range(max(at) + 1):
        action = at.get(slot) or (waiting.popleft() if waiting else None)
        if action is None:
            continue
        order.append(action)
        if action.phase is Phase.INPUT_GRAD:
            waiting.append(Action(action.stage, Phase.WEIGHT_GRAD, action.microbatch))
    return [*order, *waiting]


def _max_in_flight(order: Sequence[Action]) -> int:
    in_flight = peak = 0
    for action in order:
        in_flight += action.phase is Phase.FORWARD
        peak = max(peak, in_flight)
        in_flight -= action.phase is Phase.WEIGHT_GRAD
    return peak


def _squeeze(planned: Sequence[Sequence[Action]], limit: int, last: int) -> tuple[tuple[Action, ...], ...]:
    """Runs all ranks slot by slot, in the planned order, except for those that fill idle slots at the start and end.

    A rank that waits runs one of its first `limit` forwards if one is ready: they fit in memory whatever the order.
    A rank without forwards runs any I that is ready, else any W.
    """
    f, i, w = Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD
    queues = {(stage, phase): _Queue() for stage in range(last + 1) for phase in (f, i, w)}
    for stage in range(last + 1):
        queues[stage, f].needs = [queues[stage - 1, f]] if stage > 0 else []
        queues[stage, i].needs = [queues[stage, f], *([queues[stage + 1, i]] if stage < last else [])]
        queues[stage, w].needs = [queues[stage, i]]
    ranks = [_Rank(actions, limit, queues) for actions in planned]
    while not all(rank.is_done for rank in ranks):
        ran = [queue for rank in ranks if (queue := rank.run_one()) is not None]
        assert ran
        for queue in ran:  # none is ready in the slot of what it waits for
            queue.num_done += 1
    return tuple(tuple(rank.order) for rank in ranks)


class _Queue:
    """The actions of a stage's phase. They are planned, become ready and run in the order of their micro-batches.

    Attributes:
        places: of the actions in their rank's plan, ascending. [micro-batches]
        needs: the queues of what an action waits for, of the same micro-batch.
        num_done: how many actions have run before this slot.
    """

    __slots__ = ("needs", "num_done", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.needs: list[_Queue] = []
        self.num_done = 0

    def ready_place(self, end: int) -> int:
        """Returns the place of the next action if it is ready, and before an end; else the end."""
        num_done = self.num_done
        if num_done == len(self.places) or not all(num_done < each.num_done for each in self.needs):
            return end
        return min(self.places[num_done], end)


class _Rank:
    """What a rank has run, and what is left of its plan.

    Attributes:
        order: what it has run.
    """

    def __init__(self, planned: Sequence[Action], limit: int, queues: Mapping[tuple[int, Phase], _Queue]) -> None:
        self._planned, self._queue_of = planned, [queues[action.stage, action.phase] for action in planned]
        self.order: list[Action] = []
        self._head = 0
        for place, queue in enumerate(self._queue_of):
            queue.places.append(place)
        stages = {action.stage for action in planned}
        self._forwards, self._input_grads, self._weight_grads = (
            [queues[stage, phase] for stage in stages] for phase in (Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)
        )
        forwards = [place for place, action in enumerate(planned) if action.phase is Phase.FORWARD]
        self._end_of_early = [*forwards, len(planned)][min(limit, len(forwards))]
        self._num_forwards = len(forwards)

    @property
    def is_done(self) -> bool:
        """Whether it has run all of its plan."""
        return len(self.order) == len(self._planned)

    def run_one(self) -> _Queue | None:
        """Runs an action and returns its queue, None if nothing is ready."""
        place = self._next_place()
        if place is None:
            return None
        self.order.append(self._planned[place])
        self._num_forwards -= self._planned[place].phase is Phase.FORWARD
        return self._queue_of[place]

    def _next_place(self) -> int | None:
        end = len(self._planned)
        if self._num_forwards == 0:
            place = _first_ready(self._input_grads, end)
            place = _first_ready(self._weight_grads, end) if place == end else place
            return None if place == end else place
        while self._planned[self._head].microbatch < self._queue_of[self._head].num_done:
            self._head += 1  # it ran early
        if self._queue_of[self._head].ready_place(end) == self._head:
            return self._head
        place = _first_ready(self._forwards, self._end_of_early)
        return None if place == self._end_of_early else place


def _first_ready(queues: Sequence[_Queue], end: int) -> int:
    return min(queue.ready_place(end) for queue in queues)
