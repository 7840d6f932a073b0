"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965, fig. 2c)."""

from bapipe.schedules.table import Action, Phase, Schedule, one_per_rank


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages idle (p-1)(F+B) a step; every stage keeps all micro-batches in flight."""
    return one_per_rank(num_ranks, num_microbatches, lambda rank: order_of_rank(rank, num_ranks, num_microbatches))


def order_of_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the order of one rank of GPipe, the same for any number of ranks."""
    del num_ranks
    return tuple(Action(rank, phase, m) for phase in (Phase.FORWARD, Phase.BACKWARD) for m in range(num_microbatches))
