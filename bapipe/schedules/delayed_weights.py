"""2BP: GPipe and 1F1B with the weight gradients delayed (Rae et al. 2024, arXiv:2405.18047)."""

from bapipe.schedules.table import Action, Phase, Schedule, one_per_rank
from bapipe.schedules.zero_bubble import late_weights


def gpipe_2bp(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages idle (p-1)(F+I) a step; every stage keeps all micro-batches in flight.

    Any rank, 2 micro-batches:  F0 F1 I0 I1 W0 W1
    """
    phases = Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD
    return one_per_rank(
        num_ranks,
        num_microbatches,
        lambda rank: tuple(Action(rank, phase, m) for phase in phases for m in range(num_microbatches)),
    )


def one_f_one_b_2bp(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages idle (p-1)(F+I-min(F, I, W)) a step where m >= p; every stage keeps all micro-batches in flight.

    The bubble of ZB-H1 with the memory of GPipe: no F ever waits for a W.

    Rank 1 of 3, 4 micro-batches:  F0 F1 I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
                                   as 1F1B; once no F is left, a W after each I; then the others
    """
    return one_per_rank(
        num_ranks,
        num_microbatches,
        lambda rank: late_weights(rank, num_ranks - rank, num_microbatches, num_microbatches),
    )
