"""Decides whether any plan can be within a step time, with the rings of early stages behind backwards of later ones.

The bounds of a stage in `prefix_bound.py` end with its own rings, or with the way back of its last micro-batch. But
every earlier stage has the last micro-batches of a later one on their way back before it, several of them on one
replica, and only then the rings of its own gradients: its *delay*, beyond the way back of one micro-batch. So the
dynamic programme over prefixes has levels: of what the longest delay so far is. A level is a range, of which the limits
of later stages use the lower end (docs/algorithm.md, Many devices).

Many kinds of plans are decided at once, as numpy takes hardly longer for many prefixes than for a few.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.prefix_bound import ROUNDING_NS, PrefixBound
from bapipe.planner.device_line.prefixes import Prefixes
from bapipe.planner.device_line.replica_weights import FloatArray

DENSITY = 0.8
"""Delays count each micro-batch left behind as this part of all B of one, divided by the devices."""

NUM_LEVELS, STEPS_OF_LEVEL = 48, 8
"""Levels of delays, and the steps of each that tables of delays tell apart."""

NUM_STEPS = 2 * NUM_LEVELS * STEPS_OF_LEVEL

MAX_CELLS = 201
"""Boundaries in the tables of delays; in longer chains several count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKinds:
    """Kinds of plans that are decided at once. All [kinds].

    Attributes:
        fewest_cuts, most_cuts: between their stages.
        last_fewest, last_most: the replicas of their last stage.
    """

    fewest_cuts: IntArray
    most_cuts: IntArray
    last_fewest: IntArray
    last_most: IntArray


