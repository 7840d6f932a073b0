"""Looped breadth-first: a rank's stages in turn, all micro-batches each (Lamy-Poirier 2022, arXiv:2211.05953)."""

from bapipe.errors import InvalidSchedule
from bapipe.schedules.table import Action, Phase, Schedule


def looped_breadth_first(num_ranks: int, num_microbatches: int, *, v: int = 2) -> Schedule:
    """Equal stages, v a rank, idle (p-1)(F+B) of one stage a step where m >= p; a rank keeps vm stashes in flight.

    With the bubble of interleaved 1F1B, and transfers that hide behind the other micro-batches: a short one-way
    transfer of c adds 2(p-1)c to a step where m >= 2p.

    Rank 1 of 2, stages 1 and 3, 2 micro-batches:  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    Args:
        num_ranks: ranks; rank r has the stages r, r+p, r+2p, ...
        num_microbatches: micro-batches in one step; with m < p, (v-1)(p-m)(F+B) more is idle.
        v: stages a rank; 1 makes it GPipe.

    Raises:
        InvalidSchedule: v is not positive.
    """
    if v < 1:
        raise InvalidSchedule(f"{v} stages a rank: give v of at least 1")
    return Schedule(
        devices=tuple((s % num_ranks,) for s in range(v * num_ranks)),
        num_microbatches=num_microbatches,
        order=tuple(_rank(range(rank, v * num_ranks, num_ranks), num_microbatches) for rank in range(num_ranks)),
    )


def _rank(stages: range, num_microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(s, Phase.FORWARD, m) for s in stages for m in range(num_microbatches)]
    backwards = [Action(s, Phase.BACKWARD, m) for s in reversed(stages) for m in range(num_microbatches)]
    return (*forwards, *backwards)
