"""Numbers of devices of a stage, in classes that a lower bound does not tell apart."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bapipe.planner.device_line.in_flight import FORWARDS_FIRST
from bapipe.planner.stages.intervals import IntArray

MAX_ALIKE = 128
"""More devices that are alike are told apart by the micro-batches of a replica alone."""

MAX_SINGLE = 32
"""Others: stages of every number of devices up to this one are told apart, larger ones by 3 %."""

MAX_FINE = 200
"""The same where it matters more which replica has a micro-batch: of GPipe, if each gradient is told apart, and of
1F1B, if turns are."""

CLASS_GROWTH = 1.03

MAX_SPLIT = 16
"""GPipe: replicas with at most so many micro-batches each are told apart from slightly more replicas."""

MAX_PARTED, PARTS, WHOLE = 16, (1, 2, 4, 8, 10**9), (10**9,)
"""Replicas with at most so many micro-batches each are told apart at these parts of those that have as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaClasses:
    """Numbers of devices of a stage, in classes: fewest[g] to most[g] devices count as one choice. [classes]"""

    fewest: IntArray
    most: IntArray


def replica_classes(every: int, num_microbatches: int, schedule: str, *, alike: bool, fine: bool) -> ReplicaClasses:
    """Returns classes of 1 to `every` devices; of many alike ones, by the number of micro-batches of a replica.

    Args:
        fine: whether more numbers are told apart.
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
    if schedule in FORWARDS_FIRST:  # those that divide the micro-batches have more forwards first
        few_microbatches = [r for r in fewest if r * MAX_SPLIT >= num and r < every]
        fewest = sorted({*fewest, *(r + 1 for r in few_microbatches if num % r == 0)})
    # The more replicas, the fewer of them have the most micro-batches: classes of few micro-batches are cut finer.
    cut: set[int] = set()
    for few, after in pairwise([*fewest, every + 1]):
        parts = PARTS if few * MAX_PARTED >= num else WHOLE
        cut |= {few + (after - 1 - few) // part for part in parts}
    return sorted(cut)
