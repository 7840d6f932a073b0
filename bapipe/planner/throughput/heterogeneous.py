"""Pipelines over devices that differ, in one order, as a `LoadProblem`.

The fastest device of a stage takes the first micro-batch: the first ones run one more than the others if they do not
divide evenly. The bytes at a cut, too, are those of the stage's first device in this order.

A state is the devices of a stage together with those of the stages before and after it, because the time of a stage's
transfers depends on both. Two stages' devices exchange over `slowest_of` the links between them. Memory is counted as
if every later device took part, which is safe: it overestimates the micro-batches in flight.
"""

from collections.abc import Sequence

import numpy as np

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.planner.compute.arrays import Bools, Indices, Ints
from bapipe.planner.stages.equal_replicas import doublings
from bapipe.planner.throughput.loads import INFEASIBLE_LOAD, Boundaries, StageCostSums, load_ceiling_ns, slowest_of
from bapipe.planner.throughput.problem import END
from bapipe.simulator.interval_costs import transfer_ns
from bapipe.units import decimal

MAX_DEVICES_WITH_GAPS = 8
"""Up to this number of devices, a plan may leave out devices between those that it uses."""

MAX_DEVICES_WITH_ALL_COUNTS = 16
"""Up to this number of devices, a stage may have any number of them; with more, powers of two only."""

Replicas = tuple[int, int]
"""Consecutive devices of the cluster: the first, and how many."""

State = tuple[Replicas, Replicas, Replicas]
"""The devices of the stage before, of a stage itself, and of the stage after it."""

NO_REPLICAS: Replicas = (-1, 0)
"""The stage before the first one, or after the last one."""


