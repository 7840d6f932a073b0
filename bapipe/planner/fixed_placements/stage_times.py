"""The times of one stage of a pipeline, with any layers: its part of the time vectors.

Of long chains there are hundreds of thousands of intervals, and each device of another speed has times of its own. So
only those that are asked for are computed: the few that cuts at hand have, and for bounds those that a plan faster than
the best one may have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.stages.interval_times import Times
from bapipe.planner.stages.intervals import BoolArray, IntArray, Rows
from bapipe.planner.stages.placements import StagePlacement
from bapipe.planner.stages.stage_candidates import StageCostTable

MAX_TABLED = 30_000
"""Maximum number of intervals that are all computed at once: those of a chain of 240 boundaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """A stage with some intervals.

    Attributes:
        rows: the numbers of the intervals, ascending if it is a table of a stage.
        entries: the stage's entries of the time vector. [entries, rows]
        fits: whether its devices can hold it. [rows]
        work_ns: F and backward of all micro-batches that a replica has at least. [rows]
    """

    rows: IntArray
    entries: IntArray
    fits: BoolArray
    work_ns: IntArray

    def only(self, keep: BoolArray) -> "StageTable":
        """Returns the intervals of a mask."""
        return StageTable(
            rows=self.rows[keep], entries=self.entries[:, keep], fits=self.fits[keep], work_ns=self.work_ns[keep]
        )


class StageTimes:
    """A stage of a pipeline.

    Attributes:
        is_tabled: whether the times of all intervals are tabulated at once.
    """

    def __init__(
        self,
        costs: StageCostTable,
        placement: StagePlacement,
        phases: Sequence[int],
        num_microbatches: int,
        anywhere: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Begins without any times.

        Args:
            phases: the numbers of those that have entries.
            num_microbatches: of the step.
            anywhere: the classes of devices of which the fastest counts, () for the stage's own.
            deadline: ends the making of tables with OutOfTime.
        """
        self.costs, self.placement, self._phases = costs, placement, phases
        self._deadline = deadline
        self._num_of_replica = num_microbatches // placement.num_replicas
        self._placements = [placement.on((c,) * placement.num_replicas) for c in anywhere] or [placement]
        # All-reduces among replicas are tabulated for all intervals at once.
        self.is_tabled = len(costs.intervals.begins) <= MAX_TABLED or placement.position is None

    def at(self, rows: IntArray) -> tuple[IntArray, BoolArray]:
        """Returns the entries with some intervals, and whether these fit. [entries, rows], [rows]"""
        if self.is_tabled:
            return self.every.entries[:, rows], self.every.fits[rows]
        table = self._table(rows)
        return table.entries, table.fits

    @cached_property
    def every(self) -> StageTable:
        """All intervals."""
        return self._table(slice(None))

    def faster_than(self, limit_ns: int) -> StageTable:
        """Returns the intervals that fit and whose work alone takes less than a limit."""
        table = self.every if self.is_tabled else self._table(self._short_rows(limit_ns))
        return table.only(table.fits & (table.work_ns < limit_ns))

    def _short_rows(self, limit_ns: int) -> IntArray:
        """The intervals whose work on the fastest device may be below a limit.

        Longer intervals have more work, so for each begin they are those up to an end, which bisection finds.
        """
        intervals = self.costs.intervals
        begins, last = np.arange(intervals.num_boundaries - 1), intervals.num_boundaries - 1
        low, high = begins.copy(), np.full(last, last)  # the last end that is known to be below, and that may be
        while (low < high).any():
            middle = (low + high + 1) // 2
            is_below = self._least_work_ns(intervals.row_offset[begins] + middle - begins - 1) < limit_ns
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle - 1)
        counts = low - begins
        ends_before = np.cumsum(counts) - counts
        rows: IntArray = np.repeat(intervals.row_offset[:-1] - ends_before, counts) + np.arange(counts.sum())
        return rows

    def _least_work_ns(self, rows: IntArray) -> IntArray:
        """Less than the work of a replica, whichever device and phases it has; it grows with the interval. [rows]"""
        least = []
        for c in {c for placement in self._placements for c in placement.device_classes}:
            times = self.costs.times[c].on_device.at(rows)
            split_ns = times.input_grad_ns + times.weight_grad_ns
            # B of some layers is rounded once, I and W once each: 1 ns more or less.
            least.append(times.forward_ns + np.minimum(times.backward_ns, split_ns) - 1)
        work_ns: IntArray = self._num_of_replica * np.minimum.reduce(least)
        return work_ns

    def _table(self, rows: Rows) -> StageTable:
        tables = [self._table_on(placement, rows) for placement in self._placements]
        if len(tables) == 1:
            return tables[0]
        # On whichever device takes the least time for each interval.
        return StageTable(
            rows=tables[0].rows,
            entries=np.minimum.reduce([each.entries for each in tables]),
            fits=np.logical_or.reduce([each.fits for each in tables]),
            work_ns=np.minimum.reduce([each.work_ns for each in tables]),
        )

    def _table_on(self, placement: StagePlacement, rows: Rows) -> StageTable:
        self._deadline.check()
        fits, recompute, again_ns = self.costs.memory.fitting(placement, rows)
        entries: list[IntArray] = []
        work_ns = []
        for c in placement.device_classes:
            times = self.costs.times[c]
            at = times.at(rows)
            by_phase, sync_ns = _by_phase(at, 0), at.update_ns + self.costs.all_reduce_ns(placement, c, times, rows)
            if again_ns:  # F is repeated in B and in I; the host's times do not count then
                repeated = _by_phase(times.on_device.at(rows), np.where(recompute, again_ns[c], 0))
                by_phase = [np.where(recompute, *both) for both in zip(repeated, by_phase, strict=True)]
            entries += [*(by_phase[i] for i in self._phases), sync_ns]
            work_ns.append(_work_ns(placement, by_phase))
        return StageTable(
            rows=np.arange(len(fits)) if isinstance(rows, slice) else rows,
            entries=np.stack(entries),
            fits=fits,
            work_ns=self._num_of_replica * np.minimum.reduce(work_ns),
        )

    def maxima(self) -> list[int]:
        """Returns upper bounds of each entry, over all intervals."""
        if self.is_tabled:
            return [int(each.max()) for each in self.every.entries]
        found = []
        for placement in self._placements:
            (c,) = placement.device_classes
            longest = self.costs.times[c].longest
            by_phase = _by_phase(longest, longest.forward_ns if self.costs.memory.may_recompute else 0)
            found.append([*(int(by_phase[i][0]) for i in self._phases), int(longest.update_ns[0])])
        return [max(of_entry) for of_entry in zip(*found, strict=True)]


def _by_phase(times: Times, again_ns: IntArray | int) -> list[IntArray]:
    """F, B, I and W, with `again_ns` more in B and I. [phases][rows]"""
    return [times.forward_ns, times.backward_ns + again_ns, times.input_grad_ns + again_ns, times.weight_grad_ns]


def _work_ns(placement: StagePlacement, by_phase: Sequence[IntArray]) -> IntArray:
    """F and the backward of a micro-batch, the shorter of B and I + W if a stage has both. [rows]"""
    forward, backward, input_grad, weight_grad = by_phase
    split = input_grad + weight_grad
    if not placement.schedule.has_split_backward:
        return forward + backward
    work_ns: IntArray = forward + (np.minimum(backward, split) if placement.schedule.has_full_backward else split)
    return work_ns
