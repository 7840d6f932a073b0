"""Plans whose stages grow from the first to the last, so that all stages end the step at the same time.

In the cool-down a stage sums its gradients after its last backward. Meanwhile the gradient of the last micro-batch
still passes the earlier stages. So an early stage has to be small, and a later one can hide as much of its all-reduce
as that trip takes: what is *hidden*. Given some slack beyond that, the first stage takes as many layers as it has time
to sum the gradients of, then the second one, and so on. Little slack gives many stages and long trips over their cuts,
much slack gives few; plans are made with several slacks, and their steps are estimated elsewhere.

Devices are assigned so that all stages are equally busy between their first and their last backward: for the shortest
time for which the devices suffice, found by bisection.
"""

from collections.abc import Callable

import numpy as np

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.in_flight import IN_FLIGHT
from bapipe.planner.device_line.layer_sums import LayerSums
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.stages.intervals import IntArray
from bapipe.simulator.stage_cost import BUCKET_BYTES

SLACKS = tuple(0.002 * 4**power for power in range(6))
"""Slacks that are tried at first, as parts of F and B of one micro-batch; ..."""

REFINED = (2.0, 0.5, 1.4, 0.7)
"""... then the one with the shortest step by these factors, one after another."""

NUM_BISECTIONS, NEAR = 10, 0.15
"""The steps of the bisection over busy times; half as many within this part of the previous slack's busy time."""

MIN_WINDOW = 16
"""The minimum number of ends of a stage that are examined at once."""

NO_STAGES = np.zeros(0, dtype=np.int64)


def growing_stages(
    line: DeviceLine, schedule: str, size: int, estimate_ns: Callable[[LinePlan], float], deadline: Deadline
) -> list[tuple[float, LinePlan]]:
    """Returns (step by `estimate_ns`, plan) for growing stages on a line, for as many slacks as there is time for.

    Args:
        estimate_ns: returns the step time of a plan, infinite if it does not fit.
    """
    problem, found = _Growth(line, schedule, size), dict[LinePlan, tuple[float, float]]()

    def add(slack: float) -> None:
        cuts, counts = (NO_STAGES, NO_STAGES) if deadline.is_over else problem.stages(slack * problem.trip_ns)
        if counts.size:
            plan = LinePlan(
                cuts=tuple(line.cuts[boundary] for boundary in cuts.tolist()),
                counts=tuple(counts.tolist()),
                schedule=schedule,
                microbatch_size=size,
            )
            if plan not in found and line.allows(plan):
                found[plan] = estimate_ns(plan), slack

    for slack in SLACKS:
        add(slack)
    for factor in REFINED if found else ():
        _, best = min(found.values())
        add(best * factor)
    return [(step_ns, plan) for plan, (step_ns, _) in found.items()]


