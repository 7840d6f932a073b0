"""Decides whether any plan can be within a step time, with what the stages before its largest one cost at the end.

The pivot of a plan is a stage with the most devices. Its last micro-batches, as many as it has replicas, leave it no
earlier than its own work and round trips say. Each stage before it, with fewer devices, runs several of them on one
replica, and then sums its gradients: its *delay*, beyond the way back of one micro-batch that the bounds of a stage
count. A stage behind the pivot has the rings of the pivot behind its own work (docs/algorithm.md, Many devices).

The dynamic programme is that of `prefix_bound.py`, over rows: before the pivot one for each number of the pivot's
devices and for each level of the delay that its own work leaves room for, after the pivot one for each level of what
its rings take longer than the way back. Levels are ranges, of which a limit uses the end that allows more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.prefix_bound import ROUNDING_NS, PrefixBound
from bapipe.planner.device_line.replica_classes import MAX_PARTED

NUM_LEVELS, LEVELS_OF_STEP = 8, 64
"""Levels of delays: so many, each as wide as a step divided by this, and one without end."""

MAX_CELLS = 201
"""Boundaries in the tables of delays; in longer chains several count as one."""

MAX_CUTS = 48
"""Plans with more cuts count as if they had so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pivots:
    """Classes of pivots. All [pivots].

    Attributes:
        groups: the class of numbers of devices, of the prefix bound, that contains them.
        fewest, most: numbers of devices.
        burst: how many micro-batches at least are each the last one of a replica.
    """

    groups: IntArray
    fewest: IntArray
    most: IntArray
    burst: IntArray


