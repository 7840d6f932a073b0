"""V-shaped schedules from a building block: the slots of one micro-batch, repeated six slots later for the next.

A block is drawn in slots of equal F, I and W (Qi et al. 2024, arXiv:2405.15362). Micro-batch 0 on two ranks of two
stages each, one slot from rank to rank:

    slot      0    1    2    3    4    5    6    7
    rank 0   0F0            3F0  3I0            0I0
    rank 1        1F0  2F0            2I0  1I0
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from bapipe.schedules.table import Action, Phase, Schedule, is_ready

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
    O(n p) for n actions. The last tables are kept, unless they are very large.
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
    todo = [list(actions) for actions in planned]
    early = [[action for action in actions if action.phase is Phase.FORWARD][:limit] for actions in planned]
    num_forwards = [sum(action.phase is Phase.FORWARD for action in actions) for actions in planned]
    order: list[list[Action]] = [[] for _ in planned]
    done: set[Action] = set()
    while any(todo):
        ran = []
        for rank, rest in enumerate(todo):
            candidates = chain(rest[:1], early[rank]) if num_forwards[rank] > 0 else rest
            action = next((each for each in candidates if is_ready(each, last + 1, done)), None)
            if action is None:
                continue
            ran.append(action)
            order[rank].append(action)
            rest.remove(action)
            if action.phase is Phase.FORWARD:
                num_forwards[rank] -= 1
                if action in early[rank]:
                    early[rank].remove(action)
                if num_forwards[rank] == 0:
                    rest.sort(key=lambda each: each.phase is Phase.WEIGHT_GRAD)
        assert ran
        done.update(ran)  # none is ready in the slot of what it waits for
    return tuple(map(tuple, order))
