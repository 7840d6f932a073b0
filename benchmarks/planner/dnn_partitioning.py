"""The objective of dnn-partitioning (Tarnawski et al. 2020, arXiv:2006.16423): compute and transfers of a device.

A stage pays its compute, and the transfer of every tensor that enters or leaves it, once each, to and from memory that
all devices share. Nodes of one colour share a device, backward nodes follow the forward ones of their colour, and
stages are cut from the forward part. CPUs are slow and pay for no transfer.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bapipe.graph.downsets import downsets, members, prefixes
from bapipe.graph.layer_graph import Graph, contract, depth_first_order
from bapipe.planner.throughput.min_max_dp import min_max_load, min_max_load_below
from bapipe.planner.throughput.problem import END, StagePath

EXACT = 1e-9
"""Relative difference below which two sums of floating-point times are the same."""

MAX_DOWNSETS = 60_000

SMALL = 700
"""Up to how many boundaries the loads of all stages between them are kept."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A graph whose nodes are what must share a device.

    Attributes:
        nodes: of each graph node, the source's node numbers.
        compute, on_cpu, size: of each graph node.
        tensors: (graph nodes that make or use it, transfer time), for tensors that two or more of them see.
    """

    graph: Graph
    nodes: tuple[tuple[int, ...], ...]
    compute: tuple[float, ...]
    on_cpu: tuple[float, ...]
    size: tuple[float, ...]
    tensors: tuple[tuple[frozenset[int], float], ...]
    num_devices: int
    num_cpus: int
    memory: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best split found: the source's node numbers of every stage, and whether none is better."""

    load: float
    bound: float
    stages: tuple[tuple[int, ...], ...]
    on_cpu: tuple[bool, ...]
    num_downsets: int | None


def read(path: Path) -> Workload:
    """Returns a workload as the file says it: one graph node a colour, cycles contracted."""
    found = msgspec.json.decode(path.read_bytes())
    number: dict[object, int] = {}
    colour_of = {}
    for node in found["nodes"]:
        colour = node.get("colorClass", ("alone", node["id"]))
        colour_of[node["id"]] = number.setdefault(colour, len(number))
    inside: list[list[int]] = [[] for _ in number]
    compute, on_cpu, size = [0.0] * len(number), [0.0] * len(number), [0.0] * len(number)
    has_forward = [False] * len(number)
    backward = {node["id"] for node in found["nodes"] if node["isBackwardNode"]}
    for node in found["nodes"]:
        i = colour_of[node["id"]]
        inside[i].append(node["id"])
        compute[i] += node["fpgaLatency"] if node["supportedOnFpga"] else inf
        on_cpu[i] += node["cpuLatency"]
        size[i] += node.get("size", 0.0)
        has_forward[i] |= node["id"] not in backward
    arcs: set[tuple[int, int]] = set()
    users: dict[int, set[int]] = {}
    cost = {}
    for edge in found["edges"]:
        source, target = edge["sourceId"], edge["destId"]
        a, b = colour_of[source], colour_of[target]
        users.setdefault(source, {a}).add(b)
        cost[source] = edge["cost"]
        if a == b:
            continue
        if target not in backward:
            arcs.add((a, b))
        elif source in backward and not (has_forward[a] and has_forward[b]):
            arcs.add((b, a))  # where only the backward exists, its mirror image stands for the forward
    loose = Workload(
        graph=Graph(names=tuple(map(str, range(len(number)))), arcs=frozenset(arcs)),
        nodes=tuple(map(tuple, inside)),
        compute=tuple(compute),
        on_cpu=tuple(on_cpu),
        size=tuple(size),
        tensors=tuple((frozenset(seen), cost[source]) for source, seen in users.items() if len(seen) > 1),
        num_devices=found["maxFPGAs"],
        num_cpus=found["maxCPUs"],
        memory=found["maxSizePerFPGA"],
    )
    return joined(loose, ())


def joined(workload: Workload, groups: Iterable[Sequence[int]]) -> Workload:
    """Returns the workload with groups of graph nodes, and what then is on a cycle, as one node each."""
    graph, parts = contract(workload.graph, groups)
    place = {node: i for i, part in enumerate(parts) for node in part}
    tensors: dict[frozenset[int], float] = defaultdict(float)
    for seen, cost in workload.tensors:
        now = frozenset(place[node] for node in seen)
        if len(now) > 1:
            tensors[now] += cost
    return Workload(
        graph=graph,
        nodes=tuple(tuple(n for node in part for n in workload.nodes[node]) for part in parts),
        compute=tuple(sum(workload.compute[node] for node in part) for part in parts),
        on_cpu=tuple(sum(workload.on_cpu[node] for node in part) for part in parts),
        size=tuple(sum(workload.size[node] for node in part) for part in parts),
        tensors=tuple(tensors.items()),
        num_devices=workload.num_devices,
        num_cpus=workload.num_cpus,
        memory=workload.memory,
    )


def reduced(workload: Workload, limit: float) -> Workload:
    """Returns the workload with nodes joined that a best plan below the limit can keep together.

    - A tensor that takes longer than the limit is never cut if at most one end is a CPU.
    - A node v whose only predecessor (or only successor) is u moves to u's stage: that stage gains v's compute and the
      tensors v shares with others, and loses those that only u and v see. Where this is no gain for the stage it moves
      to, it is none for any other stage either.
    """
    while True:
        groups = _joinable(workload, limit)
        if not groups:
            return workload
        workload = joined(workload, groups)


