"""1F1B, also called PipeDream-flush (Narayanan et al. 2021, arXiv:2104.04473, fig. 4)."""

from bapipe.schedules.table import Action, Phase, Schedule, one_per_rank


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages idle (p-1)(F+B) a step; stage s of p keeps min(p-s, m) micro-batches in flight.

    Stage 1 of 3, 4 micro-batches:  F0 F1 B0 F2 B1 F3 B2 B3
                                    warm-up, then one F and one B in turn, then what is left of B
    """
    return one_per_rank(num_ranks, num_microbatches, lambda rank: order_of_rank(rank, num_ranks, num_microbatches))


def order_of_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the order of one rank of 1F1B."""
    return one_rank(rank, num_ranks - rank, num_microbatches)


def one_rank(stage: int, depth: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the order of a rank with `depth` forwards, or all there are, before its first backward."""
    in_flight = min(depth, num_microbatches)
    order = [Action(stage, Phase.FORWARD, m) for m in range(in_flight)]
    for m in range(num_microbatches):
        order.append(Action(stage, Phase.BACKWARD, m))
        if in_flight + m < num_microbatches:
            order.append(Action(stage, Phase.FORWARD, in_flight + m))
    return tuple(order)
