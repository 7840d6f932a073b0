"""Interleaved 1F1B: several stages a rank, a smaller bubble (Narayanan et al. 2021, arXiv:2104.04473, fig. 4)."""

from bapipe.errors import InvalidSchedule
from bapipe.schedules.fewer import first_microbatches
from bapipe.schedules.table import Action, Phase, Schedule


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, *, v: int = 2) -> Schedule:
    """Equal stages, v a rank, idle (p-1)(F+B) of one stage a step where p divides m.

    Rank r of p keeps min((v-1)p + 2(p-1-r) + 1, vm) stashes in flight. A one-way transfer of c <= min(F, B) adds
    2(vp-1)c to a step. Micro-batches go through a rank's stages in rounds of p. Where p does not divide m, the last
    round is a whole one that lacks some micro-batches: a shorter round of its own can deadlock.

    Rank 1 of 2, stages 1 and 3, 2 micro-batches:  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
                                                   warm-up, then B and F in turn, then what is left of B

    Args:
        num_ranks: ranks; rank r has the stages r, r+p, r+2p, ...
        num_microbatches: micro-batches in one step.
        v: stages a rank; 1 makes it eager 1F1B.

    Raises:
        InvalidSchedule: v is not positive.
    """
    if v < 1:
        raise InvalidSchedule(f"{v} stages a rank: give v of at least 1")
    num_rounds = -(-num_microbatches // num_ranks)
    whole = Schedule(
        devices=tuple((s % num_ranks,) for s in range(v * num_ranks)),
        num_microbatches=num_rounds * num_ranks,
        order=tuple(_rank(rank, num_ranks, num_rounds, v) for rank in range(num_ranks)),
    )
    return first_microbatches(whole, num_microbatches)


def _rank(rank: int, num_ranks: int, num_rounds: int, v: int) -> tuple[Action, ...]:
    stages = range(rank, v * num_ranks, num_ranks)
    rounds = [range(i * num_ranks, (i + 1) * num_ranks) for i in range(num_rounds)]
    forwards = [Action(s, Phase.FORWARD, m) for group in rounds for s in stages for m in group]
    backwards = [Action(s, Phase.BACKWARD, m) for group in rounds for s in reversed(stages) for m in group]
    depth = (v - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1
    order = forwards[:depth]
    for place, backward in enumerate(backwards):
        order.append(backward)
        order += forwards[depth + place : depth + place + 1]
    return tuple(order)