def _joinable(workload: Workload, limit: float) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []
    taken: set[int] = set()
    at: list[list[int]] = [[] for _ in workload.nodes]
    for number, (seen, cost) in enumerate(workload.tensors):
        for node in seen:
            at[node].append(number)
        if cost > limit and workload.num_cpus <= 1:
            groups.append(tuple(sorted(seen)))
            taken |= seen
    all_fit = sum(workload.size) <= workload.memory
    for node, (compute, on_cpu, size) in enumerate(zip(workload.compute, workload.on_cpu, workload.size, strict=True)):
        if node in taken or on_cpu or (size and not all_fit):
            continue
        neighbours = [
            found[0]
            for found in (members(workload.graph.before[node]), workload.graph.after[node])
            if len(found) == 1 and found[0] not in taken
        ]
        for other in neighbours:
            gain = compute
            for number in at[node]:
                seen, cost = workload.tensors[number]
                if other not in seen:
                    gain += cost
                elif len(seen) == 2:
                    gain -= cost
            if gain <= 0:
                groups.append((node, other))
                taken |= {node, other}
                break
    return groups


class Splits:
    """The splits of a workload at given downsets, as a `LoadProblem`.

    A state is (accelerators used, CPUs used, whether this stage is on a CPU). With t the compute and x the transfers of
    all tensors at a boundary, the stages before it pay t + x together where none of them is on a CPU.
    """

    def __init__(self, workload: Workload, boundaries: Sequence[int], limit: float = inf) -> None:
        """Keeps those boundaries that can be part of a split below the limit."""
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
        # A stage does not pay for the tensors of which it holds no user (as many are before its end as before its
        # beginning), nor for those of which it holds all: two products of tables of zeros and ones.
        left, right = [(placed == 0) * cost], [placed == num_users]
        for count in range(int(num_users.max(initial=0)) + 1):
            some = num_users >= count
            left.append((placed[:, some] == count) * cost[some])
            right.append(placed[:, some] == count)
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
        if self.num_boundaries > SMALL:
            return self._load(cpu, begin, end, limit)
        if cpu not in self._tables:
            everywhere = np.arange(self.num_boundaries)
            self._tables[cpu] = self._load(cpu, everywhere, everywhere, inf)
        return self._tables[cpu][np.ix_(begin, end)]

    def _load(self, cpu: bool, begin: Any, end: Any, limit: float) -> Any:
        if cpu:
            load = self._on_cpu[end][None, :] - self._on_cpu[begin][:, None]
        else:
            load = self._compute[end][None, :] - self._compute[begin][:, None]
            worth = load < limit
            rows, columns = worth.any(axis=1), worth.any(axis=0)
            kept = self._left[begin[rows]] @ self._right[end[columns]].T
            load[np.ix_(rows, columns)] += self._all_tensors - kept
            if not self._all_fit:
                load[self._size[end][None, :] - self._size[begin][:, None] > self._memory] = inf
        maybe = load < limit
        rows, columns = np.nonzero(maybe.any(axis=1))[0], np.nonzero(maybe.any(axis=0))[0]
        some, others = begin[rows], end[columns]
        within = self._inside[some] @ self._inside[others].T  # how many nodes both hold
        nested = (within == self._num_inside[some][:, None]) & (some[:, None] < others[None, :])
        load[np.ix_(rows, columns)] = np.where(nested, load[np.ix_(rows, columns)], inf)
        return load


def membership(boundaries: Sequence[int], num_nodes: int) -> Any:
    """Returns a table of zeros and ones: whether each boundary holds each node."""
    width = (num_nodes + 7) // 8
    packed = np.frombuffer(b"".join(nodes.to_bytes(width, "little") for nodes in boundaries), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(boundaries), width), axis=1, bitorder="little")
    return bits[:, :num_nodes].astype(float)


def solve(workload: Workload) -> Answer:
    """Returns the best contiguous split, proven if there are at most `MAX_DOWNSETS` downsets.

    First over the cuts of a depth-first order; then over all downsets, for one that is better.
    """
    total = sum(workload.compute)
    along = Splits(workload, prefixes(depth_first_order(workload.graph)))
    bound = total / (workload.num_devices + workload.num_cpus * min(along.cpu_rate, 1e9))
    ceiling = 2 * (total + sum(cost for _, cost in workload.tensors)) + 1
    first = min_max_load(along, bound=bound, ceiling=ceiling).best
    limit = (first.load if first else ceiling) * (1 - EXACT)
    small = reduced(workload, limit)
    found = downsets(small.graph, MAX_DOWNSETS)
    if found is None:
        assert first is not None
        return _answer(workload, along, first, bound, None)
    everywhere = Splits(small, found, limit)
    better = min_max_load_below(everywhere, limit)
    if better is not None:
        return _answer(small, everywhere, better, better.load, len(found))
    assert first is not None
    return _answer(workload, along, first, first.load, len(found))


def _answer(workload: Workload, splits: Splits, path: StagePath, bound: float, num_downsets: int | None) -> Answer:
    stages = [splits.boundaries[b] & ~splits.boundaries[a] for a, b in pairwise(path.boundaries)]
    return Answer(
        load=path.load,
        bound=bound,
        stages=tuple(tuple(n for node in members(stage) for n in workload.nodes[node]) for stage in stages),
        on_cpu=tuple(splits.states[state][2] for state in path.states),
        num_downsets=num_downsets,
    )
