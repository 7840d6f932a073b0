"""Times of a stage on a placement, and whether it fits, for every layer interval that it may hold.

The bounds (`branch_and_bound/lower_bound.py`) use letters for these times. They are per micro-batch, in ns, and the
minimum over the replicas:

    f  forward_ns             F
    r  critical_backward_ns   the part of the backward that must end before the previous stage can begin its own: B, or
                              only I if the schedule splits the backward
    e  finish_ns              what must follow the last r: W if it is separate, the all-reduces, the update
    b  microbatch_ns - f      B, or I + W

Shapes: `[rows]`, one entry per interval asked for.
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
"""Maximum number of rows of candidates (all intervals of one placement with one begin) in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCandidates:
    """A stage on one placement with each of several intervals. All arrays are [rows].

    Attributes:
        fits: whether the constraints allow the interval and the devices can hold it. With recomputation this is only a
            necessary condition.
        recompute: whether the interval fits only with recomputation.
        forward_ns, critical_backward_ns, finish_ns: f, r and e.
        replica_critical_ns: for each distinct replica, (number of its micro-batches, their f + r together).
        replica_work_ns: for the same replicas, (index in the placement, all work of a step): F and backward of all its
            micro-batches, the all-reduces and the update.
        max_backward_work_ns: the maximum over the replicas of that work without F.
        microbatch_ns: f + b.
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
        """Returns the j-th interval only: arrays of one entry."""
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
    """One replica of a stage with each of several intervals. Arrays are [rows].

    Attributes:
        index: the index of the replica in the placement.
        num_microbatches: how many it runs in a step.
        forward_ns, critical_backward_ns: f and r of this replica.
        deferred_ns: the W of a micro-batch if it is separate from r, else 0.
        after_last_action_ns: all-reduces and update, from the end of the last action.
    """

    index: int
    num_microbatches: int
    forward_ns: IntArray
    critical_backward_ns: IntArray
    deferred_ns: IntArray
    after_last_action_ns: IntArray


class StageCostTable:
    """The costs of stages on any placement, at one micro-batch size.

    Attributes:
        times: the times of each interval. [device classes]
        memory: which intervals fit on a placement.
        transfers: the transfers between two placements.
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
        """After `deadline`, making a table raises OutOfTime."""
        self.intervals, self.classes, self.links, self._deadline = intervals, classes, links, deadline
        self.times, self.memory, self.transfers = times, memory, transfers
        self._all_reduce_done_ns: dict[Hashable, IntArray] = {}
        self._rows: dict[tuple[StagePlacement, int], StageCandidates] = {}

    def candidates_from(self, placement: StagePlacement, begin: int) -> StageCandidates:
        """Returns the candidates that begin at a boundary: entry j ends at boundary begin + 1 + j."""
        # Best-first search and dives return to the same placement and begin, so rows are cached.
        key = (placement, begin)
        if key not in self._rows:
            if len(self._rows) > MAX_CACHED_ROWS:
                self._rows.clear()
            self._rows[key] = self.candidates(placement, self.intervals.row(begin))
        return self._rows[key]

    def candidates(self, placement: StagePlacement, rows: Rows) -> StageCandidates:
        """Returns the candidates with the intervals `rows`."""
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
        # Bound "work" of each replica: n (f + b), then all-reduces and update. [replicas][rows]
        counts = [replica.num_microbatches for replica in replicas]
        work_ns = [
            count * each + replica.after_last_action_ns
            for count, replica, each in zip(counts, replicas, microbatch_ns, strict=True)
        ]
        return StageCandidates(
            fits=fits,
            recompute=recompute,
            # f, r and e are minima over the replicas, so bounds that use them hold for a micro-batch on any replica.
            forward_ns=least_of(replica.forward_ns for replica in replicas),
            critical_backward_ns=least_of(critical_ns),
            finish_ns=least_of(replica.deferred_ns + replica.after_last_action_ns for replica in replicas),
            replica_critical_ns=tuple(
                (count, count * (replica.forward_ns + backward_ns))
                for count, replica, backward_ns in zip(counts, replicas, critical_ns, strict=True)
            ),
            # The bounds "work" and "return" hold for each replica by itself, so they need no minimum.
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
        """Returns lower bounds for a replica that, where `recompute` says so, runs F again in every backward.

        There only the device's times count, because the host may need less than the device for the F that is added.
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
            after_last_action_ns=np.where(recompute, on_device.after_last_action_ns, replica.after_last_action_ns),
        )

    def replica_cost(self, placement: StagePlacement, k: int, rows: Rows, *, on_device: bool = False) -> ReplicaCost:
        """Returns the cost of the k-th replica of a placement; with `on_device`, without the host's times."""
        c, load = placement.device_classes[k], placement.schedule.replicas[k]
        times = self.times[c].on_device if on_device else self.times[c]
        forward, critical, deferred = self._action_times(placement, times, rows)
        return ReplicaCost(
            index=k,
            num_microbatches=load.num_microbatches,
            forward_ns=forward,
            critical_backward_ns=critical,
            deferred_ns=deferred,
            after_last_action_ns=times.at(rows).update_ns + self.all_reduce_ns(placement, c, times, rows),
        )

    def device_times(self, placement: StagePlacement, c: int, rows: Rows) -> tuple[IntArray, IntArray]:
        """Returns lower bounds on F and r of some intervals on a device of class `c` that may be summed over layers.

        These are the device's times, because the host's do not add up over layers. If the backward is split, r is the
        smaller of I and B: a stage that sends no gradient back has all of B in its W.
        """
        times = self.times[c].on_device
        forward, critical, _ = self._action_times(placement, times, rows)
        return forward, np.minimum(critical, times.at(rows).backward_ns)

    def _action_times(
        self, placement: StagePlacement, times: IntervalTimes, rows: Rows
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Returns F, r and what is left of the backward after r. All [rows]."""
        at = times.at(rows)
        backward = at.backward_ns
        # Without a split, the previous stage waits for the whole B, and nothing of the backward is left.
        critical, deferred = backward, np.zeros_like(backward)
        if placement.schedule.has_split_backward:
            critical, deferred = at.input_grad_ns, at.weight_grad_ns
            if placement.schedule.has_full_backward:
                # Some micro-batches run B, others I and W: the minimum of both, for the sum and for r.
                total = np.minimum(critical + deferred, backward)
                critical = np.minimum(critical, total)
                deferred = total - critical
        return at.forward_ns, critical, deferred

    def all_reduce_ns(self, placement: StagePlacement, c: int, times: IntervalTimes, rows: Rows) -> IntArray:
        """Returns a lower bound on the time of all-reduces after the last action of a device of class `c`. [rows]"""
        # On a device with several stages, all-reduces may overlap with the actions of another stage.
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
            # `all_reduce_done_ns` counts from the start of the last action, `after_last_action_ns` from its end.
            at = times.at(rows)
            action_ns = at.backward_ns if full_backward else at.weight_grad_ns
            after_last.append(np.maximum(self._all_reduce_done_ns[key][rows] - action_ns, 0))
        # If some replicas end with B and others with W, the minimum holds for both.
        return least_of(after_last)
