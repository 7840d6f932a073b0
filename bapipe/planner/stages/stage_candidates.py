"""Times of a stage on a placement, and whether it fits, for every layer interval that it may hold.

Letters of the bounds (`lower_bound.py`) and the names here, per micro-batch and minimized over the replicas:

    f  forward_ns             F
    r  critical_backward_ns   the part of the backward that must end before the stage before can begin its own: B, or
                              I alone if the schedule splits the backward
    e  finish_ns              what must follow the last r: W if it is separate, the all-reduces, the update
    b  microbatch_ns - f      B, or I + W

Shapes: `[n]`, where n are the intervals asked for, of all intervals or of those with one begin.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.stages.cut_transfers import CutTransfers
from bapipe.planner.stages.devices import ClassLinks, DeviceClass
from bapipe.planner.stages.interval_times import IntervalTimes
from bapipe.planner.stages.intervals import (
    BoolArray,
    IntArray,
    IntervalIndex,
    Rows,
    greatest_of,
    least_of,
)
from bapipe.planner.stages.placements import StagePlacement
from bapipe.planner.stages.stage_memory import StageMemory
from bapipe.schedules.table import Phase

MAX_CACHED_ROWS = 20_000
"""Rows of candidates (one placement and one begin) that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCandidates:
    """A stage with each of n intervals. Arrays are [n].

    Attributes:
        fits: whether its devices can hold it; with recomputation, False only if they cannot.
        recompute: whether they hold it with recomputation only.
        forward_ns, critical_backward_ns: f and r.
        finish_ns: e, what must follow r of the last micro-batch.
        replica_critical_ns: for distinct replicas, how many micro-batches they run, and f and r of all of them.
        replica_work_ns: for the same replicas, their number in the placement, and all their work: F, I, W of all
            micro-batches, then all-reduces and update.
        max_backward_work_ns: the maximum over the replicas of that work without F.
        microbatch_ns: F, I and W of a micro-batch.
    """

    fits: BoolArray
    recompute: BoolArray
    forward_ns: IntArray
    critical_backward_ns: IntArray
    finish_ns: IntArray
    replica_critical_ns: tuple[tuple[int, IntArray], ...]
    replica_work_ns: tuple[tuple[int, IntArray], ...]
    max_backward_work_ns: IntArray
    microbatch_ns: IntArray

    def select(self, j: int) -> "StageCandidates":
        """Returns the j-th interval alone: arrays of one entry."""
        at = slice(j, j + 1)
        return StageCandidates(
            fits=self.fits[at],
            recompute=self.recompute[at],
            forward_ns=self.forward_ns[at],
            critical_backward_ns=self.critical_backward_ns[at],
            finish_ns=self.finish_ns[at],
            replica_critical_ns=tuple((count, values[at]) for count, values in self.replica_critical_ns),
            replica_work_ns=tuple((k, values[at]) for k, values in self.replica_work_ns),
            max_backward_work_ns=self.max_backward_work_ns[at],
            microbatch_ns=self.microbatch_ns[at],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCost:
    """A stage with each of n intervals on one of its replicas. Arrays are [n].

    Attributes:
        index: the number of the replica.
        num_microbatches: how many it runs.
        forward_ns, critical_backward_ns: f and r.
        deferred_ns: the W of a micro-batch if it is separate from r, else 0.
        sync_ns: all-reduces and update, after the last action.
    """

    index: int
    num_microbatches: int
    forward_ns: IntArray
    critical_backward_ns: IntArray
    deferred_ns: IntArray
    sync_ns: IntArray


class StageCostTable:
    """The stages of all placements at one micro-batch size.

    Attributes:
        times: those of each interval, by device class.
        memory: which stages fit.
        transfers: between two stages.
    """

    def __init__(
        self,
        intervals: IntervalIndex,
        classes: Sequence[DeviceClass],
        links: ClassLinks,
        times: Sequence[IntervalTimes],
        *,
        memory: StageMemory,
        transfers: CutTransfers,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """`deadline` ends the making of tables with OutOfTime."""
        self.intervals, self.classes, self.links, self._deadline = intervals, classes, links, deadline
        self.times, self.memory, self.transfers = times, memory, transfers
        self._all_reduce_done_ns: dict[Hashable, IntArray] = {}
        self._rows: dict[tuple[StagePlacement, int], StageCandidates] = {}

    def candidates_from(self, placement: StagePlacement, begin: int) -> StageCandidates:
        """Returns the stages that begin at a boundary: entry j ends at boundary begin + 1 + j."""
        # Best-first search and dives come back to the same placement and begin: keep the row.
        key = (placement, begin)
        if key not in self._rows:
            if len(self._rows) > MAX_CACHED_ROWS:
                self._rows.clear()
            self._rows[key] = self.candidates(placement, self.intervals.row(begin))
        return self._rows[key]

    def candidates(self, placement: StagePlacement, rows: Rows) -> StageCandidates:
        """Returns the stages with the intervals in `rows`."""
        replicas = [self.replica_cost(placement, k, rows) for k in placement.distinct_replicas()]
        fits, recompute, again_ns = self.memory.fitting(placement, rows)
        if again_ns:
            replicas = [
                self._with_recomputation(
                    placement, replica, rows, recompute, again_ns[placement.device_classes[replica.index]]
                )
                for replica in replicas
            ]
        critical_ns = [replica.critical_backward_ns for replica in replicas]
        microbatch_ns = [
            replica.forward_ns + ns + replica.deferred_ns for ns, replica in zip(critical_ns, replicas, strict=True)
        ]
        # Bound "work" of each replica: n (f + b), then all-reduces and update. [replicas][n]
        counts = [replica.num_microbatches for replica in replicas]
        work_ns = [
            count * each + replica.sync_ns for count, replica, each in zip(counts, replicas, microbatch_ns, strict=True)
        ]
        return StageCandidates(
            fits=fits,
            recompute=recompute,
            # f, r and e are minima over the replicas: a bound that uses them holds on whichever replica a micro-batch
            # runs (docs/algorithm.md, Notation).
            forward_ns=least_of(replica.forward_ns for replica in replicas),
            critical_backward_ns=least_of(critical_ns),
            finish_ns=least_of(replica.deferred_ns + replica.sync_ns for replica in replicas),
            replica_critical_ns=tuple(
                (count, count * (replica.forward_ns + backward_ns))
                for count, replica, backward_ns in zip(counts, replicas, critical_ns, strict=True)
            ),
            # The work of one replica is not a minimum: the bounds "work" and "return" are stated for each replica.
            replica_work_ns=tuple((replica.index, work) for replica, work in zip(replicas, work_ns, strict=True)),
            max_backward_work_ns=greatest_of(
                work - count * replica.forward_ns
                for count, replica, work in zip(counts, replicas, work_ns, strict=True)
            ),
            microbatch_ns=least_of(microbatch_ns),
        )

    def _with_recomputation(
        self, placement: StagePlacement, replica: ReplicaCost, rows: Rows, recompute: BoolArray, again_ns: IntArray
    ) -> ReplicaCost:
        """Returns lower bounds of a replica that repeats F at the start of every backward in some intervals.

        In these, the host's times do not count: the host may need less for the repeated F than the device.
        """
        on_device = self.replica_cost(placement, replica.index, rows, on_device=True)
        return ReplicaCost(
            index=replica.index,
            num_microbatches=replica.num_microbatches,
            forward_ns=np.where(recompute, on_device.forward_ns, replica.forward_ns),
            critical_backward_ns=np.where(
                recompute, on_device.critical_backward_ns + again_ns, replica.critical_backward_ns
            ),
            deferred_ns=np.where(recompute, on_device.deferred_ns, replica.deferred_ns),
            sync_ns=np.where(recompute, on_device.sync_ns, replica.sync_ns),
        )

    def replica_cost(self, placement: StagePlacement, k: int, rows: Rows, *, on_device: bool = False) -> ReplicaCost:
        """Returns the k-th replica of a placement with some intervals; `on_device` without the host's times."""
        c, load = placement.device_classes[k], placement.schedule.replicas[k]
        times = self.times[c].on_device if on_device else self.times[c]
        forward, critical, deferred = self._action_times(placement, times, rows)
        return ReplicaCost(
            index=k,
            num_microbatches=load.num_microbatches,
            forward_ns=forward,
            critical_backward_ns=critical,
            deferred_ns=deferred,
            sync_ns=times.at(rows).update_ns + self.all_reduce_ns(placement, c, times, rows),
        )

    def device_times(self, placement: StagePlacement, c: int, rows: Rows) -> tuple[IntArray, IntArray]:
        """Returns F and the least r of some intervals on a device of class `c`, which add up over stages.

        So without the host's times; and where I runs apart from W, r is no more than B, which a stage that sends no
        gradient back takes for its W.
        """
        times = self.times[c].on_device
        forward, critical, _ = self._action_times(placement, times, rows)
        return forward, np.minimum(critical, times.at(rows).backward_ns)

    def _action_times(
        self, placement: StagePlacement, times: IntervalTimes, rows: Rows
    ) -> tuple[IntArray, IntArray, IntArray]:
        """F, r and what is left of the backward after r, of some intervals."""
        at = times.at(rows)
        backward = at.backward_ns
        # r and W: without a split, the stage before waits for the whole B, and nothing of the backward is left.
        critical, deferred = backward, np.zeros_like(backward)
        if placement.schedule.has_split_backward:
            critical, deferred = at.input_grad_ns, at.weight_grad_ns
            if placement.schedule.has_full_backward:
                # Some micro-batches run B, others I and W: take the minimum of both, part by part.
                total = np.minimum(critical + deferred, backward)
                critical = np.minimum(critical, total)
                deferred = total - critical
        return at.forward_ns, critical, deferred

    def all_reduce_ns(self, placement: StagePlacement, c: int, times: IntervalTimes, rows: Rows) -> IntArray:
        """The minimum time that the all-reduces take after the last action of a device of class `c`."""
        # All-reduces of a device with several stages go on while it runs another stage.
        if placement.num_replicas == 1 and not (times.has_group_sums and placement.position is None):
            return np.zeros(self.intervals.begins[rows].shape, dtype=np.int64)
        after_last = []
        for phase in sorted(placement.schedule.last_phases):
            full_backward = phase is Phase.BACKWARD
            links, member_links = self.links.ring(placement.device_classes), self.links.members([c])
            overlapped = self.links.host_sum_link(placement.device_classes) is None
            key = (times, placement.num_replicas, *links, *member_links, full_backward, overlapped)
            if key not in self._all_reduce_done_ns:
                self._deadline.check()
                self._all_reduce_done_ns[key] = times.all_reduce_done_ns(
                    placement.num_replicas, links, full_backward, overlapped, member_links=member_links
                )
            # `all_reduce_done_ns` counts from the start of the last action, `sync_ns` from its end.
            at = times.at(rows)
            action_ns = at.backward_ns if full_backward else at.weight_grad_ns
            after_last.append(np.maximum(self._all_reduce_done_ns[key][rows] - action_ns, 0))
        # Replicas may end with B or with W: the minimum holds for both.
        return least_of(after_last)
