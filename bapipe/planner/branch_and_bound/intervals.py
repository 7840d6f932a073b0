"""All layer intervals [begin, end) between legal cuts, as flat arrays: times and bytes of each.

Boundaries 0 to K are the start of the chain, its legal cuts, and its end. The K (K + 1) / 2 intervals [begin, end) are
sorted by begin, then by end: the intervals with one begin are a slice, and a minimum over ends is one `reduceat`.

Shapes: `[intervals]` one entry per interval, `[boundaries]` one per boundary 0 to K, `[layers]` one per layer. Sums
over an interval are differences of prefix sums. Times are rounded as the simulator rounds them, once per stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.profile import LayerProfile, ModelProfile
from bapipe.simulator.in_flight import InFlight, in_flight_bytes
from bapipe.simulator.interval_costs import IntervalCosts, gradient_crosses, prefix_sums, ring_ns
from bapipe.simulator.stage_cost import BUCKET_BYTES
from bapipe.simulator.tied_weights import TiedWeights

IntArray = NDArray[Any]
"""Nanoseconds, bytes, counts or numbers: int64, and if a sum could overflow, Python integers."""

BoolArray = NDArray[Any]

Rows = slice | IntArray
"""Some intervals: from one number to another, or by their numbers in any order."""

INF = 1 << 60
"""Stands for infinity in arrays of nanoseconds and bytes; the sum of two still fits in 64 bits."""

MAX_TIME = INF >> 14
"""Times of one action or transfer are cut off here, at 2^46 ns, so that sums of many stay below `INF`."""


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


class IntervalMemory:
    """Bytes of every interval at one micro-batch size, on one kind of device. All [intervals].

    Attributes:
        static_bytes: parameters, gradients, optimizer state and workspace.
        stash_bytes: kept per micro-batch from F to the end of its backward.
        gradient_stash_bytes: what I leaves for W, per micro-batch; nothing if the stage sends no gradient back.
        input_bytes, output_grad_bytes: activations that come in per micro-batch, and gradients that come back.
    """

    def __init__(
        self,
        intervals: IntervalIndex,
        profile: ModelProfile,
        microbatch_size: int,
        cut_bytes: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """`cut_bytes` are the activations and the gradients alive before each layer. [layers + 1]"""
        measured = profile.at(microbatch_size)
        static_bytes = [
            layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes for layer in profile.layers
        ]
        self.static_bytes = intervals.sums(static_bytes) + intervals.maxima([m.workspace_bytes for m in measured])
        self.static_bytes += _tied_copy_bytes(intervals, profile)
        self.stash_bytes = intervals.sums([m.stash_bytes for m in measured])
        left_for_w = intervals.sums([m.left_by_input_grad_bytes for m in measured])
        self.gradient_stash_bytes = np.where(intervals.sends_gradient(profile), left_for_w, 0)
        # [layers + 1] -> [boundaries]. Activations come in at the begin of a stage, gradients at its end.
        send, grad = (np.array([side[cut] for cut in intervals.cuts], dtype=np.int64) for side in cut_bytes)
        self.input_bytes, self.output_grad_bytes = send[intervals.begins], grad[intervals.ends]

    def in_flight_bytes(self, peaks: Sequence[InFlight], rows: Rows, *, recompute: bool) -> IntArray:
        """Returns the maximum over some states of a device of what its micro-batches in flight keep. [rows]"""
        stash, gradient_stash = self.stash_bytes[rows], self.gradient_stash_bytes[rows]
        # Without recomputation a micro-batch keeps its stash all the time, and nothing besides during its backward.
        states = peaks if recompute else dict.fromkeys(peak._replace(in_backward=0) for peak in peaks)
        kept = self.input_bytes[rows] if recompute else stash
        num_bytes: IntArray = np.maximum.reduce(
            [in_flight_bytes(state, kept, stash, gradient_stash) for state in states]
        )
        return num_bytes

    def least_in_flight_bytes(self, peaks: Sequence[InFlight], rows: Rows) -> IntArray:
        """Returns what these keep at least if any layers are recomputed: a lower bound of the maximum. [rows]"""
        stash, gradient_stash = self.stash_bytes[rows], self.gradient_stash_bytes[rows]
        num_bytes: IntArray = np.maximum.reduce(
            [min(of.kept, of.in_backward) * stash + of.before_weight_grad * gradient_stash for of in peaks]
        )
        return num_bytes


def _tied_copy_bytes(intervals: IntervalIndex, profile: ModelProfile) -> IntArray:
    """Bytes of the parameters, gradients and optimizer state that each interval uses and a layer outside it counts."""
    num_bytes = np.zeros(len(intervals.begins), dtype=np.int64)
    index = {layer.name: i for i, layer in enumerate(profile.layers)}

    def contains(layer: LayerProfile) -> BoolArray:
        cuts, i = np.array(intervals.cuts), index[layer.name]
        inside: BoolArray = (cuts[intervals.begins] <= i) & (i < cuts[intervals.ends])
        return inside

    for owner, users, copy in TiedWeights(profile.layers).copies():
        # The layer that counts a tied parameter is elsewhere, but a layer that uses it is inside. [intervals]
        needs_copy = np.logical_or.reduce([contains(user) for user in users]) & ~contains(owner)
        copy_bytes = copy.param_bytes + copy.gradient_bytes + copy.optimizer_bytes
        num_bytes += np.where(needs_copy, copy_bytes, 0)
    return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of some intervals. All [rows]

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns, backward_ns: F, I, W and B of a micro-batch.
        update_ns: the optimizer's update, once per step.
    """

    forward_ns: IntArray
    input_grad_ns: IntArray
    weight_grad_ns: IntArray
    backward_ns: IntArray
    update_ns: IntArray