class PivotBound:
    """The problem of a prefix bound on alike devices, with 1F1B or GPipe.

    Rows: those before the pivot, [pivots x levels]; one of plans whose largest stage has few devices; those behind the
    pivot, [pivots x levels].
    """

    def __init__(self, prefix: PrefixBound, level_ns: float, deadline: Deadline) -> None:
        """`level_ns` is the width of a level."""
        self.prefix = prefix
        self._pivots, max_other = self._pivot_classes()
        levels = np.arange(NUM_LEVELS + 1, dtype=np.float64) * level_ns
        self._from: NDArray[np.float64] = levels
        to = np.append(levels[1:], np.inf)
        num_pivots, num_levels = self._pivots.groups.size, levels.size
        self._num_before = num_pivots * num_levels
        # Of each row: the pivot; its level; the most devices of any stage, and of one that is added. The pivot is the
        # last stage of its class.
        pivots = np.repeat(np.arange(num_pivots), num_levels)
        self._pivot_of = np.concatenate([pivots, [-1], pivots])
        every_level = np.tile(np.arange(num_levels), num_pivots)
        self._level_of = np.concatenate([every_level, [0], every_level])
        largest = self._pivots.most[pivots]
        self._most = np.concatenate([largest, [max_other], largest])
        self._most_next = np.concatenate([largest, [max_other], self._pivots.fewest[pivots] - 1])
        delays = _Delays(prefix, to)
        self._ring_ends = delays.last_ends(1)
        self._delay_ends = np.zeros((num_pivots, *self._ring_ends.shape), dtype=np.int32)
        for pivot, burst in enumerate(self._pivots.burst.tolist()):
            deadline.check()
            self._delay_ends[pivot] = delays.last_ends(burst)

    def _pivot_classes(self) -> tuple[_Pivots, int]:
        """The classes, and the most devices of a stage that is no pivot wherever it is."""
        prefix = self.prefix
        num, groups = prefix.num_microbatches, prefix.groups
        rounds = -(-num // groups.most)
        pivots = np.flatnonzero(rounds <= MAX_PARTED)
        others = groups.most[rounds > MAX_PARTED]
        most = groups.most[pivots]
        burst = num - (rounds[pivots] - 1) * most
        return _Pivots(groups=pivots, fewest=groups.fewest[pivots], most=most, burst=burst), int(others.max(initial=0))

    def is_feasible(self, limit_ns: int, deadline: Deadline) -> bool:
        """Returns whether the relaxation has a plan within a step time."""
        num, last = self.prefix.num_devices, len(self.prefix.line.cuts) - 1
        limit = limit_ns * (1 + 1e-12)
        first = self._first_boundaries(limit)  # [rows, devices]
        # Furthest boundaries. [rows, devices, cuts]
        furthest = np.full((self._most.size, num + 1, min(MAX_CUTS, num, last) + 1), -1, dtype=np.int32)
        furthest[: self._num_before + 1, 0, 0] = 0
        for position in range(num):
            deadline.check()
            layer = furthest[:, position]
            if (layer[self._num_before :] == last).any():
                return True
            np.maximum(furthest[:, position + 1], layer, out=furthest[:, position + 1])  # devices may stay idle
            useful = (layer >= first[:, position, None]) & (layer < last)
            useful[:, 1:] &= layer[:, 1:] > np.maximum.accumulate(layer, axis=1)[:, :-1]
            rows, cuts = np.nonzero(useful)
            if rows.size:
                self._extend(furthest, position, _States(rows, cuts, layer[rows, cuts].astype(np.int64)), limit)
        return bool((furthest[self._num_before :, num] == last).any())

    def _first_boundaries(self, limit: float) -> IntArray:
        """The first boundaries behind which the devices from each position on can do all work. [rows, devices]

        The most work that devices can do is a dynamic programme over the class of their first stage, which does what
        the bounds work and round trip leave it, wherever it begins.
        """
        prefix, groups = self.prefix, self.prefix.groups
        num, v = prefix.num_devices, prefix.max_speed
        positions = np.arange(num)[:, None]
        work = np.diff(prefix.least.work)
        shares = np.diff(prefix.least.backward)[work > 0] / work[work > 0]
        n, every = prefix.counts[None, :], np.arange(groups.fewest.size)[None, :]
        slack = 2 * ROUNDING_NS * (prefix.num_microbatches + num) * (1 + 1 / v)
        most_of: dict[int, NDArray[np.float64]] = {}
        for most in set(self._most.tolist()):
            u = prefix.forwards_apart(positions, every, most)  # [devices, groups]
            share = np.where(u > n - 1, shares.max(initial=0), shares.min(initial=1))
            apart = u + (n - 1 - u) * share
            room = max(limit + slack - prefix.least.work[-1] / v, 0.0) * v
            stage = np.minimum((limit + slack) * v / n, room / np.maximum(apart, 1e-9))
            allowed = np.flatnonzero(groups.fewest <= most)
            total = np.zeros(num + 1)
            for position in range(num - 1, -1, -1):
                fit = allowed[groups.fewest[allowed] <= num - position]
                after = total[position + groups.fewest[fit]] + stage[position, fit]
                total[position] = max(total[position + 1], after.max(initial=0.0))
            most_of[most] = total
        can = np.array([most_of[most] for most in self._most.tolist()])
        first: IntArray = np.searchsorted(-(prefix.least.work[-1] - prefix.least.work), -can * (1 + 1e-9), side="left")
        return first

    def _extend(self, furthest: IntArray, position: int, states: "_States", limit: float) -> None:
        """Adds a stage to some prefixes."""
        fewest = self.prefix.groups.fewest
        groups = np.flatnonzero(fewest <= self.prefix.num_devices - position)
        pairs = states.pairs(np.zeros_like(states.rows))
        ends = self.prefix.last_ends(position, pairs.cuts, pairs.begins, groups, limit)[pairs.of_state]
        rows, begins = states.rows, states.begins
        pivot, level = self._pivot_of[rows], self._level_of[rows]
        before = np.flatnonzero(rows < self._num_before)
        self._place_pivot(furthest, position, states, before, ends, limit)
        delayed = self._delay_ends[pivot[before, None], level[before, None], groups[None, :], begins[before, None]]
        ends[before] = np.minimum(ends[before], delayed)
        behind = np.flatnonzero((rows > self._num_before) & (level > 0))
        if behind.size:
            later = states.at(behind)
            pairs = later.pairs(level[behind])
            rings: NDArray[np.float64] = self._from[pairs.values][:, None]
            delayed = self.prefix.delayed_ends(position, pairs.cuts, pairs.begins, groups, limit, rings)
            ends[behind] = np.minimum(ends[behind], delayed[pairs.of_state])
        ends[fewest[groups][None, :] > self._most_next[rows][:, None]] = -1
        s, g = np.nonzero(ends > begins[:, None])
        _raise(furthest, rows[s], position + fewest[groups[g]], states.cuts[s] + 1, ends[s, g])

    def _place_pivot(
        self, furthest: IntArray, position: int, every: "_States", before: IntArray, ends: IntArray, limit: float
    ) -> None:
        """Adds the pivot to prefixes of rows before it; `ends` are of all states without a delay. [states, groups]"""
        pivot = self._pivot_of[every.rows[before]]
        before = before[self._pivots.fewest[pivot] <= self.prefix.num_devices - position]
        if before.size == 0:
            return
        states = every.at(before)
        pivot, level = self._pivot_of[states.rows], self._level_of[states.rows]
        own = self._pivots.groups[pivot]
        columns, column = np.unique(own * self._from.size + level, return_inverse=True)
        groups, levels = columns // self._from.size, columns % self._from.size
        pairs = states.pairs(np.zeros_like(level))
        delayed = self.prefix.delayed_ends(
            position,
            pairs.cuts,
            pairs.begins,
            groups,
            limit,
            self._from[levels][None, :],
            self.prefix.groups.most[groups][None, :],
        )
        last = np.minimum(ends[before, own], delayed[pairs.of_state, column])
        # By the level of what its rings take longer than the way back. [states, levels]
        of_level = np.minimum(last[:, None], self._ring_ends[:, own, states.begins].T)
        s, z = np.nonzero(of_level > states.begins[:, None])
        into = self._num_before + 1 + pivot[s] * self._from.size + z
        _raise(furthest, into, position + self._pivots.fewest[pivot[s]], states.cuts[s] + 1, of_level[s, z])


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Distinct cuts, begins and another value of states, and which of them each state has."""

    cuts: IntArray
    begins: IntArray
    values: IntArray
    of_state: IntArray


@dataclass(frozen=True, slots=True)
class _States:
    """Prefixes of devices: their rows, cuts and the boundaries at which they end. [states]"""

    rows: IntArray
    cuts: IntArray
    begins: IntArray

    def at(self, indices: IntArray) -> "_States":
        return _States(self.rows[indices], self.cuts[indices], self.begins[indices])

    def pairs(self, values: IntArray) -> _Pairs:
        """Returns what tells the states apart, with a value of each. [states]"""
        most_cuts, most = MAX_CUTS + 1, int(values.max()) + 1
        keys, of_state = np.unique((self.begins * most_cuts + self.cuts) * most + values, return_inverse=True)
        return _Pairs(keys // most % most_cuts, keys // most // most_cuts, keys % most, of_state)


def _raise(furthest: IntArray, rows: IntArray, devices: IntArray, cuts: IntArray, ends: IntArray) -> None:
    """Raises the furthest boundaries of some prefixes."""
    np.maximum.at(furthest, (rows, devices, np.minimum(cuts, furthest.shape[2] - 1)), ends.astype(np.int32))


class _Delays:
    """By how much a stage before the pivot delays its end, beyond the way back of one micro-batch."""

    def __init__(self, prefix: PrefixBound, levels: "NDArray[np.float64]") -> None:
        """`levels` are the ends of the ranges of delays, ascending. [levels]"""
        self.prefix, self._levels = prefix, levels
        self._num = len(prefix.line.cuts)
        self._cells = np.unique(np.linspace(0, self._num - 1, MAX_CELLS).astype(np.int64))
        # A stage counts as if it began at the last boundary of a cell, and ended at the first one of another.
        self._cell_of = np.searchsorted(self._cells, np.arange(self._num))
        self._firsts = np.concatenate([[0], self._cells[:-1] + 1])
        self._backward = self._between(prefix.least.backward)
        self._rings = [self._ring_excess(g) for g in range(prefix.groups.fewest.size)]
        self._known: dict[tuple[int, int], IntArray] = {}

    def _between(self, sums: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """Differences of prefix sums from the last boundary of a cell to the first one of another. [cells, cells]"""
        between: NDArray[np.float64] = np.maximum(sums[self._firsts][None, :] - sums[self._cells][:, None], 0.0)
        return between

    def _ring_excess(self, g: int) -> "NDArray[np.float64]":
        """How much longer than the way back the rings of a stage take after its last B starts. [cells, cells]"""
        prefix, speed = self.prefix, self.prefix.max_speed
        # Until the first bucket is full, without the way back from the stage's end.
        first = np.minimum.reduceat(prefix.least.first_bucket - prefix.least.backward, self._firsts)[None, :]
        first = np.minimum(first, -prefix.least.before_gradients[self._cells][:, None])
        excess: NDArray[np.float64] = np.maximum(
            prefix.rings.least_ns(g, self._between(prefix.gradients)) + first / speed, 0
        )
        return excess

    def last_ends(self, burst: int) -> IntArray:
        """Returns the last end of stages whose delay by some micro-batches is in each level, or below it.

        [levels, groups, boundaries]
        """
        most = self.prefix.groups.most.tolist()
        return np.stack([self._ends_of(g, (burst - 1) // most[g]) for g in range(len(most))], axis=1)

    def _ends_of(self, g: int, num_before: int) -> IntArray:
        """The same of one class of stages, with `num_before` micro-batches before the last one. [levels, boundaries]"""
        if (g, num_before) not in self._known:
            delay = num_before * self._backward / self.prefix.max_speed + self._rings[g]
            delay -= ROUNDING_NS * (num_before + 2)
            least = np.minimum.accumulate(delay[:, ::-1], axis=1)[:, ::-1]  # of longer stages
            count = (least[None, :, :] <= self._levels[:, None, None]).sum(axis=2)
            self._known[g, num_before] = self._cells[np.maximum(count - 1, 0)][:, self._cell_of]
        return self._known[g, num_before]
