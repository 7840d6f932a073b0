"""The times of one stage of a pipeline with any layers: its part of the time vectors (`placed_pipeline.py`).

A long chain has hundreds of thousands of intervals, and devices of different speeds have different times. So times are
computed only when needed: for given cuts those of a few intervals, and for bounds those of the intervals that a plan
faster than the best one may have.
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
"""The times of all intervals are computed at once if there are at most this many, as with about 240 boundaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """A stage with each of some intervals.

    Attributes:
        rows: the indices of the intervals; ascending, unless `StageTimes.at` asked for others.
        entries: the entries of the stage in the time vector, in ns. [entries, rows]
        fits: whether its devices can hold the interval. [rows]
        work_ns: a lower bound on F and the backward of all micro-batches of a replica. [rows]
    """

    rows: IntArray
    entries: IntArray
    fits: BoolArray
    work_ns: IntArray

    def only(self, keep: BoolArray) -> "StageTable":
        """Returns the table of the intervals for which `keep` is true. [rows]"""
        return StageTable(
            rows=self.rows[keep], entries=self.entries[:, keep], fits=self.fits[keep], work_ns=self.work_ns[keep]
        )


class StageTimes:
    """The times of a stage of a pipeline, computed when needed.

    Attributes:
        is_tabled: whether the times of all intervals are computed at once.
    """

    def __init__(
        self,
        costs: StageCostTable,
        placement: StagePlacement,
        phases: Sequence[int],
        num_microbatches: int,
        any_of_classes: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Computes nothing yet.

        Args:
            phases: the phases that have entries, by their index in `Phase`.
            num_microbatches: micro-batches of the step.
            any_of_classes: if given, the stage may be on devices of any of these classes, and times are the minima over
                them; () for the classes of `placement`.
            deadline: after it, making a table raises OutOfTime.
        """
        self.costs, self.placement, self._phases = costs, placement, phases
        self._deadline = deadline
        self._min_microbatches = num_microbatches // placement.num_replicas
        self._placements = [placement.on((c,) * placement.num_replicas) for c in any_of_classes] or [placement]
        # All-reduces of replicas are computed for all intervals at once in any case.
        self.is_tabled = len(costs.intervals.begins) <= MAX_TABLED or placement.position is None

    def at(self, rows: IntArray) -> tuple[IntArray, BoolArray]:
        """Returns the entries for some intervals, and whether these fit. [entries, rows], [rows]"""
        if self.is_tabled:
            return self.every.entries[:, rows], self.every.fits[rows]
        table = self._table(rows)
        return table.entries, table.fits

    @cached_property
    def every(self) -> StageTable:
        """All intervals."""
        return self._table(slice(None))

    def faster_than(self, limit_ns: int) -> StageTable:
        """Returns the table of the intervals that fit and have less work than a limit."""
        table = self.every if self.is_tabled else self._table(self._short_rows(limit_ns))
        return table.only(table.fits & (table.work_ns < limit_ns))

    def _short_rows(self, limit_ns: int) -> IntArray:
        """Returns the indices of all intervals whose work may be below a limit, ascending.

        Longer intervals have more work. So for each begin these are the intervals up to some end, found by bisection.
        """
        intervals = self.costs.intervals
        begins, last = np.arange(intervals.num_boundaries - 1), intervals.num_boundaries - 1
        low, high = begins.copy(), np.full(last, last)  # the last end known to be below, and the last that may be
        while (low < high).any():
            middle = (low + high + 1) // 2
            is_below = self._least_work_ns(intervals.row_offset[begins] + middle - begins - 1) < limit_ns
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle - 1)
        counts = low - begins
        ends_before = np.cumsum(counts) - counts
        rows: IntArray = np.repeat(intervals.row_offset[:-1] - ends_before, counts) + np.arange(counts.sum())
        return rows

    def _least_work_ns(self, rows: IntArray) -> IntArray:
        """Returns a lower bound on the work of a replica that grows with the interval. [rows]"""
        least = []
        for c in {c for placement in self._placements for c in placement.device_classes}:
            times = self.costs.times[c].on_device.at(rows)
            split_ns = times.input_grad_ns + times.weight_grad_ns
            # B is rounded once, I and W once each, so their sums may differ by 1 ns.
            least.append(times.forward_ns + np.minimum(times.backward_ns, split_ns) - 1)
        work_ns: IntArray = self._min_microbatches * np.minimum.reduce(least)
        return work_ns

    def _table(self, rows: Rows) -> StageTable:
        """Returns the table of some intervals, with minima over the classes of `any_of_classes` if given."""
        tables = [self._table_on(placement, rows) for placement in self._placements]
        if len(tables) == 1:
            return tables[0]
        return StageTable(
            rows=tables[0].rows,
            entries=np.minimum.reduce([each.entries for each in tables]),
            fits=np.logical_or.reduce([each.fits for each in tables]),
            work_ns=np.minimum.reduce([each.work_ns for each in tables]),
        )

    def _table_on(self, placement: StagePlacement, rows: Rows) -> StageTable:
        """Returns the table of some intervals on one placement."""
        self._deadline.check()
        fits, recompute, again_ns = self.costs.memory.fitting(placement, rows)
        entries: list[IntArray] = []
        work_ns = []
        for c in placement.device_classes:
            times = self.costs.times[c]
            at = times.at(rows)
            by_phase = _by_phase(at, 0)
            after_last_ns = at.update_ns + self.costs.all_reduce_ns(placement, c, times, rows)
            if again_ns:  # B and I run F again; then only the device's times are lower bounds
                repeated = _by_phase(times.on_device.at(rows), np.where(recompute, again_ns[c], 0))
                by_phase = [np.where(recompute, *both) for both in zip(repeated, by_phase, strict=True)]
            entries += [*(by_phase[i] for i in self._phases), after_last_ns]
            work_ns.append(_work_ns(placement, by_phase))
        return StageTable(
            rows=np.arange(len(fits)) if isinstance(rows, slice) else rows,
            entries=np.stack(entries),
            fits=fits,
            work_ns=self._min_microbatches * np.minimum.reduce(work_ns),
        )

    def maxima(self) -> list[int]:
        """Returns an upper bound on each entry, over all intervals. [entries]"""
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
    """Returns F, B, I and W, with `again_ns` added to B and I. [phases][rows]"""
    return [times.forward_ns, times.backward_ns + again_ns, times.input_grad_ns + again_ns, times.weight_grad_ns]


def _work_ns(placement: StagePlacement, by_phase: Sequence[IntArray]) -> IntArray:
    """Returns F and the backward of a micro-batch: the shorter of B and I + W if a stage has both. [rows]"""
    forward, backward, input_grad, weight_grad = by_phase
    split = input_grad + weight_grad
    if not placement.schedule.has_split_backward:
        return forward + backward
    work_ns: IntArray = forward + (np.minimum(backward, split) if placement.schedule.has_full_backward else split)
    return work_ns
