"""Decides whether any plan with one device for each stage, stage s on device s, can be within a step time.

Without replicas more is known than `prefix_bound.py` takes into account: kind and speed of the device of each stage,
the link that each cut crosses, and, for plans with a given number of stages, how many micro-batches are in flight and
what the round trip after a stage takes. Let reached(s) be the boundaries at which stage s may begin, if those before
it are within a limit T. A stage [i, j) is within T only if, with M micro-batches, d of them in flight, x and y the
transfers of one over the cut j, there and back, A the F and transfers before i, D the same there and back, and `around`
the round trip of one micro-batch from the stage on (docs/many_devices.md, "One device for each stage")

    work         A + M (F + B) + update <= T
    return       D + M (F + r) <= T
    link         D + around + (M - 1) max(x, y) <= T
    round trip   D + around + (M - 1) r + max(0, M - d) F <= T, of the first micro-batch
    backwards    A + F and transfers behind + M B + max(0, M - d) F + update <= T, of the first micro-batch
    last one     D + around + (M - 1) F + max(0, M - d) r <= T, before the round trip of the last micro-batch
    rounds       D + k around + (M - 1 - (k - 1) d) max(F + r, x, y) <= T; of pairs with max(F, r)
    GPipe        D + around + (M - 1) (max(F, x) + max(r, y)) <= T
    memory       parameters, gradients, optimizer state and the stashes in flight fit

A device that cannot compute while it transfers also spends the transfers over both its cuts, i and j, that a limit's
time contains (`_Stalls`).

Each limit is a sum of something at i and something at j, so its smallest value over all i that are reached is a running
minimum: O(boundaries) for each stage.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile
from bapipe.planner.compute.arrays import Bools, Floats
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.in_flight import FORWARDS_FIRST, IN_FLIGHT, IN_PAIRS
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.inputs.scalable_times import scalable_times
from bapipe.schedules import splits_backwards
from bapipe.simulator.interval_costs import cut_bytes, gradient_crosses, prefix_sums, transfer_ns

MICROBATCH_ROUNDING_NS = 2.0
"""By how much the times of the actions of one micro-batch on a device may be shorter than the sums over its layers."""


class SingleDevices:
    """The plans of one order of the devices, schedule and micro-batch size, with a range of numbers of cuts.

    Attributes:
        num_cuts: the minimum and the maximum number of cuts between the stages of its plans.
        bound_ns: a lower bound on the step time of every plan.
    """

    has_rings = False  # bounds by rings need replicas

    def __init__(self, line: DeviceLine, schedule: str, size: int) -> None:
        self.line, self.schedule, self.bound_ns = line, schedule, 0
        self._size = size
        self._num_microbatches = line.options.minibatch_size // size
        self._has_recompute = line.options.recompute
        devices, last = line.cluster.devices, len(line.cuts) - 1
        most, wanted = min(len(devices), last) - 1, line.options.num_stages
        self.num_cuts = (0, most) if wanted is None else (min(wanted - 1, most),) * 2
        sums_of = {kind: _KindSums(profile, line, schedule, size) for kind, profile in line.profiles.items()}
        self._sums = [sums_of[device.kind] for device in devices[: most + 1]]
        self._speeds = [device.speed for device in devices[: most + 1]]
        self._overlaps = [device.overlaps_transfers for device in devices]
        self._limits = [float(limit) for limit in line.limits[: most + 1]]
        # Transfers over each boundary from each device to the next one, and back; many share an array. [devices - 1]
        self._sent = [self._sums[k].transfers(line.cluster.link(k, k + 1), back=False) for k in range(most)]
        self._returned = [self._sums[k].transfers(line.cluster.link(k + 1, k), back=True) for k in range(most)]
        self._rounding_ns = 0.0 if {device.speed for device in devices} == {1.0} else MICROBATCH_ROUNDING_NS

    def with_num_cuts(self, fewest: int, most: int) -> "SingleDevices":
        """Returns the problem of the plans with `fewest` to `most` cuts between their stages."""
        other = copy(self)
        other.num_cuts = fewest, most
        return other

    def parts_by_last_stage(self) -> "list[SingleDevices]":
        """Returns nothing: the last stage always has one device."""
        return []

    def is_refuted(self, limit_ns: int, deadline: Deadline) -> bool:
        """Returns whether no plan can be within a step time; if so, raises the bound above it."""
        if self._search(limit_ns, deadline) is not None:
            return False
        self.bound_ns = max(self.bound_ns, limit_ns + 1)
        return True

    def path(self, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """Returns the stages within the limits that have the shortest round trip; None if there are none."""
        found = self._search(limit_ns, deadline)
        if found is None:
            return None
        begun, behind = found
        boundaries = [len(self.line.cuts) - 1]
        for stage, prefix in reversed(list(enumerate(begun))):
            end, trip = boundaries[-1], self._sums[stage].trip / self._speeds[stage]
            keeps = self._keeps(stage, prefix, behind[stage], limit_ns, end)
            wanted = np.where(keeps, prefix.there_and_back - trip, np.inf)[:end]
            begin = int(wanted.argmin())
            boundaries.append(begin if wanted[begin] < np.inf else int(np.flatnonzero(prefix.reached[:end])[-1]))
        return LinePlan(
            cuts=tuple(self.line.cuts[boundary] for boundary in reversed(boundaries)),
            counts=(1,) * len(begun),
            schedule=self.schedule,
            microbatch_size=self._size,
        )

    def _search(self, limit_ns: int, deadline: Deadline) -> "tuple[list[_Prefixes], Floats] | None":
        """Returns what precedes each stage up to a possible last one, and the round trips after; None if refuted."""
        fewest, most = self.num_cuts[0] + 1, self.num_cuts[1] + 1
        last = len(self.line.cuts) - 1
        behind = self._behind(fewest, most)
        reached = np.arange(last + 1) == 0
        begun = [
            _Prefixes(
                reached=reached, arrival=np.where(reached, 0.0, np.inf), there_and_back=np.where(reached, 0.0, np.inf)
            )
        ]
        for stage in range(most):
            deadline.check()
            prefix = begun[-1]
            ends = self._keeps(stage, prefix, behind[stage], limit_ns)
            if stage + 1 >= fewest and ends[last]:
                return begun, behind
            ends[last] = False
            if stage + 1 == most or not ends.any():
                return None
            f, trip = (sums / self._speeds[stage] for sums in (self._sums[stage].forward, self._sums[stage].trip))
            arrival = _least_before(prefix.arrival - f) + f + self._sent[stage]
            both = _least_before(prefix.there_and_back - trip) + trip + self._sent[stage] + self._returned[stage]
            begun.append(
                _Prefixes(
                    reached=ends,
                    arrival=np.where(ends, arrival, np.inf),
                    there_and_back=np.where(ends, both, np.inf),
                )
            )
        return None

    def _behind(self, fewest: int, most: int) -> Floats:
        """Returns the round trip of one micro-batch after each end of each stage, with transfers. [stages, boundaries]

        The minimum over all cuts and numbers of stages.
        """
        num = len(self.line.cuts)
        behind = np.full((most, num), np.inf)
        begun = np.full(num, np.inf)  # from the begin of the next stage on
        for stage in range(most - 1, -1, -1):
            if stage < most - 1:
                behind[stage] = begun + self._sent[stage] + self._returned[stage]
            behind[stage, -1] = 0.0 if stage + 1 >= fewest else np.inf
            trip = self._sums[stage].trip / self._speeds[stage]
            least = np.minimum.accumulate((trip + behind[stage])[::-1])[::-1]
            begun = np.append(least[1:], np.inf) - trip
        return behind

    def _keeps(self, stage: int, prefix: "_Prefixes", behind: Floats, limit_ns: int, end: int | None = None) -> Bools:
        """Returns whether, for each end, every limit is kept by some begin; or for a given `end`, by each begin."""
        num, fewest, most = self._num_microbatches, self.num_cuts[0] + 1, self.num_cuts[1] + 1
        sums, speed = self._sums[stage], self._speeds[stage]
        f, r = sums.forward / speed, sums.critical / speed
        x, y, later = *self._over_cut(stage), num - 1
        limit = limit_ns * (1 + 1e-12)

        def within(before: Floats, at_stage: Floats, at_end: Floats, trips: int = 1) -> Bools:
            """Returns whether before(i) + at_stage(j) - at_stage(i) + at_end(j) is within the limit."""
            room = limit + self._rounding_ns * (num + most * (trips + 1))
            if end is None:
                found: Bools = _least_before(before - at_stage) + at_stage + at_end <= room
                return found
            found = before - at_stage + at_stage[end] + at_end[end] <= room
            return found

        both, stalls = prefix.there_and_back, self._stalls(stage)
        arrived, back = later * stalls.received, later * stalls.gradient_sent
        sent, returned = stalls.sent, stalls.gradient_received
        work = num * (sums.work / speed) + sums.update / speed
        kept = within(prefix.arrival + arrived, work, num * (sent + returned))
        kept &= within(both + arrived + back, num * (f + r), num * (sent + returned))
        kept &= within(both, f + r, behind + later * (x + y if stalls.is_shared else np.maximum(x, y)))
        depth = 1 if self.schedule in FORWARDS_FIRST else IN_FLIGHT[self.schedule](most - stage)
        apart = max(0, num - depth)
        backwards = work - (num - 1 - apart) * f
        kept &= within(prefix.arrival, backwards, behind + later * returned + apart * sent)
        if self.schedule in FORWARDS_FIRST:
            kept &= within(both + arrived + back, num * (f + r), behind + later * (sent + returned))
            kept &= within(both, num * f + r, behind + later * y)
            kept &= within(both, f + num * r, behind + later * x)
            kept &= within(both, f + r, behind + later * (x + y))
        else:
            kept &= within(both + back, (1 + apart) * f + num * r, behind + later * returned + apart * sent)
            kept &= within(both + arrived, num * f + (1 + apart) * r, behind + later * sent + apart * returned)
            for trips in {2, 1 + later // depth}:
                steps = later - (trips - 1) * depth
                if trips < 2 or steps < 0:
                    continue
                around = trips * (f + r)
                for step in (f, r) if self.schedule in IN_PAIRS else (f + r,):
                    kept &= within(both, around + steps * step, trips * behind, trips)
                kept &= within(both, around, trips * behind + steps * np.maximum(x, y), trips)
        held = sums.static + self._in_flight(max(fewest - stage, 1)) * sums.stash
        least = np.where(prefix.reached, -held, np.inf)
        least = _least_before(least) + held if end is None else least + held[end]
        kept &= least <= self._limits[stage]
        return kept

    def _over_cut(self, stage: int) -> tuple[Floats, Floats]:
        """Returns the transfers over the cut behind a stage, there and back: none over the ends. [boundaries]"""
        there, back = np.zeros(len(self.line.cuts)), np.zeros(len(self.line.cuts))
        if 0 <= stage < self.num_cuts[1]:
            there[1:-1], back[1:-1] = self._sent[stage][1:-1], self._returned[stage][1:-1]
        return there, back

    def _stalls(self, stage: int) -> "_Stalls":
        """Returns the transfers during which the device of a stage does not compute."""
        overlaps = self._overlaps
        before, behind = self._over_cut(stage - 1), self._over_cut(stage)
        if overlaps[stage]:
            before = behind = np.zeros_like(before[0]), np.zeros_like(before[0])
        is_shared = stage < self.num_cuts[1] and not (overlaps[stage] and overlaps[stage + 1])
        return _Stalls(*before, *behind, is_shared)

    def _in_flight(self, num_behind: int) -> int:
        """Returns a lower bound on the stashes that a device holds, with `num_behind` stages from its stage on."""
        if self._has_recompute:
            return 1
        if self.schedule in FORWARDS_FIRST:
            return self._num_microbatches
        return min(IN_FLIGHT[self.schedule](num_behind), self._num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefixes:
    """What is known of the stages before each boundary. All [boundaries]

    Attributes:
        reached: whether a stage may begin there.
        arrival: lower bound on F of one micro-batch in these stages, with the transfers.
        there_and_back: lower bound on F and r of one micro-batch in these stages, with the transfers both ways.
    """

    reached: Bools
    arrival: Floats
    there_and_back: Floats


class _Stalls(NamedTuple):
    """The transfers of a micro-batch for which a device does not compute; 0 where it can. All [boundaries]

    Between the arrival of the first micro-batch and the end of the last F lie all other arrivals; until it has been
    sent on, all are sent; between the end of the first r and the arrival of the last gradient at the stage before lie
    all gradients that are received after the first, and all that are sent back. The first arrival and the last gradient
    are in what is known of the stages before.

    Attributes:
        received, gradient_sent: over the cut before the stage, by its begin.
        sent, gradient_received: over the cut behind it, by its end.
        is_shared: whether transfers there and back over the cut behind it exclude each other.
    """

    received: Floats
    gradient_sent: Floats
    sent: Floats
    gradient_received: Floats
    is_shared: bool


class _KindSums:
    """Sums over the layers before each boundary, on a kind of device at speed 1, for one micro-batch. [boundaries]"""

    def __init__(self, profile: ModelProfile, line: DeviceLine, schedule: str, size: int) -> None:
        measured, cuts = scalable_times(profile, size, line.cluster), line.cuts
        splits = splits_backwards(schedule)

        def sums(value: Callable[[LayerMeasurement], int]) -> Floats:
            return prefix_sums([value(m) for m in measured])[cuts].astype(float)

        self.forward = sums(lambda m: m.forward_ns)
        backward = sums(lambda m: m.min_backward_ns)
        self.critical = sums(lambda m: m.min_input_grad_ns) if splits else backward
        if splits and not gradient_crosses(profile)[cuts[1:-1]].all():
            self.critical = np.zeros_like(backward)  # a stage that sends no gradient back has no I
        self.work, self.trip = self.forward + backward, self.forward + self.critical
        self.stash = sums(lambda m: m.stash_bytes)
        state = [layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes for layer in profile.layers]
        self.static = prefix_sums(state)[cuts].astype(float)
        self.update = prefix_sums([layer.update_ns for layer in profile.layers])[cuts].astype(float)
        send, grad = cut_bytes(profile, size)
        self._send, self._grad = send[cuts], grad[cuts]
        self._transfers: dict[tuple[Bandwidth, bool], Floats] = {}

    def transfers(self, link: Bandwidth, *, back: bool) -> Floats:
        """Returns the time of a transfer over each boundary, on one link."""
        if (link, back) not in self._transfers:
            self._transfers[link, back] = transfer_ns(self._grad if back else self._send, link).astype(float)
        return self._transfers[link, back]


def _least_before(values: Floats) -> Floats:
    """Returns the minimum of all values before each one. [n] -> [n]"""
    least: Floats = np.concatenate([[np.inf], np.minimum.accumulate(values)[:-1]])
    return least
