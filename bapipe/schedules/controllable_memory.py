"""V-Half and V-Min: about a half and a third of 1F1B's stashes (Qi et al. 2024, arXiv:2405.15362)."""

from bapipe.schedules.building_block import Block, v_shaped
from bapipe.schedules.table import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages with F = I = W idle (3p-7)F of one stage a step (p even, at least 4) or (3p-4)F (p odd), m >= p.

    A rank keeps at most 2(p//2 + 1) stashes of one of its two stages in flight: about half of the 2p of ZB-V or 1F1B.
    Where F, I and W differ much, the ranks fall out of step, and the bubble grows with m.

    Rank 1 of 2, stages 1 and 2, 3 micro-batches:
        1F0 2F0 1F1 2F1  2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1  2I2 1I2 2W1 1W1 2W2 1W2
        warm-up          the block, repeated              I first, then W

    Args:
        num_ranks: ranks; rank r has the stages r and 2p-1-r.
        num_microbatches: micro-batches in one step.
    """
    wait = 3 if num_ranks % 2 == 0 else 0  # keeps the slots of a rank apart modulo the period
    return v_shaped(num_ranks, num_microbatches, Block(down=2, up=1, wait_at_top=wait, wait_at_turn=1))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages with F = I = W idle (4p-7)F of one stage a step (3 divides p) or (4p-5)F (p >= 4), m >= p.

    A rank keeps at most 2((p+1)//3 + 1) stashes of one of its two stages in flight: about a third of ZB-V's 2p.
    Where F, I and W differ, the ranks fall out of step, and the bubble grows with m.

    Rank 1 of 2, stages 1 and 2, 3 micro-batches:
        1F0 2F0 1F1 2F1  2I0 1I0 2W0 1W0 2I1 1I1 1F2 2F2  2W1 1W1 2I2 1I2 2W2 1W2

    Args:
        num_ranks: ranks; rank r has the stages r and 2p-1-r.
        num_microbatches: micro-batches in one step.
    """
    wait = 2 if num_ranks % 3 == 0 else 0  # keeps the slots of a rank apart modulo the period
    return v_shaped(num_ranks, num_microbatches, Block(down=1, up=1, wait_at_top=wait))