class _Growth:
    """Makes stages for one order of the devices, schedule and micro-batch size."""

    def __init__(self, line: DeviceLine, schedule: str, size: int) -> None:
        sums = LayerSums(line, schedule, size, len(line.cluster.devices))
        self._speeds, self._num_devices, self._num_microbatches = sums.speeds, sums.num_devices, sums.num_microbatches
        # Sums over the layers before each boundary. [boundaries]
        self._forward, self._backward = sums.least.forward, sums.least.backward
        self._gradients = sums.gradients
        self._last = len(line.cuts) - 1
        # At most as many buckets as there are layers with gradients, and as the bytes fill.
        num_summed = max(1, int(np.count_nonzero(np.diff(sums.gradients))))
        self._bucket_bytes = max(BUCKET_BYTES, float(sums.gradients[-1]) / num_summed)
        self._hosts = sums.hosts_before
        cluster = line.cluster
        self._latency = np.array([cluster.intra_host.latency_ns, cluster.inter_host.latency_ns], dtype=float)
        self._ns_per_byte = 1e9 / np.array([cluster.intra_host.bytes_per_s, cluster.inter_host.bytes_per_s])
        num_cuts = np.arange(self._last + 1)
        self._back = np.array([sums.round_trip_ns(int(number)) for number in num_cuts]) / 2  # over the cuts before
        # How many micro-batches run F on a stage after its first backward, by its first device. [devices]
        depth = np.full(self._num_devices, self._num_microbatches)
        if schedule in IN_FLIGHT:
            depth = np.array([IN_FLIGHT[schedule](self._num_devices - p) for p in range(self._num_devices)])
        self._num_behind = np.maximum(0, self._num_microbatches - depth)
        self._busy_ns = 0.0
        self.trip_ns = float(sums.least.trip[-1]) / sums.max_speed

    def stages(self, slack_ns: float) -> tuple[IntArray, IntArray]:
        """Returns boundaries and numbers of devices of stages with some slack; empty if devices do not suffice."""
        if self._busy_ns:
            found = self._bisect(slack_ns, self._busy_ns * (1 - NEAR), self._busy_ns * (1 + NEAR), NUM_BISECTIONS // 2)
            if found[1].size:
                return found
        shared_ns = self._num_microbatches * float(self._forward[-1] + self._backward[-1]) / float(self._speeds.sum())
        if shared_ns == 0.0:
            return NO_STAGES, NO_STAGES  # no stage is busy
        return self._bisect(slack_ns, 0.3 * shared_ns, 4 * shared_ns, NUM_BISECTIONS)

    def _bisect(self, slack_ns: float, low_ns: float, high_ns: float, num_steps: int) -> tuple[IntArray, IntArray]:
        """Returns the stages with the minimum busy time between `low_ns` and `high_ns`; empty if there are none."""
        found = self._grow(slack_ns, high_ns)
        for _ in range(num_steps if found[1].size else 0):
            self._busy_ns = high_ns
            middle_ns = (low_ns * high_ns) ** 0.5
            cuts, counts = self._grow(slack_ns, middle_ns)
            if counts.size:
                found, high_ns = (cuts, counts), middle_ns
            else:
                low_ns = middle_ns
        return found

    def _grow(self, slack_ns: float, busy_ns: float) -> tuple[IntArray, IntArray]:
        """Returns stages that are busy for `busy_ns` after their first backward; empty if there are too few devices."""
        cuts, counts = [0], list[int]()
        begin = first = 0
        while begin < self._last:
            if first == self._num_devices:
                return NO_STAGES, NO_STAGES
            hidden_ns = self._backward[begin] + self._back[len(counts)] + slack_ns
            window, is_longest = 2 * (cuts[-1] - cuts[-2] if counts else 0) + MIN_WINDOW, False
            while not is_longest:
                ends = np.arange(begin + 1, min(begin + window, self._last) + 1)
                numbers = self._numbers(begin, first, ends, busy_ns)
                fit = np.flatnonzero(self._sum_ns(begin, first, ends, numbers) <= hidden_ns)
                chosen = int(fit[-1]) if fit.size else 0
                is_longest = chosen < ends.size - 1 or ends[-1] == self._last
                window *= 4
            if first + numbers[chosen] > self._num_devices:
                return NO_STAGES, NO_STAGES
            begin, first = int(ends[chosen]), first + int(numbers[chosen])
            cuts.append(begin)
            counts.append(int(numbers[chosen]))
        return np.array(cuts), np.array(counts)

    def _numbers(self, begin: int, first: int, ends: IntArray, busy_ns: float) -> IntArray:
        """Returns how many devices stages need to be busy for `busy_ns`, one more than remain if too many. [ends]"""
        forward, backward = self._forward[ends] - self._forward[begin], self._backward[ends] - self._backward[begin]
        work = (self._num_microbatches - 1) * backward + self._num_behind[first] * forward
        # The slowest replica limits what all can do.
        slowest = np.minimum.accumulate(self._speeds[first:])
        can = np.maximum.accumulate(slowest * np.arange(1, slowest.size + 1))
        nearest = np.searchsorted(can, work / busy_ns - slowest[0] / 2) + 1
        numbers: IntArray = np.minimum(nearest, self._num_microbatches)
        return numbers

    def _sum_ns(self, begin: int, first: int, ends: IntArray, numbers: IntArray) -> Floats:
        """Returns about how long stages sum gradients after their last backward. [ends]"""
        last = np.minimum(first + numbers, self._num_devices) - 1
        crosses = (self._hosts[last] > self._hosts[first]).astype(np.int64)
        gradients = self._gradients[ends] - self._gradients[begin]
        num_buckets = np.ceil(gradients / self._bucket_bytes)
        rings = self._latency[crosses] * num_buckets + self._ns_per_byte[crosses] * gradients / numbers
        # The first bucket is full when the last backward has passed its layers.
        shown = np.maximum(0.0, self._backward[ends] - self._backward[begin]) * (1 - 1 / np.maximum(num_buckets, 1))
        summed: Floats = 2 * (numbers - 1) * rings - shown / self._speeds[first]
        return summed
