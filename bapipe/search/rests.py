"""What the stages still to come must add to the step, wherever they are cut: one dynamic programme over slots.

Letters as in `bapipe.search.bounds`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from bapipe.search.pieces import Piece, Pieces
from bapipe.search.slots import Slot
from bapipe.search.spans import BIG, Numbers


class Rest(NamedTuple):
    """For every place, the least that a slot and those after it add, counted from the first F there.

    Attributes:
        path: one micro-batch all the way down and back.
        last: the same, until all updates that its way back allows are done.
        done: until all updates are done.
        load: until the last r of the slot is on its way to the stage before.
        total: F and B of one micro-batch.
        send: for gpipe, what the F of all micro-batches add to those of the first one.
        back_done, back_load: for gpipe, `done` and `load` without that.
    """

    path: Numbers
    last: Numbers
    done: Numbers
    load: Numbers
    total: Numbers
    send: Numbers
    back_done: Numbers
    back_load: Numbers


@dataclass(frozen=True, slots=True)
class Steps:
    """From a slot to each of those that can be next, a row each, at every place.

    Attributes:
        slots: the next slots.
        x, y: transfer times of one micro-batch.
        all_x, all_y: how long the busiest link takes for all of them.
        most: micro-batches that pass a link before the last one, a column.
        before: those that pass it before one of the last device's last ones.
        rest: of the next slots.
    """

    slots: tuple[Slot, ...]
    x: Numbers
    y: Numbers
    all_x: Numbers
    all_y: Numbers
    most: Numbers
    before: Numbers
    rest: Rest

    def at(self, rows: slice, places: slice) -> "Steps":
        """Returns some rows, at some places."""
        part = (rows, places)
        return Steps(
            self.slots[rows],
            self.x[part],
            self.y[part],
            self.all_x[part],
            self.all_y[part],
            self.most[rows],
            self.before[rows],
            Rest(*(values[part] for values in self.rest)),
        )


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


class Rests:
    """The rests of one schedule and micro-batch size. Each takes O(places**2)."""

    def __init__(self, pieces: Pieces, num_microbatches: int, send: Numbers, grad: Numbers, *, gpipe: bool) -> None:
        self.pieces, self.num, self.gpipe = pieces, num_microbatches, gpipe
        self.send, self.grad = send, grad
        self._rests: dict[int, tuple[Slot, Rest]] = {}
        self._steps: dict[int, tuple[Slot, Steps | None]] = {}

    def rest(self, slot: Slot) -> Rest:
        """Returns the least that a slot and those after it add, made when it is first asked for."""
        if id(slot) not in self._rests:
            self._rests[id(slot)] = slot, self._make(slot)
        return self._rests[id(slot)][1]

    def steps(self, slot: Slot) -> Steps | None:
        """Returns the ways from a slot to the next ones; None where there is none."""
        if id(slot) not in self._steps:
            self._steps[id(slot)] = slot, self._make_steps(slot)
        return self._steps[id(slot)][1]

    def before(self, slot: Slot) -> int:
        """Micro-batches that a device has passed on before one of the last ones of a device of the last stage."""
        return max(0, (self.num - self._last(slot)) // len(slot.devices))

    def _last(self, slot: Slot) -> int:
        """Devices that the last stage has at most."""
        return len(slot.devices) if slot.last else slot.most_last

    def _make_steps(self, slot: Slot) -> Steps | None:
        if not slot.next:
            return None
        ways = [self.pieces.transfers(slot, other, self.send, forward=True) for other in slot.next]
        backs = [self.pieces.transfers(slot, other, self.grad, forward=False) for other in slot.next]
        links = [int(np.lcm(len(slot.devices), len(other.devices))) for other in slot.next]
        return Steps(
            slot.next,
            np.stack([one for one, _ in ways]),
            np.stack([one for one, _ in backs]),
            np.stack([every for _, every in ways]),
            np.stack([every for _, every in backs]),
            np.array([[(self.num - 1) // link] for link in links]),
            np.array([[max(0, (self.num - self._last(slot)) // link)] for link in links]),
            Rest(*map(np.stack, zip(*map(self.rest, slot.next), strict=True))),
        )

    def _make(self, slot: Slot) -> Rest:
        grid, num = self.pieces.grid, self.num
        piece = self.pieces.all(slot, slice(None))
        steps = self.steps(slot)
        if steps is None and not slot.last:
            return Rest(*[np.full(grid.num_places, BIG, dtype=np.int64)] * 8)
        after = self._after(slot, steps)
        f, r, e = piece.forward, piece.back, piece.after
        reach, linked = after.path[grid.ends], after.linked[grid.ends]
        own = stay(slot, num, piece, reach, linked, self._held(slot, after))
        fits = piece.fits & (reach < BIG)
        back = f + r
        load = np.maximum(own.load, back + after.load[grid.ends])
        left = np.maximum(own.left, load)
        x_last = f + after.last[grid.ends]
        done = most_of([load + e, f + after.done[grid.ends], own.start + x_last, *(work for _, work in own.work)])

        def least(values: Numbers) -> Numbers:
            return keep(grid.least(np.where(fits, values, BIG)))

        none = np.zeros(grid.num_places, dtype=np.int64)
        send = back_done = back_load = none
        if self.gpipe:
            again = np.maximum(own.around + own.again, back + after.back_load[grid.ends])
            back_load = least(again)
            back_done = least(most_of([again + e, own.around - r + piece.spent, f + after.back_done[grid.ends]]))
            send = least(np.maximum(self.before(slot) * f, after.send[grid.ends]))
        return Rest(
            path=least(own.around),
            last=least(np.maximum(own.around + e, x_last)),
            done=least(done),
            load=least(left),
            total=least(piece.both + after.total[grid.ends]),
            send=send,
            back_done=back_done,
            back_load=back_load,
        )

    def _held(self, slot: Slot, after: "_After") -> Held:
        if not self.pieces.stalls(slot):
            return Held()
        grid = self.pieces.grid
        enter = self.pieces.entry(slot, self.send, forward=True)
        leave = self.pieces.entry(slot, self.grad, forward=False)
        return Held(enter[grid.starts], leave[grid.starts], after.send_one[grid.ends], after.take_one[grid.ends])

    def _after(self, slot: Slot, steps: Steps | None) -> "_After":
        """What follows a slot, at every place where it may end."""
        if steps is None:
            last = np.full(self.pieces.grid.num_places, BIG, dtype=np.int64)
            last[-1] = 0
            return _After(*[last] * 11)
        rest, x, y = steps.rest, steps.x, steps.y
        send = back = back_load = np.zeros(1)
        if self.gpipe:
            send = least_of(np.maximum(steps.before * x, rest.send))
            back = least_of(x + rest.back_done)
            back_load = least_of(x + y + np.maximum(rest.back_load, rest.path + steps.most * y))
        return _After(
            path=least_of(x + y + rest.path),
            last=least_of(x + rest.last),
            done=least_of(x + rest.done),
            load=least_of(x + y + rest.load),
            linked=least_of(rest.path + np.maximum(steps.all_x + y, x + steps.all_y)),
            total=least_of(rest.total),
            send=send,
            back_done=back,
            back_load=back_load,
            send_one=least_of(x),
            take_one=least_of(y),
        )


@dataclass(frozen=True, slots=True)
class _After:
    """A `Rest` from the transfer before it on, least over what can be next."""

    path: Numbers
    last: Numbers
    done: Numbers
    load: Numbers
    linked: Numbers
    total: Numbers
    send: Numbers
    back_done: Numbers
    back_load: Numbers
    send_one: Numbers
    take_one: Numbers


def least_of(rows: Numbers) -> Numbers:
    """Returns the least of every column."""
    return keep(np.minimum.reduce(rows))


def most_of(values: Sequence[Numbers]) -> Numbers:
    """Returns the largest, element by element."""
    return reduce(np.maximum, values)


def keep(values: Numbers) -> Numbers:
    """Returns the values, infinity where they are larger."""
    found: Numbers = np.minimum(values, BIG)
    return found
