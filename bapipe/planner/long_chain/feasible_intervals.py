"""Which layer intervals a stage may hold within a limit on the step time: for each begin, those up to some last end.

Time and memory mostly grow with the number of layers. Where they do not, as with all-reduces in buckets, an interval
counts as the minimum over itself and all longer ones with the same begin (a suffix minimum). So nothing here exceeds
what the simulator says, and the feasible ends of each begin are a range, which `relaxation.py` needs.

Shapes: `[intervals]` and `[boundaries]` as in `stages/intervals.py`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.cost_to_go import num_before_final
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.stages.intervals import MAX_TIME, BoolArray, IntArray
from bapipe.planner.stages.placements import StagePlacement, reachable
from bapipe.planner.stages.stage_candidates import ReplicaCost, StageCostTable
from bapipe.simulator.in_flight import InFlight
from bapipe.simulator.interval_costs import gradient_crosses, prefix_sums

_MemoryKey = tuple[tuple[tuple[int, tuple[InFlight, ...], int], ...], bool]
"""(device class, memory peaks, micro-batches) of the replicas; whether the stage receives activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckReplica:
    """The replica of a placement with the most micro-batches.

    Attributes:
        forward_sums, backward_sums: F and r of one micro-batch in all layers before each boundary. [boundaries]
        num_microbatches: how many it runs in a step.
        num_disjoint_forwards: how many F it cannot run during the round trip of one micro-batch.
    """

    forward_sums: IntArray
    backward_sums: IntArray
    num_microbatches: int
    num_disjoint_forwards: int

    @property
    def disjoint_work_sums(self) -> IntArray:
        """The work outside the round trip of one micro-batch: all other r, and some F. [boundaries]"""
        sums: IntArray = (
            self.num_microbatches - 1
        ) * self.backward_sums + self.num_disjoint_forwards * self.forward_sums
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class IntervalLimits:
    """A lower bound on the step time if a stage holds each interval. Hashed by identity.

    Attributes:
        plain_ns, recompute_ns: without and with recomputation; suffix minima over the ends. [intervals]
    """

    plain_ns: IntArray
    recompute_ns: IntArray


