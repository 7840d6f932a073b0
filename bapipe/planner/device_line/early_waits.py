"""How early and later stages of 1F1B wait for each other, in chains of actions that pass all stages twice.

After B of a micro-batch a stage runs F of the one a fixed number later, and after that F the B of yet another. So two
micro-batches that go to the last stage and back are linked into one chain by what runs between them: alternating F and
B on one stage (*turns*), or trips from the first stage to another one and back (*cycles*); see docs/many_devices.md.
"""

from typing import NamedTuple

import numpy as np

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import inlined
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import BoundInputs
from bapipe.planner.stages.intervals import IntArray


class Waits(NamedTuple):
    """What is known of the first stage of plans of a kind.

    Attributes:
        num_left: minimum number of micro-batches after the one whose F follows its first B; 0 if stages do not wait.
        first_ns: lower bound on the time of its alternating F and B until k micro-batches later, for each k.
            [num_left + 1]
    """

    num_left: int
    first_ns: Floats


def early_waits(problem: BoundInputs, kind: PlanKind, first_ends: IntArray | None = None) -> Waits:
    """Returns what is known of the first stage.

    Args:
        first_ends: the first boundary at which it may end, by its number of devices; None if unknown. [devices + 1]
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
        # The busiest replica runs one of the first `replicas` micro-batches, so its turns may begin later.
        for later, replica in ((0, "fastest"), (replicas - 1, "backward")):
            turn_ns = (ends["forward"] + ends["critical"]) * own[replica] - 2 * problem.rounding_ns
            num_turns = np.maximum(left - later, 0) // replicas
            first_ns = np.maximum(first_ns, num_turns * np.maximum(turn_ns, 0.0))
        first_ns = first_ns.min(axis=1)
    return Waits(num_left, first_ns)


@inlined
def count_cycles(problem: BoundInputs, kind: PlanKind, waits: Waits, p: int, g: int) -> int:
    """Returns a lower bound on the number of cycles between the first stage and one of class `g` after `p` devices.

    After B of micro-batch m the first stage runs F of one up to m + the devices + its replicas - 1, and after F of
    micro-batch x that stage runs B of one up to x - the devices from there on + its replicas.
    """
    if p == 0:
        return 0
    up_to = min(p + problem.stages[p, g].most, problem.stages.shape[0]) + kind.first_most - 1
    return int(waits.num_left // up_to)


@inlined
def count_turns(problem: BoundInputs, waits: Waits, p: int, g: int) -> tuple[int, float]:
    """Returns how many turns of F and B a replica of such a stage runs, and the time of the first stage's besides."""
    replicas = problem.stages[p, g].most
    num_turns = waits.num_left // replicas
    return int(num_turns), float(waits.first_ns[waits.num_left - num_turns * replicas])
