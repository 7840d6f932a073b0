"""DualPipeV: DualPipe (DeepSeek-AI 2024, arXiv:2412.19437) folded into a V of two stages a rank."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from bapipe.schedules.fewer import first_microbatches
from bapipe.schedules.table import Action, Phase, Schedule

_Step = tuple[Phase, int]
"""What a rank does next, and for which of its stages; counting gives the micro-batch."""


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages with F = I = W idle (p-1)F of one stage a step where m >= 2p; a rank keeps 2p+1 stashes in flight.

    The paper hides the transfers of a paired F and B behind the other's compute; here one runs after the other. Fewer
    than 2p micro-batches run as the first ones of 2p.

    Rank 1 of 2, stages 1 and 2, 4 micro-batches:
        1F0 2F0 1F1 2F1  1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1  2B2 1B2 2I3 1I3  2W3 1W3
        fill the V       F and B in pairs                 empty the V      what waited

    Args:
        num_ranks: ranks; rank r has the stages r and 2p-1-r.
        num_microbatches: micro-batches in one step.
    """
    enough = max(num_microbatches, 2 * num_ranks)
    whole = Schedule(
        devices=tuple((min(s, 2 * num_ranks - 1 - s),) for s in range(2 * num_ranks)),
        num_microbatches=enough,
        order=tuple(_numbered(_steps(rank, num_ranks, enough)) for rank in range(num_ranks)),
    )
    return first_microbatches(whole, num_microbatches)


def _steps(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[_Step]:
    f, b, i, w = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD
    first, second = rank, 2 * num_ranks - 1 - rank
    through, beyond = rank + 1, num_ranks - 1 - rank  # ranks up to this one, and between it and the turn of the V
    yield from [(f, first)] * (2 * beyond)
    yield from [(f, first), (f, second)] * through
    yield from [(i, second), (w, second), (f, second)] * beyond
    yield from [(f, first), (b, second), (f, second), (b, first)] * (num_microbatches - 2 * num_ranks + through)
    yield from [(b, second), (f, second), (b, first)] * beyond
    emptying = [second, first] * through
    yield from [(b, stage) for stage in emptying[:through]]
    yield from [(i, stage) for stage in emptying[through:]]
    yield from [(w, first), (i, first)] * beyond
    yield from [(w, first)] * through


def _numbered(steps: Iterable[_Step]) -> tuple[Action, ...]:
    """Numbers the micro-batches of each stage; a W is of the I that waits longest, of whichever stage."""
    num: Counter[tuple[bool, int]] = Counter()
    waiting: deque[Action] = deque()
    order = []
    for phase, stage in steps:
        if phase is Phase.WEIGHT_GRAD:
            order.append(waiting.popleft())
            continue
        kind = phase is Phase.FORWARD, stage
        action = Action(stage, phase, num[kind])
        num[kind] += 1
        order.append(action)
        if phase is Phase.INPUT_GRAD:
            waiting.append(Action(stage, Phase.WEIGHT_GRAD, action.microbatch))
    return tuple(order)
