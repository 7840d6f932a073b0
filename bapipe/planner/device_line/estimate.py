"""Estimates the step of a plan on a line of devices in about a millisecond, without a table of its actions.

A replica with n micro-batches of which w are in flight runs F of the first w, then B and F in turn, then B. Both orders
that are estimated are of this form: 1F1B with w = ceil(devices from here on / replicas), and GPipe with w = n. So the
actions of all replicas of a stage are a matrix of 2 n rows, and the ends of a chain of actions that each wait for an
arrival are a running maximum of what arrives, less the time of the actions before it. Stages are passed forwards and
backwards until no end changes: a longest path, as in the simulator (`longest_path.py`). Where w = n, no F waits for a
gradient, and one pass there and one back are enough.

Left out are rounding, links that carry several transfers at once, links of their own between two devices, sums that
take compute, and tied weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.stage_memory import StageMemory
from bapipe.simulator.interval_costs import prefix_sums
from bapipe.simulator.stage_cost import fill_buckets

ESTIMATED = ("1f1b", "gpipe")
"""The schedules whose steps are estimated."""

MAX_PASSES = 12
"""Passes over all stages, forwards and backwards; paths that turn around more often are left out."""

SMOOTHING = 0.03
"""The part of the mean end of the stages in a score."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Order:
    """Where the actions of the replicas of a stage are: rows of a matrix whose columns are the replicas.

    Attributes:
        forward, backward: the rows of F and of B of the first, second ... micro-batch of a replica. [micro-batches]
        is_forwards_first: whether all F come before the first B.
        num_absent: so many replicas, the last ones, have one micro-batch less.
    """

    forward: IntArray
    backward: IntArray
    is_forwards_first: bool
    num_absent: int