class RingBound:
    """The problem of a prefix bound on alike devices, with 1F1B or GPipe."""

    def __init__(self, prefix: PrefixBound, longest_ns: float) -> None:
        """Delays above `longest_ns` are not told apart."""
        self.prefix, speed = prefix, prefix.max_speed
        self.density_ns = DENSITY * float(prefix.least.backward[-1]) / speed / prefix.num_devices
        # As many micro-batches but one are each the last one of a replica that has the most.
        most, num = prefix.groups.most, prefix.num_microbatches
        self.left = np.minimum(num - 1 - (-(-num // most) - 1) * most, (num - 1) // 2)  # [groups]
        self.delays = _Delays(prefix, self.left, self.density_ns, longest_ns)

    def feasible(
        self, kinds: PlanKinds, limit_ns: int, deadline: Deadline, *, has_delays: bool, may_stop: bool
    ) -> "NDArray[np.bool_]":
        """Returns which kinds of plans the relaxation has within a step time. [kinds]

        Args:
            has_delays: whether delays count.
            may_stop: whether one kind that it has is enough.
        """
        return _Decision(self, kinds, limit_ns * (1 + 1e-12), has_delays=has_delays).run(deadline, may_stop=may_stop)


class _Decision:
    """Furthest boundaries by kind of plan, level of the delay so far, devices and cuts."""

    def __init__(self, bound: RingBound, kinds: PlanKinds, limit: float, *, has_delays: bool) -> None:
        self._bound, self._prefix, self._kinds, self._limit = bound, bound.prefix, kinds, limit
        prefix = bound.prefix
        self._delays = bound.delays if has_delays else None
        self._num_levels = NUM_LEVELS if has_delays else 1
        self._first = prefix.first_begins(limit, kinds.fewest_cuts, kinds.last_most)
        self._last = len(prefix.line.cuts) - 1
        shape = kinds.fewest_cuts.size, self._num_levels, prefix.num_devices + 1, int(kinds.most_cuts.max()) + 2
        self._furthest = np.full(shape, -1, dtype=np.int32)
        self._furthest[:, 0, 0, 0] = 0
        self._reached = np.full(shape[:2] + shape[3:], -1, dtype=np.int32)  # with one device less, and no more delay
        self._is_feasible = np.zeros(kinds.fewest_cuts.size, dtype=bool)

    def run(self, deadline: Deadline, *, may_stop: bool) -> "NDArray[np.bool_]":
        num = self._prefix.num_devices
        for position in range(num + 1):
            deadline.check()
            self._is_feasible |= (self._furthest[:, :, position] == self._last).any(axis=(1, 2))
            if self._is_feasible.all() or (may_stop and self._is_feasible.any()):
                break
            if position < num:
                # Devices may stay idle.
                here, following = self._furthest[:, :, position], self._furthest[:, :, position + 1]
                np.maximum(following, here, out=following)
                self._extend(position)
        return self._is_feasible

    def _extend(self, position: int) -> None:
        """Adds a stage to all prefixes of some devices that others do not stand for."""
        prefix, kinds = self._prefix, self._kinds
        layer = self._furthest[:, :, position]
        cuts = np.arange(layer.shape[2])
        useful = (layer >= self._first[:, position, None, None]) & (cuts <= kinds.most_cuts[:, None, None])
        useful &= ~self._is_feasible[:, None, None]
        # One device less and as far, or less delay.
        reached = np.maximum.accumulate(layer, axis=1)
        useful[:, 1:] &= layer[:, 1:] > reached[:, :-1]
        useful &= layer > self._reached
        self._reached = reached
        if self._delays is None:
            # Or fewer cuts, with as few transfers to come; from delays more cuts take more transfers.
            reached = np.where(cuts >= kinds.fewest_cuts[:, None, None], reached, -1)
            useful[:, :, 1:] &= layer[:, :, 1:] > np.maximum.accumulate(reached, axis=2)[:, :, :-1]
        kind, level, cut = np.nonzero(useful)
        numbers, groups = prefix.numbers_within(prefix.num_devices - position)
        if kind.size == 0 or groups.size == 0:
            return
        prefixes = Prefixes(
            begins=layer[kind, level, cut].astype(np.int64),
            cuts=cut,
            fewest_cuts=kinds.fewest_cuts[kind],
            last_fewest=kinds.last_fewest[kind],
            last_most=kinds.last_most[kind],
        )
        known = self._furthest[kind[:, None], level[:, None], position + numbers, cut[:, None] + 1]
        wanted = np.maximum(known + 1, self._first[kind[:, None], position + numbers])
        delays = None
        if self._delays is not None:
            delays = self._delays.from_ns(level)[:, None] + self._bound.left[groups] * self._bound.density_ns
            delays = np.maximum(delays - prefix.forced_transfers(position, cut)[:, None], 0.0)
        ends = prefix.last_ends(position, prefixes, groups, self._limit, at_least=wanted, delays=delays)
        self._place(position + numbers, prefixes, kind, level, ends, wanted)

    def _place(
        self, devices: IntArray, prefixes: Prefixes, kind: IntArray, level: IntArray, ends: IntArray, wanted: IntArray
    ) -> None:
        """Notes the ends of stages behind some prefixes, each in the levels of its delay. [prefixes, groups]"""
        begins = prefixes.begins
        # Or none: the layers of a plan's stage may lie before, if the devices before it can do more than theirs.
        needs_cuts = prefixes.cuts < prefixes.fewest_cuts
        s, g = np.nonzero((ends >= wanted) & ((ends > begins[:, None]) | needs_cuts[:, None]))
        end, at = ends[s, g], level[s]
        while s.size:
            within = end
            if self._delays is not None:
                within = np.minimum(end, self._delays.last_ends(g, begins[s], prefixes.cuts[s], at))
            within = np.where(needs_cuts[s], np.maximum(within, begins[s]), within)
            put = (within >= wanted[s, g]) & ((within > begins[s]) | needs_cuts[s])
            into = kind[s[put]], at[put], devices[g[put]], prefixes.cuts[s[put]] + 1
            np.maximum.at(self._furthest, into, within[put].astype(np.int32))
            more = np.flatnonzero((within < end) & (at + 1 < self._num_levels))
            s, g, end, at = s[more], g[more], end[more], at[more] + 1


class _Delays:
    """How much longer than the way back a stage takes behind the last backward of any later one.

    Let y + 1 micro-batches leave the later stage at the end, and R be the devices of the earlier one, with backward b.
    The delay is at least e + floor(y / R) b, and that at least e + h + y density, with the smallest h over all y. Here
    e is B of the first bucket and the rings, less B of all layers before the stage's end and the transfers back over
    the cuts before it, but 0 at least. Levels are ranges of e + h.
    """

    def __init__(self, prefix: PrefixBound, left: IntArray, density_ns: float, longest_ns: float) -> None:
        self._prefix, self._most_left, self._density = prefix, int(left.max()), density_ns
        self._least = -self._most_left * density_ns
        self._step = (longest_ns - self._least) / (NUM_LEVELS * STEPS_OF_LEVEL)
        self._num = len(prefix.line.cuts)
        self._cells = np.unique(np.linspace(0, self._num - 1, MAX_CELLS).astype(np.int64))
        # A stage counts as if it began at the last boundary of a cell, and ended at the first one of another.
        self._cell_of = np.searchsorted(self._cells, np.arange(self._num))
        self._firsts = np.concatenate([[0], self._cells[:-1] + 1])
        tables = [self._tables(g) for g in range(prefix.groups.fewest.size)]
        self._by_filler = np.stack([table for table, _ in tables])  # [groups, cells, steps]
        self._by_rings = np.stack([table for _, table in tables])
        back = np.cumsum(np.append(0.0, np.sort(prefix.back_ns)[::-1]))
        self._steps_back = np.ceil(back / self._step).astype(np.int64)  # at most, over so many cuts

    def from_ns(self, levels: IntArray) -> FloatArray:
        """Returns the lower ends of levels; the first one has none."""
        ends = self._least + levels * (STEPS_OF_LEVEL * self._step)
        return np.where(levels == 0, -np.inf, ends)

    def last_ends(self, groups: IntArray, begins: IntArray, cuts: IntArray, levels: IntArray) -> IntArray:
        """Returns the last ends of stages whose delays are no more than some levels; fits all arguments."""
        cell, below = self._cell_of[begins], (levels + 1) * STEPS_OF_LEVEL
        of_filler = self._by_filler[groups, cell, below]
        below = below + self._steps_back[np.minimum(cuts, self._steps_back.size - 1)]
        of_rings = self._by_rings[groups, cell, np.minimum(below, NUM_STEPS)]
        is_any = (levels == NUM_LEVELS - 1) | (below > NUM_STEPS)
        return np.where(is_any, self._num - 1, np.minimum(of_rings, of_filler))

    def _between(self, sums: FloatArray) -> FloatArray:
        """Differences of prefix sums from the last boundary of a cell to the first one of another. [cells, cells]"""
        between: FloatArray = np.maximum(sums[self._firsts][None, :] - sums[self._cells][:, None], 0.0)
        return between

    def _tables(self, g: int) -> tuple[IntArray, IntArray]:
        """The last ends of stages of a class with h, and e + h, below so many steps from the least. [cells, steps]"""
        prefix, most, y = self._prefix, int(self._prefix.groups.most[g]), self._most_left
        speed = prefix.max_speed
        backward = self._between(prefix.least.backward) / speed
        whole = y // most
        filler = np.full_like(backward, -min(most - 1, y) * self._density)
        if whole >= 1:
            filler = np.minimum(filler, (whole - 1) * backward - (whole * most - 1) * self._density)
            filler = np.minimum(filler, whole * backward - y * self._density)
        filler -= ROUNDING_NS * (y // int(prefix.groups.fewest[g]) + 3)
        # Until the first bucket is full, without the way back from the stage's end.
        first = np.minimum.reduceat(prefix.least.first_bucket - prefix.least.backward, self._firsts)[None, :]
        first = np.minimum(first, -prefix.least.before_gradients[self._cells][:, None])
        rings = prefix.rings.least_ns(g, self._between(prefix.gradients)) + first / speed
        return self._last_cells(filler), self._last_cells(rings + filler)

    def _last_cells(self, values: FloatArray) -> IntArray:
        """The last boundary whose value, from each cell on, is below so many steps. [cells, steps]"""
        num_cells, num_steps = values.shape[0], NUM_STEPS
        least = np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1]  # of longer stages
        step = np.clip(np.floor((least - self._least) / self._step), 0, num_steps).astype(np.int64)
        flat = step + np.arange(num_cells)[:, None] * (num_steps + 1)
        of_step = np.bincount(flat.ravel(), minlength=num_cells * (num_steps + 1)).reshape(num_cells, -1)
        count = np.cumsum(of_step, axis=1) - of_step  # with fewer steps
        last: IntArray = self._cells[np.maximum(count - 1, 0)]
        return last
