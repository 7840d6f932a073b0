"""Decides whether any plan on the first devices of a cluster, in its order, can be within a step time.

For a limit T, let furthest(p, c) be the last boundary such that the first p devices can run all layers before it, in
stages that are within T, with c cuts between them. A stage of fewer layers, begun later, is within T whenever a longer
one is, so nothing else of what lies before matters: a dynamic programme over p, c and the number of devices of the next
stage, without tables of intervals or placements. A stage [i, j) of R devices is within T only if (docs/algorithm.md,
Many devices)

    work         A + n (F + B) + the ring of its last bucket + its update <= T
    return       D + n (F + r) <= T
    round trip   the round trip of one micro-batch + (n - 1) r + u F <= T
    rounds       D + k trips from here on + (n - 1 - (k - 1) w) (F + r) <= T, 1F1B with w micro-batches in flight
    all-reduce   the start of its last B + B of the layers of its first bucket + the rings of all its buckets
                 + its update <= T, where that start is bounded by the work, the round trip and the rounds
    memory       parameters, gradients, optimizer state and the stash of one micro-batch fit

with A and D the F, and the F and r, of one micro-batch in all layers before and over c cuts.
"""

from copy import copy
from itertools import pairwise

import numpy as np

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.in_flight import FORWARDS_FIRST, IN_FLIGHT, IN_PAIRS
from bapipe.planner.device_line.layer_sums import LayerSums, splits_backwards
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.prefixes import Prefixes
from bapipe.planner.device_line.replica_classes import Groups, replica_classes
from bapipe.planner.device_line.replica_weights import FloatArray, replica_weights
from bapipe.planner.device_line.rings import Rings
from bapipe.planner.device_line.stage_kinds import StageKinds
from bapipe.planner.device_line.stage_limits import StageLimits

LAST_STAGE_GROWTH = 4
"""GPipe: the replicas of the last stage are told apart by powers of this."""

ROUNDING_NS = 2.0
"""By how much the simulator's time of an action may be shorter than the sum over its layers, two halves each way."""


