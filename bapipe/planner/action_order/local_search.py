"""Local search for an order: moves single actions along their device by threshold accepting.

Threshold accepting (Dueck and Scheuer 1990) is simulated annealing without probabilities: a move is accepted unless it
makes the step longer by more than a threshold, and the threshold falls to zero. Random numbers come from the seed
alone, so the same call gives the same order.
"""

from collections.abc import Callable
from random import Random

from bapipe.planner.action_order.problem import OrderProblem, Orders
from bapipe.planner.compute.deadline import Deadline

MAX_SHIFT = 12
"""The furthest that one move shifts an action, in positions of its device's order."""

MAX_THRESHOLD_SHARE = 32
"""The first threshold is the longest action divided by this."""


def threshold_accepting(
    problem: OrderProblem,
    orders: Orders,
    step_ns: Callable[[Orders], int | None],
    *,
    goal_ns: int,
    num_trials: int,
    seed: int,
    deadline: Deadline,
) -> Orders:
    """Returns the fastest order seen in `num_trials` moves from `orders`, which must fit and not deadlock.

    Stops at once when a step takes `goal_ns`, a lower bound, and at the deadline. Two rounds of half the trials each,
    the second from the best order of the first.
    """
    random = Random(seed)
    best, best_ns = orders, step_ns(orders)
    assert best_ns is not None
    ranks = [rank for rank, codes in enumerate(orders) if len(codes) > 1]
    if not ranks:
        return best
    max_threshold_ns, num_moves = max(problem.action_ns) // MAX_THRESHOLD_SHARE, max(1, num_trials // 2)
    for _ in range(2):
        # Each round restarts from the best order, with the threshold at its maximum.
        current, current_ns = best, best_ns
        for moves_left in range(num_moves, 0, -1):
            if best_ns <= goal_ns or deadline.is_over:
                return best
            neighbour = _neighbour(problem, current, random.choice(ranks), random)
            if neighbour is None or (neighbour_ns := step_ns(neighbour)) is None:
                continue
            # Accept if not longer by more than the threshold, which falls linearly to zero.
            if neighbour_ns <= current_ns + max_threshold_ns * moves_left // num_moves:
                current, current_ns = neighbour, neighbour_ns
                if current_ns < best_ns:
                    best, best_ns = current, current_ns
    return best


def _neighbour(problem: OrderProblem, orders: Orders, rank: int, random: Random) -> Orders | None:
    """Returns the orders with one action of a device moved, None if that breaks the phase order or the memory limit."""
    codes = list(orders[rank])
    source = random.randrange(len(codes))
    target = min(max(source + random.choice([-1, 1]) * random.randint(1, MAX_SHIFT), 0), len(codes) - 1)
    codes.insert(target, codes.pop(source))
    if not problem.is_phase_ordered(codes) or not problem.rank_fits(rank, codes):
        return None
    return (*orders[:rank], tuple(codes), *orders[rank + 1 :])
