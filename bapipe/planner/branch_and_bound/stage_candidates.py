"""What a stage is worth to a bound: its times on the devices of a slot, for every run of layers it may hold."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.branch_and_bound.devices import DeviceClass, Links
from bapipe.planner.branch_and_bound.intervals import (
    INF,
    IntArray,
    IntervalIndex,
    IntervalMemory,
    IntervalTimes,
    transfer_ns,
)
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.schedules.table import Phase

ForbiddenIntervals = Callable[[StagePlacement, slice], IntArray | None]
"""Runs of layers that a slot must not hold, None where it may hold all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCandidates:
    """A stage with each of some runs of layers.

    Attributes:
        fits: whether its devices can hold it.
        recompute: whether they hold it with recomputation only.
        forward, back: least time over its devices of F, and of what the stage before waits for (B, or I alone).
        after: what must follow `back` of the last micro-batch: W where it is apart, all-reduces, the update.
        turns: for some devices, how many micro-batches they run, and the time of F and `back` of all of them.
        work: for the same devices, their number in the slot, and the time of F, I, W and all that follows the last.
        spent: the most of that without F.
        both: F, I and W of a micro-batch, least over the devices.
    """

    fits: IntArray
    recompute: IntArray
    forward: IntArray
    back: IntArray
    after: IntArray
    turns: tuple[tuple[int, IntArray], ...]
    work: tuple[tuple[int, IntArray], ...]
    spent: IntArray
    both: IntArray

    def only(self, j: int) -> "StageCandidates":
        """Returns the j-th run of layers alone."""
        at = slice(j, j + 1)
        return StageCandidates(
            fits=self.fits[at],
            recompute=self.recompute[at],
            forward=self.forward[at],
            back=self.back[at],
            after=self.after[at],
            turns=tuple((n, own[at]) for n, own in self.turns),
            work=tuple((k, own[at]) for k, own in self.work),
            spent=self.spent[at],
            both=self.both[at],
        )