class FeasibleIntervals:
    """The feasible intervals of all placements at one micro-batch size.

    Attributes:
        forward_before_ns: a lower bound on F of one micro-batch in all layers before each boundary. [boundaries]
        trip_before_ns: a lower bound on its F and r there. [boundaries]
    """

    def __init__(self, costs: StageCostTable, first_placements: Sequence[StagePlacement]) -> None:
        """`first_placements` are the possible placements of the first stage."""
        self.costs, self.intervals = costs, costs.intervals
        self._layer_sums: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._limits: dict[Hashable, IntervalLimits] = {}
        self._memory_ends: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._transfers: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._time_ends: dict[IntervalLimits, tuple[IntArray, IntArray]] = {}
        self._limit_ns = -1
        # With a split backward, r is 0 in a stage that sends no gradient back: the first one, or one that begins at a
        # cut without gradients. If there are such cuts inside the chain, the r of all layers counts 0.
        crosses = gradient_crosses(costs.times[0].profile)[list(costs.intervals.cuts)]
        self._counts_input_grad = bool(crosses[1:-1].all())
        # Suffix minima grow with the end, so that the ends that fit are a range. [classes][intervals]
        self._static_bytes = [self._suffix_min(memory.static_bytes) for memory in costs.memory.of_class]
        # The layers before a boundary may be on any placement of any pipeline.
        placements = reachable(first_placements)
        distinct = {(p.device_classes, p.schedule.has_split_backward): p for p in placements}.values()
        self.trip_before_ns = _sums_of_min([self.microbatch_sums(placement) for placement in distinct])
        forward_sums = [self._sums_on(placement, c)[0] for placement in distinct for c in placement.device_classes]
        self.forward_before_ns = _sums_of_min(forward_sums)

    def microbatch_sums(self, placement: StagePlacement) -> IntArray:
        """Returns prefix sums of F and r of one micro-batch, for each layer the minimum over replicas. [boundaries]"""
        on_each = [self._sums_on(placement, c) for c in placement.device_classes]
        return _sums_of_min([forward + backward for forward, backward in on_each])

    def forward_sums(self, placement: StagePlacement) -> IntArray:
        """Returns prefix sums of F of one micro-batch, for each layer the minimum over replicas. [boundaries]"""
        return _sums_of_min([self._sums_on(placement, c)[0] for c in placement.device_classes])

    def bottleneck(self, placement: StagePlacement, lower_bound: LowerBound) -> BottleneckReplica:
        """Returns the replica of a placement that runs the most micro-batches."""
        loads = placement.schedule.replicas
        # Any replica would give a valid bound; the one with the most micro-batches is usually the busiest.
        k = max(range(len(loads)), key=lambda k: loads[k].num_microbatches)
        forward_sums, backward_sums = self._sums_on(placement, placement.device_classes[k])
        num = loads[k].num_microbatches
        # Until the first r ends, and so during the round trip of its micro-batch, at most `max_in_flight` F start. In a
        # forwards-first schedule, the F of earlier micro-batches come before the round trip of a final one.
        max_in_flight = max((peak.kept for peak in loads[k].memory_peaks), default=num)
        forwards_first = lower_bound.cost_to_go.forwards_first
        num_before = num_before_final(placement, lower_bound.num_microbatches) if forwards_first else 0
        return BottleneckReplica(
            forward_sums=forward_sums,
            backward_sums=backward_sums,
            num_microbatches=num,
            num_disjoint_forwards=max(num - max_in_flight, num_before),
        )

    def _sums_on(self, placement: StagePlacement, c: int) -> tuple[IntArray, IntArray]:
        """Returns prefix sums of F and of r of one micro-batch on a device of class `c`. [boundaries], [boundaries]"""
        key = (c, placement.schedule.has_split_backward)
        if key not in self._layer_sums:
            units = self.intervals.row_offset[:-1]  # the intervals from each boundary to the next
            forward_ns, backward_ns = self.costs.device_times(placement, c, units)
            counts = self._counts_input_grad or not placement.schedule.has_split_backward
            # The simulator rounds once per stage and phase, so the sum over units may be half a nanosecond too long for
            # each of them, unless the speed is 1.
            slack = 0 if self.costs.classes[c].device.speed == 1.0 else 2
            self._layer_sums[key] = (
                prefix_sums(np.maximum(forward_ns - slack, 0)),
                prefix_sums(np.maximum(backward_ns - slack, 0) * counts),
            )
        return self._layer_sums[key]

    def limits(self, placement: StagePlacement) -> IntervalLimits:
        """Returns a placement's limits, from the bounds "work", "round trip" and "return" of one stage."""
        key = self._limits_key(placement)
        if key not in self._limits:
            self._limits[key] = self._interval_limits(placement)
        return self._limits[key]

    def _limits_key(self, placement: StagePlacement) -> tuple[Hashable, ...]:
        """Returns what the limits of a placement depend on."""
        schedule = placement.schedule
        key: tuple[Hashable, ...] = (
            placement.device_classes,
            tuple(_max_microbatches(placement).items()),
            schedule.has_split_backward,
            schedule.has_full_backward,
            tuple(sorted(map(str, schedule.last_phases))),
        )
        # The F that recomputation adds depends on memory; if every interval fits without, it adds none.
        plain_ends, _ = self.memory_ends(placement)
        return key + (self._memory_key(placement) if (plain_ends < len(self.forward_before_ns) - 1).any() else ())

    def _interval_limits(self, placement: StagePlacement) -> IntervalLimits:
        """Returns the limits of a placement: the maxima over its replicas, each of which must meet its own."""
        counts = list(
            zip(placement.device_classes, (r.num_microbatches for r in placement.schedule.replicas), strict=True)
        )
        indices = [counts.index(pair) for pair in _max_microbatches(placement).items()]
        replicas = [self.costs.replica_cost(placement, k, slice(None)) for k in indices]
        on_device = [self.costs.replica_cost(placement, k, slice(None), on_device=True) for k in indices]
        # By device class. [intervals]
        again_ns = self.costs.memory.recomputed_ns(placement, slice(None)) if self.costs.memory.may_recompute else {}
        is_split = placement.schedule.has_split_backward
        plain = [self._limit_ns_of(each, each.critical_backward_ns, is_split=is_split) for each in replicas]
        recomputed = [
            self._limit_ns_of(each, each.critical_backward_ns + np.minimum(ns, MAX_TIME), is_split=is_split)
            for each in on_device
            if (ns := again_ns.get(placement.device_classes[each.index])) is not None
        ] or plain
        return IntervalLimits(
            self._suffix_min(np.maximum.reduce(plain)), self._suffix_min(np.maximum.reduce(recomputed))
        )

    def _limit_ns_of(self, replica: ReplicaCost, backward_ns: IntArray, *, is_split: bool) -> IntArray:
        """Returns a lower bound on the step time if a replica holds each interval. [intervals]

        Args:
            backward_ns: r of a micro-batch. [intervals]
            is_split: whether the backward is split into I and W.
        """
        begins, num = self.intervals.begins, replica.num_microbatches
        critical = num * (replica.forward_ns + backward_ns)
        # F and r of one micro-batch in all layers from the begin of the interval on.
        round_trip = (self.trip_before_ns[-1] - self.trip_before_ns)[begins]
        if is_split:  # the first stage has no r: before its W, one micro-batch needs its F and the layers after it
            first = self.intervals.row(0)
            round_trip[first] = replica.forward_ns[first] + (self.trip_before_ns[-1] - self.trip_before_ns[1:])
        work = (
            np.maximum(critical + (num - 1) * replica.deferred_ns, round_trip)
            + replica.deferred_ns
            + replica.after_last_action_ns
        )
        # After F of the previous layers: all work and the update. Or F and r, between F and r of the previous layers.
        limit_ns: IntArray = np.maximum(self.forward_before_ns[begins] + work, self.trip_before_ns[begins] + critical)
        return limit_ns

    def clear(self) -> None:
        """Drops the interval limits, which are large; they are computed again when needed."""
        self._limits.clear()
        self._time_ends.clear()

    def time_ends(self, limits: IntervalLimits, limit_ns: int) -> tuple[IntArray, IntArray]:
        """Returns for each begin the last end with a bound of at most `limit_ns`, without and with recomputation.

        [boundaries], [boundaries]
        """
        if limit_ns != self._limit_ns:
            self._limit_ns = limit_ns
            self._time_ends.clear()
        if limits not in self._time_ends:
            # Suffix minima grow with the end, so the allowed intervals of each begin are the first of its row.
            plain, recomputed = limits.plain_ns <= limit_ns, limits.recompute_ns <= limit_ns
            self._time_ends[limits] = self._last_ends(plain), self._last_ends(recomputed)
        return self._time_ends[limits]

    def memory_ends(self, placement: StagePlacement) -> tuple[IntArray, IntArray]:
        """Returns for each begin the last end that may fit in memory, without and with recomputation.

        [boundaries], [boundaries]
        """
        key = self._memory_key(placement)
        if key not in self._memory_ends:
            plain = recomputed = np.full(self.intervals.num_boundaries, self.intervals.num_boundaries - 1)
            for c, peaks, num in key[0]:
                memory = self.costs.memory.of_class[c]
                room = self.costs.classes[c].limit_bytes - self._static_bytes[c]
                if placement.receives_activations:
                    room = room - num * memory.input_bytes
                # Receive buffers for gradients do not count: they depend on the end, but need not grow with it.
                usage = memory.in_flight_bytes(peaks, slice(None), recompute=False)
                plain = np.minimum(plain, self._last_ends(usage <= room))
                if self.costs.memory.may_recompute:
                    usage = memory.least_in_flight_bytes(peaks, slice(None))
                    recomputed = np.minimum(recomputed, self._last_ends(usage <= room))
            self._memory_ends[key] = plain, np.maximum(plain, recomputed) if self.costs.memory.may_recompute else plain
        return self._memory_ends[key]

    def _memory_key(self, placement: StagePlacement) -> _MemoryKey:
        """Returns what the memory of a placement depends on."""
        loads = {
            (c, load.memory_peaks, load.num_microbatches)
            for c, load in zip(placement.device_classes, placement.schedule.replicas, strict=True)
        }
        return (tuple(sorted(loads)), placement.receives_activations)

    def transfers(
        self, lower_bound: LowerBound, placement: StagePlacement, successor: StagePlacement
    ) -> tuple[IntArray, IntArray]:
        """Returns two times between a stage and the next one, for each boundary, both ways together.

        The transfers of one micro-batch; and the same if all micro-batches on the busiest link must cross it in one
        direction. [boundaries], [boundaries]
        """
        num_microbatches = lower_bound.num_microbatches
        key = (
            placement.device_classes,
            successor.device_classes,
            placement.position,
            successor.position,
            num_microbatches,
        )
        if key not in self._transfers:
            send, busy_send = self.costs.transfers.between(placement, successor, forward=True)
            grad, busy_grad = self.costs.transfers.between(placement, successor, forward=False)
            self._transfers[key] = send + grad, np.maximum(busy_send + grad, send + busy_grad)
        return self._transfers[key]

    def _suffix_min(self, values: IntArray) -> IntArray:
        """Returns for each interval the minimum over it and all longer ones with the same begin. [intervals]"""
        minima = values.copy()
        for begin in range(self.intervals.num_boundaries - 1):
            row = minima[self.intervals.row(begin)][::-1]  # the longest first
            np.minimum.accumulate(row, out=row)
        return minima

    def _last_ends(self, allowed: BoolArray) -> IntArray:
        """Returns for each begin the last allowed end, or the begin itself if there is none.

        Of each begin, the allowed intervals must be the shortest ones. [intervals] -> [boundaries]
        """
        num_allowed = np.add.reduceat(allowed, self.intervals.row_offset[:-1], dtype=np.int64)
        return np.append(num_allowed, 0) + np.arange(self.intervals.num_boundaries)


def _max_microbatches(placement: StagePlacement) -> dict[int, int]:
    """Returns for each device class of a placement how many micro-batches its busiest replica runs."""
    most: dict[int, int] = {}
    for c, load in zip(placement.device_classes, placement.schedule.replicas, strict=True):
        most[c] = max(most.get(c, 0), load.num_microbatches)
    return most


def _sums_of_min(sums: Sequence[IntArray]) -> IntArray:
    """Returns the prefix sums of the minima, between two boundaries, over several prefix sums. [boundaries]"""
    if len(sums) == 1:
        return sums[0]
    return prefix_sums(np.minimum.reduce([np.diff(values) for values in sums]))