class PrefixBound(LayerSums):
    """The problem of one order of the devices, schedule and micro-batch size.

    Attributes:
        num_cuts: the fewest and the most cuts between the stages of its plans.
        bound_ns: what is proven of every plan.
    """

    def __init__(
        self,
        line: DeviceLine,
        schedule: str,
        size: int,
        num_devices: int,
        last_replicas: tuple[int, int] | None = None,
        only_replicas: int | None = None,
    ) -> None:
        """`last_replicas` restricts the last stage's devices to a range; `only_replicas` fixes those of all stages."""
        super().__init__(line, schedule, size, num_devices)
        most, wanted = min(num_devices, len(line.cuts) - 1) - 1, line.options.num_stages
        self.num_cuts = (0, most) if wanted is None else (min(wanted - 1, most),) * 2
        self.last_replicas, self._only_replicas = last_replicas or (1, num_devices), only_replicas
        self.bound_ns = 0
        self._rounded_stages = num_devices if self.is_rounded else 0
        self.has_whole_backward = not splits_backwards(schedule)
        self.are_forwards_first = schedule in FORWARDS_FIRST
        self.step_share = 0.5 if schedule in IN_PAIRS else 1.0  # of F + r, that from one F or r to the next one takes
        self._depths = None  # the micro-batches in flight from each position on, on one device. [devices]
        if schedule in IN_FLIGHT:
            self._depths = np.array([IN_FLIGHT[schedule](num_devices - p) for p in range(num_devices)])
        if only_replicas is not None:
            self.groups = Groups(fewest=np.array([only_replicas]), most=np.array([only_replicas]))
        else:
            every = min(num_devices, self.num_microbatches) if line.options.replicas else 1
            self.groups = replica_classes(every, self.num_microbatches, schedule, alike=self._has_one_speed)
        self.weights = replica_weights(self.speeds, schedule, self.num_microbatches, self.groups)
        self.counts = self.weights.counts.min(axis=0)  # of every replica of a class. [groups]
        self._list_targets()
        self._kinds_of_stages = StageKinds(self, self.groups.most)
        self.rings = Rings(self, self.groups.fewest, may_be_idle=self._has_one_speed)
        self.limit_bytes = self._list_memory()

    def with_num_cuts(self, fewest: int, most: int) -> "PrefixBound":
        """Returns the problem of plans with so many cuts between their stages."""
        other = copy(self)
        other.num_cuts = fewest, most
        return other

    def parts_by_last_stage(self) -> list["PrefixBound"]:
        """Returns, of GPipe, problems for ranges of the replicas of the last stage, on which its bound depends."""
        most = int(self.groups.most[-1])
        if not self.are_forwards_first or self.last_replicas != (1, most) or most < LAST_STAGE_GROWTH:
            return []
        powers = [LAST_STAGE_GROWTH**i for i in range(most.bit_length()) if LAST_STAGE_GROWTH**i <= most]
        parts = [copy(self) for _ in powers]
        for part, fewest in zip(parts, powers, strict=True):
            part.last_replicas = fewest, min(LAST_STAGE_GROWTH * fewest - 1, most)
        return parts

    @property
    def is_alike(self) -> bool:
        """Whether `ring_bound.py` knows more: 1F1B or GPipe, with replicas, on devices of one speed."""
        return self.schedule in ("1f1b", "gpipe") and self.line.options.replicas and self._has_one_speed

    def _list_targets(self) -> None:
        """Notes the numbers of devices that a stage may have, ascending, and the class of each. [numbers]

        Of alike devices the fewest of a class stand for all; then devices may stay idle.
        """
        fewest, most = self.groups.fewest, self.groups.most
        sizes = np.ones_like(fewest) if self._has_one_speed else most - fewest + 1
        self._first_targets = np.cumsum(sizes) - sizes
        self._class_of = np.repeat(np.arange(fewest.size), sizes)
        self._numbers = np.arange(self._class_of.size) - self._first_targets[self._class_of] + fewest[self._class_of]

    def numbers_within(self, most: int) -> tuple[IntArray, IntArray]:
        """Returns the numbers of devices of a stage up to this one, and their classes."""
        numbers = self._numbers[: np.searchsorted(self._numbers, most, side="right")]
        return numbers, np.arange(self._class_of[numbers.size - 1] + 1 if numbers.size else 0)

    def _list_memory(self) -> FloatArray:
        """The bytes that the devices of a stage may hold, by its first device and its class. [positions, groups]"""
        limits = np.array(self.line.limits[: self.num_devices], dtype=float)
        limit_bytes = np.full((self.num_devices, self.groups.fewest.size), limits.max())
        if not self._has_one_speed:
            for g, number in enumerate(self.groups.fewest.tolist()):
                if number <= limits.size:
                    windows = np.lib.stride_tricks.sliding_window_view(limits, number).min(axis=1)
                    limit_bytes[: windows.size, g] = windows
        return limit_bytes

    def path(self, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """Returns the stages that the relaxation chooses within a step time; None if no plan can be within it."""
        last, num = len(self.line.cuts) - 1, self.num_devices
        fewest_cuts, max_cuts = self.num_cuts[0], self.num_cuts[1] + 1
        limit = limit_ns * (1 + 1e-12)
        first = self.first_begins(limit, np.array([fewest_cuts]), np.array([self.last_replicas[1]]))[0]
        furthest = np.full((num + 1, max_cuts + 1), -1, dtype=np.int64)  # the last column: cuts of a whole plan
        furthest[0, 0] = 0
        before = np.full_like(furthest, -1)  # the first device of the last stage
        for position in range(num):
            deadline.check()
            row = furthest[position]
            # Only states that reach further than those with fewer cuts, and as few transfers to come.
            reached = np.maximum.accumulate(np.concatenate([[-1], row[fewest_cuts:-1]]))
            reached = np.concatenate([np.full(fewest_cuts, -1), reached])
            cuts = np.flatnonzero((row > reached) & (row >= first[position]))
            if cuts.size == 0:
                continue
            if row[cuts[-1]] == last:
                return self._trace(furthest, before, position, int(cuts[-1]))
            if self._has_one_speed:  # devices may stay idle
                idle = cuts[row[cuts] > furthest[position + 1, cuts]]
                furthest[position + 1, idle], before[position + 1, idle] = row[idle], before[position, idle]
                if position:
                    cuts = cuts[row[cuts] > furthest[position - 1, cuts]]  # one device less does not reach as far
            cuts = cuts[cuts < max_cuts]
            if cuts.size:
                self._extend(furthest, before, first, position, cuts, limit)
        done = np.flatnonzero(furthest[num] == last)
        return self._trace(furthest, before, num, int(done[0])) if done.size else None

    def _extend(
        self, furthest: IntArray, before: IntArray, first: IntArray, position: int, cuts: IntArray, limit: float
    ) -> None:
        """Adds a stage to the prefixes with some numbers of cuts, where it ends behind all that is known."""
        numbers, groups = self.numbers_within(self.num_devices - position)
        if groups.size == 0:
            return
        begins = furthest[position, cuts]
        rows = (position + numbers)[:, None]
        known = furthest[rows, cuts + 1]
        wanted = np.maximum(np.maximum(known, begins) + 1, first[rows])  # [numbers, cuts]
        at_least = np.minimum.reduceat(wanted, self._first_targets[groups], axis=0).T
        prefixes = Prefixes(
            begins=begins,
            cuts=cuts,
            fewest_cuts=np.full_like(cuts, self.num_cuts[0]),
            last_fewest=np.full_like(cuts, self.last_replicas[0]),
            last_most=np.full_like(cuts, self.last_replicas[1]),
        )
        ends = self.last_ends(position, prefixes, groups, limit, at_least=at_least)
        ends = ends[:, self._class_of[: numbers.size]].T
        if not self._has_one_speed or cuts[0] < self.num_cuts[0]:
            # Or none: the layers of a plan's stage may lie before, if the devices before it can do more than theirs.
            wanted = np.maximum(known + 1, np.maximum(first[rows], 1))
            ends = np.maximum(ends, begins)
        number, cut = np.nonzero(ends >= wanted)
        into = position + numbers[number], cuts[cut] + 1
        furthest[into], before[into] = ends[number, cut], position

    def first_begins(self, limit: float, fewest_cuts: IntArray, last_most: IntArray) -> IntArray:
        """The first boundaries behind which the devices from each position on can do all work. [plans, positions + 1]

        As `path` backwards, without transfers, rings and memory: the stages behind begin as early as they can.

        Args:
            fewest_cuts: of several kinds of plans. [plans]
            last_most: the replicas that the last stage of those has at most. [plans]
        """
        w, num, last = self.weights, self.num_devices, len(self.line.cuts) - 1
        trip, arrival = self.least.trip, 1 / self.max_speed
        whole_trip = trip[-1] * arrival + self._both_ways[fewest_cuts][:, None]
        slack = self.slack(np.arange(num)[:, None], np.arange(self.groups.fewest.size)[None, :])
        first = np.full((fewest_cuts.size, num + 1), last)
        for p in range(num - 1, -1, -1):
            numbers, g = self.numbers_within(num - p)
            if g.size == 0:
                continue
            ends = np.minimum.reduceat(first[:, p + numbers], self._first_targets[g], axis=1)
            ends = np.minimum(ends, last)  # behind those that cannot
            n, v, q, busiest = w.counts[p, g], w.speed[p, g], w.forward_speed[p, g], w.busiest[p, g]
            room, before = limit + slack[p, g], arrival * trip[ends]
            # What the layers of the stage may take before those ends; of a begin behind the end nothing is said.
            of_trip = (room - before) / np.maximum(busiest - arrival, 1e-9)
            begins = np.zeros_like(ends)
            for k, steps in self.rounds(p, g, n):
                here = k * w.from_here[p]
                between = self.step_share * np.maximum(steps, 0) / v
                has_rounds = (k >= 2) & (steps >= 0)
                passed = room - before - here * (trip[-1] - trip[ends])
                of_trip = np.where(has_rounds, np.minimum(of_trip, passed / np.maximum(between, 1e-9)), of_trip)
                y = trip[ends] - passed / np.maximum(here + between - arrival, 1e-9)
                begins = np.where(has_rounds, np.maximum(begins, np.searchsorted(trip, y * (1 - 1e-9))), begins)
            apart_f = np.broadcast_to(self.forwards_apart(p, g, last_most[:, None]) / q, ends.shape)
            apart_r = (n - 1) / v
            for sums, columns in self._kinds_of_stages.sums(p, g):
                own, e = sums.own, ends[:, columns]
                share_f, share_r = own.least_shares
                apart = apart_r[columns] * share_r + apart_f[:, columns] * share_f
                of_work = np.maximum(room[columns] - whole_trip, 0) / np.maximum(apart, 1e-9)
                of_work = np.minimum(of_work, room[columns] / busiest[columns])
                x, y = own.work[e] - of_work, own.trip[e] - of_trip[:, columns]
                by_trip = np.minimum(np.searchsorted(own.trip, y * (1 - 1e-9)), e)
                of_own = np.maximum(np.searchsorted(own.work, x * (1 - 1e-9)), by_trip)
                begins[:, columns] = np.maximum(begins[:, columns], of_own)
            first[:, p] = np.minimum(last, begins.min(axis=1))
            if self._has_one_speed:
                first[:, p] = np.minimum(first[:, p], first[:, p + 1])
        return first

    def rounds(self, position: int, groups: IntArray, counts: IntArray) -> list[tuple[IntArray, IntArray]]:
        """Round trips, one after another, and steps on a replica between them; fits `groups`."""
        if self._depths is None:
            return []
        in_flight = self.replica_in_flight(position, groups)
        return [(k, counts - 1 - (k - 1) * in_flight) for k in (np.full_like(counts, 2), 1 + (counts - 1) // in_flight)]

    def replica_in_flight(self, position: int | IntArray, groups: IntArray) -> IntArray:
        """How many micro-batches one replica has in flight at most; fits `groups`, the classes of stages."""
        assert self._depths is not None
        in_flight: IntArray = -(-self._depths[position] // self.groups.fewest[groups])
        return in_flight

    def slack(self, position: int | IntArray, groups: IntArray) -> FloatArray:
        """By how much a chain of actions may be shorter than the sums over its layers."""
        n, v = self.weights.counts[position, groups], self.weights.speed[position, groups]
        trips: IntArray | int = 1
        if self._depths is not None:
            trips = 1 + (n - 1) // self.replica_in_flight(position, groups)
        slack: FloatArray = (ROUNDING_NS * n + self._rounded_stages * trips) * (1 + 1 / v)
        return slack

    def last_ends(
        self,
        position: int,
        prefixes: Prefixes,
        groups: IntArray,
        limit: float,
        *,
        at_least: IntArray | None = None,
        delays: FloatArray | None = None,
    ) -> IntArray:
        """The last end of a stage within the limits, per prefix and group; the begin if there is none.

        [prefixes, groups]

        Args:
            at_least: smaller ends are of no use, and may be reported as smaller than they are. [prefixes, groups]
            delays: what follows behind the way back of the stage's last micro-batch. [prefixes, groups]
        """
        i, last = prefixes.begins[:, None], len(self.line.cuts) - 1
        most, few = self.groups.most[groups], self.groups.fewest[groups]
        may_end = (few <= prefixes.last_most[:, None]) & (most >= prefixes.last_fewest[:, None])
        highest = np.where(may_end, last, last - 1)
        lowest = np.broadcast_to(i + 1, highest.shape) if at_least is None else np.maximum(at_least, i + 1)
        ends = np.broadcast_to(i, highest.shape).copy()
        for sums, columns in self._kinds_of_stages.sums(position, groups):
            of_columns = None if delays is None else delays[:, columns]
            stages = StageLimits(self, sums, position, prefixes, groups[columns], limit, of_columns)
            high, low = np.minimum(stages.highest_ends(), highest[:, columns]), lowest[:, columns]
            s, g = np.nonzero(high >= low)
            ends[s, columns[g]] = np.maximum(stages.last_within(s, g, low[s, g], high[s, g]), prefixes.begins[s])
        return ends

    def transfers_before(self, position: int, cuts: IntArray) -> tuple[FloatArray, FloatArray]:
        """The transfers over some cuts on the devices before a position, one way and both ways. [cuts]"""
        forced = self._forced_crossings(position, cuts)
        one_way = self._one_way[cuts] + forced * self._extra_one_way
        return one_way, self._both_ways[cuts] + forced * self._extra_both

    def forced_transfers(self, position: int, cuts: IntArray) -> FloatArray:
        """What `transfers_before` counts, both ways, for boundaries between hosts. [cuts]"""
        extra: FloatArray = self._forced_crossings(position, cuts) * self._extra_both
        return extra

    def _forced_crossings(self, position: int, cuts: IntArray) -> IntArray:
        """The boundaries between hosts before a position that no stage spans, at least. [cuts]"""
        forced: IntArray = np.maximum(0, self._boundaries_before[position] - (position - cuts))
        return forced

    def transfers_behind(self, prefixes: Prefixes) -> FloatArray:
        """The transfers both ways over the cuts that are still to come behind prefixes, at least. [prefixes]"""
        behind: FloatArray = self._both_ways[np.maximum(0, prefixes.fewest_cuts - prefixes.cuts)]
        return behind

    def forwards_apart(self, position: int, groups: IntArray, last_most: IntArray) -> IntArray:
        """F of a replica that do not run during the round trip of its micro-batch whose backward is first.

        Args:
            groups: the classes of devices of stages.
            last_most: the replicas that the last stage has at most; fits `groups`.
        """
        n, most, few = self.weights.counts[position, groups], self.groups.most[groups], self.groups.fewest[groups]
        if self.are_forwards_first:
            # The last stage is this one, or has devices behind it.
            left = self.num_devices - position
            last = np.minimum(np.maximum(last_most, few), np.maximum(most, left - few))
            apart: IntArray = np.maximum(0, (self.num_microbatches - last) // most)
        elif self._depths is None:
            apart = np.zeros_like(n)
        else:
            apart = np.maximum(0, n - self.replica_in_flight(position, groups))
        return apart

    def num_rounds(self, position: int, groups: IntArray) -> IntArray:
        """How many micro-batches make a round trip to the last stage one after another, at least. [groups]"""
        assert self._depths is not None
        in_flight = self._max_in_flight(int(self._depths[position]))[groups]
        rounds: IntArray = (self.num_microbatches - 1) // in_flight + 1
        return rounds

    def _max_in_flight(self, depth: int) -> IntArray:
        """The micro-batches of a stage in flight: a multiple of its devices, the largest of each class. [groups]"""
        if self._only_replicas is not None:
            at_depth: IntArray = self.groups.fewest * -(-depth // self.groups.fewest)
            return at_depth
        sizes = np.arange(1, int(self.groups.most[-1]) + 1)
        largest: IntArray = np.maximum.reduceat(sizes * -(-depth // sizes), self.groups.fewest - 1)
        return largest

    def _trace(self, furthest: IntArray, before: IntArray, position: int, num_cuts: int) -> LinePlan:
        """The stages of a path; devices that it leaves idle, or without layers, join the stage before them."""
        boundaries, begins = [len(self.line.cuts) - 1], []
        at = position
        for c in range(num_cuts, 0, -1):
            at = int(before[at, c])
            boundary = int(furthest[at, c - 1])
            if boundary < boundaries[-1]:
                begins.append(at)
                boundaries.append(boundary)
        boundaries.reverse()
        firsts = [0, *begins[::-1][1:], position]
        counts = tuple(min(b - a, int(self.groups.most[-1])) for a, b in pairwise(firsts))
        return LinePlan(
            cuts=tuple(self.line.cuts[boundary] for boundary in boundaries),
            counts=counts,
            schedule=self.schedule,
            microbatch_size=self.size,
        )
