"""1F1B with some more forwards in its warm-up: between 1F1B and eager 1F1B in memory and in what it hides."""

from bapipe.schedules.eager_one_f_one_b import eager_one_f_one_b
from bapipe.schedules.table import Schedule


def deeper_one_f_one_b(num_ranks: int, num_microbatches: int, *, extra: int) -> Schedule:
    """Equal stages idle (p-1)(F+B) a step; stage s of p keeps min(p-s+extra, 2(p-1-s)+1, m) micro-batches in flight.

    Where memory has no room for eager 1F1B, each forward more still gives a transfer that much more time.

    Rank 1 of 4, 6 micro-batches, extra 1:  F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5

    Args:
        num_ranks: ranks, one stage each.
        num_microbatches: micro-batches in one step.
        extra: forwards more than 1F1B; none makes it 1F1B, p-1 eager 1F1B.

    Raises:
        InvalidSchedule: fewer than none.
    """
    depths = [min(num_ranks - s + extra, 2 * (num_ranks - 1 - s) + 1) for s in range(num_ranks)]
    return eager_one_f_one_b(num_ranks, num_microbatches, depths=depths)
