"""The objective of dnn-partitioning (Tarnawski et al. 2020, arXiv:2006.16423): compute and transfers of a device.

A stage pays its compute, and the transfer of every tensor that enters or leaves it, once each, to and from memory that
all devices share. Nodes of one colour share a device, backward nodes follow the forward ones of their colour, and
stages are cut from the forward part. CPUs are slow and pay for no transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from bapipe.graph.downsets import downsets, members, prefixes
from bapipe.graph.layer_graph import depth_first_order
from bapipe.planner.throughput.min_max_dp import min_max_load, min_max_load_below
from bapipe.planner.throughput.problem import END, StagePath
from benchmarks.planner.placement_workload import Workload, reduced

EXACT = 1e-9
"""Relative difference below which two sums of floating-point times are the same."""

MAX_DOWNSETS = 60_000

MAX_CACHED_BOUNDARIES = 700
"""Up to this number of boundaries, the loads of all stages between them are computed once and cached."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best split, with the file's node numbers of every stage, and a lower bound of its load."""

    load: float
    bound: float
    stages: tuple[tuple[int, ...], ...]
    on_cpu: tuple[bool, ...]
    num_downsets: int | None


class Splits:
    """The splits of a workload at given downsets, as a `LoadProblem`.

    A state is (accelerators used, CPUs used, whether this stage is on a CPU). With t the compute and x the transfers of
    all tensors at a boundary, the stages before it pay t + x together if none of them is on a CPU.
    """

    def __init__(self, workload: Workload, boundaries: Sequence[int], limit: float = inf) -> None:
        """Uses those of the boundaries that can be part of a split below the limit."""
        k, cpus = workload.num_devices, workload.num_cpus
        self._limits, self._memory = (k, cpus), workload.memory
        self._all_fit = sum(workload.size) <= workload.memory
        rates = [t / c if c else inf for t, c in zip(workload.compute, workload.on_cpu, strict=True) if t]
        self.cpu_rate = max(rates, default=0.0)
        inside = membership(boundaries, workload.graph.num_nodes)
        seen = np.zeros((workload.graph.num_nodes, len(workload.tensors)))
        for number, (nodes, _) in enumerate(workload.tensors):
            seen[list(nodes), number] = 1
        cost = np.array([cost for _, cost in workload.tensors])
        num_users, placed = seen.sum(axis=0), inside @ seen
        self._compute = inside @ np.array(workload.compute)
        self._crossing = ((placed > 0) & (placed < num_users)) @ cost
        if limit < inf:
            counts = [(a, c) for a in range(k + 1) for c in range(cpus + 1)]
            kept = np.logical_or.reduce([self._possible(a, c, limit) for a, c in counts])
            kept[[0, -1]] = True
            boundaries = [boundaries[row] for row in np.nonzero(kept)[0].tolist()]
            inside, placed, self._compute, self._crossing = (
                rows[kept] for rows in (inside, placed, self._compute, self._crossing)
            )
        self.boundaries, self.num_boundaries = boundaries, len(boundaries)
        self._inside, self._num_inside = inside, inside.sum(axis=1)
        self._on_cpu = inside @ np.array(workload.on_cpu)
        self._size = inside @ np.array(workload.size)
        self._all_tensors = cost.sum()
        # A stage does not pay for tensors of which it has no user (as many users are before its end as before its
        # beginning), nor for those of which it has all: two products of tables of zeros and ones.
        left, right = [(placed == 0) * cost], [placed == num_users]
        for count in range(int(num_users.max(initial=0)) + 1):
            columns = num_users >= count
            left.append((placed[:, columns] == count) * cost[columns])
            right.append(placed[:, columns] == count)
        self._left, self._right = np.hstack(left), np.hstack(right).astype(float)
        self.states = [
            (total - c, c, cpu)
            for total in range(1, k + cpus + 1)
            for c in range(min(cpus, total) + 1)
            if total - c <= k
            for cpu in (False, True)
            if (c if cpu else total - c)
        ]
        self._number = {state: i for i, state in enumerate(self.states)}
        self._tables: dict[bool, Any] = {}
        self.num_states = len(self.states)
        self.starts = [self._number[state] for state in ((1, 0, False), (0, 1, True)) if state in self._number]

    def successors(self, state: int) -> list[int]:
        a, c, _ = self.states[state]
        after = [self._number[s] for s in ((a + 1, c, False), (a, c + 1, True)) if s in self._number]
        return [*after, END]

    def begins(self, state: int, limit: float) -> Any:
        a, c, cpu = self.states[state]
        return self._possible(a - (not cpu), c - cpu, limit)

    def ends(self, state: int, limit: float) -> Any:
        a, c, _ = self.states[state]
        return self._possible(a, c, limit)

    def _possible(self, used: int, used_cpus: int, limit: float) -> Any:
        t, x = self._compute, self._crossing
        left, left_cpus = self._limits[0] - used, self._limits[1] - used_cpus
        slack = 1 + EXACT
        can = used_cpus * self.cpu_rate * limit if used_cpus else 0.0
        before = t + (0 if used_cpus else x) <= (used * limit + can) * slack
        can = left_cpus * self.cpu_rate * limit if left_cpus else 0.0
        return before & (t[-1] - t + (0 if left_cpus else x) <= (left * limit + can) * slack)

    def load(self, state: int, begin: Any, end: Any, limit: float) -> Any:
        _, _, cpu = self.states[state]
        if self.num_boundaries > MAX_CACHED_BOUNDARIES:
            return self._load(cpu, begin, end, limit)
        if cpu not in self._tables:
            every = np.arange(self.num_boundaries)
            self._tables[cpu] = self._load(cpu, every, every, inf)
        return self._tables[cpu][np.ix_(begin, end)]

    def _load(self, cpu: bool, begin: Any, end: Any, limit: float) -> Any:
        if cpu:
            load = self._on_cpu[end][None, :] - self._on_cpu[begin][:, None]
        else:
            load = self._compute[end][None, :] - self._compute[begin][:, None]
            below = load < limit
            rows, columns = below.any(axis=1), below.any(axis=0)
            unpaid = self._left[begin[rows]] @ self._right[end[columns]].T
            load[np.ix_(rows, columns)] += self._all_tensors - unpaid
            if not self._all_fit:
                load[self._size[end][None, :] - self._size[begin][:, None] > self._memory] = inf
        below = load < limit
        rows, columns = np.nonzero(below.any(axis=1))[0], np.nonzero(below.any(axis=0))[0]
        begins, ends = begin[rows], end[columns]
        common = self._inside[begins] @ self._inside[ends].T  # how many nodes are in both
        nested = (common == self._num_inside[begins][:, None]) & (begins[:, None] < ends[None, :])
        load[np.ix_(rows, columns)] = np.where(nested, load[np.ix_(rows, columns)], inf)
        return load


