"""Which layer intervals a stage may hold within a limit on the step time: for each begin, those up to some last end.

The more layers, the more time and memory they take. If that is not so, as with all-reduces in buckets, an interval
counts as little as the minimum over all longer ones with the same begin (a suffix minimum). So nothing here exceeds
what the simulator says, and the feasible intervals with one begin form a range of ends: `relaxation.py` needs that.

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
"""(class, memory peaks, micro-batches) of the replicas; whether the stage receives activations, and may recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckReplica:
    """The replica of a placement with the most micro-batches, by prefix sums over the layers. All [boundaries].

    Attributes:
        forward_sums, backward_sums: F, and the r that the stage before waits for, of one micro-batch.
        num_microbatches: how many it runs.
        num_disjoint_forwards: F of these that it cannot run during the round trip of one micro-batch.
    """

    forward_sums: IntArray
    backward_sums: IntArray
    num_microbatches: int
    num_disjoint_forwards: int

    @property
    def disjoint_work_sums(self) -> IntArray:
        """What the replica does outside the round trip of one micro-batch: the other r, and some F."""
        sums: IntArray = (
            self.num_microbatches - 1
        ) * self.backward_sums + self.num_disjoint_forwards * self.forward_sums
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class IntervalLimits:
    """The minimum step time that allows each interval, for placements that differ only in memory. Hashed by identity.

    Attributes:
        plain_ns, recompute_ns: of stages without and with recomputation; suffix minima over the ends. [intervals]
    """

    plain_ns: IntArray
    recompute_ns: IntArray


