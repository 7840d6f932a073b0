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

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from bapipe.formats.cluster import Bandwidth, Link
from bapipe.formats.profile import LayerMeasurement
from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.replica_classes import Groups, replica_classes
from bapipe.simulator.interval_costs import cut_bytes, gradient_crosses, prefix_sums
from bapipe.simulator.stage_cost import BUCKET_BYTES

ROUNDING_NS = 2.0
"""By how much the simulator's time of an action may be shorter than the sum over its layers, two halves each way."""


@dataclass(frozen=True, slots=True)
class _State:
    """Where the last stage of a prefix begins: its first device, the cuts up to it, and its first boundary."""

    position: int
    num_cuts: int
    boundary: int


class PrefixBound:
    """The problem of one schedule, micro-batch size and number of devices."""

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
        self.last_replicas, self._only_replicas = last_replicas or (1, num_devices), only_replicas
        self.line, self.schedule, self.size, self.num_devices = line, schedule, size, num_devices
        self.num_microbatches = line.options.minibatch_size // size
        self.bound_ns = 0  # what is proven of every plan of this problem
        devices = line.cluster.devices[:num_devices]
        self._speeds = np.array([device.speed for device in devices])
        self.max_speed = float(self._speeds.max())
        self._rounded_stages = 0 if set(self._speeds.tolist()) == {1.0} else num_devices
        self._limit = max(line.limits[:num_devices])
        self._sum_layers()
        if only_replicas is not None:
            self.groups = Groups(fewest=np.array([only_replicas]), most=np.array([only_replicas]))
        else:
            every = min(num_devices, self.num_microbatches) if line.options.replicas else 1
            alike = len(set(self._speeds)) == 1
            self.groups = replica_classes(every, self.num_microbatches, schedule, alike=alike)
        self._weigh_groups()
        self._transfers()

    @property
    def is_alike(self) -> bool:
        """Whether a pivot says more: whole backwards, replicas, and devices of one speed."""
        has_whole_backward = self.schedule in ("1f1b", "gpipe")
        return has_whole_backward and self.line.options.replicas and len(set(self._speeds.tolist())) == 1

    def _sum_layers(self) -> None:
        """Prefix sums at the boundaries, each layer on the kind of device where it takes the least. [boundaries]"""
        profiles = [self.line.profiles[kind] for kind in {d.kind for d in self.line.cluster.devices}]
        measured = [profile.at(self.size) for profile in profiles]
        splits = self.schedule not in ("1f1b", "gpipe")

        def least_of_layers(value: "Callable[[LayerMeasurement], int]") -> "NDArray[np.float64]":
            rows = [[value(m) for m in of_kind] for of_kind in measured]
            return prefix_sums(np.min(rows, axis=0).tolist()).astype(float)

        def least(value: "Callable[[LayerMeasurement], int]") -> "NDArray[np.float64]":
            return least_of_layers(value)[self.line.cuts]

        self.forward = least(lambda m: m.forward_ns)
        self._backward_of_layers = least_of_layers(
            lambda m: min(m.whole_backward_ns, m.input_grad_ns + m.weight_grad_ns)
        )
        self.backward = self._backward_of_layers[self.line.cuts]
        self._critical = least(lambda m: min(m.whole_backward_ns, m.input_grad_ns)) if splits else self.backward
        if splits and not gradient_crosses(profiles[0])[self.line.cuts[1:-1]].all():
            # A stage that sends no gradient back has no I: the first one, whose W ends the way back instead, or any
            # that begins at such a cut.
            self._critical = np.zeros_like(self.backward)
        self._stash = least(lambda m: m.stash_bytes)
        layers = [profile.layers for profile in profiles]
        state = [[x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in of_kind] for of_kind in layers]
        self._static = prefix_sums(np.min(state, axis=0).tolist())[self.line.cuts].astype(float)
        gradients = [[layer.gradient_bytes for layer in of_kind] for of_kind in layers]
        updates = [[layer.update_ns for layer in of_kind] for of_kind in layers]
        self._update = prefix_sums(np.min(updates, axis=0).tolist())[self.line.cuts] / self.max_speed
        self._sum_buckets(np.array(gradients))
        self.work, self._trip = self.forward + self.backward, self.forward + self._critical

    def _sum_buckets(self, gradient_bytes: IntArray) -> None:
        """Of a stage that ends at each boundary: B until its first bucket is full; and the bytes of any bucket.

        The first bucket holds the last layers, from the last one whose gradients fill it: the largest of any kind. Of
        two ends the earlier one has the minimum of both, so that a longer stage never seems shorter. [boundaries]

        Args:
            gradient_bytes: of each layer on each kind of device. [kinds, layers]
        """
        ends = np.array(self.line.cuts)
        self.gradients = prefix_sums(gradient_bytes.min(axis=0).tolist())[ends].astype(float)
        most = prefix_sums(gradient_bytes.max(axis=0).tolist()).astype(float)
        first = np.searchsorted(most, most[ends] - BUCKET_BYTES, side="right") - 1  # -1: they do not fill a bucket
        until_full = self._backward_of_layers[ends] - self._backward_of_layers[np.maximum(first, 0)]
        until_full[first < 0] = np.inf
        self.first_bucket = np.minimum.accumulate(until_full[::-1])[::-1]
        # A bucket that is not full waits for the first layer of the stage that has gradients, not for those before it.
        has_gradients = np.append(np.flatnonzero(gradient_bytes.min(axis=0) > 0), gradient_bytes.shape[1])
        lowest = has_gradients[np.searchsorted(has_gradients, np.minimum(ends, gradient_bytes.shape[1]))]
        self.before_gradients = self._backward_of_layers[lowest]
        self._min_bucket = int(gradient_bytes.min())  # if not 0, every stage's last bucket is full at its last backward
        self._max_bucket = BUCKET_BYTES + int(gradient_bytes.max())  # no bucket is as large

    def _weigh_groups(self) -> None:
        """For each position and class of groups: micro-batches per unit of speed of the busiest replica.

        And of the slowest replica, how many it has and how fast it is. All [positions, groups]
        """
        num, groups, v = self.num_microbatches, self.groups, self._speeds
        slowest = np.full((self.num_devices, len(groups.fewest)), np.inf)
        total = np.zeros_like(slowest)
        sums = np.concatenate([[0.0], np.cumsum(v)])
        for g, (few, most) in enumerate(zip(groups.fewest.tolist(), groups.most.tolist(), strict=True)):
            windows = np.lib.stride_tricks.sliding_window_view(v, few).min(axis=1) if few <= len(v) else v[:0]
            slowest[: len(windows), g] = windows
            ends = np.minimum(np.arange(self.num_devices) + most, self.num_devices)
            total[:, g] = sums[ends] - sums[:-1]
        alike = len(set(v.tolist())) == 1
        self.counts = -(-num // groups.most) if alike else num // groups.most  # of the slowest replica. [groups]
        self._slowest = np.where(np.isfinite(slowest), slowest, v.min())
        busiest = np.maximum(self.counts / self._slowest, -(-num // groups.most) / self.max_speed)
        self._busiest = np.maximum(busiest, num / total)

    def _transfers(self) -> None:
        """Lower bounds of the transfers of 0, 1, 2 ... cuts, one way and both ways; and host boundaries. [cuts]"""
        cluster, interior = self.line.cluster, self.line.cuts[1:-1]
        names = {device.kind for device in cluster.devices}
        sizes = [cut_bytes(self.line.profiles[kind], self.size) for kind in names]
        send = np.min([np.array(forward)[interior] for forward, _ in sizes], axis=0)
        grad = np.min([np.array(back)[interior] for _, back in sizes], axis=0)
        links: list[Bandwidth | Link] = [cluster.intra_host, cluster.inter_host, *cluster.links]
        rate, latency = max(link.bytes_per_s for link in links), min(link.latency_ns for link in links)

        def times(num_bytes: IntArray) -> "NDArray[np.float64]":
            return np.where(num_bytes > 0, latency + num_bytes * 1e9 / rate, 0.0)

        zero = [0.0]
        self._one_way = np.concatenate([zero, np.cumsum(np.sort(times(send)))])
        self._both_ways = np.concatenate([zero, np.cumsum(np.sort(times(send) + times(grad)))])
        # Hosts in a row: the transfer over a boundary between two of them takes the slower link.
        hosts = [device.host for device in cluster.devices[: self.num_devices]]
        crossings = [a != b for a, b in pairwise(hosts)]
        in_a_row = sum(crossings) + 1 == len(set(hosts)) and not cluster.links
        self._boundaries_before = np.concatenate([[0], np.cumsum(crossings)]) * in_a_row
        slower = max(cluster.inter_host.latency_ns - latency, 0) if send.size and send.min() > 0 else 0.0
        extra_rate = max(1e9 / cluster.inter_host.bytes_per_s - 1e9 / rate, 0.0)
        self._extra_one_way = slower + float(send.min(initial=2**60)) * extra_rate if send.size else 0.0
        self._extra_both = 2 * slower + float((send + grad).min()) * extra_rate if send.size else 0.0
        per_host = max(hosts.count(host) for host in set(hosts))
        fastest = Bandwidth(bytes_per_s=rate, latency_ns=latency)  # the links of no two devices, maybe
        ring = [cluster.inter_host if few > per_host else fastest for few in self.groups.fewest.tolist()]
        counted = cluster.intra_host_sum is UNSET and not cluster.links
        steps = 2 * (self.groups.fewest - 1)
        self._ring_latency = np.array([link.latency_ns for link in ring]) * steps * counted
        self._ring_rate = np.array([1e9 / link.bytes_per_s for link in ring]) * steps / self.groups.fewest * counted

    def path(self, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """Returns the stages that the relaxation chooses within a step time; None if no plan can be within it."""
        last, num = len(self.line.cuts) - 1, self.num_devices
        max_cuts = min(num, last)
        limit = limit_ns * (1 + 1e-12)
        furthest = np.full((num + 1, max_cuts + 1), -1, dtype=np.int64)  # the last column: cuts of a whole plan
        furthest[0, 0] = 0
        before: dict[tuple[int, int], _State] = {}
        fewest = self.groups.fewest
        for position in range(num):
            deadline.check()
            row = furthest[position]
            # Only states that reach further than those with fewer cuts.
            reached = np.maximum.accumulate(np.concatenate([[-1], row[:-1]]))
            cuts = np.flatnonzero(row > reached)
            if cuts.size == 0:
                continue
            if row[cuts[-1]] == last:
                return self._trace(before, position, int(cuts[-1]))
            for c in cuts.tolist():  # devices may stay idle
                if row[c] > furthest[position + 1, c]:
                    furthest[position + 1, c] = row[c]
                    if (position, c) in before:  # else no stage has begun yet
                        before[position + 1, c] = before[position, c]
            groups = np.flatnonzero(fewest <= num - position)
            ends = self.last_ends(position, cuts, row[cuts], groups, limit)  # [cuts, groups]
            for g, few in zip(range(groups.size), fewest[groups].tolist(), strict=True):
                target = furthest[position + few]
                into = np.minimum(cuts + 1, max_cuts)
                better = ends[:, g] > np.maximum(target[into], row[cuts])
                for k in np.flatnonzero(better).tolist():
                    c = int(cuts[k])
                    if ends[k, g] > target[into[k]]:
                        target[into[k]] = ends[k, g]
                        before[position + few, int(into[k])] = _State(position, c, int(row[c]))
        row = furthest[num]
        done = np.flatnonzero(row == last)
        return self._trace(before, num, int(done[0])) if done.size else None

    def last_ends(
        self,
        position: int,
        cuts: IntArray,
        begins: IntArray,
        groups: IntArray,
        limit: float,
        most_last: IntArray | int | None = None,
    ) -> IntArray:
        """The last end of a stage within the limits, per state and group; the begin if there is none. [cuts, groups]

        Args:
            most_last: replicas that the last stage has at most. [cuts, 1]
        """
        i, g = begins[:, None], groups[None, :]
        n, v, w = self.counts[g], self._slowest[position, g], self._busiest[position, g]
        most, few = self.groups.most[g], self.groups.fewest[g]
        d = self.num_devices - position if self.schedule == "1f1b" else self.num_microbatches
        forced = np.maximum(0, self._boundaries_before[position] - (position - cuts))
        arrival = self.forward[begins] / self.max_speed + self._one_way[cuts] + forced * self._extra_one_way
        return_ns = self._trip[begins] / self.max_speed + self._both_ways[cuts] + forced * self._extra_both
        arrival, return_ns = arrival[:, None], return_ns[:, None]
        rest = self._trip[-1] / self.max_speed
        u = self.forwards_apart(position, g, most_last)
        last_ring = (self._ring_latency[g] + self._ring_rate[g] * self._min_bucket) * (self._min_bucket > 0)
        has_whole_backward = self.schedule in ("1f1b", "gpipe")
        from_here = rest - self._trip[i] / self.max_speed
        rounds: list[tuple[IntArray, IntArray]] = []  # round trips, and steps on the device between them
        if self.schedule == "1f1b":
            in_flight = -(-d // few)
            rounds = [(k, n - 1 - (k - 1) * in_flight) for k in (np.full_like(n, 2), 1 + (n - 1) // in_flight)]
        # F and B of every stage, on each trip, may be rounded down by half a nanosecond.
        num_trips = np.maximum(1, rounds[1][0]) if rounds else 1
        slack = ROUNDING_NS * n + self._rounded_stages * num_trips

        def is_within(j: IntArray) -> "NDArray[np.bool_]":
            f, r, b = (sums[j] - sums[i] for sums in (self.forward, self._critical, self.backward))
            update = self._update[j] - self._update[i]
            work = arrival + w * (f + b) + last_ring + update
            returned = return_ns + w * (f + r)
            own = (f + r) * (1 / v - 1 / self.max_speed) + ((n - 1) * r + u * f) / v
            trip = rest + self._both_ways[cuts][:, None] + forced[:, None] * self._extra_both + own
            gradients = self.gradients[j] - self.gradients[i]
            ring = self.ring_ns(g, gradients)
            with_gradients = np.maximum(self.backward[j] - self.before_gradients[i], 0.0)
            first_full = np.minimum(with_gradients, self.first_bucket[j])
            held = self._static[j] - self._static[i] + self._stash[j] - self._stash[i]
            # From the start of the last B on: the first bucket is full, all rings follow, then the update.
            after = arrival + first_full / v + ring + update
            synced = after + (n * f + (n - 1) * b) / v
            longest = np.maximum(np.maximum(work, returned), np.maximum(trip, synced))
            after -= b / self.max_speed
            if has_whole_backward:
                longest = np.maximum(longest, np.where(n >= 2, after + from_here + ((n - 1) * b + u * f) / v, 0.0))
            for k, steps in rounds:
                passed = k * from_here + steps * (f + r) / v
                longest = np.maximum(longest, np.where((k >= 2) & (steps >= 0), return_ns + passed, 0.0))
                longest = np.maximum(longest, np.where((k >= 2) & (steps >= 1), after + passed, 0.0))
            within: NDArray[np.bool_] = (longest - slack * (1 + 1 / v) <= limit) & (held <= self._limit)
            return within

        low = self._bisect(i, groups.size, is_within)
        if self.schedule == "1f1b":
            # Rounds, one after another: F of micro-batch m + d follows r of micro-batch m.
            num_rounds = (self.num_microbatches - 1) // self._max_in_flight(d)[g] + 1
            low = np.where(return_ns + num_rounds * (rest - self._trip[i] / self.max_speed) <= limit, low, i)
        may_end = (few <= self.last_replicas[1]) & (most >= self.last_replicas[0])
        ends: IntArray = np.where(may_end, low, np.minimum(low, len(self.line.cuts) - 2))
        return ends

    def _bisect(
        self, begins: IntArray, num_groups: int, is_within: "Callable[[IntArray], NDArray[np.bool_]]"
    ) -> IntArray:
        """The last end that is within limits, per state and group, given that the begin is. [cuts, groups]"""
        low = np.broadcast_to(begins, (begins.size, num_groups)).copy()
        high = np.full_like(low, len(self.line.cuts) - 1)
        while (low < high).any():
            middle = (low + high + 1) // 2
            within = is_within(middle)
            low, high = np.where(within, middle, low), np.where(within, high, middle - 1)
        return low

    def forwards_apart(
        self, position: int | IntArray, groups: IntArray, most_last: IntArray | int | None = None
    ) -> IntArray:
        """F of a replica that do not run during the round trip of its micro-batch whose backward is first.

        Args:
            groups: the classes of devices of stages; `position`, their first devices, and `most_last`, the replicas
                that the last stage has at most, fit them.
        """
        n, most, few = self.counts[groups], self.groups.most[groups], self.groups.fewest[groups]
        left = self.num_devices - position
        if self.schedule == "gpipe":
            # The last stage is this one, or has devices behind it.
            most_last = self.last_replicas[1] if most_last is None else np.minimum(most_last, self.last_replicas[1])
            last = np.minimum(np.maximum(most_last, few), np.maximum(most, left - few))
            apart: IntArray = np.maximum(0, (self.num_microbatches - last) // most)
        else:
            apart = np.maximum(0, n - -(-left // few)) if self.schedule == "1f1b" else np.zeros_like(n)
        return apart

    def delayed_ends(
        self,
        position: int,
        cuts: IntArray,
        begins: IntArray,
        groups: IntArray,
        limit: float,
        delays: "NDArray[np.float64]",
        most_last: IntArray | int | None = None,
    ) -> IntArray:
        """The last end of a stage of alike devices that leaves room for a delay behind its last backwards.

        By the bounds return, round trip, and rounds and work, without the transfers back. [cuts, groups]

        Args:
            delays: of each state or group. [cuts or 1, groups or 1]
            most_last: replicas that the last stage has at most. [cuts, 1]
        """
        i, g = begins[:, None], groups[None, :]
        n, v, left = self.counts[g], self.max_speed, self.num_devices - position
        forced = np.maximum(0, self._boundaries_before[position] - (position - cuts))
        transfers = (self._one_way[cuts] + forced * self._extra_one_way)[:, None]
        u = self.forwards_apart(position, g, most_last)
        from_here = (self._trip[-1] - self._trip[i]) / v
        w = -(-left // self.groups.fewest[g]) if self.schedule == "1f1b" else self.num_microbatches
        k = 1 + (n - 1) // w
        steps = n - 1 - (k - 1) * w
        slack = (ROUNDING_NS * n + self._rounded_stages * k) * (1 + 1 / v)
        room = limit + slack - delays - transfers
        apart = room - self._trip[-1] / v
        passed = room - self._trip[i] / v
        in_rounds = np.where(k >= 2, passed - k * from_here, np.inf)

        def is_within(j: IntArray) -> "NDArray[np.bool_]":
            f, r = self.forward[j] - self.forward[i], self._critical[j] - self._critical[i]
            within: NDArray[np.bool_] = ((n - 1) * r + u * f <= apart * v) & (n * (f + r) <= passed * v)
            within &= steps * (f + r) <= in_rounds * v
            return within

        return self._bisect(i, groups.size, is_within)

    def ring_ns(self, groups: IntArray | int, gradient_bytes: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """Returns the least time of the rings of gradients, for stages of some classes of devices."""
        buckets = np.ceil(gradient_bytes / self._max_bucket)
        ring: NDArray[np.float64] = self._ring_latency[groups] * buckets + self._ring_rate[groups] * gradient_bytes
        return ring

    def _max_in_flight(self, depth: int) -> IntArray:
        """The micro-batches of a stage in flight: a multiple of its devices, the largest of each class. [groups]"""
        if self._only_replicas is not None:
            at_depth: IntArray = self.groups.fewest * -(-depth // self.groups.fewest)
            return at_depth
        sizes = np.arange(1, int(self.groups.most[-1]) + 1)
        largest: IntArray = np.maximum.reduceat(sizes * -(-depth // sizes), self.groups.fewest - 1)
        return largest

    def _trace(self, before: dict[tuple[int, int], _State], position: int, num_cuts: int) -> LinePlan:
        """The stages of a path; devices that it leaves idle join the stage before them."""
        boundaries, begins = [len(self.line.cuts) - 1], []
        at = position, num_cuts
        while at in before:
            state = before[at]
            begins.append(state.position)
            boundaries.append(state.boundary)
            at = state.position, state.num_cuts
        boundaries.reverse()
        firsts = [0, *begins[::-1][1:], self.num_devices]
        alike = len(set(self._speeds.tolist())) == 1
        firsts[-1] = position if alike else self.num_devices
        counts = tuple(min(b - a, int(self.groups.most[-1])) for a, b in pairwise(firsts))
        return LinePlan(
            cuts=tuple(self.line.cuts[boundary] for boundary in boundaries),
            counts=counts,
            schedule=self.schedule,
            microbatch_size=self.size,
        )
