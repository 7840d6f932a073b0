"""FBP-AS: forward and backward at once on devices that split their compute (Zhao et al. 2020, arXiv:2012.12544)."""

from bapipe.schedules.eager_one_f_one_b import eager_one_f_one_b
from bapipe.schedules.table import Schedule


def fbp_as(num_ranks: int, num_microbatches: int) -> Schedule:
    """Equal stages take (m+2p-1)(F+B) a step on devices that run side by side; stage s keeps min(2(p-s), m) stashes.

    There each lane runs its own phases of the table, so nothing of it counts but that both ascend, and a transfer of
    c <= F+B adds 2(p-1)c to a step. The table is that of eager 1F1B, which is what it makes of other devices.

    Args:
        num_ranks: ranks, one stage each.
        num_microbatches: micro-batches in one step.
    """
    return eager_one_f_one_b(num_ranks, num_microbatches)