class IntervalTimes:
    """Times of every interval at one micro-batch size, on one kind of device at one speed."""

    def __init__(
        self,
        intervals: IntervalIndex,
        profile: ModelProfile,
        microbatch_size: int,
        speed: float,
        costs: IntervalCosts | None = None,
    ) -> None:
        """`costs` are those of the profile at this size and any speed, if they are known."""
        self.intervals, self.profile = intervals, profile
        self._microbatch_size, self._speed = microbatch_size, speed
        self._bucket_fills: dict[tuple[bool, bool, bool], _BucketFill] = {}
        self.has_group_sums = any(layer.group_gradient_bytes for layer in profile.layers)
        self._costs = (costs or IntervalCosts(profile, microbatch_size, speed, max_ns=MAX_TIME)).at_speed(speed)
        self._cuts = np.array(intervals.cuts)

    def at(self, rows: Rows) -> Times:
        """Returns the times of some intervals: with a slice from a table of all, which is kept."""
        if not isinstance(rows, slice):
            return self._times(rows)
        every = self._every
        return Times(
            forward_ns=every.forward_ns[rows],
            input_grad_ns=every.input_grad_ns[rows],
            weight_grad_ns=every.weight_grad_ns[rows],
            backward_ns=every.backward_ns[rows],
            update_ns=every.update_ns[rows],
        )

    @cached_property
    def _every(self) -> Times:
        """Of all intervals, made when first asked for: long chains have very many."""
        return self._times(slice(None))

    def _times(self, rows: Rows) -> Times:
        # The layers of each interval. [rows]
        first, stop = self._cuts[self.intervals.begins[rows]], self._cuts[self.intervals.ends[rows]]
        apart_ns = self._costs.weight_grad_after_input_grad_ns(first, stop)
        backward_ns = self._costs.backward_ns(first, stop)
        return Times(
            forward_ns=self._costs.forward_ns(first, stop),
            input_grad_ns=self._costs.input_grad_ns(first, stop),
            weight_grad_ns=np.where(self._sends_gradient[rows], apart_ns, backward_ns),
            backward_ns=backward_ns,
            update_ns=self._costs.update_ns(first, stop),
        )

    @cached_property
    def longest(self) -> Times:
        """Upper bounds of the times of all intervals. One row."""
        first, stop = self._cuts[:1], self._cuts[-1:]
        apart = self._costs.weight_grad_after_input_grad_ns(first, stop)
        sent = self._costs.input_grad_if_sent_ns(first, stop)
        backward = np.maximum(self._costs.backward_ns(first, stop), sent + apart)
        return Times(
            forward_ns=self._costs.forward_ns(first, stop),
            input_grad_ns=sent,
            weight_grad_ns=backward,  # all of it in a stage that sends no gradient back
            backward_ns=backward,
            update_ns=self._costs.update_ns(first, stop),
        )

    @cached_property
    def _sends_gradient(self) -> BoolArray:
        return self.intervals.sends_gradient(self.profile)

    def unit_input_grad_ns(self) -> IntArray:
        """Returns I from each boundary to the next, if that stage sends a gradient back. [boundaries - 1]"""
        return self._costs.input_grad_if_sent_ns(self._cuts[:-1], self._cuts[1:])

    @cached_property
    def on_device(self) -> "IntervalTimes":
        """The same without the host's times.

        An action takes the longer of what device and host need, so what actions of stages take does not add up over
        layers, or with the F that is recomputed. What the device needs does, and bounds it from below.
        """
        if not self._costs.has_host_times:
            return self
        costs = self._costs.without_host_times()
        return IntervalTimes(self.intervals, self.profile, self._microbatch_size, self._speed, costs)

    def all_reduce_done_ns(
        self,
        num_devices: int,
        links: Sequence[Bandwidth],
        full_backward: bool,
        overlapped: bool,
        *,
        member_links: Sequence[Bandwidth] = (),
    ) -> IntArray:
        """Returns when the all-reduces of every interval are done, counted from the start of its last B, or W.

        Args:
            links: those among the devices; a ring is as slow as the slowest.
            full_backward: whether B is the last action, not W.
            overlapped: whether the links carry a bucket while B or W runs.
            member_links: of groups, those among their members.
        """
        after_b_ns = self._all_reduce_done_ns(num_devices, links, True, overlapped, member_links)
        if full_backward:
            return after_b_ns
        # The W of a stage that sends no gradient back is all of its B.
        after_w_ns = self._all_reduce_done_ns(num_devices, links, False, overlapped, member_links)
        done_ns: IntArray = np.where(self._sends_gradient, after_w_ns, after_b_ns)
        return done_ns

    def _all_reduce_done_ns(
        self,
        num_devices: int,
        links: Sequence[Bandwidth],
        full_backward: bool,
        overlapped: bool,
        member_links: Sequence[Bandwidth],
    ) -> IntArray:
        """When they are done, if the W of every stage is without its I.

        Buckets fill from the last layer, so one pass down the layers serves all intervals with the same begin. It
        advances all ends at once. [intervals]
        """
        intervals = self.intervals
        key = full_backward, overlapped, num_devices > 1
        if key not in self._bucket_fills:
            self._bucket_fills[key] = self._fill_buckets(full_backward, overlapped, num_devices > 1)
        fill = self._bucket_fills[key]
        num_members = num_devices * self.profile.device.num_members

        def bucket_ns(num_bytes: IntArray, group_bytes: IntArray) -> IntArray:
            """The ring of all members, then those of partners; as `bapipe.simulator.allreduce.sum_ns`."""
            if not self.has_group_sums:
                return np.minimum(ring_ns(num_bytes, num_devices, links, MAX_TIME), INF >> 2)
            whole_ns = ring_ns(group_bytes, num_members, [*links, *member_links], MAX_TIME)
            if num_devices > 1:
                whole_ns = whole_ns + ring_ns(num_bytes - group_bytes, num_devices, links, MAX_TIME)
            return np.minimum(whole_ns, INF >> 2)

        # done_ns[end]: when the full buckets of [begin, end) are done; a bucket waits for the one before and for its
        # gradients.
        done_ns = np.zeros(intervals.num_boundaries, dtype=np.int64)
        done_from = np.zeros((intervals.num_boundaries, intervals.num_boundaries), dtype=np.int64)  # [begin, end]
        # The buckets were recorded from the last layer to the first; the loop goes through them in that order.
        full_buckets = iter(fill.full)
        for begin in reversed(range(intervals.num_boundaries - 1)):
            for _ in range(fill.num_full[begin]):
                ends, num_bytes, group_bytes, ready_ns = next(full_buckets)
                done_ns[ends] = np.maximum(done_ns[ends], ready_ns) + bucket_ns(num_bytes, group_bytes)
            # Every layer from `begin` on has been seen: these are the final times of its intervals. [boundaries]
            done_from[begin] = done_ns
        full_done_ns = done_from[intervals.begins, intervals.ends]
        # The bucket that remains unfilled comes after all full ones.
        last_bucket_ns = bucket_ns(fill.last_bytes, fill.last_group_bytes)
        last_done_ns = np.maximum(full_done_ns, fill.last_ready_ns) + last_bucket_ns
        all_done_ns: IntArray = np.where(fill.last_bytes > 0, last_done_ns, full_done_ns)
        if overlapped:
            return all_done_ns
        # Not overlapped: all buckets were taken as ready at 0, which is the end of the last action.
        return all_done_ns + (self._every.backward_ns if full_backward else self._every.weight_grad_ns)

    def _fill_buckets(self, full_backward: bool, overlapped: bool, has_replicas: bool) -> "_BucketFill":
        """How the buckets fill, which depends neither on the devices nor on the links."""
        intervals, stops = self.intervals, np.array(self.intervals.cuts)
        costs = self._costs
        last_action_ns = costs.backward_ns if full_backward else costs.weight_grad_after_input_grad_ns
        # State of the bucket that is filling, for each end. [boundaries]
        num_bytes, group_bytes, ready_ns = (np.zeros(intervals.num_boundaries, dtype=np.int64) for _ in range(3))
        unfilled = np.zeros((3, intervals.num_boundaries, intervals.num_boundaries), dtype=np.int64)  # [3, begin, end]
        full: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        num_full = [0] * intervals.num_boundaries
        begin = intervals.num_boundaries - 2
        for layer in reversed(range(len(self.profile.layers))):
            profiled = self.profile.layers[layer]
            gradient_bytes = profiled.summed_bytes(has_replicas=has_replicas)
            if gradient_bytes:
                # One bucket per end serves all begins, as buckets fill from the last layer. This layer is in
                # the intervals that begin here or before and end later. [boundaries]
                inside = stops > layer
                num_bytes = np.where(inside, num_bytes + gradient_bytes, num_bytes)
                if profiled.group_gradient_bytes:
                    group_bytes = np.where(inside, group_bytes + profiled.group_gradient_bytes, group_bytes)
                first = np.full_like(stops, layer)
                stop = np.maximum(stops, first)
                # The gradients of this layer are ready when its backward and that of all later layers are over.
                layer_ready_ns = last_action_ns(first, stop)
                ready_ns = np.where(inside, layer_ready_ns, ready_ns) if overlapped else ready_ns
                # A bucket is full from `BUCKET_BYTES` on, as in the simulator (`stage_cost.fill_buckets`).
                overflowing = np.flatnonzero(num_bytes >= BUCKET_BYTES)
                if len(overflowing):
                    full.append((overflowing, num_bytes[overflowing], group_bytes[overflowing], ready_ns[overflowing]))
                    num_full[begin] += 1
                    num_bytes[overflowing] = group_bytes[overflowing] = 0
            # The first layer after boundary `begin`: what has not filled a bucket is the last one of [begin, end).
            if layer == intervals.cuts[begin]:
                unfilled[0, begin], unfilled[1, begin], unfilled[2, begin] = num_bytes, group_bytes, ready_ns
                begin -= 1
        return _BucketFill(
            full=tuple(full),
            num_full=tuple(num_full),
            last_bytes=unfilled[0][intervals.begins, intervals.ends],
            last_group_bytes=unfilled[1][intervals.begins, intervals.ends],
            last_ready_ns=unfilled[2][intervals.begins, intervals.ends],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketFill:
    """How the all-reduce buckets of every interval fill.

    Attributes:
        full: last layers first, for each layer that fills buckets: the ends of the intervals whose bucket it fills, its
            bytes, how many of them members of a group sum, and when its gradients are ready. Each of the four: [filled
            buckets]
        num_full: how many entries of `full` lie between each boundary and the next. [boundaries]
        last_bytes, last_group_bytes, last_ready_ns: the same of what remains for the last bucket. [intervals]
    """

    full: tuple[tuple[IntArray, IntArray, IntArray, IntArray], ...]
    num_full: tuple[int, ...]
    last_bytes: IntArray
    last_group_bytes: IntArray
    last_ready_ns: IntArray
