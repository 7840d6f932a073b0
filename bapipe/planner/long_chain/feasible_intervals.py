"""Which runs of layers a slot may hold within a limit: for every start, those up to some end.

The more layers, the more time and memory they take. Where that is not so, as with all-reduces in buckets, a run counts
as little as the least of the longer ones; so nothing here exceeds what the judge says.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.stage_candidates import ReplicaCost, StageCostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckReplica:
    """What one device of a slot does with the layers before each place.

    Attributes:
        forward, back: sums of F, and of what the stage before waits for, of one micro-batch.
        num_microbatches: how many it runs.
        apart: F of them that it cannot run while one micro-batch goes down and back; it runs no other backward either.
    """

    forward: IntArray
    back: IntArray
    num_microbatches: int
    apart: int

    @property
    def beside(self) -> IntArray:
        """What a step takes beside one micro-batch's way down and back, for the layers before each place."""
        found: IntArray = (self.num_microbatches - 1) * self.back + self.apart * self.forward
        return found


class IntervalLimits:
    """For slots alike but for what they keep in memory, the least limits that allow each run.

    Attributes:
        plain, again: of stages that do not recompute, and that do; flat, run by run.
    """

    __slots__ = ("again", "plain")

    def __init__(self, plain: IntArray, again: IntArray) -> None:
        self.plain, self.again = plain, again


