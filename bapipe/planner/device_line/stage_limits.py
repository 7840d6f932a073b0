"""Which layers a next stage may have within a step time, for many prefixes and numbers of devices at once."""

from typing import TYPE_CHECKING

import numpy as np

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.device_line.prefixes import Prefixes
from bapipe.planner.device_line.replica_weights import FloatArray
from bapipe.planner.device_line.stage_kinds import StageSums

if TYPE_CHECKING:
    from bapipe.planner.device_line.prefix_bound import PrefixBound


class StageLimits:
    """The limits of stages that begin at one device, behind several prefixes, in several classes of devices."""

    def __init__(
        self,
        bound: "PrefixBound",
        sums: StageSums,
        position: int,
        prefixes: Prefixes,
        groups: IntArray,
        limit: float,
        delays: FloatArray | None,
    ) -> None:
        """See `PrefixBound.last_ends`."""
        self.bound, self.begins, self.groups, self.position = bound, prefixes.begins, groups, position
        self._own, self._layers_before, self._layers_behind = sums.own, sums.before, sums.behind
        weights, cuts = bound.weights, prefixes.cuts
        self._n, self._v = weights.counts[position, groups], weights.speed[position, groups]
        self._forward_v, self._busiest = weights.forward_speed[position, groups], weights.busiest[position, groups]
        self._before, self._behind = weights.before[position, groups], weights.behind[position, groups]
        apart = bound.forwards_apart(position, groups, prefixes.last_most[:, None])
        self._apart = np.broadcast_to(apart, (cuts.size, groups.size))  # [prefixes, groups]
        self._one_way, self._both_ways = bound.transfers_before(position, cuts)
        self._ways_behind = bound.transfers_behind(prefixes)  # [prefixes]
        self._room = limit + bound.slack(position, groups)
        self._delays = delays
        self._rounds = bound.rounds(position, groups, self._n)
        self._last_ring = bound.rings.last_ns(position, groups)
        self._limit_bytes = bound.limit_bytes[position, groups]

    def highest_ends(self) -> IntArray:
        """Ends that no stage exceeds, by the limits that are sums over its layers. [prefixes, groups]"""
        bound, i, own_sums = self.bound, self.begins[:, None], self._own
        n, v, q, behind = self._n, self._v, self._forward_v, self._behind
        share_f, share_r = own_sums.least_shares
        trip_before, trip_behind = self._layers_before.trip, self._layers_behind.trip
        arrival = trip_before[i] * self._before + self._both_ways[:, None]
        room = self._room - arrival  # [prefixes, groups]
        if self._delays is not None:
            room = room - self._delays
        of_trip = room / self._busiest
        from_here = (trip_behind[-1] - trip_behind[i]) * behind + self._ways_behind[:, None]
        for k, steps in self._rounds:
            each = k * (1 / v - behind) + bound.step_share * steps / v
            in_rounds = (room - k * from_here) / np.maximum(each, 1e-9)
            of_trip = np.where((k >= 2) & (steps >= 0), np.minimum(of_trip, in_rounds), of_trip)
        own = (n - 1) * share_r / v + self._apart * share_f / q
        own = own + share_f * (1 / q - behind) + share_r * (1 / v - behind)
        of_work = (room - from_here) / np.maximum(own, 1e-9)
        of_work = np.minimum(of_work, (self._room - self._layers_before.forward[i] * self._before) / self._busiest)
        # A little more: the sums are rounded.
        work, trip = own_sums.work, own_sums.trip
        ends = np.searchsorted(work, (work[i] + of_work) * (1 + 1e-12), side="right")
        ends = np.minimum(ends, np.searchsorted(trip, (trip[i] + of_trip) * (1 + 1e-12), side="right")) - 1
        if self._rounds:
            # Rounds, one after another: F of micro-batch m + d follows r of micro-batch m.
            num_rounds = bound.num_rounds(self.position, self.groups)
            here = trip_behind[-1] - trip_behind[i]
            here = here * bound.weights.from_here[self.position] + self._ways_behind[:, None]
            may_begin = trip_before[i] / bound.max_speed + self._both_ways[:, None] + num_rounds * here <= self._room
            ends = np.where(may_begin, ends, i)
        highest: IntArray = np.maximum(ends, i)
        return highest

    def last_within(self, states: IntArray, groups: IntArray, low: IntArray, high: IntArray) -> IntArray:
        """The last end from `low` to `high` that is within the limits, of pairs of state and group; -1 if none is."""
        found = np.full_like(low, -1)
        at_low = self._excess(low, states, groups)
        left = np.flatnonzero(at_low <= 0)
        found[left] = low[left]
        # Invariant: `low` is within the limits, `beyond` is not. Excess rises with the end, nearly in a line.
        beyond, middle = high[left] + 1, high[left]
        low, at_low, at_beyond = low[left], at_low[left], np.full(left.size, np.inf)
        number = 0
        while left.size:
            excess = self._excess(middle, states[left], groups[left])
            within = excess <= 0
            low, at_low = np.where(within, middle, low), np.where(within, excess, at_low)
            beyond, at_beyond = np.where(within, beyond, middle), np.where(within, at_beyond, excess)
            found[left] = low
            more = np.flatnonzero(low + 1 < beyond)
            left, low, beyond = left[more], low[more], beyond[more]
            at_low, at_beyond = at_low[more], at_beyond[more]
            number += 1
            share = at_low / (at_low - at_beyond) if number % 3 else np.full(left.size, 0.5)
            share = np.where(np.isfinite(at_beyond), share, 0.5)
            middle = np.clip(low + (share * (beyond - low)).astype(np.int64), low + 1, beyond - 1)
        return found

    def _excess(self, ends: IntArray, states: IntArray, groups: IntArray) -> FloatArray:
        """By how much stages exceed the limits, at most 0 if they keep them all. All [pairs]"""
        bound, i, j = self.bound, self.begins[states], ends
        n, v, w, u = self._n[groups], self._v[groups], self._busiest[groups], self._apart[states, groups]
        q, before = self._forward_v[groups], self._before[groups]
        own, trip_behind = self._own, self._layers_behind.trip
        arrival = self._layers_before.forward[i] * before + self._one_way[states]
        return_ns = self._layers_before.trip[i] * before + self._both_ways[states]
        f, r, b = (sums[j] - sums[i] for sums in (own.forward, own.critical, own.backward))
        update = bound.update[j] - bound.update[i]
        work = arrival + w * (f + b) + self._last_ring[groups] + update
        returned = return_ns + w * (f + r)
        around = f / q + r / v + (trip_behind[-1] - trip_behind[j]) * self._behind[groups] + self._ways_behind[states]
        trip = return_ns + around + (n - 1) * r / v + u * f / q
        ring = bound.rings.all_ns(self.position, self.groups[groups], bound.gradients[j] - bound.gradients[i])
        with_gradients = np.maximum(own.backward[j] - own.before_gradients[i], 0.0)
        first_full = np.minimum(with_gradients, own.first_bucket[j])
        # From the start of the last B on: the first bucket is full, all rings follow, then the update.
        after = arrival + first_full / v + ring + update
        work = np.maximum(work, after + (n * f + (n - 1) * b) / v)
        after -= b / v
        if bound.has_whole_backward:
            work = np.maximum(work, np.where(n >= 2, after + around + (n - 1) * b / v + u * f / q, 0.0))
        returned = np.maximum(returned, trip)
        for trips, between in self._rounds:
            k, steps = trips[groups], between[groups]
            passed = k * around + bound.step_share * steps * (f + r) / v
            returned = np.maximum(returned, np.where((k >= 2) & (steps >= 0), return_ns + passed, 0.0))
            if bound.has_whole_backward:
                work = np.maximum(work, np.where((k >= 2) & (steps >= 1), after + passed, 0.0))
        if self._delays is not None:
            returned = returned + self._delays[states, groups]
        fits = bound.held(i, j) <= self._limit_bytes[groups]
        excess: FloatArray = np.where(fits, np.maximum(work, returned) - self._room[groups], np.inf)
        return excess
