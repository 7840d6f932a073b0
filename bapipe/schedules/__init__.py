"""Schedules by name. A new one is a function in a file of its own and one line here."""

from collections.abc import Callable
from functools import cache, partial

from bapipe.schedules.controllable_memory import v_half, v_min
from bapipe.schedules.deeper_one_f_one_b import deeper_one_f_one_b
from bapipe.schedules.delayed_weights import gpipe_2bp, one_f_one_b_2bp
from bapipe.schedules.dualpipe_v import dualpipe_v
from bapipe.schedules.eager_one_f_one_b import eager_one_f_one_b
from bapipe.schedules.fbp_as import fbp_as
from bapipe.schedules.gpipe import gpipe
from bapipe.schedules.gpipe import order_of_rank as gpipe_order_of_rank
from bapipe.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from bapipe.schedules.k_f_k_b import k_f_k_b
from bapipe.schedules.looped_breadth_first import looped_breadth_first
from bapipe.schedules.one_f_one_b import one_f_one_b
from bapipe.schedules.one_f_one_b import order_of_rank as one_f_one_b_order_of_rank
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.schedules.zb_v import zb_v
from bapipe.schedules.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b+1": partial(deeper_one_f_one_b, extra=1),
    "1f1b+2": partial(deeper_one_f_one_b, extra=2),
    "eager-1f1b": eager_one_f_one_b,
    "2f2b": k_f_k_b,
    "fbp-as": fbp_as,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "gpipe-2bp": gpipe_2bp,
    "1f1b-2bp": one_f_one_b_2bp,
}
"""`(num_ranks, num_microbatches) -> Schedule`, with stage s on rank s."""

ORDER_OF_RANK: dict[str, Callable[[int, int, int], tuple[Action, ...]]] = {
    "gpipe": gpipe_order_of_rank,
    "1f1b": one_f_one_b_order_of_rank,
}
"""`(rank, num_ranks, num_microbatches) -> order`: of some of `SCHEDULES`, a rank's order without the whole table."""

LOOPED: dict[str, Callable[[int, int], Schedule]] = {
    "interleaved-1f1b": interleaved_one_f_one_b,
    "looped-bfs": looped_breadth_first,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
"""`(num_ranks, num_microbatches) -> Schedule`, with two stages a rank, `Schedule.devices` says which."""

SIDE_BY_SIDE = frozenset({"fbp-as"})
"""Those for devices that run forward and backward side by side."""

ALL: dict[str, Callable[[int, int], Schedule]] = {**SCHEDULES, **LOOPED}


@cache
def splits_backwards(schedule: str) -> bool:
    """Returns whether a schedule runs the two parts of a backward, I and W, as actions of their own."""
    return any(action.phase is Phase.WEIGHT_GRAD for order in ALL[schedule](2, 2).order for action in order)
