"""ZB-V: zero bubble in the memory of 1F1B (Qi et al. 2023, arXiv:2401.10241, sec. 6; 2024, arXiv:2405.15362)."""

from bapipe.schedules.building_block import Block, v_shaped
from bapipe.schedules.table import Schedule


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages with F = I = W idle (p-1)F of one stage a step where m >= p: no schedule idles less.

    Every rank keeps 2min(p, m) stashes of one of its two stages in flight, as many bytes as min(p, m) of 1F1B's.

    Rank 1 of 2, stages 1 and 2, 3 micro-batches:
        1F0 2F0 1F1 2F1  2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1  2I2 1I2 2W1 1W1 2W2 1W2
        warm-up          the block, repeated              I first, then W

    Args:
        num_ranks: ranks; rank r has the stages r and 2p-1-r.
        num_microbatches: micro-batches in one step.
    """
    return v_shaped(num_ranks, num_microbatches, Block(down=4, up=2))
