"""How the first stages of 1F1B and those behind them wait for each other, in chains that pass all stages twice.

Behind B of a micro-batch a stage runs F of one a fixed number later, and behind that F again B of another. So two
micro-batches on their way to the last stage and back are one chain, with all that is run between them: F and B by turns
on one stage, or ways from the first stage to another one and back (docs/many_devices.md).
"""

from typing import NamedTuple

import numpy as np

from bapipe.planner.compute.compiled import inlined
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import Floats, Problem
from bapipe.planner.stages.intervals import IntArray


class Waits(NamedTuple):
    """What is known of the first stage of plans of a kind.

    Attributes:
        num_left: the micro-batches behind that of the F that follows its first B, at least; 0 if stages do not wait.
        first_ns: F and B by turns, until so many micro-batches later, take so long on it at least. [num_left + 1]
    """

    num_left: int
    first_ns: Floats


def early_waits(problem: Problem, kind: PlanKind, first_ends: IntArray | None = None) -> Waits:
    """Returns what is known of the first stage.

    Args:
        first_ends: the first boundary at which it may end, by its devices, if any is known. [devices + 1]
    """
    if not problem.has_cycles:
        return Waits(0, np.zeros(1))
    num_devices = problem.stages.shape[0]
    replicas = np.arange(kind.first_fewest, min(kind.first_most, num_devices) + 1)
    in_flight = -(-num_devices // replicas) * replicas
    num_left = max(0, problem.num_microbatches - 1 - int(in_flight.max()))
    first_ns = np.zeros(num_left + 1)
    if first_ends is not None and replicas[-1] <= num_left:
        own = problem.stages[0, np.searchsorted(problem.stages[0]["few"], replicas, side="right") - 1]
        ends = problem.layers[own["own"], np.maximum(first_ends[replicas], kind.earliest_end)]
        left, first_ns = np.arange(num_left + 1)[:, None], np.zeros((num_left + 1, replicas.size))
        # The busiest replica has one of the first micro-batches, so that its turns may have to begin later.
        for later, replica in ((0, "fastest"), (replicas - 1, "backward")):
            turn_ns = (ends["forward"] + ends["critical"]) * own[replica] - 2 * problem.rounding_ns
            num_turns = np.maximum(left - later, 0) // replicas
            first_ns = np.maximum(first_ns, num_turns * np.maximum(turn_ns, 0.0))
        first_ns = first_ns.min(axis=1)
    return Waits(num_left, first_ns)


@inlined
def count_cycles(problem: Problem, kind: PlanKind, waits: Waits, p: int, g: int) -> int:
    """Returns how often the stages up to one of class `g` behind `p` devices wait for each other, at least.

    Behind B of micro-batch m the first stage runs F of one up to m + the devices + its replicas - 1, and behind F of
    micro-batch x that stage runs B of one up to x - the devices from there on + its replicas.
    """
    if p == 0:
        return 0
    up_to = min(p + problem.stages[p, g].most, problem.stages.shape[0]) + kind.first_most - 1
    return int(waits.num_left // up_to)


@inlined
def count_turns(problem: Problem, waits: Waits, p: int, g: int) -> tuple[int, float]:
    """Returns how often a replica of such a stage runs F and B by turns, and what the first stage runs besides."""
    replicas = problem.stages[p, g].most
    num_turns = waits.num_left // replicas
    return int(num_turns), float(waits.first_ns[waits.num_left - num_turns * replicas])