class FeasibleIntervals:
    """The windows of all slots at one micro-batch size.

    Attributes:
        head: F of one micro-batch, at least, in all layers before each place.
        before: F and backward of it.
    """

    def __init__(self, pieces: StageCostTable, slots: Sequence[StagePlacement]) -> None:
        self.pieces, self.grid = pieces, pieces.grid
        self._sums: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._limits: dict[Hashable, IntervalLimits] = {}
        self._fitting: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._pairs: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._ends: dict[int, tuple[IntArray, IntArray]] = {}
        self._limit_ns = -1
        self._held = [self._rising(sizes.held) for sizes in pieces.sizes]
        one_of_each = {(slot.devices, slot.turns.splits, slot.turns.joins): slot for slot in slots}
        self.before = _sums(np.minimum.reduce([np.diff(self.times(slot)) for slot in one_of_each.values()]))
        heads = [self._sums_of(slot, c)[0] for slot in one_of_each.values() for c in slot.devices]
        self.head = _sums(np.minimum.reduce([np.diff(head) for head in heads]))

    def times(self, slot: StagePlacement) -> IntArray:
        """Returns F and backward of one micro-batch, at least, summed over the layers before each place."""
        found = [forward + back for forward, back in map(self._sums_of, [slot] * len(slot.devices), slot.devices)]
        return found[0] if len(set(slot.devices)) == 1 else _sums(np.minimum.reduce([np.diff(row) for row in found]))

    def turn(self, slot: StagePlacement, bounds: LowerBound) -> BottleneckReplica:
        """Returns the device of a slot that runs the most micro-batches."""
        shares = slot.turns.shares
        k = max(range(len(shares)), key=lambda k: shares[k].num_microbatches)
        forward, back = self._sums_of(slot, slot.devices[k])
        num = shares[k].num_microbatches
        kept = max((kept for kept, _, _ in shares[k].points), default=num)
        first = bounds.rests.before(slot) if bounds.rests.gpipe else 0  # F that are over before any backward
        return BottleneckReplica(forward=forward, back=back, num_microbatches=num, apart=max(num - kept, first))

    def _sums_of(self, slot: StagePlacement, c: int) -> tuple[IntArray, IntArray]:
        key = (c, slot.turns.splits, slot.turns.joins)
        if key not in self._sums:
            part = self.pieces.part(slot, slot.devices.index(c), slice(None))
            single = self.grid.first[:-1]  # the runs from each place to the next
            slack = 0 if self.pieces.classes[c].device.speed == 1.0 else 2  # each run's times are rounded
            self._sums[key] = (
                _sums(np.maximum(part.forward[single] - slack, 0)),
                _sums(np.maximum(part.back[single] - slack, 0)),
            )
        return self._sums[key]

    def limits(self, slot: StagePlacement) -> IntervalLimits:
        """Returns the limits that a device's own work sets.

        It comes after F of the layers before; then all-reduces and the update, or the backward of those layers. It
        contains one micro-batch's way down and back.
        """
        most: dict[int, int] = {}
        for c, share in zip(slot.devices, slot.turns.shares, strict=True):
            most[c] = max(most.get(c, 0), share.num_microbatches)
        turns = slot.turns
        key = (slot.devices, tuple(most.items()), turns.splits, turns.joins, tuple(sorted(map(str, turns.ends))))
        if key not in self._limits:
            shares = list(zip(slot.devices, (share.num_microbatches for share in turns.shares), strict=True))
            parts = [self.pieces.part(slot, shares.index(device), slice(None)) for device in most.items()]
            plain = np.maximum.reduce([self._limit_ns_of(part, part.back) for part in parts])
            again = np.maximum.reduce([self._limit_ns_of(part, part.back + part.forward) for part in parts])
            self._limits[key] = IntervalLimits(self._rising(plain), self._rising(again))
        return self._limits[key]

    def _limit_ns_of(self, part: ReplicaCost, back: IntArray) -> IntArray:
        starts, num = self.grid.starts, part.num_microbatches
        turn, around = num * (part.forward + back), (self.before[-1] - self.before)[starts]
        done = self.head[starts] + np.maximum(turn + (num - 1) * part.rest, around) + part.rest + part.end
        found: IntArray = np.maximum(done, self.before[starts] + turn)
        return found

    def forget(self) -> None:
        """Drops the limits, which are large; they are made again when asked for."""
        self._limits.clear()
        self._ends.clear()

    def ends(self, limits: IntervalLimits, limit_ns: int) -> tuple[IntArray, IntArray]:
        """Returns for each start the last end that a limit allows, without and with recomputation."""
        if limit_ns != self._limit_ns:
            self._limit_ns = limit_ns
            self._ends.clear()
        if id(limits) not in self._ends:
            self._ends[id(limits)] = self._last(limits.plain <= limit_ns), self._last(limits.again <= limit_ns)
        return self._ends[id(limits)]

    def fitting(self, slot: StagePlacement) -> tuple[IntArray, IntArray]:
        """Returns for each start the last end of a run that fits, without recomputation and with it."""
        shares = {(c, s.points, s.num_microbatches) for c, s in zip(slot.devices, slot.turns.shares, strict=True)}
        recompute = self.pieces.may_recompute and slot.place is None
        key = (tuple(sorted(shares)), slot.receives, recompute)
        if key not in self._fitting:
            plain = again = np.full(self.grid.num_places, self.grid.num_places - 1)
            for c, points, num in sorted(shares):
                sizes = self.pieces.sizes[c]
                room = self.pieces.classes[c].limit_bytes - self._held[c]
                if slot.receives:
                    room = room - num * sizes.incoming
                stash, left, kept = sizes.stash, sizes.left, sizes.incoming
                plain = np.minimum(plain, self._last(_most([n * stash + late * left for n, _, late in points]) <= room))
                if recompute:
                    most = _most([n * kept + whole * stash + late * left for n, whole, late in points])
                    again = np.minimum(again, self._last(most <= room))
            self._fitting[key] = plain, np.maximum(plain, again) if recompute else plain
        return self._fitting[key]

    def transfers(self, bounds: LowerBound, slot: StagePlacement, other: StagePlacement) -> tuple[IntArray, IntArray]:
        """Returns both transfers of one micro-batch at every place, and how long the busiest link takes for all."""
        key = (slot.devices, other.devices, slot.place, other.place, bounds.num)
        if key not in self._pairs:
            x, all_x = self.pieces.transfers(slot, other, bounds.rests.send, forward=True)
            y, all_y = self.pieces.transfers(slot, other, bounds.rests.grad, forward=False)
            self._pairs[key] = x + y, np.maximum(all_x + y, x + all_y)
        return self._pairs[key]

    def _rising(self, flat: IntArray) -> IntArray:
        """Returns of each run the least over the runs of the same start that are as long or longer."""
        found = flat.copy()
        for place in range(self.grid.num_places - 1):
            row = found[self.grid.row(place)][::-1]
            np.minimum.accumulate(row, out=row)
        return found

    def _last(self, allowed: IntArray) -> IntArray:
        """Returns for each start the last end, where of its runs the first ones are allowed; itself where none is."""
        counts = np.add.reduceat(allowed, self.grid.first[:-1], dtype=np.int64)
        return np.append(counts, 0) + np.arange(self.grid.num_places)


def _sums(values: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(values)])


def _most(values: Sequence[IntArray]) -> IntArray:
    found: IntArray = np.maximum.reduce(list(values))
    return found
