"""Compiled: a random walk along plans on a line of devices, by estimates of their steps.

A plan that is better is always kept, one that is worse by x with probability exp(-x / temperature) (Metropolis et al.
1953; simulated annealing, Kirkpatrick et al. 1983).
"""

from math import log

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import compiled
from bapipe.planner.device_line.moves import copy_plan, draw, fraction
from bapipe.planner.device_line.search_arrays import Costs, Moves, Notes, Plan, Random
from bapipe.planner.device_line.step_programme import STAGE_ACTIONS, estimate_ns


@compiled
def walk(
    costs: Costs,
    moves: Moves,
    notes: Notes,
    plans: tuple[Plan, Plan, Plan],
    scores: Floats,
    random: Random,
    temperature: float,
    max_actions: int,
) -> int:
    """Walks from `plans[0]` by random moves, and returns the number of actions that this has cost.

    Args:
        plans: the current plan, the one with the shortest step so far, and room for a draft.
        scores: the score of the first plan, and the step of the second. [2]
        temperature: the probability to keep a plan whose score is worse by x is exp(-x / temperature). In ns.
        max_actions: the walk ends once about this many actions have been estimated.
    """
    here, best, draft = plans
    num_actions = 0
    while num_actions < max_actions:
        num_actions += STAGE_ACTIONS
        if not draw(moves, here, draft, random):
            continue
        highest_ns = scores[0] - temperature * log(fraction(random))
        score_ns, step_ns, cost = estimate_ns(costs, draft, notes, highest_ns)
        num_actions += cost
        if score_ns > highest_ns:
            continue
        copy_plan(draft, here)
        scores[0] = score_ns
        if step_ns < scores[1]:
            copy_plan(draft, best)
            scores[1] = step_ns
    return num_actions
