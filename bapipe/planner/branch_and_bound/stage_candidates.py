"""Times, memory and feasibility of a stage on a placement, for every layer interval that it may hold.

Letters of the bounds (`lower_bound.py`) and the names here, per micro-batch and minimized over the replicas:

    f  forward_ns             F
    r  critical_backward_ns   the part of the backward that must end before the stage before can begin its own: B, or
                              I alone if the schedule splits the backward
    e  finish_ns              what must follow the last r: W if it is separate, the all-reduces, the update
    b  microbatch_ns - f      B, or I + W

Shapes: `[n]`, where n are the intervals asked for, of all intervals or of those with one begin.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.branch_and_bound.devices import ClassLinks, DeviceClass
from bapipe.planner.branch_and_bound.intervals import (
    INF,
    MAX_TIME,
    BoolArray,
    IntArray,
    IntervalIndex,
    IntervalMemory,
    IntervalTimes,
    Rows,
)
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.recomputation import MemoryLimit, Recomputation, RecomputedLayers
from bapipe.planner.deadline import UNLIMITED, Deadline
from bapipe.schedules.table import Phase
from bapipe.simulator.interval_costs import at_speed, transfer_ns

MAX_CACHED_ROWS = 20_000
"""Rows of candidates (one placement and one begin) that are kept."""

ForbiddenIntervals = Callable[[StagePlacement, Rows], BoolArray | None]
"""Which of some intervals constraints forbid on a placement; None if they forbid none."""


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
        min_send_bytes, min_grad_bytes: activations and gradients of a micro-batch at every boundary, on the kind of
            device on which they are smallest. [boundaries]
    """

    def __init__(
        self,
        intervals: IntervalIndex,
        classes: Sequence[DeviceClass],
        links: ClassLinks,
        times: Sequence[IntervalTimes],
        memory: Sequence[IntervalMemory],
        *,
        min_send_bytes: IntArray,
        min_grad_bytes: IntArray,
        recompute: Recomputation | None,
        forbidden: ForbiddenIntervals,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """`times` and `memory` have an entry per device class; without `recompute` no layer may be recomputed.

        `deadline` ends the making of tables with OutOfTime.
        """
        self.intervals, self.classes, self.links, self._deadline = intervals, classes, links, deadline
        self.times, self.memory, self.recomputation, self._forbidden = times, memory, recompute, forbidden
        self.min_send_bytes, self.min_grad_bytes = min_send_bytes, min_grad_bytes
        self._all_reduce_done_ns: dict[Hashable, IntArray] = {}
        self._transfer_ns: dict[tuple[Bandwidth, bool], IntArray] = {}
        self._transfers: dict[Hashable, tuple[IntArray, IntArray]] = {}
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
        replicas = [self.replica_cost(placement, k, rows) for k in self.distinct_replicas(placement)]
        fits, recompute, again_ns = self.fitting(placement, rows)
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
            forward_ns=_min(replica.forward_ns for replica in replicas),
            critical_backward_ns=_min(critical_ns),
            finish_ns=_min(replica.deferred_ns + replica.sync_ns for replica in replicas),
            replica_critical_ns=tuple(
                (count, count * (replica.forward_ns + backward_ns))
                for count, replica, backward_ns in zip(counts, replicas, critical_ns, strict=True)
            ),
            # The work of one replica is not a minimum: the bounds "work" and "return" are stated for each replica.
            replica_work_ns=tuple((replica.index, work) for replica, work in zip(replicas, work_ns, strict=True)),
            max_backward_work_ns=_max(
                work - count * replica.forward_ns
                for count, replica, work in zip(counts, replicas, work_ns, strict=True)
            ),
            microbatch_ns=_min(microbatch_ns),
        )

    def fitting(self, placement: StagePlacement, rows: Rows) -> tuple[BoolArray, BoolArray, dict[int, IntArray]]:
        """Returns which intervals fit, which of them with recomputation only, and the F that it adds (if any do)."""
        fits_plain = self._shortfall_bytes(placement, rows, recompute=False) <= 0
        fits, recompute = fits_plain, np.zeros(fits_plain.shape, dtype=bool)
        again_ns: dict[int, IntArray] = {}
        if self.may_recompute and not fits_plain.all():
            # Recomputation only costs time, so a stage recomputes only if it does not fit without.
            again_ns = self.recomputed_ns(placement, rows)
            fits = np.logical_and.reduce([ns < INF for ns in again_ns.values()])
            recompute = fits & ~fits_plain
        forbidden = self._forbidden(placement, rows)
        if forbidden is not None:
            fits = fits & ~forbidden
        return fits, recompute, again_ns if recompute.any() else {}

    @property
    def may_recompute(self) -> bool:
        """Whether layers of stages may be recomputed."""
        return self.recomputation is not None

    def recomputed_ns(self, placement: StagePlacement, rows: Rows) -> dict[int, IntArray]:
        """Returns for each class of the replicas a lower bound of the F that recomputation adds; `INF` if none fits.

        Without the tensors between layers that are recomputed and layers that are not, a state fits if
        kept * (stash - saved) + in_backward * saved <= room; replicas of one kind recompute the same layers. [rows]
        """
        assert self.recomputation is not None
        least_saved: dict[str, IntArray] = {}
        for k in self.distinct_replicas(placement):
            c, load = placement.device_classes[k], placement.schedule.replicas[k]
            kind, stash = self.classes[c].device.kind, self.memory[c].stash_bytes[rows]
            for peak in load.memory_peaks:
                lacking = peak.kept * stash - self._room_bytes(placement, k, rows, peak.before_weight_grad)
                per_byte = peak.kept - peak.in_backward
                saved = -(-lacking // per_byte) if per_byte > 0 else np.where(lacking > 0, INF, 0)
                saved = np.where(saved > stash, INF, np.maximum(saved, 0))
                least_saved[kind] = np.maximum(least_saved.get(kind, 0), saved)
        again_ns = {}
        for c in set(placement.device_classes):
            device = self.classes[c].device
            saved = least_saved[device.kind]
            least_ns = at_speed(self.recomputation.bounds[device.kind].least_ns(saved, rows), device.speed, MAX_TIME)
            again_ns[c] = np.where(saved >= INF, INF, least_ns)
        return again_ns

    def recomputed_layers(self, placement: StagePlacement, begin: int, end: int) -> RecomputedLayers | None:
        """Returns the layers that a stage between two boundaries recomputes; None if it does not fit with any."""
        number = self.intervals.row(begin).start + end - begin - 1
        row = slice(number, number + 1)
        if self._shortfall_bytes(placement, row, recompute=False)[0] <= 0:
            return RecomputedLayers(layers=frozenset())
        if not self.may_recompute:
            return None
        assert self.recomputation is not None
        limits = [
            MemoryLimit(
                kind=self.classes[placement.device_classes[k]].device.kind,
                kept=peak.kept,
                in_backward=peak.in_backward,
                room_bytes=int(self._room_bytes(placement, k, row, peak.before_weight_grad)[0]),
            )
            for k in self.distinct_replicas(placement)
            for peak in placement.schedule.replicas[k].memory_peaks
        ]
        return self.recomputation.choice.best(
            self.intervals.cuts[begin],
            self.intervals.cuts[end],
            limits,
            self.classes[placement.device_classes[0]].device.kind,
            whole_fits=bool(self._shortfall_bytes(placement, row, recompute=True)[0] <= 0),
        )

    def _room_bytes(self, placement: StagePlacement, k: int, rows: Rows, num_before_weight_grad: int) -> IntArray:
        """What is left on replica k for the stashes, after all else. [rows]"""
        c, load = placement.device_classes[k], placement.schedule.replicas[k]
        memory = self.memory[c]
        room = self.classes[c].limit_bytes - memory.static_bytes[rows]
        if num_before_weight_grad:
            room = room - num_before_weight_grad * memory.gradient_stash_bytes[rows]
        if placement.receives_activations:
            room = room - load.num_microbatches * memory.input_bytes[rows]
        if placement.receives_gradients:
            room = room - load.num_microbatches * memory.output_grad_bytes[rows]
        return room

    def shortfall_bytes(self, placement: StagePlacement) -> IntArray:
        """Returns for every interval the shortfall of the replica with the largest one; `INF` if forbidden."""
        shortfall = self._shortfall_bytes(placement, slice(None), recompute=False)
        if self.may_recompute:
            shortfall = np.minimum(shortfall, self._shortfall_bytes(placement, slice(None), recompute=True))
        forbidden = self._forbidden(placement, slice(None))
        return shortfall if forbidden is None else np.where(forbidden, INF, shortfall)

    def _shortfall_bytes(self, placement: StagePlacement, rows: Rows, *, recompute: bool) -> IntArray:
        """The bytes by which the worst replica exceeds its device's limit; negative if all fit. [n]

        As the simulator counts: static bytes, receive buffers of all micro-batches of the step, and the maximum over
        the schedule's peaks of what is in flight.
        """
        shortfalls = []
        for k in self.distinct_replicas(placement):
            c, load = placement.device_classes[k], placement.schedule.replicas[k]
            memory = self.memory[c]
            needed = memory.static_bytes[rows] + memory.in_flight_bytes(load.memory_peaks, rows, recompute=recompute)
            if placement.receives_activations:
                needed = needed + load.num_microbatches * memory.input_bytes[rows]
            if placement.receives_gradients:
                needed = needed + load.num_microbatches * memory.output_grad_bytes[rows]
            shortfalls.append(needed - self.classes[c].limit_bytes)
        return _max(shortfalls)

    def transfers(
        self, placement: StagePlacement, successor: StagePlacement, forward: bool
    ) -> tuple[IntArray, IntArray]:
        """Returns the transfers to the next stage, or if not `forward` those of the gradients back, at every boundary.

        Both are [boundaries]: the minimum time of one micro-batch, and the time that all micro-batches take on the
        busiest link.
        """
        if placement.position is not None and placement.position == successor.position:
            zeros = np.zeros(self.intervals.num_boundaries, dtype=np.int64)  # two stages on one device
            return zeros, zeros
        num_microbatches = placement.schedule.num_microbatches
        key = (placement.device_classes, successor.device_classes, num_microbatches, forward)
        if key not in self._transfers:
            counts = _microbatches_per_link(placement, successor)
            # Gradients go back between the same pairs of devices, from the successor to the placement.
            directed = {pair: pair if forward else pair[::-1] for pair in counts}
            times = {
                pair: self._cut_transfer_ns(self.links.between([a], [b])[0], forward)
                for pair, (a, b) in directed.items()
            }
            # One micro-batch may take the fastest link; all of them together wait for the busiest (bound "link").
            self._transfers[key] = _min(times.values()), _max(count * times[pair] for pair, count in counts.items())
        return self._transfers[key]

    def blocks_on_transfers(self, placement: StagePlacement) -> bool:
        """Returns whether no replica computes while it transfers; said of devices with one stage only."""
        return placement.position is None and not any(
            self.classes[c].device.overlaps_transfers for c in placement.device_classes
        )

    def min_entry_ns(self, placement: StagePlacement, forward: bool) -> IntArray:
        """Returns the minimum time of a transfer from any stage before (or back to it). [boundaries]

        It is 0 at the start of the chain, where there is none.
        """
        # The stage before is not known in the cost-to-go: take the fastest link to any device of the cluster.
        others = range(len(self.classes))
        here = placement.device_classes
        sources, targets = (others, here) if forward else (here, others)
        if not self.links.between(sources, targets):
            return np.zeros(self.intervals.num_boundaries, dtype=np.int64)
        times = self.min_transfer_ns(sources, targets, forward).copy()
        times[0] = 0
        return times

    def min_transfer_ns(self, sources: Iterable[int], targets: Iterable[int], forward: bool) -> IntArray:
        """Returns the minimum time of a transfer from a device of some classes to another one of some. [boundaries]"""
        return _min(self._cut_transfer_ns(link, forward) for link in self.links.between(sources, targets))

    def _cut_transfer_ns(self, link: Bandwidth, forward: bool) -> IntArray:
        """The transfer of a micro-batch on a link at every boundary. [boundaries]"""
        key = (link, forward)
        if key not in self._transfer_ns:
            num_bytes = self.min_send_bytes if forward else self.min_grad_bytes
            self._transfer_ns[key] = transfer_ns(num_bytes, link, MAX_TIME)
        return self._transfer_ns[key]

    def distinct_replicas(self, placement: StagePlacement) -> list[int]:
        """Returns the replicas of a placement, of equal ones only the last.

        The last one is the strongest for the work bound: it waits for the most micro-batches of the replicas before.
        """
        last_of = {
            # Of equal keys the dict keeps the last k.
            (c, load.num_microbatches, load.memory_peaks): k
            for k, (c, load) in enumerate(zip(placement.device_classes, placement.schedule.replicas, strict=True))
        }
        return sorted(last_of.values())

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
        """Returns F and r of some intervals on a device of class `c`, without the host's times: they add up."""
        forward, critical, _ = self._action_times(placement, self.times[c].on_device, rows)
        return forward, critical

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
        return _min(after_last)


def _microbatches_per_link(placement: StagePlacement, successor: StagePlacement) -> dict[tuple[int, int], int]:
    """How many micro-batches a device of one class hands to a device of another class, by their classes.

    Micro-batch m goes from replica m mod R to replica m mod R', so the pairs repeat with period lcm(R, R').

    Between two classes it is the maximum over links. If a stage has several classes, it is what any two devices that
    meet have at least: that does not change when symmetric classes are exchanged, which reorders the devices.
    """
    num = placement.schedule.num_microbatches
    senders, receivers = placement.device_classes, successor.device_classes
    # Each of the `period` pairs of replicas gets every period-th micro-batch: floor(num / period) or one more.
    period = int(np.lcm(len(senders), len(receivers)))
    if len(set(senders)) > 1 or len(set(receivers)) > 1:
        return {(senders[m % len(senders)], receivers[m % len(receivers)]): num // period for m in range(period)}
    return {(senders[0], receivers[0]): -(-num // period)}


def _min(values: Iterable[IntArray]) -> IntArray:
    minimum: IntArray = np.minimum.reduce(list(values))
    return minimum


def _max(values: Iterable[IntArray]) -> IntArray:
    maximum: IntArray = np.maximum.reduce(list(values))
    return maximum