class FeasibleIntervals:
    """The feasible intervals of all placements at one micro-batch size.

    Attributes:
        head_ns: a lower bound of F of one micro-batch in all layers before each boundary. [boundaries]
        before_ns: the same of F and r. [boundaries]
    """

    def __init__(self, costs: StageCostTable, first_placements: Sequence[StagePlacement]) -> None:
        """`first_placements` are those of the first stage of every pipeline."""
        self.costs, self.intervals = costs, costs.intervals
        self._layer_sums: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._limits: dict[Hashable, IntervalLimits] = {}
        self._memory_ends: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._transfers: dict[Hashable, tuple[IntArray, IntArray]] = {}
        self._time_ends: dict[IntervalLimits, tuple[IntArray, IntArray]] = {}
        self._limit_ns = -1
        # If I runs apart from W, a stage that sends no gradient back has none: the first one, or any that begins at a
        # cut without gradients. If there are such cuts, no I counts.
        crosses = gradient_crosses(costs.times[0].profile)[list(costs.intervals.cuts)]
        self._counts_input_grad = bool(crosses[1:-1].all())
        # Suffix minima make memory grow with the end, so that the ends that fit are a range. [classes][intervals]
        self._static_bytes = [self._suffix_min(memory.static_bytes) for memory in costs.memory.of_class]
        # The layers before a boundary may be on any devices of any pipeline, not only on those of a first stage.
        placements = reachable(first_placements)
        distinct = {(p.device_classes, p.schedule.has_split_backward): p for p in placements}.values()
        self.before_ns = _sums_of_min([self.microbatch_sums(placement) for placement in distinct])
        forward_sums = [self._sums_on(placement, c)[0] for placement in distinct for c in placement.device_classes]
        self.head_ns = _sums_of_min(forward_sums)

    def microbatch_sums(self, placement: StagePlacement) -> IntArray:
        """Returns prefix sums of F and r of one micro-batch: per layer, the minimum over the replicas. [boundaries]"""
        on_each = [self._sums_on(placement, c) for c in placement.device_classes]
        return _sums_of_min([forward + backward for forward, backward in on_each])

    def forward_sums(self, placement: StagePlacement) -> IntArray:
        """Returns the same of F alone. [boundaries]"""
        return _sums_of_min([self._sums_on(placement, c)[0] for c in placement.device_classes])

    def bottleneck(self, placement: StagePlacement, lower_bound: LowerBound) -> BottleneckReplica:
        """Returns the replica of a placement that runs the most micro-batches."""
        loads = placement.schedule.replicas
        # Any replica gives a valid bound; the one with the most micro-batches is usually the busiest.
        k = max(range(len(loads)), key=lambda k: loads[k].num_microbatches)
        forward_sums, backward_sums = self._sums_on(placement, placement.device_classes[k])
        num = loads[k].num_microbatches
        # At most `max_in_flight` F start before the first backward ends; in a forwards-first schedule, F of the
        # micro-batches before the final one are over before any backward starts.
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
        """Prefix sums of F and r of one micro-batch on a class of devices. [boundaries]"""
        key = (c, placement.schedule.has_split_backward)
        if key not in self._layer_sums:
            units = self.intervals.row_offset[:-1]  # the intervals from each boundary to the next
            forward_ns, backward_ns = self.costs.device_times(placement, c, units)
            counts = self._counts_input_grad or not placement.schedule.has_split_backward
            # The time of an interval is rounded as a whole, F and W each: its units may be half a nanosecond too long.
            slack = 0 if self.costs.classes[c].device.speed == 1.0 else 2
            self._layer_sums[key] = (
                prefix_sums(np.maximum(forward_ns - slack, 0)),
                prefix_sums(np.maximum(backward_ns - slack, 0) * counts),
            )
        return self._layer_sums[key]

    def limits(self, placement: StagePlacement) -> IntervalLimits:
        """Returns the limits that the work of a replica sets: bounds "work" and "return" of one stage."""
        max_microbatches: dict[int, int] = {}
        loads = placement.schedule.replicas
        for c, load in zip(placement.device_classes, loads, strict=True):
            max_microbatches[c] = max(max_microbatches.get(c, 0), load.num_microbatches)
        schedule = placement.schedule
        key: tuple[Hashable, ...] = (
            placement.device_classes,
            tuple(max_microbatches.items()),
            schedule.has_split_backward,
            schedule.has_full_backward,
            tuple(sorted(map(str, schedule.last_phases))),
        )
        # The F that recomputation adds depends on what the stage must save, else it is nothing.
        key += self._memory_key(placement) if (self.memory_ends(placement)[0] < len(self.head_ns) - 1).any() else ()
        if key not in self._limits:
            counts = list(zip(placement.device_classes, (load.num_microbatches for load in loads), strict=True))
            numbers = [counts.index(pair) for pair in max_microbatches.items()]
            replicas = [self.costs.replica_cost(placement, k, slice(None)) for k in numbers]
            on_device = [self.costs.replica_cost(placement, k, slice(None), on_device=True) for k in numbers]
            # Recomputation adds some F to each r. Every replica must meet its limit, hence the maximum over them.
            # [intervals]
            again_ns = (
                self.costs.memory.recomputed_ns(placement, slice(None)) if self.costs.memory.may_recompute else {}
            )
            is_split = schedule.has_split_backward
            plain = [self._limit_ns_of(each, each.critical_backward_ns, is_split=is_split) for each in replicas]
            recomputed = [
                self._limit_ns_of(each, each.critical_backward_ns + np.minimum(ns, MAX_TIME), is_split=is_split)
                for each in on_device
                if (ns := again_ns.get(placement.device_classes[each.index])) is not None
            ] or plain
            self._limits[key] = IntervalLimits(
                self._suffix_min(np.maximum.reduce(plain)), self._suffix_min(np.maximum.reduce(recomputed))
            )
        return self._limits[key]

    def _limit_ns_of(self, replica: ReplicaCost, backward_ns: IntArray, *, is_split: bool) -> IntArray:
        """A lower bound of the step time if a replica holds each interval. [intervals]"""
        begins, num = self.intervals.begins, replica.num_microbatches
        critical = num * (replica.forward_ns + backward_ns)
        # All layers from the begin of the interval on, forwards and backwards, for one micro-batch.
        round_trip = (self.before_ns[-1] - self.before_ns)[begins]
        if is_split:  # of the first stage, before its W: only what comes behind it runs backwards
            first = self.intervals.row(0)
            round_trip[first] = replica.forward_ns[first] + (self.before_ns[-1] - self.before_ns[1:])
        work = (
            np.maximum(critical + (num - 1) * replica.deferred_ns, round_trip) + replica.deferred_ns + replica.sync_ns
        )
        # After F of the layers before: the work, then the update. Or F and r, between F and r of the layers before.
        limit_ns: IntArray = np.maximum(self.head_ns[begins] + work, self.before_ns[begins] + critical)
        return limit_ns

    def clear(self) -> None:
        """Drops the interval limits, which are large; they are computed anew when asked for."""
        self._limits.clear()
        self._time_ends.clear()

    def time_ends(self, limits: IntervalLimits, limit_ns: int) -> tuple[IntArray, IntArray]:
        """Returns for each begin the last end within a step time, without and with recomputation. [boundaries]"""
        if limit_ns != self._limit_ns:
            self._limit_ns = limit_ns
            self._time_ends.clear()
        if limits not in self._time_ends:
            # Suffix minima grow with the end, so the allowed intervals of each begin come first in its row.
            plain, recomputed = limits.plain_ns <= limit_ns, limits.recompute_ns <= limit_ns
            self._time_ends[limits] = self._last_ends(plain), self._last_ends(recomputed)
        return self._time_ends[limits]

    def memory_ends(self, placement: StagePlacement) -> tuple[IntArray, IntArray]:
        """Returns for each begin the last end that fits, without recomputation and with it. [boundaries]"""
        key = self._memory_key(placement)
        if key not in self._memory_ends:
            plain = recomputed = np.full(self.intervals.num_boundaries, self.intervals.num_boundaries - 1)
            for c, peaks, num in key[0]:
                memory = self.costs.memory.of_class[c]
                room = self.costs.classes[c].limit_bytes - self._static_bytes[c]
                if placement.receives_activations:
                    room = room - num * memory.input_bytes
                # Buffers for gradients are left out: they depend on the end, and need not grow with it.
                usage = memory.in_flight_bytes(peaks, slice(None), recompute=False)
                plain = np.minimum(plain, self._last_ends(usage <= room))
                if self.costs.memory.may_recompute:
                    usage = memory.least_in_flight_bytes(peaks, slice(None))
                    recomputed = np.minimum(recomputed, self._last_ends(usage <= room))
            self._memory_ends[key] = plain, np.maximum(plain, recomputed) if self.costs.memory.may_recompute else plain
        return self._memory_ends[key]

    def _memory_key(self, placement: StagePlacement) -> _MemoryKey:
        """What the memory of a placement depends on."""
        loads = {
            (c, load.memory_peaks, load.num_microbatches)
            for c, load in zip(placement.device_classes, placement.schedule.replicas, strict=True)
        }
        return (tuple(sorted(loads)), placement.receives_activations)

    def transfers(
        self, lower_bound: LowerBound, placement: StagePlacement, successor: StagePlacement
    ) -> tuple[IntArray, IntArray]:
        """Returns both transfers of one micro-batch, and the same while all cross the busiest link. [boundaries]"""
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
        """Returns for each interval the minimum over those with the same begin that are as long or longer."""
        minima = values.copy()
        for begin in range(self.intervals.num_boundaries - 1):
            row = minima[self.intervals.row(begin)][::-1]  # the longest first
            np.minimum.accumulate(row, out=row)
        return minima

    def _last_ends(self, allowed: BoolArray) -> IntArray:
        """Returns for each begin the last end, given that the shortest intervals are allowed; the begin if none is.

        [intervals] -> [boundaries]
        """
        num_allowed = np.add.reduceat(allowed, self.intervals.row_offset[:-1], dtype=np.int64)
        return np.append(num_allowed, 0) + np.arange(self.intervals.num_boundaries)


def _sums_of_min(sums: Sequence[IntArray]) -> IntArray:
    """Prefix sums of the minimum over several prefix sums, layer by layer. [boundaries]"""
    if len(sums) == 1:
        return sums[0]
    return prefix_sums(np.minimum.reduce([np.diff(values) for values in sums]))
