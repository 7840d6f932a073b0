"""Plans whose stages grow from the first one to the last: what they all do at the end of a step ends at one time.

In the cool-down a stage sums its gradients when its last backward is done. The gradient of the last micro-batch then
still passes the stages before it, so an early stage has to be small, and a later one may take as long to sum its
gradients as that way takes: what is *hidden*. For some slack beyond it, the first stage takes as many layers as it has
the time to sum, then the second one, and so on. Little slack makes many stages and long ways over their cuts, much
slack makes few; plans with several slacks are made, and what they take is estimated elsewhere.

Devices are shared out in proportion to the time between the first backward of a stage and its last one. All stages then
take as long for it; by bisection so long that the devices suffice.
"""

from collections.abc import Callable

import numpy as np

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.in_flight import IN_FLIGHT
from bapipe.planner.device_line.layer_sums import LayerSums
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.replica_weights import FloatArray
from bapipe.planner.stages.intervals import IntArray
from bapipe.simulator.stage_cost import BUCKET_BYTES

SLACKS = tuple(0.002 * 4**power for power in range(6))
"""Slacks that are tried at first, as parts of F and B of one micro-batch; ..."""

REFINED = (2.0, 0.5, 1.4, 0.7)
"""... then the one with the shortest step by these factors, one after another."""

NUM_BISECTIONS, NEAR = 10, 0.15
"""The time that stages are busy for is bisected so often; near that of the slack before, half as often."""

MIN_WINDOW = 16
"""At least so many ends of a stage are looked at once."""

NO_STAGES = np.zeros(0, dtype=np.int64)


def growing_stages(
    line: DeviceLine, schedule: str, size: int, estimate_ns: Callable[[LinePlan], float], deadline: Deadline
) -> list[tuple[float, LinePlan]]:
    """Returns plans with replicas on all devices of a line and their steps, as many as there is time for.

    Args:
        estimate_ns: the step time of a plan, infinite if it does not fit.
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
        # Not more buckets than layers with gradients, nor than the bytes fill.
        num_summed = max(1, int(np.count_nonzero(np.diff(sums.gradients))))
        self._bucket_bytes = max(BUCKET_BYTES, float(sums.gradients[-1]) / num_summed)
        self._hosts = sums.hosts_before
        cluster = line.cluster
        self._latency = np.array([cluster.intra_host.latency_ns, cluster.inter_host.latency_ns], dtype=float)
        self._ns_per_byte = 1e9 / np.array([cluster.intra_host.bytes_per_s, cluster.inter_host.bytes_per_s])
        num_cuts = np.arange(self._last + 1)
        self._back = np.array([sums.round_trip_ns(int(number)) for number in num_cuts]) / 2  # over the cuts before
        # Micro-batches whose F on a stage follow its first backward, by its first device. [devices]
        depth = np.full(self._num_devices, self._num_microbatches)
        if schedule in IN_FLIGHT:
            depth = np.array([IN_FLIGHT[schedule](self._num_devices - p) for p in range(self._num_devices)])
        self._num_behind = np.maximum(0, self._num_microbatches - depth)
        self._busy_ns = 0.0
        self.trip_ns = float(sums.least.trip[-1]) / sums.max_speed

    def stages(self, slack_ns: float) -> tuple[IntArray, IntArray]:
        """Returns the boundaries and the numbers of devices of stages with some slack; none if they have no place."""
        if self._busy_ns:
            found = self._bisect(slack_ns, self._busy_ns * (1 - NEAR), self._busy_ns * (1 + NEAR), NUM_BISECTIONS // 2)
            if found[1].size:
                return found
        shared_ns = self._num_microbatches * float(self._forward[-1] + self._backward[-1]) / float(self._speeds.sum())
        if shared_ns == 0.0:
            return NO_STAGES, NO_STAGES  # no stage is busy
        return self._bisect(slack_ns, 0.3 * shared_ns, 4 * shared_ns, NUM_BISECTIONS)

    def _bisect(self, slack_ns: float, low_ns: float, high_ns: float, num_steps: int) -> tuple[IntArray, IntArray]:
        """The stages that are busy for the least time between two, if any are."""
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
        """Stages that are busy for so long after their first backward; none if there are too few devices."""
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
        """How many devices stages need that are busy for so long, one more than there are if too many. [ends]"""
        forward, backward = self._forward[ends] - self._forward[begin], self._backward[ends] - self._backward[begin]
        work = (self._num_microbatches - 1) * backward + self._num_behind[first] * forward
        # The slowest replica decides what all can do.
        slowest = np.minimum.accumulate(self._speeds[first:])
        can = np.maximum.accumulate(slowest * np.arange(1, slowest.size + 1))
        nearest = np.searchsorted(can, work / busy_ns - slowest[0] / 2) + 1
        numbers: IntArray = np.minimum(nearest, self._num_microbatches)
        return numbers

    def _sum_ns(self, begin: int, first: int, ends: IntArray, numbers: IntArray) -> FloatArray:
        """How long stages sum their gradients after their last backward, about. [ends]"""
        last = np.minimum(first + numbers, self._num_devices) - 1
        crosses = (self._hosts[last] > self._hosts[first]).astype(np.int64)
        gradients = self._gradients[ends] - self._gradients[begin]
        num_buckets = np.ceil(gradients / self._bucket_bytes)
        rings = self._latency[crosses] * num_buckets + self._ns_per_byte[crosses] * gradients / numbers
        # The first bucket is full when the last backward has passed its layers.
        shown = np.maximum(0.0, self._backward[ends] - self._backward[begin]) * (1 - 1 / np.maximum(num_buckets, 1))
        summed: FloatArray = 2 * (numbers - 1) * rings - shown / self._speeds[first]
        return summed