def membership(boundaries: Sequence[int], num_nodes: int) -> Any:
    """Returns a table of zeros and ones: whether each downset contains each node."""
    width = (num_nodes + 7) // 8
    packed = np.frombuffer(b"".join(nodes.to_bytes(width, "little") for nodes in boundaries), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(boundaries), width), axis=1, bitorder="little")
    return bits[:, :num_nodes].astype(float)


def solve(workload: Workload) -> Answer:
    """Returns the best contiguous split, proven if there are at most `MAX_DOWNSETS` downsets.

    The first search is over the cuts of a depth-first order, the second over all downsets for a better split.
    """
    total = sum(workload.compute)
    chain = Splits(workload, prefixes(depth_first_order(workload.graph)))
    bound = total / (workload.num_devices + workload.num_cpus * min(chain.cpu_rate, 1e9))
    ceiling = 2 * (total + sum(cost for _, cost in workload.tensors)) + 1
    first = min_max_load(chain, bound=bound, ceiling=ceiling).best
    limit = (first.load if first else ceiling) * (1 - EXACT)
    smaller = reduced(workload, limit)
    sets = downsets(smaller.graph, MAX_DOWNSETS)
    if sets is None:
        assert first is not None
        return _answer(workload, chain, first, bound, None)
    every = Splits(smaller, sets, limit)
    better = min_max_load_below(every, limit)
    if better is not None:
        return _answer(smaller, every, better, better.load, len(sets))
    assert first is not None
    return _answer(workload, chain, first, first.load, len(sets))


def _answer(workload: Workload, splits: Splits, path: StagePath, bound: float, num_downsets: int | None) -> Answer:
    stages = [splits.boundaries[b] & ~splits.boundaries[a] for a, b in pairwise(path.boundaries)]
    return Answer(
        load=path.load,
        bound=bound,
        stages=tuple(tuple(n for node in members(stage) for n in workload.nodes[node]) for stage in stages),
        on_cpu=tuple(splits.states[state][2] for state in path.states),
        num_downsets=num_downsets,
    )
