"""All layer intervals [begin, end) between legal cuts, as flat arrays: which there are, sums and maxima over each.

Boundaries 0 to K are the start of the chain, its legal cuts, and its end. The K (K + 1) / 2 intervals [begin, end) are
sorted by begin, then by end: the intervals with one begin are a slice, and a minimum over ends is one `reduceat`.

Shapes: `[intervals]` one entry per interval, `[boundaries]` one per boundary 0 to K, `[layers]` one per layer. Sums
over an interval are differences of prefix sums.
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
"""Nanoseconds, bytes, counts or numbers: int64, and if a sum could overflow, Python integers."""

BoolArray = NDArray[Any]

Rows = slice | IntArray
"""Some intervals: from one number to another, or by their numbers in any order."""

INF = 1 << 60
"""Stands for infinity in arrays of nanoseconds and bytes; the sum of two still fits in 64 bits."""

MAX_TIME = INF >> 14
"""Times of one action or transfer are cut off here, at 2^46 ns, so that sums of many stay below `INF`."""


def least_of(values: Iterable[IntArray]) -> IntArray:
    """Returns the least of several arrays, each number by itself."""
    found: IntArray = np.minimum.reduce(list(values))
    return found


def greatest_of(values: Iterable[IntArray]) -> IntArray:
    """Returns the greatest of several arrays, each number by itself."""
    found: IntArray = np.maximum.reduce(list(values))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeIntervals:
    """Some of the intervals between cuts, by begin, then by end.

    Attributes:
        rows: their numbers. [n]
        begins, ends: the boundaries of each. [n]
        first: where the intervals with each begin start, of the begins that occur. [begins that occur]
        num_boundaries: of the chain.
    """

    rows: Rows
    begins: IntArray
    ends: IntArray
    first: IntArray
    num_boundaries: int

    def min_per_begin(self, values: IntArray) -> IntArray:
        """Returns for each begin the minimum over its intervals; `INF` without any. [n] -> [boundaries]"""
        minima = np.full(self.num_boundaries, INF, dtype=np.int64)
        if len(self.first):
            minima[self.begins[self.first]] = np.minimum.reduceat(values, self.first)
        return minima


class IntervalIndex:
    """Which intervals there are, and where.

    Attributes:
        cuts: the layer that begins at each boundary. [boundaries]
        begins, ends: the boundaries of each interval. [intervals]
        row_offset: the number of the first interval with each begin. [boundaries]
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
        """Returns where the intervals with a begin are: those with end begin + 1, begin + 2, ..., K."""
        return slice(int(self.row_offset[begin]), int(self.row_offset[begin + 1]))

    def sums(self, values: Sequence[int]) -> IntArray:
        """Returns the sum of a figure of the layers over each interval. [layers] -> [intervals]"""
        # [layers + 1] -> [boundaries]
        at_boundaries = prefix_sums(values)[list(self.cuts)]
        sums: IntArray = at_boundaries[self.ends] - at_boundaries[self.begins]
        return sums

    def maxima(self, values: Sequence[int]) -> IntArray:
        """Returns the maximum of a figure of the layers over each interval. [layers] -> [intervals]"""
        # A unit is the layers from one boundary to the next; no interval divides it. [layers] -> [units]
        unit_maxima = np.maximum.reduceat(np.array(values, dtype=np.int64), self.cuts[:-1])
        # A running maximum from each begin on is in the order of the intervals with that begin.
        rows = [np.maximum.accumulate(unit_maxima[begin:]) for begin in range(len(unit_maxima))]
        return np.concatenate(rows)

    def sends_gradient(self, profile: ModelProfile) -> BoolArray:
        """Returns whether a stage of each interval sends a gradient back to the stage before. [intervals]"""
        sends: BoolArray = gradient_crosses(profile)[list(self.cuts)][self.begins]
        return sends

    @cached_property
    def every(self) -> SomeIntervals:
        """All intervals."""
        return self.some(slice(None))

    def some(self, rows: Rows) -> SomeIntervals:
        """Returns the intervals with some numbers, which ascend."""
        begins, ends = self.begins[rows], self.ends[rows]
        first = np.flatnonzero(np.diff(begins, prepend=-1))
        return SomeIntervals(rows=rows, begins=begins, ends=ends, first=first, num_boundaries=self.num_boundaries)

    def numbers(self, begins: IntArray, ends: IntArray) -> IntArray:
        """Returns the numbers of the intervals with some begins and ends."""
        numbers: IntArray = self.row_offset[begins] + ends - begins - 1
        return numbers
