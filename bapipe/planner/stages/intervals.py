"""All layer intervals [begin, end) between legal cuts, as flat arrays, with sums and maxima over each interval.

Boundaries 0 to K are the start of the chain, its legal cuts, and its end. The K (K + 1) / 2 intervals [begin, end) are
sorted by begin, then by end. So the intervals with one begin are a slice (a *row*), and a minimum over ends is one
`reduceat`.

Shapes: `[intervals]` one entry per interval, `[boundaries]` one per boundary 0 to K, `[layers]` one per layer, `[rows]`
one per interval of a selection of type `Rows`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.formats.profile import ModelProfile
from bapipe.simulator.interval_costs import gradient_crosses, prefix_sums

IntArray = NDArray[Any]
"""Nanoseconds, bytes, counts or indices: int64, or Python integers where a sum could overflow."""

BoolArray = NDArray[Any]

Rows = slice | IntArray
"""A selection of intervals: a slice, or an array of their indices."""

MANY_BOUNDARIES = 200
"""In longer chains, half of the random moves of cuts are multiplied by the number of boundaries divided by this."""

INF = 1 << 60
"""Stands for infinity in arrays of nanoseconds and bytes; the sum of two still fits in 64 bits."""

MAX_TIME = INF >> 14
"""Longer times of an action or a transfer count as this, 2^46 ns, so that sums of many stay below `INF`."""


def least_of(values: Iterable[IntArray]) -> IntArray:
    """Returns the element-wise minimum of several arrays of one shape; at least one."""
    found: IntArray = np.minimum.reduce(list(values))
    return found


def greatest_of(values: Iterable[IntArray]) -> IntArray:
    """Returns the element-wise maximum of several arrays of one shape; at least one."""
    found: IntArray = np.maximum.reduce(list(values))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeIntervals:
    """A selection of intervals, sorted by begin, then by end.

    Attributes:
        rows: their indices among all intervals. [n]
        begins, ends: the boundaries of each. [n]
        first: for each begin that occurs, the position in this selection of its first interval. [begins that occur]
        num_boundaries: the number of boundaries of the chain.
    """

    rows: Rows
    begins: IntArray
    ends: IntArray
    first: IntArray
    num_boundaries: int

    def min_per_begin(self, values: IntArray) -> IntArray:
        """Returns for each begin the minimum over its intervals; `INF` if it has none. [n] -> [boundaries]"""
        minima = np.full(self.num_boundaries, INF, dtype=np.int64)
        if len(self.first):
            minima[self.begins[self.first]] = np.minimum.reduceat(values, self.first)
        return minima


class IntervalIndex:
    """All intervals of a chain, and the index of each in flat arrays.

    Attributes:
        cuts: the layer that begins at each boundary; the last one is the number of layers. [boundaries]
        begins, ends: the boundaries of each interval. [intervals]
        row_offset: the index of the first interval with each begin. [boundaries]
    """

    def __init__(self, cuts: Sequence[int]) -> None:
        self.cuts = tuple(cuts)
        self.num_boundaries = len(cuts)
        last = len(cuts) - 1
        # For K = 3: begins 0 0 0 1 1 2, ends 1 2 3 2 3 3, row_offset 0 3 5 6.
        self.begins = np.repeat(np.arange(last), np.arange(last, 0, -1))
        self.ends = np.concatenate([np.arange(begin + 1, last + 1) for begin in range(last)])
        self.row_offset = np.concatenate([[0], np.cumsum(np.arange(last, 0, -1))])

    def row(self, begin: int) -> slice:
        """Returns the slice of the intervals with a begin: their ends are begin + 1, begin + 2, ..., K."""
        return slice(int(self.row_offset[begin]), int(self.row_offset[begin + 1]))

    def sums(self, values: Sequence[int]) -> IntArray:
        """Returns the sum over the layers of each interval. [layers] -> [intervals]"""
        # [layers + 1] -> [boundaries]
        at_boundaries = prefix_sums(values)[list(self.cuts)]
        sums: IntArray = at_boundaries[self.ends] - at_boundaries[self.begins]
        return sums

    def maxima(self, values: Sequence[int]) -> IntArray:
        """Returns the maximum over the layers of each interval. [layers] -> [intervals]"""
        # A unit is the layers between a boundary and the next; no interval divides it. [layers] -> [units]
        unit_maxima = np.maximum.reduceat(np.array(values, dtype=np.int64), self.cuts[:-1])
        # The running maxima from a begin on are those of the intervals with that begin, in their order.
        rows = [np.maximum.accumulate(unit_maxima[begin:]) for begin in range(len(unit_maxima))]
        return np.concatenate(rows)

    def sends_gradient(self, profile: ModelProfile) -> BoolArray:
        """Returns whether a stage with each interval sends a gradient back to the previous one. [intervals]"""
        sends: BoolArray = gradient_crosses(profile)[list(self.cuts)][self.begins]
        return sends

    @cached_property
    def every(self) -> SomeIntervals:
        """All intervals."""
        return self.some(slice(None))

    def some(self, rows: Rows) -> SomeIntervals:
        """Returns a selection of intervals; their indices must ascend."""
        begins, ends = self.begins[rows], self.ends[rows]
        first = np.flatnonzero(np.diff(begins, prepend=-1))
        return SomeIntervals(rows=rows, begins=begins, ends=ends, first=first, num_boundaries=self.num_boundaries)

    def numbers(self, begins: IntArray, ends: IntArray) -> IntArray:
        """Returns the indices of the intervals with these begins and ends; shapes broadcast."""
        numbers: IntArray = self.row_offset[begins] + ends - begins - 1
        return numbers
