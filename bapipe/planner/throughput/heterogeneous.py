"""Pipelines over devices that are not alike, in the cluster's order, as a `LoadProblem`.

A state is the devices of a stage with those of the stages before and after: what its transfers take depends on them.
Two stages' devices exchange over the slowest link between them. Memory is counted as if every later device took part.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.planner.throughput.loads import NOTHING_FITS, Cuts, Runs, most_ns, transfer_ns
from bapipe.planner.throughput.problem import END

MAX_GAPS = 8
"""Up to how many devices some between others may be left out."""

MAX_COUNTS = 16
"""Up to how many devices a stage may have any number of them; beyond, powers of two."""

Group = tuple[int, int]
"""First device, and how many."""

NONE: Group = (-1, 0)


class UnlikeDevices:
    """See `LoadProblem`. `runs` are figures of the layers by (kind, speed) of device."""

    def __init__(
        self,
        cuts: Cuts,
        runs: Mapping[tuple[str, float], Runs],
        cluster: Cluster,
        *,
        num_microbatches: int,
        memory_bytes: Sequence[int],
    ) -> None:
        self._cuts, self._cluster, self._memory, self._num_microbatches = cuts, cluster, memory_bytes, num_microbatches
        self.num_boundaries = cuts.num_boundaries
        self._runs = [runs[device.kind, device.speed] for device in cluster.devices]
        self._bytes = self._runs[0]
        total = len(cluster.devices)
        counts = [c for c in range(1, min(total, num_microbatches) + 1) if total <= MAX_COUNTS or c & (c - 1) == 0]
        groups = [(start, count) for start in range(total) for count in counts if start + count <= total]
        self._after: dict[Group, list[Group]] = {
            group: [o for o in groups if (o[0] >= sum(group) if total <= MAX_GAPS else o[0] == sum(group))]
            for group in groups
        }
        first = groups if total <= MAX_GAPS else [group for group in groups if group[0] == 0]
        self._after[NONE] = first
        states = [
            (before, own, after)
            for before in [NONE, *groups]
            for own in self._after[before]
            for after in [*self._after[own], NONE]
        ]
        self.states = sorted(states, key=lambda state: (state[1], state[0], state[2]))
        self._number = {state: i for i, state in enumerate(self.states)}
        self.num_states = len(states)
        self.starts = [i for i, state in enumerate(self.states) if state[0] == NONE]
        self._links: dict[tuple[Group, Group], Bandwidth] = {}
        self._transfers: dict[tuple[bool, Bandwidth], Any] = {}
        everywhere = np.arange(self.num_boundaries)
        last = self.num_boundaries - 1
        slack = 2 * total
        if len({device.kind for device in cluster.devices}) == 1:
            rates = [Fraction(str(device.speed)) for device in cluster.devices]
            unit = max(rates)
            fastest = self._runs[rates.index(unit)]
            self._rates = np.array([float(rate / unit) for rate in rates])
            self._before_ns = np.maximum(fastest.microbatch_ns(0, everywhere) - slack, 0)
            self._after_ns = np.maximum(fastest.microbatch_ns(everywhere, last) - slack, 0)
        else:  # each layer may be fastest on another kind, so sums over layers bound nothing
            self._rates = np.ones(total)
            self._before_ns = self._after_ns = np.zeros(self.num_boundaries)

    @property
    def bound_ns(self) -> float:
        """All micro-batches shared out among all devices in proportion to their speeds."""
        return float(max(0.0, self._num_microbatches * self._before_ns[-1] / self._rates.sum()))

    @property
    def ceiling_ns(self) -> float:
        """A load that every plan is below."""
        total = len(self._cluster.devices)
        everything = (0, total)
        return most_ns(self._cuts, self._runs, self._num_microbatches, total, [self._slowest(everything, everything)])

    def load_alone(self, ranks: Sequence[int]) -> int:
        """Returns the load of one stage that holds everything, whether it fits or not."""
        loads = [0]
        group = (ranks[0], len(ranks))
        everything = np.array([0]), np.array([self.num_boundaries - 1])
        for place, rank in enumerate(ranks):
            times = -(-(self._num_microbatches - place) // len(ranks))
            loads.append(int(self._unlimited(rank, times, NONE, group, NONE, *everything)[0, 0]))
        return max(loads)

    def followers(self, state: int) -> list[int]:
        _, own, after = self.states[state]
        if after == NONE:
            return [END]
        return [self._number[own, after, later] for later in [*self._after[after], NONE]]

    def beginnings(self, state: int, limit: float) -> Any:
        start = self.states[state][1][0]
        return self._possible(self._rates[:start].sum(), self._rates[start:].sum(), limit)

    def endings(self, state: int, limit: float) -> Any:
        _, own, after = self.states[state]
        stop = sum(own)
        possible = self._possible(self._rates[:stop].sum(), self._rates[stop:].sum(), limit)
        possible[-1] = after == NONE
        possible[:-1] &= after != NONE
        return possible

    def _possible(self, before: float, after: float, limit: float) -> Any:
        room = limit / self._num_microbatches * (1 + 1e-9)
        return (self._before_ns <= before * room) & (self._after_ns <= after * room)

    def load(self, state: int, begin: Any, end: Any, limit: float) -> Any:
        before, own, after = self.states[state]
        loads = np.where(self._cuts.nested[np.ix_(begin, end)], np.int64(0), NOTHING_FITS)
        seen = set()
        for place in range(own[1]):
            rank = own[0] + place
            device = self._cluster.devices[rank]
            times = -(-(self._num_microbatches - place) // own[1])
            key = (device.kind, device.speed, device.overlaps_transfers, self._memory[rank], times)
            if key not in seen:
                seen.add(key)
                np.maximum(loads, self._load(rank, times, before, own, after, begin, end), out=loads)
        return loads

    def _load(self, rank: int, times: int, before: Group, own: Group, after: Group, begin: Any, end: Any) -> Any:
        load = self._unlimited(rank, times, before, own, after, begin, end)
        width = len(self._cluster.devices) - own[0]
        in_flight = min(-(-width // own[1]), times)
        fits = self._runs[rank].fits(begin[:, None], end[None, :], in_flight, times, self._memory[rank])
        return np.where(fits, load, NOTHING_FITS)

    def _unlimited(self, rank: int, times: int, before: Group, own: Group, after: Group, begin: Any, end: Any) -> Any:
        runs = self._runs[rank]
        begin, end = begin[:, None], end[None, :]
        ring = self._slowest(own, own)
        load = times * runs.microbatch_ns(begin, end) + runs.once_ns(begin, end, own[1], ring)
        transfers = []
        if before != NONE:
            transfers += [
                times * self._sent(before, own)[begin],
                times * self._back(own, before)[begin],
            ]
        if after != NONE:
            transfers += [times * self._sent(own, after)[end], times * self._back(after, own)[end]]
        for transfer in transfers:
            load = np.maximum(load, transfer) if self._cluster.devices[rank].overlaps_transfers else load + transfer
        return load

    def _sent(self, source: Group, target: Group) -> Any:
        link = self._slowest(source, target)
        if (True, link) not in self._transfers:
            self._transfers[True, link] = transfer_ns(self._bytes.send_bytes, link)
        return self._transfers[True, link]

    def _back(self, source: Group, target: Group) -> Any:
        link = self._slowest(source, target)
        if (False, link) not in self._transfers:
            self._transfers[False, link] = transfer_ns(self._bytes.grad_bytes, link)
        return self._transfers[False, link]

    def _slowest(self, source: Group, target: Group) -> Bandwidth:
        """Least bandwidth and most latency of the links from one group to another, or within one."""
        if (source, target) not in self._links:
            links = [
                self._cluster.link(a, b)
                for a in range(source[0], sum(source))
                for b in range(target[0], sum(target))
                if a != b
            ] or [self._cluster.intra_host]
            self._links[source, target] = Bandwidth(
                bytes_per_s=min(link.bytes_per_s for link in links), latency_ns=max(link.latency_ns for link in links)
            )
        return self._links[source, target]
