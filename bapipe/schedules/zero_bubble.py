"""ZB-H1 and ZB-H2: weight gradients wait and fill what 1F1B leaves idle (Qi et al. 2023, arXiv:2401.10241)."""

from bapipe.schedules.table import Action, Phase, Schedule, one_per_rank


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages idle (p-1)(F+I-min(F, I, W)) a step where m >= p; every rank keeps p in flight.

    Rank 1 of 3, 4 micro-batches:  F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
                                   as 1F1B, with each W one I late on rank 1, two on rank 2, and so on
    """
    return one_per_rank(
        num_ranks, num_microbatches, lambda rank: late_weights(rank, num_ranks - rank, rank, num_microbatches)
    )


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages idle (p-1)max(F, F+I-2W) a step where m >= 2p-1; every rank keeps 2p-1 in flight.

    Rank 1 of 2, 4 micro-batches:  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
                                   as ZB-H1, with twice the warm-up and each W twice as late
    """
    return one_per_rank(
        num_ranks,
        num_microbatches,
        lambda rank: late_weights(rank, 2 * (num_ranks - rank) - 1, 2 * rank, num_microbatches),
    )


def late_weights(stage: int, depth: int, late: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the order of a rank with `depth` forwards before its first I and up to `late` W that wait.

    Once no F is left for a W to hold up, one W follows each I.
    """
    order = [Action(stage, Phase.FORWARD, m) for m in range(min(depth, num_microbatches))]
    num_done = 0
    for m in range(num_microbatches):
        order.append(Action(stage, Phase.INPUT_GRAD, m))
        if m - num_done >= late or depth + m >= num_microbatches:
            order.append(Action(stage, Phase.WEIGHT_GRAD, num_done))
            num_done += 1
        if depth + m < num_microbatches:
            order.append(Action(stage, Phase.FORWARD, depth + m))
    return (*order, *(Action(stage, Phase.WEIGHT_GRAD, m) for m in range(num_done, num_microbatches)))