@lru_cache(maxsize=4096)
def _order(num_microbatches: int, num_replicas: int, depth: int) -> _Order:
    """The order of replicas with `depth` micro-batches of the stage in flight."""
    n = -(-num_microbatches // num_replicas)
    w = min(-(-depth // num_replicas), n)
    each = np.arange(n)
    # F of micro-batch i has min(i, w) F and max(0, i - w + 1) B before it that are not in pairs.
    forward = each + np.maximum(0, each - w + 1)
    backward = each + np.minimum(each + w, n)
    return _Order(forward, backward, w == n, n * num_replicas - num_microbatches)


@dataclass(frozen=True)
class _Stage:
    """What a stage takes on its devices. Times in ns; [replicas] unless said otherwise.

    Attributes:
        order: of its actions.
        forward, backward: of one micro-batch.
        hosts: the host of each device.
        after_last: what follows the last B of a replica, all-reduces and update; the replica of the first of the last
            micro-batches comes first.
    """

    order: _Order
    forward: Floats
    backward: Floats
    hosts: IntArray
    after_last: Floats

    @cached_property
    def times(self) -> Floats:
        """The time of each action of a replica. [2 n, replicas]"""
        order, count = self.order, self.backward.size
        times = np.empty((2 * order.forward.size, count))
        times[order.forward], times[order.backward] = self.forward, self.backward
        if order.num_absent:
            absent = slice(count - order.num_absent, count)
            times[order.forward[-1], absent] = times[order.backward[-1], absent] = 0.0
        return times

    @cached_property
    def after(self) -> Floats:
        """The time of the actions of a replica up to each one. [2 n, replicas]"""
        after: Floats = np.cumsum(self.times, axis=0)
        return after

    @cached_property
    def before(self) -> Floats:
        """The time of the actions of a replica before each one. [2 n, replicas]"""
        return self.after - self.times

    @cached_property
    def least(self) -> "_Least":
        counts = np.full(self.backward.size, self.order.forward.size)
        counts[counts.size - self.order.num_absent :] -= 1
        return _Least(
            num_replicas=counts.size,
            count=int(counts[0]),
            in_flight=int(self.order.backward[0]),
            forward=float(self.forward.min()),
            backward=float(self.backward.min()),
            work=float((counts * (self.forward + self.backward)).max()),
            after_last=float(self.after_last.min()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Least:
    """What every replica of a stage takes at least, in ns.

    Attributes:
        count: the most micro-batches of a replica.
        in_flight: the forwards before its first backward.
        work: of the busiest replica.
        after_last: what follows its last B.
    """

    num_replicas: int
    count: int
    in_flight: int
    forward: float
    backward: float
    work: float
    after_last: float


class StepEstimate:
    """Estimates the step times of plans with a schedule and a micro-batch size."""

    def __init__(self, line: DeviceLine, schedule: str, microbatch_size: int) -> None:
        self.line, self.schedule = line, schedule
        self.num_microbatches = line.options.minibatch_size // microbatch_size
        cluster = line.cluster
        kinds = sorted({device.kind for device in cluster.devices})
        profiles = [line.profiles[kind] for kind in kinds]
        measured = [profile.at(microbatch_size) for profile in profiles]
        self._kinds = np.array([kinds.index(device.kind) for device in cluster.devices])
        self._speeds = np.array([device.speed for device in cluster.devices])
        names = list(dict.fromkeys(device.host for device in cluster.devices))
        self._hosts = np.array([names.index(device.host) for device in cluster.devices])
        # Prefix sums over the layers. [kinds, layers + 1], or of the first kind [layers + 1]
        self._forward = np.array([prefix_sums([m.forward_ns for m in of_kind]) for of_kind in measured], dtype=float)
        self._backward = np.array([prefix_sums([m.whole_backward_ns for m in of_kind]) for of_kind in measured]) * 1.0
        layers = profiles[0].layers
        self._update = prefix_sums([layer.update_ns for layer in layers]).astype(float)
        self._gradients = [layer.summed_bytes(has_replicas=True) for layer in layers]
        self._memory = StageMemory(line, microbatch_size)
        # Transfers over each cut within and between hosts, forwards and backwards. [2, layers + 1]
        sizes = [self._memory.sent.tolist(), self._memory.returned.tolist()]
        self._inside, self._between = (
            np.array([[float(link.transfer_ns(size)) if size else 0.0 for size in of_way] for of_way in sizes])
            for link in (cluster.intra_host, cluster.inter_host)
        )
        self._least_ways = np.minimum(self._inside, self._between).tolist()
        self._stages: dict[tuple[int, int, int, int, int], _Stage | None] = {}

    def step_ns(self, plan: LinePlan) -> float:
        """Returns the step time of a plan, infinite if it does not fit."""
        step_ns, stages = inf, self._stages_of(plan)
        for done in () if stages is None else self._passes(stages, plan.cuts):
            step_ns = max(done)
        return step_ns

    def score_ns(self, plan: LinePlan, below_ns: float = inf) -> float:
        """Returns the step time of a plan and a small part of the mean end of its stages; infinite if it does not fit.

        Of two plans with equal steps the one in which other stages have more time left is nearer to a faster one.

        Args:
            below_ns: a plan with a higher score is of no use, and may have any such score.
        """
        stages = self._stages_of(plan)
        if stages is None or self._least_ns(stages, plan.cuts) > below_ns:
            return inf
        score_ns = inf
        for done in self._passes(stages, plan.cuts):
            score_ns = max(done) + SMOOTHING * sum(done) / len(done)
            if score_ns > below_ns:  # ends only rise
                break
        return score_ns

    def _stages_of(self, plan: LinePlan) -> list[_Stage] | None:
        """The costs of the stages, None if they do not fit."""
        stages = []
        first, num_devices = 0, sum(plan.counts)
        for begin, end, count in zip(plan.cuts, plan.cuts[1:], plan.counts, strict=False):
            depth = self.num_microbatches if self.schedule == "gpipe" else num_devices - first
            stage = self._stage(begin, end, first, count, min(depth, self.num_microbatches))
            if stage is None:
                return None
            stages.append(stage)
            first += count
        return stages

    def _least_ns(self, stages: list[_Stage], cuts: tuple[int, ...]) -> float:
        """A score that a plan does not beat, by the bounds of stages and by what follows in the stages before them.

        The last B of a stage comes no earlier than its work, or the round trip of its first micro-batch, says. Then
        that micro-batch goes back through the stages before it, as `ring_bound.py` has it: behind others of the last
        micro-batches on the same replica, and before the all-reduce.
        """
        num, all_least = self.num_microbatches, [stage.least for stage in stages]
        there, back = [0.0], [0.0]
        for each, cut in zip(all_least, cuts[1:], strict=True):
            there.append(there[-1] + each.forward + self._least_ways[0][cut])
            back.append(back[-1] + each.backward + self._least_ways[1][cut])
        round_trip = there[-1] + back[-1] - self._least_ways[0][cuts[-1]] - self._least_ways[1][cuts[-1]]
        # When the last micro-batches of later stages are back at the first, if none were before them, and how many
        # others end with them. More of both stand for less.
        ends: list[tuple[float, int]] = []
        latest = total = 0.0
        for least, way_there, way_back in zip(all_least[::-1], there[-2::-1], back[-2::-1], strict=True):
            apart = least.count - least.in_flight
            if self.schedule == "gpipe":
                apart = max(0, (num - all_least[-1].num_replicas) // least.num_replicas)
            around = round_trip + (least.count - 1) * least.backward + apart * least.forward
            end = max(way_there + least.work + way_back, around)
            own = max((e + y // least.num_replicas * least.backward for e, y in ends), default=end)
            done = max(end, own) - way_back + least.after_last
            others = num - 1 - (least.count - 1) * least.num_replicas
            if not any(e >= end and y >= others for e, y in ends):
                ends = [(e, y) for e, y in ends if e > end or y > others] + [(end, others)]
            latest, total = max(latest, done, end), total + done
        return latest + SMOOTHING * total / len(stages)

    def _passes(self, stages: list[_Stage], cuts: tuple[int, ...]) -> Iterator[list[float]]:
        """Yields when the devices of each stage are done after each pass."""
        for ends in self._ends(stages, cuts):
            yield [_done(stage, end) for stage, end in zip(stages, ends, strict=True)]

    def _stage(self, begin: int, end: int, first: int, count: int, depth: int) -> _Stage | None:
        """The costs of a stage, None if it does not fit."""
        key = begin, end, first, count, depth
        if key not in self._stages:
            self._stages[key] = self._cost(*key)
        return self._stages[key]

    def _cost(self, begin: int, end: int, first: int, count: int, depth: int) -> _Stage | None:
        ranks = np.array(self.line.group(first, count))
        kinds, speeds = self._kinds[ranks], self._speeds[ranks]
        forward = (self._forward[kinds, end] - self._forward[kinds, begin]) / speeds
        backward = (self._backward[kinds, end] - self._backward[kinds, begin]) / speeds
        order = _order(self.num_microbatches, count, depth)
        ready, rings = self._buckets(begin, end, ranks)
        recomputes = self._memory.recomputes(begin, end, ranks.tolist(), int(order.backward[0]))
        if recomputes is None:
            return None
        if recomputes:
            backward, ready = backward + forward, ready + forward
        # All devices update when the last ring is done. The longest of [buckets] for each replica.
        update = (self._update[end] - self._update[begin]) / speeds
        summed = (ready - backward + rings[:, None]).max(axis=0, initial=-inf) + update.max()
        after_last = np.roll(np.maximum(summed, update), -(self.num_microbatches % count))
        return _Stage(order, forward, backward, self._hosts[ranks], after_last)

    def _buckets(self, begin: int, end: int, ranks: IntArray) -> tuple[Floats, Floats]:
        """When each bucket is full after the start of the last B, and its ring and those behind it."""
        if ranks.size == 1:
            return np.zeros((0, 1)), np.zeros(0)
        filled = fill_buckets(self._gradients[begin:end][::-1])
        at = end - np.array([last for last, _ in filled], dtype=np.int64)
        kinds, speeds = self._kinds[ranks], self._speeds[ranks]
        ready = (self._backward[kinds, end] - self._backward[kinds[None, :], at[:, None]]) / speeds
        hosts, cluster = self._hosts[ranks], self.line.cluster
        num_hosts = np.unique(hosts).size
        links: list[Bandwidth] = [cluster.intra_host] if num_hosts < ranks.size else []
        links += [cluster.inter_host] if num_hosts > 1 else []
        shares = [-(-num_bytes // ranks.size) for _, num_bytes in filled]
        rings = [2 * (ranks.size - 1) * max(link.transfer_ns(share) for link in links) for share in shares]
        behind: Floats = np.cumsum(np.array(rings[::-1], dtype=float))[::-1]
        return ready, behind

    def _ends(self, stages: list[_Stage], cuts: tuple[int, ...]) -> Iterator[list[Floats]]:
        """Yields when the B of the micro-batches end, after each pass over the stages. [stages][micro-batches]"""
        num, last = self.num_microbatches, len(stages) - 1
        ways = [self._transfers(a, b, cut) for a, b, cut in zip(stages, stages[1:], cuts[1:], strict=False)]
        at_start = np.zeros(num)
        forward = [at_start] * (last + 1)  # ends of F and of B. [stages][micro-batches]
        ends = [at_start] * (last + 1)
        # What ended elsewhere when a stage was run last: a stage that gets the same again need not be run again.
        known: list[tuple[int, int]] = [(-1, -1)] * (last + 1)
        versions = [[0, 0] for _ in stages]  # of `forward` and of `ends`

        def run(s: int, *, is_way_back: bool) -> bool:
            """Runs a stage; returns whether its F end later than before."""
            stage = stages[s]
            arrived, returned = versions[s - 1][0] if s else 0, versions[s + 1][1] if s < last else 0
            if known[s] == (arrived, returned):
                return False
            arrivals = forward[s - 1] + ways[s - 1][0] if s else at_start
            gradients = ends[s + 1] + ways[s][1] if s < last else at_start
            if not stage.order.is_forwards_first:
                own, back = _run(stage, arrivals, gradients)
            else:
                own = _run_forwards(stage, arrivals) if known[s][0] != arrived else forward[s]
                back = _run_backwards(stage, own, gradients) if is_way_back else ends[s]
            is_later = own is not forward[s] and bool((own > forward[s]).any())
            if is_later:
                forward[s], versions[s][0] = own, versions[s][0] + 1
            if back is not ends[s] and bool((back > ends[s]).any()):
                ends[s], versions[s][1] = back, versions[s][1] + 1
            known[s] = arrived, returned if is_way_back or not stage.order.is_forwards_first else -1
            return is_later

        for _ in range(MAX_PASSES):
            for s in range(last + 1):
                run(s, is_way_back=False)
            is_changed = [run(s, is_way_back=True) for s in range(last, -1, -1)]
            yield ends
            if not any(is_changed):
                break

    def _transfers(self, a: _Stage, b: _Stage, cut: int) -> tuple[Floats, Floats]:
        """The transfers over a cut, forwards and backwards. [micro-batches, or 1 if equal]"""
        inside, between = self._inside[:, cut : cut + 1], self._between[:, cut : cut + 1]
        if (inside == between).all():
            return inside[0], inside[1]
        num = self.num_microbatches
        crosses = np.resize(a.hosts, num) != np.resize(b.hosts, num)
        return np.where(crosses, between[0], inside[0]), np.where(crosses, between[1], inside[1])


def _done(stage: _Stage, ends: Floats) -> float:
    """When the devices of a stage are done, with their all-reduces and updates."""
    return float((ends[-stage.after_last.size :] + stage.after_last).max())


def _run(stage: _Stage, arrivals: Floats, gradients: Floats) -> tuple[Floats, Floats]:
    """Returns when each F and B ends, given when what they wait for arrives. [micro-batches]"""
    order, num = stage.order, arrivals.size
    rows = np.empty(stage.before.shape)
    rows[order.forward], rows[order.backward] = _of_replicas(stage, arrivals), _of_replicas(stage, gradients)
    rows -= stage.before
    np.maximum.accumulate(rows, axis=0, out=rows)
    rows += stage.after
    return rows[order.forward].ravel()[:num], rows[order.backward].ravel()[:num]


def _run_forwards(stage: _Stage, arrivals: Floats) -> Floats:
    """Returns when each F ends if all come before the first B. [micro-batches]"""
    n = stage.order.forward.size
    rows = _of_replicas(stage, arrivals) - stage.before[:n]
    np.maximum.accumulate(rows, axis=0, out=rows)
    rows += stage.after[:n]
    return rows.ravel()[: arrivals.size]


def _run_backwards(stage: _Stage, forward: Floats, gradients: Floats) -> Floats:
    """Returns when each B ends if all come after the last F; `forward` are the ends of F. [micro-batches]"""
    n = stage.order.forward.size
    rows = _of_replicas(stage, gradients) - stage.before[n:]
    # A replica without a last micro-batch is free after the one before it.
    free = _of_replicas(stage, forward)[-2:].max(axis=0) - stage.before[n]
    np.maximum(rows[0], free, out=rows[0])
    np.maximum.accumulate(rows, axis=0, out=rows)
    rows += stage.after[n:]
    return rows.ravel()[: gradients.size]


def _of_replicas(stage: _Stage, of_microbatches: Floats) -> Floats:
    """Values of micro-batches by replica, 0 where a replica has one micro-batch less. [micro-batches, replicas]"""
    order, count = stage.order, stage.backward.size
    if order.num_absent:
        padded = np.zeros(order.forward.size * count)
        padded[: of_microbatches.size] = of_microbatches
        return padded.reshape(-1, count)
    return of_microbatches.reshape(-1, count)
