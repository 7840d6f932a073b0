"""What the stages still to come must add to the step, wherever they are cut: one dynamic programme over slots.

Letters as in `bapipe.planner.branch_and_bound.lower_bound`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bapipe.planner.branch_and_bound.intervals import INF, IntArray
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.stage_bound import TransferStalls, bound_stage, keep, maximum
from bapipe.planner.branch_and_bound.stage_candidates import StageCandidates, StageCostTable

UNUSED = np.zeros(0, dtype=np.int64)
"""Stands for what nobody asks for."""


class CostToGo(NamedTuple):
    """For every place, the least that a slot and those after it add, counted from the first F there.

    A row for each class of what is to come: of the largest e in it.

    Attributes:
        path: one micro-batch all the way down and back.
        last: the same, until all updates that its way back allows are done.
        done: until all updates are done.
        load: until the last r of the slot is on its way to the stage before.
        total: F and B of one micro-batch.
        send: for gpipe, what the F of all micro-batches add to those of the first one.
        back_done, back_load: for gpipe, `done` and `load` without that.
    """

    path: IntArray
    last: IntArray
    done: IntArray
    load: IntArray
    total: IntArray
    send: IntArray
    back_done: IntArray
    back_load: IntArray


@dataclass(frozen=True, slots=True)
class Transitions:
    """From a slot to each of those that can be next, a row for each class of its rest, at every place.

    Attributes:
        x, y: transfer times of one micro-batch.
        all_x, all_y: how long the busiest link takes for all of them.
        most: micro-batches that pass a link before the last one, a column.
        before: those that pass it before one of the last device's last ones.
        rest: of the next slots.
    """

    x: IntArray
    y: IntArray
    all_x: IntArray
    all_y: IntArray
    most: IntArray
    before: IntArray
    rest: CostToGo

    def at(self, rows: slice, places: slice) -> "Transitions":
        """Returns some rows, at some places."""
        part = (rows, places)
        return Transitions(
            self.x[part],
            self.y[part],
            self.all_x[part],
            self.all_y[part],
            self.most[rows],
            self.before[rows],
            CostToGo(*(values[part] for values in self.rest)),
        )


class CostToGoTable:
    """The rests of one schedule and micro-batch size. Each takes O(places**2) for every class.

    A short way for the last micro-batch needs stages with a small e, and less work for a device needs replicas, whose
    all-reduces make e large. So what is to come is told apart by its largest e, between `limits_ns`.
    """

    def __init__(
        self,
        pieces: StageCostTable,
        num_microbatches: int,
        send: IntArray,
        grad: IntArray,
        limits_ns: Sequence[int],
        *,
        gpipe: bool,
    ) -> None:
        self.pieces, self.num, self.gpipe = pieces, num_microbatches, gpipe
        self._limits = np.array(limits_ns, dtype=np.int64)
        self.num_classes = len(limits_ns) + 1
        self.send, self.grad = send, grad
        self._rests: dict[Hashable, tuple[StagePlacement, CostToGo]] = {}
        self._steps: dict[int, tuple[StagePlacement, Transitions | None]] = {}

    def rest(self, slot: StagePlacement) -> CostToGo:
        """Returns the least that a slot and those after it add, made when it is first asked for."""
        key = id(slot) if slot.alike is None else slot.alike
        if key not in self._rests:
            self._rests[key] = slot, self._make(slot)
        return self._rests[key][1]

    def steps(self, slot: StagePlacement) -> Transitions | None:
        """Returns the ways from a slot to the next ones; None where there is none."""
        if id(slot) not in self._steps:
            self._steps[id(slot)] = slot, self._make_steps(slot)
        return self._steps[id(slot)][1]

    def before(self, slot: StagePlacement) -> int:
        """Micro-batches that a device has passed on before one of the last ones of a device of the last stage."""
        return max(0, (self.num - self._last(slot)) // len(slot.devices))

    def _last(self, slot: StagePlacement) -> int:
        """Devices that the last stage has at most."""
        return len(slot.devices) if slot.last else slot.most_last

    def _make_steps(self, slot: StagePlacement) -> Transitions | None:
        if not slot.next:
            return None
        ways = [self.pieces.transfers(slot, other, self.send, forward=True) for other in slot.next]
        backs = [self.pieces.transfers(slot, other, self.grad, forward=False) for other in slot.next]
        links = [int(np.lcm(len(slot.devices), len(other.devices))) for other in slot.next]

        def rows(values: Sequence[object]) -> IntArray:
            return np.repeat(np.array(values), self.num_classes, axis=0)

        return Transitions(
            rows([one for one, _ in ways]),
            rows([one for one, _ in backs]),
            rows([every for _, every in ways]),
            rows([every for _, every in backs]),
            rows([[(self.num - 1) // link] for link in links]),
            rows([[max(0, (self.num - self._last(slot)) // link)] for link in links]),
            CostToGo(*map(np.concatenate, zip(*map(self.rest, slot.next), strict=True))),
        )

    def _make(self, slot: StagePlacement) -> CostToGo:
        piece = self.pieces.all(slot, slice(None))
        steps = self.steps(slot)
        if steps is None and not slot.last:
            return CostToGo(*[np.full((self.num_classes, self.pieces.grid.num_places), INF, dtype=np.int64)] * 8)
        after = self._after(slot, steps)
        own = np.searchsorted(self._limits, piece.after)
        rows = []
        for k in range(self.num_classes):
            chosen = _SuccessorCosts(*(self._at_ends(values, own, k) for values in after))
            rows.append(self._row(slot, piece, chosen, own <= k))
        return CostToGo(*map(np.stack, zip(*rows, strict=True)))

    def _at_ends(self, values: IntArray, own: IntArray, k: int) -> IntArray:
        """Returns for every run what follows it, where that makes the larger of its class and that of the rest k."""
        ends = self.pieces.grid.ends
        if not len(values):
            return UNUSED
        found: IntArray = values[k].take(ends)
        if self.num_classes > 1:
            found = np.where(own == k, np.minimum.reduce(values[: k + 1]).take(ends), found)
        return found

    def _row(self, slot: StagePlacement, piece: StageCandidates, after: "_SuccessorCosts", may: IntArray) -> CostToGo:
        """The least that a slot adds with the runs that it may hold, `after` being what follows each of them."""
        grid, num = self.pieces.grid, self.num
        f, r, e = piece.forward, piece.back, piece.after
        own = bound_stage(slot, num, piece, after.path, after.linked, self._held(slot, after))
        fits = piece.fits & may & (after.path < INF)
        load = np.maximum(own.load, f + r + after.load)
        left = np.maximum(own.left, load)
        last = f + after.last
        done = maximum([load + e, f + after.done, own.start + last, *(work for _, work in own.work)])

        def least(values: IntArray) -> IntArray:
            return keep(grid.least(np.where(fits, values, INF)))

        none = np.zeros(grid.num_places, dtype=np.int64)
        send = back_done = back_load = none
        if self.gpipe:
            again = np.maximum(own.around + own.again, f + r + after.back_load)
            back_load = least(again)
            back_done = least(maximum([again + e, own.around - r + piece.spent, f + after.back_done]))
            send = least(np.maximum(self.before(slot) * f, after.send))
        return CostToGo(
            path=least(own.around),
            last=least(np.maximum(own.around + e, last)),
            done=least(done),
            load=least(left),
            total=none if slot.place is None else least(piece.both + after.total),
            send=send,
            back_done=back_done,
            back_load=back_load,
        )

    def _held(self, slot: StagePlacement, after: "_SuccessorCosts") -> TransferStalls:
        if not self.pieces.stalls(slot):
            return TransferStalls()
        starts = self.pieces.grid.starts
        enter = self.pieces.entry(slot, self.send, forward=True)
        leave = self.pieces.entry(slot, self.grad, forward=False)
        return TransferStalls(enter[starts], leave[starts], after.one_x, after.one_y)

    def _after(self, slot: StagePlacement, steps: Transitions | None) -> "_SuccessorCosts":
        """What follows a slot, at every place where it may end, a row for each class; only what is asked for."""
        gpipe, stalls, looped = self.gpipe, self.pieces.stalls(slot), slot.place is not None
        if steps is None:
            last = np.full((self.num_classes, self.pieces.grid.num_places), INF, dtype=np.int64)
            last[0, -1] = 0
            none = UNUSED
            return _SuccessorCosts(
                *[last] * 5,
                *[last if looped else none],
                *[last if gpipe else none] * 3,
                *[last if stalls else none] * 2,
            )
        rest, x, y = steps.rest, steps.x, steps.y

        def least(values: IntArray) -> IntArray:
            return keep(np.minimum.reduce(values.reshape(-1, self.num_classes, values.shape[-1])))

        return _SuccessorCosts(
            path=least(x + y + rest.path),
            last=least(x + rest.last),
            done=least(x + rest.done),
            load=least(x + y + rest.load),
            linked=least(rest.path + np.maximum(steps.all_x + y, x + steps.all_y)),
            total=least(rest.total) if looped else UNUSED,
            send=least(np.maximum(steps.before * x, rest.send)) if gpipe else UNUSED,
            back_done=least(x + rest.back_done) if gpipe else UNUSED,
            back_load=least(x + y + np.maximum(rest.back_load, rest.path + steps.most * y)) if gpipe else UNUSED,
            one_x=least(x) if stalls else UNUSED,
            one_y=least(y) if stalls else UNUSED,
        )


class _SuccessorCosts(NamedTuple):
    """A `CostToGo` from the transfer before it on, least over what can be next."""

    path: IntArray
    last: IntArray
    done: IntArray
    load: IntArray
    linked: IntArray
    total: IntArray
    send: IntArray
    back_done: IntArray
    back_load: IntArray
    one_x: IntArray
    one_y: IntArray