class StageCostTable:
    """The stages of all slots at one micro-batch size."""

    def __init__(
        self,
        grid: IntervalIndex,
        classes: Sequence[DeviceClass],
        links: Links,
        times: Sequence[IntervalTimes],
        sizes: Sequence[IntervalMemory],
        *,
        recompute: bool,
        mask: ForbiddenIntervals,
    ) -> None:
        self.grid, self.classes, self.links = grid, classes, links
        self._times, self.sizes, self.may_recompute, self._mask = times, sizes, recompute, mask
        self._reduced: dict[Hashable, IntArray] = {}
        self._transfers: dict[tuple[Bandwidth, int], tuple[IntArray, IntArray]] = {}
        self._ways: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._rows: dict[tuple[int, int], tuple[StagePlacement, StageCandidates]] = {}

    def row(self, slot: StagePlacement, place: int) -> StageCandidates:
        """Returns the stages that start at a place."""
        key = (id(slot), place)
        if key not in self._rows:
            if len(self._rows) > 20_000:
                self._rows.clear()
            self._rows[key] = slot, self.all(slot, self.grid.row(place))
        return self._rows[key][1]

    def all(self, slot: StagePlacement, rows: slice) -> StageCandidates:
        """Returns the stages with the runs of layers in `rows`."""
        parts = [self.part(slot, k, rows) for k in self.different(slot)]
        plain = _most(part.lacks for part in parts) <= 0
        fits = plain
        again = np.zeros(plain.shape, dtype=bool)
        if self.may_recompute and not plain.all() and slot.place is None:
            fits = plain | (_most(part.lacks_again for part in parts) <= 0)
            again = fits & ~plain
        forbidden = self._mask(slot, rows)
        if forbidden is not None:
            fits = fits & ~forbidden
        backs = [part.back + part.forward * again for part in parts]
        boths = [part.forward + part.back + part.rest + part.forward * again for part in parts]
        shares = [part.num_microbatches for part in parts]
        work = [n * both + part.end for n, part, both in zip(shares, parts, boths, strict=True)]
        return StageCandidates(
            fits=fits,
            recompute=again,
            forward=_least(part.forward for part in parts),
            back=_least(backs),
            after=_least(part.rest + part.end for part in parts),
            turns=tuple((n, n * (part.forward + back)) for n, part, back in zip(shares, parts, backs, strict=True)),
            work=tuple((part.number, own) for part, own in zip(parts, work, strict=True)),
            spent=_most(own - n * part.forward for n, part, own in zip(shares, parts, work, strict=True)),
            both=_least(boths),
        )

    def lacks(self, slot: StagePlacement) -> IntArray:
        """Returns how many bytes too many each run of layers needs on the device that lacks most, at least."""
        parts = [self.part(slot, k, slice(None)) for k in self.different(slot)]
        plain = _most(part.lacks for part in parts)
        if self.may_recompute and slot.place is None:
            plain = np.minimum(plain, _most(part.lacks_again for part in parts))
        forbidden = self._mask(slot, slice(None))
        return plain if forbidden is None else np.where(forbidden, INF, plain)

    def transfers(
        self, slot: StagePlacement, other: StagePlacement, num_bytes: IntArray, forward: bool
    ) -> tuple[IntArray, IntArray]:
        """Returns of each of some transfers from a slot to the next one (or back) the least time, and the time that all
        micro-batches take on the link that is busiest.
        """
        if slot.place is not None and slot.place == other.place:
            none = np.zeros(len(num_bytes), dtype=np.int64)
            return none, none
        key = (slot.devices, other.devices, slot.turns.num_microbatches, id(num_bytes), forward)
        if key not in self._ways:
            self._ways[key] = self._way(slot, other, num_bytes, forward)
        return self._ways[key]

    def _way(
        self, slot: StagePlacement, other: StagePlacement, num_bytes: IntArray, forward: bool
    ) -> tuple[IntArray, IntArray]:
        counts = _counts(slot, other)
        links = {(a, b): self.links.between([a], [b]) for a, b in (p if forward else p[::-1] for p in counts)}
        times = {pair: self._transfer_ns(link, num_bytes) for pair, (link,) in links.items()}
        busiest = [count * times[p if forward else p[::-1]] for p, count in counts.items()]
        return _least(times.values()), _most(busiest)

    def stalls(self, slot: StagePlacement) -> bool:
        """Returns whether no device of a slot with one stage a device computes while it transfers."""
        return slot.place is None and not any(self.classes[c].device.overlaps_transfers for c in slot.devices)

    def entry(self, slot: StagePlacement, num_bytes: IntArray, forward: bool) -> IntArray:
        """Returns the least time of a transfer from any stage before a slot (or back); nothing at the start."""
        others = range(len(self.classes))
        links = self.links.between(others, slot.devices) if forward else self.links.between(slot.devices, others)
        times = _least(self._transfer_ns(link, num_bytes) for link in links) if links else np.zeros_like(num_bytes)
        times = times.copy()
        times[0] = 0
        return times

    def _transfer_ns(self, link: Bandwidth, num_bytes: IntArray) -> IntArray:
        key = (link, id(num_bytes))
        if key not in self._transfers:
            self._transfers[key] = num_bytes, transfer_ns(link, num_bytes)
        return self._transfers[key][1]

    def different(self, slot: StagePlacement) -> list[int]:
        """The devices of a slot, of those alike only the last one."""
        found = {
            (c, share.num_microbatches, share.points): k
            for k, (c, share) in enumerate(zip(slot.devices, slot.turns.shares, strict=True))
        }
        return sorted(found.values())

    def part(self, slot: StagePlacement, k: int, rows: slice) -> "ReplicaCost":
        c, share = slot.devices[k], slot.turns.shares[k]
        times, sizes = self._times[c], self.sizes[c]
        forward, backward = times.forward[rows], times.backward[rows]
        back, rest = backward, np.zeros_like(backward)
        if slot.turns.splits:
            back, rest = times.input_grad[rows], times.weight_grad[rows]
            if slot.turns.joins:
                both = np.minimum(back + rest, backward)
                back = np.minimum(back, both)
                rest = both - back
        held = sizes.held[rows]
        if slot.receives:
            held = held + share.num_microbatches * sizes.incoming[rows]
        if slot.returns:
            held = held + share.num_microbatches * sizes.returning[rows]
        limit, stash, kept = self.classes[c].limit_bytes, sizes.stash[rows], sizes.incoming[rows]
        left = sizes.left[rows]
        plain = [num * stash + late * left for num, _, late in share.points]
        again = [num * kept + whole * stash + late * left for num, whole, late in share.points]
        return ReplicaCost(
            number=k,
            num_microbatches=share.num_microbatches,
            forward=forward,
            back=back,
            rest=rest,
            end=times.update[rows] + self._sync_ns(slot, c, rows),
            lacks=held + _most(plain) - limit,
            lacks_again=held + _most(again) - limit,
        )

    def _sync_ns(self, slot: StagePlacement, c: int, rows: slice) -> IntArray:
        """What the all-reduces take after the last action of a device of class `c`, at least."""
        if len(slot.devices) == 1:
            return np.zeros_like(self._times[c].forward[rows])
        times = self._times[c]
        found = []
        for phase in sorted(slot.turns.ends):
            whole = phase is Phase.BACKWARD
            links = self.links.ring(slot.devices)
            beside = self.links.host_sum_link(slot.devices) is None
            key = (id(times), len(slot.devices), *links, whole, beside)
            if key not in self._reduced:
                self._reduced[key] = times.reduced_ns(len(slot.devices), links, whole, beside)
            last = times.backward[rows] if whole else times.weight_grad[rows]
            found.append(np.maximum(self._reduced[key][rows] - last, 0))
        return _least(found)


def _counts(slot: StagePlacement, other: StagePlacement) -> dict[tuple[int, int], int]:
    """How many micro-batches a device of a class hands to one of another class, by their classes.

    It is the most on one link, and where a slot has several classes what any two of them that meet have at least: that
    is the same with twins exchanged, which changes the order of the devices.
    """
    num = slot.turns.num_microbatches
    period = int(np.lcm(len(slot.devices), len(other.devices)))
    if len({*slot.devices}) > 1 or len({*other.devices}) > 1:
        return {
            (slot.devices[first % len(slot.devices)], other.devices[first % len(other.devices)]): num // period
            for first in range(period)
        }
    return {(slot.devices[0], other.devices[0]): -(-num // period)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCost:
    """A stage on one of its devices; `rest` and `end` follow its last `back`."""

    number: int
    num_microbatches: int
    forward: IntArray
    back: IntArray
    rest: IntArray
    end: IntArray
    lacks: IntArray
    lacks_again: IntArray


def _least(values: Iterable[IntArray]) -> IntArray:
    found: IntArray = np.minimum.reduce(list(values))
    return found


def _most(values: Iterable[IntArray]) -> IntArray:
    found: IntArray = np.maximum.reduce(list(values))
    return found
