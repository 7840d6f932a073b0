"""What one stage takes, from its first F on, with each of some runs of layers: letters as in `bounds`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from bapipe.planner.branch_and_bound.intervals import BIG, Numbers
from bapipe.planner.branch_and_bound.placements import Slot
from bapipe.planner.branch_and_bound.stage_candidates import Piece


@dataclass(frozen=True, slots=True)
class Held:
    """How long a device that cannot overlap is held by each transfer of a micro-batch; nothing where it can.

    Attributes:
        enter, leave: activations from the stage before, gradients back to it.
        send, take: activations to the next stage, and gradients from there; `out` is both.
    """

    enter: Numbers | int = 0
    leave: Numbers | int = 0
    send: Numbers | int = 0
    take: Numbers | int = 0

    @property
    def out(self) -> Numbers | int:
        return self.send + self.take


@dataclass(frozen=True, slots=True)
class Stay:
    """What a stage takes, counted from its first F.

    Attributes:
        around: one micro-batch from here to the end and back.
        start: until F of the last micro-batch begins.
        load: until the last r is done.
        left: until all transfers before the last one to the stage before are done too.
        again: what all r but the first add.
        work: for some devices, given by number, until their update is done.
    """

    around: Numbers
    start: Numbers
    load: Numbers
    left: Numbers
    again: Numbers
    work: tuple[tuple[int, Numbers], ...]


def stay(slot: Slot, num: int, piece: Piece, reach: Numbers | int, linked: Numbers | int, held: Held) -> Stay:
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
        start = np.maximum(start, rounds * np.minimum(around, BIG // rounds) + extra // replicas * f)
    again = (most - 1) * (r + held.take)
    busy = [own + n * held.out + (n - 1) * held.enter for n, own in piece.turns]
    load = most_of([start + around, f + r + linked, around + late * (f + held.send) + again, *busy])
    left = most_of([load, *(own + (n - 1) * held.leave for own, (n, _) in zip(busy, piece.turns, strict=True))])
    work = tuple(
        (k, own + n * held.out + (n - 1) * held.enter) for (k, own), (n, _) in zip(piece.work, piece.turns, strict=True)
    )
    return Stay(around=around, start=start, load=load, left=left, again=again, work=work)


def most_of(values: Sequence[Numbers]) -> Numbers:
    """Returns the largest, element by element."""
    return reduce(np.maximum, values)


def keep(values: Numbers) -> Numbers:
    """Returns the values, infinity where they are larger."""
    found: Numbers = np.minimum(values, BIG)
    return found