class HeterogeneousDevices:
    """See `LoadProblem`. `sums` are the costs of the layers by rank; one object for devices on which they are equal."""

    def __init__(
        self,
        boundaries: Boundaries,
        sums: Sequence[StageCostSums],
        cluster: Cluster,
        *,
        num_microbatches: int,
        memory_bytes: Sequence[int],
        fastest_first: Sequence[int],
        has_equal_replicas: bool = False,
    ) -> None:
        """With `has_equal_replicas`, all stages have the same number of devices: for a first plan in little time.

        Args:
            fastest_first: all ranks, in the order in which those of one stage take micro-batches.
        """
        self._boundaries, self._cluster, self._num_microbatches = boundaries, cluster, num_microbatches
        self._memory_bytes = memory_bytes
        self.num_boundaries = boundaries.num_boundaries
        self._sums = sums
        self._place = {rank: place for place, rank in enumerate(fastest_first)}
        replicas_after = _equal_replicas_after if has_equal_replicas else _replicas_after
        self._replicas_after = replicas_after(len(cluster.devices), num_microbatches)
        # The cube of the choices of replicas in the worst case: that is why large clusters restrict them.
        states = [
            (before, replicas, after)
            for before in self._replicas_after
            for replicas in self._replicas_after[before]
            for after in [*self._replicas_after[replicas], NO_REPLICAS]
        ]
        # Sorted by the stage's own devices: every successor begins at a later device, hence has a larger number.
        self.states: list[State] = sorted(states, key=lambda state: (state[1], state[0], state[2]))
        self._number = {state: i for i, state in enumerate(self.states)}
        self.num_states = len(states)
        # The first stage has no stage before it.
        self.starts = [i for i, state in enumerate(self.states) if state[0] == NO_REPLICAS]
        # Caches: many states have the same pair of stages, and many pairs the same slowest link.
        self._ordered: dict[Replicas, tuple[int, ...]] = {}
        self._links: dict[tuple[Replicas, Replicas], Bandwidth] = {}
        self._transfer_ns: dict[tuple[bool, str, Bandwidth], Ints] = {}
        self._set_bounds()

    def _set_bounds(self) -> None:
        """Sets each device's rate, and the time of the layers before and after each boundary at rate 1; [boundaries].

        With one kind of device, replicas finish at most the sum of their rates, so they need that much time.
        With several kinds each layer may be fastest on another kind, so sums over layers bound nothing.
        """
        devices = self._cluster.devices
        everywhere, last = np.arange(self.num_boundaries), self.num_boundaries - 1
        rounding_ns = 2 * (len(devices) + 1)  # F and B of each stage are rounded, and of all layers as well
        self._rates = np.ones(len(devices))
        self._before_ns = self._after_ns = np.zeros(self.num_boundaries)
        if len({device.kind for device in devices}) == 1:
            rates = [decimal(device.speed) for device in devices]
            max_rate = max(rates)
            # Times on the fastest kind, so that a device of rate x needs at least 1/x of them. If speeds differ, that
            # is true of what devices work themselves, but neither of their hosts nor of what members exchange.
            fastest = self._sums[rates.index(max_rate)]
            times_ns = fastest.microbatch_ns if len(set(rates)) == 1 else fastest.own_microbatch_ns
            self._rates = np.array([float(rate / max_rate) for rate in rates])
            self._before_ns = np.maximum(times_ns(0, everywhere) - rounding_ns, 0)
            self._after_ns = np.maximum(times_ns(everywhere, last) - rounding_ns, 0)

    @property
    def bound_ns(self) -> float:
        """A lower bound on the load: all micro-batches shared out among all devices in proportion to their speeds."""
        return float(max(0.0, self._num_microbatches * self._before_ns[-1] / self._rates.sum()))

    @property
    def ceiling_ns(self) -> float:
        """An upper bound on the load of every plan."""
        total = len(self._cluster.devices)
        slowest = self._slowest_link((0, total), (0, total))
        return load_ceiling_ns(self._boundaries, self._sums, self._num_microbatches, total, [slowest])

    def replicas(self, state: int) -> tuple[int, ...]:
        """Returns the devices of the stage, in the order in which they take micro-batches."""
        return self._in_order(self.states[state][1])

    def _in_order(self, replicas: Replicas) -> tuple[int, ...]:
        if replicas not in self._ordered:
            self._ordered[replicas] = tuple(sorted(range(replicas[0], sum(replicas)), key=self._place.__getitem__))
        return self._ordered[replicas]

    def successors(self, state: int) -> list[int]:
        _, replicas, after = self.states[state]
        if after == NO_REPLICAS:
            return [END]
        return [self._number[replicas, after, later] for later in [*self._replicas_after[after], NO_REPLICAS]]

    def begins(self, state: int, limit: float) -> Bools:
        start = self.states[state][1][0]
        return self._possible(self._rates[:start].sum(), self._rates[start:].sum(), limit)

    def ends(self, state: int, limit: float) -> Bools:
        _, replicas, after = self.states[state]
        stop = sum(replicas)
        possible = self._possible(self._rates[:stop].sum(), self._rates[stop:].sum(), limit)
        # A stage ends at the last boundary if and only if no stage follows it.
        possible[-1] = after == NO_REPLICAS
        possible[:-1] &= after != NO_REPLICAS
        return possible

    def _possible(self, rate_before: float, rate_after: float, limit: float) -> Bools:
        """Boundaries whose layers on each side the devices on that side can run below the limit; [boundaries]."""
        per_microbatch = limit / self._num_microbatches * (1 + 1e-9)
        return (self._before_ns <= rate_before * per_microbatch) & (self._after_ns <= rate_after * per_microbatch)

    def load(self, state: int, begin: Indices, end: Indices, limit: float) -> Ints:
        replicas = self.replicas(state)
        loads: Ints = np.where(self._boundaries.nested[np.ix_(begin, end)], np.int64(0), INFEASIBLE_LOAD)
        seen = set()  # replicas with the same cost, memory and number of micro-batches are computed once
        for position, rank in enumerate(replicas):
            device = self._cluster.devices[rank]
            times = -(-(self._num_microbatches - position) // len(replicas))
            key = (self._sums[rank], device.overlaps_transfers, self._memory_bytes[rank], times)
            if key not in seen:
                seen.add(key)
                np.maximum(loads, self._device_load(rank, times, self.states[state], begin, end), out=loads)
        return loads

    def _device_load(self, rank: int, times: int, state: State, begin: Indices, end: Indices) -> Ints:
        """Returns the load of one device that runs `times` micro-batches; [begins, ends]."""
        load = self._load_without_memory(rank, times, state, begin, end)
        before, replicas, _ = state
        start, count = replicas
        # Every later device of the cluster is counted, whether or not a stage uses it.
        in_flight = min(-(-(len(self._cluster.devices) - start) // count), times)
        # The bytes at a cut are those of the first device of the stage before it, as for transfers.
        first = self._in_order(replicas)[0]
        sender = first if before == NO_REPLICAS else self._in_order(before)[0]
        received = self._sums[sender].send_bytes, self._sums[first].grad_bytes
        fits = self._sums[rank].fits(
            begin[:, None], end[None, :], in_flight, times, self._memory_bytes[rank], received_bytes=received
        )
        load = self._sums[rank].with_feasible_replicas(load, begin[:, None], end[None, :], count)
        return np.where(fits, load, INFEASIBLE_LOAD)

    def _load_without_memory(self, rank: int, times: int, state: State, begin: "Indices", end: "Indices") -> "Ints":
        sums, (before, replicas, after) = self._sums[rank], state
        begin, end = begin[:, None], end[None, :]
        # A ring all-reduce is as slow as its slowest link.
        ring = self._slowest_link(replicas, replicas)
        load = times * sums.microbatch_ns(begin, end) + sums.per_step_ns(begin, end, replicas[1], ring)
        transfers = []
        if before != NO_REPLICAS:
            transfers.append(times * self._send_ns(before, replicas)[begin])
            transfers.append(times * self._return_ns(replicas, before)[begin])
        if after != NO_REPLICAS:
            transfers += [times * self._send_ns(replicas, after)[end], times * self._return_ns(after, replicas)[end]]
        # Transfers that overlap compute bound the load from below, others add to it.
        for transfer in transfers:
            load = np.maximum(load, transfer) if self._cluster.devices[rank].overlaps_transfers else load + transfer
        return load

    def _send_ns(self, before: Replicas, after: Replicas) -> "Ints":
        """Returns the time of one micro-batch's activations at each boundary between two stages; [boundaries]."""
        return self._crossing_ns(True, before, self._slowest_link(before, after))

    def _return_ns(self, after: Replicas, before: Replicas) -> "Ints":
        """Returns the time of one micro-batch's gradients at each boundary between two stages; [boundaries]."""
        return self._crossing_ns(False, before, self._slowest_link(after, before))

    def _crossing_ns(self, is_forward: bool, before: Replicas, link: Bandwidth) -> "Ints":
        """Returns the time of what crosses a cut: its bytes are those of the first device of the stage before it."""
        first = self._in_order(before)[0]
        key = is_forward, self._cluster.devices[first].kind, link
        if key not in self._transfer_ns:
            sums = self._sums[first]
            self._transfer_ns[key] = transfer_ns(sums.send_bytes if is_forward else sums.grad_bytes, link)
        return self._transfer_ns[key]

    def _slowest_link(self, source: Replicas, target: Replicas) -> Bandwidth:
        """Returns the minimal bandwidth and maximal latency of the links from some replicas to others, or among them.

        Among them it is that of a ring, which also takes as long as the host to sum, if it does.
        """
        if (source, target) not in self._links:
            links = [
                self._cluster.link(a, b)
                for a in range(source[0], sum(source))
                for b in range(target[0], sum(target))
                if a != b
                # One device has no link, and its all-reduce takes no time.
            ] or [self._cluster.intra_host]
            of_host = self._cluster.host_sum_link(range(source[0], sum(source))) if source == target else None
            self._links[source, target] = slowest_of(links if of_host is None else [*links, of_host])
        return self._links[source, target]


def _replicas_after(num_devices: int, num_microbatches: int) -> dict[Replicas, list[Replicas]]:
    """Returns for the replicas of a stage those that the next stage can have; for `NO_REPLICAS` those of the first.

    Small clusters may leave out devices between stages; large ones restrict the numbers of devices, because the number
    of states grows with the cube of their number.
    """
    has_gaps = num_devices <= MAX_DEVICES_WITH_GAPS
    counts = [
        count
        for count in range(1, min(num_devices, num_microbatches) + 1)
        if num_devices <= MAX_DEVICES_WITH_ALL_COUNTS or count & (count - 1) == 0
    ]
    every = [(start, count) for start in range(num_devices) for count in counts if start + count <= num_devices]
    after: dict[Replicas, list[Replicas]] = {NO_REPLICAS: [first for first in every if has_gaps or first[0] == 0]}
    for replicas in every:
        stop = sum(replicas)
        after[replicas] = [other for other in every if (other[0] >= stop if has_gaps else other[0] == stop)]
    return after


def _equal_replicas_after(num_devices: int, num_microbatches: int) -> dict[Replicas, list[Replicas]]:
    """Returns the same if all stages have as many devices: 1, 2, 4 ..., or all; O(devices) choices."""
    most = min(num_devices, num_microbatches)
    counts = doublings(most)
    every = [(start, count) for count in counts for start in range(0, num_devices - count + 1, count)]
    after: dict[Replicas, list[Replicas]] = {NO_REPLICAS: [(0, count) for count in counts]}
    for start, count in every:
        after[start, count] = [(start + count, count)] if start + 2 * count <= num_devices else []
    return after
