"""Times of every layer interval [begin, end) between legal cuts: its actions, its update and its all-reduces.

Shapes as in `intervals.py`. Times are rounded as the simulator rounds them, once per stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.profile import ModelProfile
from bapipe.planner.stages.interval_buckets import BucketFill, buckets_done_ns, fill_buckets
from bapipe.planner.stages.intervals import INF, MAX_TIME, BoolArray, IntArray, IntervalIndex, Rows
from bapipe.simulator.interval_costs import IntervalCosts, ring_ns


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
        """`costs` may be given if known: those of the profile at this size, at any speed."""
        self.intervals, self.profile = intervals, profile
        self._microbatch_size, self._speed = microbatch_size, speed
        self._bucket_fills: dict[tuple[bool, bool, bool], BucketFill] = {}
        self.has_group_sums = any(layer.group_gradient_bytes for layer in profile.layers)
        self._costs = (costs or IntervalCosts(profile, microbatch_size, speed, max_ns=MAX_TIME)).at_speed(speed)
        self._cuts = np.array(intervals.cuts)

    def at(self, rows: Rows) -> Times:
        """Returns the times of some intervals. For a slice they come from a table of all intervals, which is kept."""
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
        """The times of all intervals, computed when first needed, because long chains have very many."""
        return self._times(slice(None))

    def _times(self, rows: Rows) -> Times:
        """Computes the times of some intervals."""
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
        """Upper bounds on the times of all intervals. Arrays of one entry."""
        first, stop = self._cuts[:1], self._cuts[-1:]
        apart = self._costs.weight_grad_after_input_grad_ns(first, stop)
        sent = self._costs.input_grad_if_sent_ns(first, stop)
        backward = np.maximum(self._costs.backward_ns(first, stop), sent + apart)
        return Times(
            forward_ns=self._costs.forward_ns(first, stop),
            input_grad_ns=sent,
            weight_grad_ns=backward,  # W is all of B in a stage that sends no gradient back
            backward_ns=backward,
            update_ns=self._costs.update_ns(first, stop),
        )

    @cached_property
    def _sends_gradient(self) -> BoolArray:
        return self.intervals.sends_gradient(self.profile)

    def unit_input_grad_ns(self) -> IntArray:
        """Returns I of the layers between each boundary and the next, if they send a gradient back. [boundaries - 1]"""
        return self._costs.input_grad_if_sent_ns(self._cuts[:-1], self._cuts[1:])

    def unit_backward_ns(self, split: bool) -> IntArray:
        """Returns the least backward of the layers between each boundary and the next. [boundaries - 1]

        B, or with `split` the shorter of B and I + W: a stage that sends no gradient back has all of B as its W.
        """
        first, stop = self._cuts[:-1], self._cuts[1:]
        whole_ns = self._costs.backward_ns(first, stop)
        if not split:
            return whole_ns
        apart_ns = self.unit_input_grad_ns() + self._costs.weight_grad_after_input_grad_ns(first, stop)
        return np.minimum(whole_ns, apart_ns)

    @cached_property
    def on_device(self) -> "IntervalTimes":
        """The times of the same intervals on the device alone, without the host's times.

        An action takes the longer of the device's and the host's time, so its time is not a sum over layers, and
        recomputed F cannot be added to it. The device's times do add up, and are lower bounds.
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
        member_links: Sequence[Bandwidth],
    ) -> IntArray:
        """Returns when the all-reduces of every interval are done, from the start of its last B or W. [intervals]

        Args:
            num_devices: the replicas of the stage.
            links: the links between the devices; a ring is as slow as the slowest.
            full_backward: whether the last action is B, else W.
            overlapped: whether the links carry buckets while the last action runs.
            member_links: the links between the members of each group.
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
        """Returns the same, taking every W as what is left of B after I, also in stages that send no gradient back."""
        num_members = num_devices * self.profile.device.num_members

        def bucket_ns(num_bytes: IntArray, group_bytes: IntArray) -> IntArray:
            """Returns the time of a ring of all members, then of rings of partners, as in `simulator.allreduce`."""
            if not self.has_group_sums:
                return np.minimum(ring_ns(num_bytes, num_devices, links, MAX_TIME), INF >> 2)
            whole_ns = ring_ns(group_bytes, num_members, [*links, *member_links], MAX_TIME)
            if num_devices > 1:
                whole_ns = whole_ns + ring_ns(num_bytes - group_bytes, num_devices, links, MAX_TIME)
            return np.minimum(whole_ns, INF >> 2)

        fill = self._bucket_fill(full_backward, overlapped, num_devices > 1)
        all_done_ns = buckets_done_ns(self.intervals, fill, bucket_ns)
        if overlapped:
            return all_done_ns
        # Not overlapped: the buckets start when the last action ends, which counts as 0 above.
        return all_done_ns + (self._every.backward_ns if full_backward else self._every.weight_grad_ns)

    def _bucket_fill(self, full_backward: bool, overlapped: bool, has_replicas: bool) -> BucketFill:
        """Returns how the buckets fill, computed once for all devices and links."""
        key = full_backward, overlapped, has_replicas
        if key not in self._bucket_fills:
            costs = self._costs
            last_action_ns = costs.backward_ns if full_backward else costs.weight_grad_after_input_grad_ns
            self._bucket_fills[key] = fill_buckets(
                self.intervals, self.profile.layers, last_action_ns if overlapped else None, has_replicas=has_replicas
            )
        return self._bucket_fills[key]
