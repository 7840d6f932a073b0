"""Eager 1F1B: 1F1B with deeper warm-up, which hides transfers (1F1B-SO in Zhao et al. 2020, arXiv:2012.12544)."""

from collections.abc import Sequence

from bapipe.errors import InvalidSchedule
from bapipe.schedules.one_f_one_b import one_rank
from bapipe.schedules.table import Schedule, one_per_rank


def eager_one_f_one_b(num_ranks: int, num_microbatches: int, *, depths: Sequence[int] | None = None) -> Schedule:
    """Equal stages idle (p-1)(F+B) a step; stage s of p keeps min(2(p-1-s)+1, m) micro-batches in flight.

    A one-way transfer of c <= (F+B)/2 adds 2(p-1)c to a step, however many micro-batches it has.

    Rank 1 of 3, 5 micro-batches:  F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
                                   warm-up, then one B and one F in turn, then what is left of B

    Args:
        num_ranks: ranks, one stage each.
        num_microbatches: micro-batches in one step.
        depths: forwards of each rank before its first backward, if not 2(p-1-s)+1; p-s makes it 1F1B, and m GPipe.

    Raises:
        InvalidSchedule: the depths are not one for each rank, or not positive, or rise from one rank to the next.
    """
    depths = [2 * (num_ranks - s) - 1 for s in range(num_ranks)] if depths is None else list(depths)
    _check(depths, num_ranks)
    return one_per_rank(num_ranks, num_microbatches, lambda rank: one_rank(rank, depths[rank], num_microbatches))


def _check(depths: Sequence[int], num_ranks: int) -> None:
    if len(depths) != num_ranks:
        raise InvalidSchedule(f"depths {depths} are {len(depths)}, for {num_ranks} ranks: give one for each rank")
    if min(depths) < 1:
        raise InvalidSchedule(f"depths {depths} hold {min(depths)}: give each rank at least 1")
    # A rank that waits for more forwards than the one before it sends without a backward waits for ever.
    if sorted(depths, reverse=True) != depths:
        raise InvalidSchedule(f"depths {depths} rise along the pipeline, a deadlock: give them in falling order")
