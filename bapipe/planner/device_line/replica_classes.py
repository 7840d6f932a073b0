"""Numbers of devices of a stage, in classes that a lower bound does not distinguish."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bapipe.planner.device_line.in_flight import FORWARDS_FIRST
from bapipe.planner.stages.intervals import IntArray

MAX_ALIKE = 128
"""With more equal devices than this, their numbers are distinguished only by the micro-batches of a replica."""

MAX_SINGLE = 32
"""Otherwise all numbers of devices up to this one are distinguished, and larger ones in steps of `CLASS_GROWTH`."""

MAX_FINE = 200
"""The same where it matters more which replica has a micro-batch: if gradients (GPipe) or turns (1F1B) are
distinguished."""

CLASS_GROWTH = 1.03

MAX_SPLIT = 16
"""GPipe: numbers of replicas that divide the micro-batches, at most this many each, are distinguished from slightly
larger numbers."""

MAX_PARTED, PARTS, WHOLE = 16, (1, 2, 4, 8, 10**9), (10**9,)
"""With at most `MAX_PARTED` micro-batches on each replica, the numbers of replicas with equally many are divided into
classes at 1/`PARTS` of their range; with more they are one class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaClasses:
    """Numbers of devices of a stage, in classes: fewest[g] to most[g] devices count as one choice. [classes]"""

    fewest: IntArray
    most: IntArray


def replica_classes(every: int, num_microbatches: int, schedule: str, *, alike: bool, fine: bool) -> ReplicaClasses:
    """Returns classes of 1 to `every` devices; of many equal devices by the number of micro-batches of a replica.

    Args:
        fine: whether more numbers are distinguished.
    """
    if alike and every > MAX_ALIKE:
        fewest = _fewest_of_alike(every, num_microbatches, schedule)
    else:
        most_single = MAX_FINE if fine else MAX_SINGLE
        fewest = list(range(1, min(every, most_single) + 1))
        while fewest[-1] < every:
            fewest.append(min(every, max(fewest[-1] + 1, int(fewest[-1] * CLASS_GROWTH))))
        # Where R does not divide the micro-batches M, M mod R of the replicas have one more: those classes are one.
        dividing = {r for r in range(1, every + 1) if num_microbatches % r == 0}
        firsts = {-(-num_microbatches // (n + 1)) for n in range(1, num_microbatches // MAX_SINGLE + 1)}
        cut = {*fewest, *dividing, *(r + 1 for r in dividing), *firsts}
        fewest = sorted(few for few in cut if few <= every)
    most = [*(after - 1 for after in fewest[1:]), every]
    return ReplicaClasses(fewest=np.array(fewest), most=np.array(most))


def _fewest_of_alike(every: int, num: int, schedule: str) -> list[int]:
    fewest = sorted({-(-num // -(-num // replicas)) for replicas in range(1, every + 1)})
    if schedule in FORWARDS_FIRST:  # numbers that divide the micro-batches have more forwards first
        few_microbatches = [r for r in fewest if r * MAX_SPLIT >= num and r < every]
        fewest = sorted({*fewest, *(r + 1 for r in few_microbatches if num % r == 0)})
    # The more replicas, the fewer of them have the most micro-batches: classes of few micro-batches are cut finer.
    cut: set[int] = set()
    for few, after in pairwise([*fewest, every + 1]):
        parts = PARTS if few * MAX_PARTED >= num else WHOLE
        cut |= {few + (after - 1 - few) // part for part in parts}
    return sorted(cut)
