"""Local improvement of an order: moves single actions along their device, worse steps allowed less and less.

Threshold accepting (Dueck and Scheuer 1990): a move is kept unless it makes the step longer by more than a threshold
that falls to nothing. Random numbers come from the seed alone, so the same call gives the same order.
"""

from collections.abc import Callable
from random import Random

from bapipe.planner.action_order.problem import OrderProblem, Orders

REACH = 12
"""Places an action moves at most."""


def threshold_accepting(
    problem: OrderProblem,
    orders: Orders,
    step_ns: Callable[[Orders], int | None],
    *,
    goal_ns: int,
    num_trials: int,
    seed: int,
) -> Orders:
    """Returns the fastest order met in `num_trials` moves from a given one, which must fit and not deadlock.

    Stops at once when a step takes `goal_ns`. Two rounds, the second from the best order of the first.
    """
    random = Random(seed)
    best, best_ns = orders, step_ns(orders)
    assert best_ns is not None
    ranks = [rank for rank, codes in enumerate(orders) if len(codes) > 1]
    if not ranks:
        return best
    widest_ns, num_moves = max(problem.ns) // 32, max(1, num_trials // 2)
    for _ in range(2):
        now, now_ns = best, best_ns
        for left in range(num_moves, 0, -1):
            if best_ns <= goal_ns:
                return best
            moved = _move(problem, now, random.choice(ranks), random)
            if moved is None or (moved_ns := step_ns(moved)) is None:
                continue
            if moved_ns <= now_ns + widest_ns * left // num_moves:
                now, now_ns = moved, moved_ns
                if now_ns < best_ns:
                    best, best_ns = now, now_ns
    return best


def _move(problem: OrderProblem, orders: Orders, rank: int, random: Random) -> Orders | None:
    """Returns the orders with one action of a device elsewhere, None where that breaks the sequence or the memory."""
    codes = list(orders[rank])
    here = random.randrange(len(codes))
    there = min(max(here + random.choice([-1, 1]) * random.randint(1, REACH), 0), len(codes) - 1)
    code = codes.pop(here)
    codes.insert(there, code)
    if not problem.in_sequence(codes) or not problem.rank_fits(rank, codes):
        return None
    return (*orders[:rank], tuple(codes), *orders[rank + 1 :])
