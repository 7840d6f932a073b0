"""What one stage takes, from its first F on, with each of some runs of layers: letters as in `bounds`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from bapipe.planner.branch_and_bound.intervals import INF, IntArray
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.stage_candidates import StageCandidates


@dataclass(frozen=True, slots=True)
class TransferStalls:
    """How long a device that cannot overlap is held by each transfer of a micro-batch; nothing where it can.

    Attributes:
        enter, leave: activations from the stage before, gradients back to it.
        send, take: activations to the next stage, and gradients from there; `out` is both.
    """

    enter: IntArray | int = 0
    leave: IntArray | int = 0
    send: IntArray | int = 0
    take: IntArray | int = 0

    @property
    def out(self) -> IntArray | int:
        return self.send + self.take


@dataclass(frozen=True, slots=True)
class StageBound:
    """What a stage takes, counted from its first F.

    Attributes:
        around: one micro-batch from here to the end and back.
        start: until F of the last micro-batch begins.
        load: until the last r is done.
        left: until all transfers before the last one to the stage before are done too.
        again: what all r but the first add.
        work: for some devices, given by number, until their update is done.
    """

    around: IntArray
    start: IntArray
    load: IntArray
    left: IntArray
    again: IntArray
    work: tuple[tuple[int, IntArray], ...]


def bound_stage(
    slot: StagePlacement,
    num: int,
    piece: StageCandidates,
    reach: IntArray | int,
    linked: IntArray | int,
    held: TransferStalls,
) -> StageBound:
    """Returns what a stage with each of some runs of layers takes, of `num` micro-batches.

    `reach` is one micro-batch's way from the next transfer until its gradients are here again, and `linked` the same
    while all micro-batches pass the link to the next stage, or that from it.
    """
    f, r = piece.forward, piece.back
    replicas, depth = len(slot.devices), slot.turns.depth
    most = -(-num // replicas)
    late = max(0, most - depth // replicas)  # F of a device that follow its first r
    around = f + r + reach
    start = (most - 1) * (f + held.enter) + late * (r + held.out)
    rounds, extra = divmod(num - 1, depth)
    if late:
        start = np.maximum(start, around + (late - 1) * (f + r))
    if rounds:
        start = np.maximum(start, rounds * np.minimum(around, INF // rounds) + extra // replicas * f)
    again = (most - 1) * (r + held.take)
    busy = [own + n * held.out + (n - 1) * held.enter for n, own in piece.turns]
    load = maximum([start + around, f + r + linked, around + late * (f + held.send) + again, *busy])
    left = maximum([load, *(own + (n - 1) * held.leave for own, (n, _) in zip(busy, piece.turns, strict=True))])
    work = tuple(
        (k, own + n * held.out + (n - 1) * held.enter) for (k, own), (n, _) in zip(piece.work, piece.turns, strict=True)
    )
    return StageBound(around=around, start=start, load=load, left=left, again=again, work=work)


def maximum(values: Sequence[IntArray]) -> IntArray:
    """Returns the largest, element by element."""
    return reduce(np.maximum, values)


def keep(values: IntArray) -> IntArray:
    """Returns the values, infinity where they are larger."""
    found: IntArray = np.minimum(values, INF)
    return found
