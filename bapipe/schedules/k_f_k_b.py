"""kFkB: 1F1B over groups of k micro-batches, which hides transfers (Wang et al. 2023, arXiv:2303.01675)."""

from bapipe.errors import InvalidSchedule
from bapipe.schedules.table import Action, Phase, Schedule, one_per_rank


def k_f_k_b(num_ranks: int, num_microbatches: int, *, k: int = 2) -> Schedule:
    """Equal stages idle (p-1)(F+B) a step; stage s of p keeps min(k(p-s), m) micro-batches in flight.

    Where k > 1, a one-way transfer of c <= min(F, B) adds 2(p-1)c to a step, however many micro-batches it has.

    Rank 1 of 2, 4 micro-batches:  F0 F1 B0 B1 F2 F3 B2 B3

    Args:
        num_ranks: ranks, one stage each.
        num_microbatches: micro-batches in one step; the last group has what is left of them.
        k: micro-batches in a group; 1 makes it 1F1B, and m GPipe.

    Raises:
        InvalidSchedule: k is not positive.
    """
    if k < 1:
        raise InvalidSchedule(f"groups of {k} micro-batches: give k of at least 1")
    return one_per_rank(num_ranks, num_microbatches, lambda rank: _order(rank, num_ranks - rank, num_microbatches, k))


def _order(stage: int, depth: int, num_microbatches: int, k: int) -> tuple[Action, ...]:
    groups = [range(start, min(start + k, num_microbatches)) for start in range(0, num_microbatches, k)]
    phases = [(Phase.FORWARD, group) for group in groups[:depth]]
    for place, group in enumerate(groups):
        phases.append((Phase.BACKWARD, group))
        phases += [(Phase.FORWARD, later) for later in groups[depth + place : depth + place + 1]]
    return tuple(Action(stage, phase, m) for phase, group in phases for m in group)
