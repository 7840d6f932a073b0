"""What is known of the plans within a step time: what a micro-batch takes after each boundary, and how many cuts."""

from typing import NamedTuple

import numpy as np

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.device_line.trip_tables import ANY
from bapipe.planner.stages.intervals import IntArray


class Behind(NamedTuple):
    """What is known of plans within a step time.

    Attributes:
        limit: that step time, in ns.
        cuts: the minimum and the maximum number of cuts.
        lows, tables, gradients: see `Tables`; indexed by the number of stages before a boundary, where the last entry
            is for that many stages or more.
        numbers: the first micro-batch of each range of which `gradients` has a row.
        num_passes: how many times the tables have been filled for that step time.
    """

    limit: float
    cuts: tuple[int, int]
    lows: IntArray
    tables: tuple[Floats, ...]
    gradients: tuple[Floats, ...]
    numbers: IntArray
    num_passes: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the tables."""
        return sum(table.nbytes for table in (*self.tables, *self.gradients))

    def num_left(self, num_tables: int) -> int:
        """Returns how many pairs of devices and boundary any stages may reach, in the first `num_tables` tables."""
        return sum(int(np.isfinite(table[0]).sum()) for table in self.tables[:num_tables])

    def first_ends(self, end: int) -> IntArray:
        """Returns the first boundary at which a first stage may end, by its devices; `end` if there is none."""
        is_reached = np.isfinite(self.behind_stages(1, or_more=False)[0])
        return np.where(is_reached.any(axis=1), self.lows + is_reached.argmax(axis=1), end)

    def firsts(self) -> IntArray:
        """Returns the numbers of devices that a first stage may have."""
        return np.flatnonzero(np.isfinite(self.behind_stages(1, or_more=False)[0]).any(axis=1))

    def ends_of_first(self, num_replicas: int) -> IntArray:
        """Returns the boundaries at which a first stage of `num_replicas` devices may end."""
        is_reached = np.isfinite(self.behind_stages(1, or_more=False)[0, num_replicas])
        ends: IntArray = np.flatnonzero(is_reached) + self.lows[num_replicas]
        return ends

    def behind_stages(self, num_stages: int, *, or_more: bool) -> Floats:
        """Returns the table of what is known after `num_stages` stages, or after that many or more."""
        tables = self.tables[min(num_stages, len(self.tables) - 1) :]
        return np.minimum.reduce(tables) if or_more else tables[0]

    def gradients_behind(self, num_stages: int, numbers: IntArray, *, or_more: bool) -> Floats:
        """Returns when gradients arrive, for micro-batches from each of `numbers` to the next; see `behind_stages`."""
        begin = min(num_stages, len(self.tables) - 1)
        if self.numbers.size * numbers.size == 0:
            of_any = self.behind_stages(num_stages, or_more=or_more)[ANY]
            return np.repeat(of_any[..., None], numbers.size, axis=-1)
        tables = self.gradients[begin:]
        known = np.minimum.reduce(tables) if or_more else tables[0]
        first = np.searchsorted(self.numbers, numbers, side="right") - 1
        after = np.append(np.searchsorted(self.numbers, numbers[1:], side="left"), self.numbers.size)
        return np.stack([known[..., a:b].min(axis=-1) for a, b in zip(first, after, strict=True)], axis=-1)

    def at_boundary(self, boundary: int, times: Floats) -> Floats:
        """Returns the times of a table at a boundary, by devices before it; infinite where it is not in the table."""
        columns = boundary - self.lows
        is_inside = (columns >= 0) & (columns < times.shape[1])
        return np.where(is_inside, times[np.arange(columns.size), np.where(is_inside, columns, 0)], np.inf)


def in_band(known: Behind) -> Behind:
    """Returns the same with tables that, after each number of devices, hold only the boundaries that stages reach."""
    is_reached = np.any([np.isfinite(table[0]) for table in known.tables], axis=0)
    first = np.where(is_reached.any(axis=1), is_reached.argmax(axis=1), 0)
    last = np.where(is_reached.any(axis=1), is_reached.shape[1] - 1 - is_reached[:, ::-1].argmax(axis=1), 0)
    width = int((last - first).max()) + 1
    columns = first[:, None] + np.arange(width)
    is_inside = columns < is_reached.shape[1]
    devices, columns = np.arange(len(first))[:, None], np.where(is_inside, columns, 0)
    tables = (np.where(is_inside, table[:, devices, columns], np.inf) for table in known.tables)
    gradients = (np.where(is_inside[..., None], table[devices, columns], np.inf) for table in known.gradients)
    # In C order, as all other tables: compiled functions have a version for each layout.
    return known._replace(
        lows=known.lows + first,
        tables=tuple(map(np.ascontiguousarray, tables)),
        gradients=tuple(map(np.ascontiguousarray, gradients)),
    )
