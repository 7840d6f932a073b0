"""PipeDream's objective on one level of links (Narayanan et al. 2019, arXiv:1806.03377), every boundary charged.

A stage of r devices takes (compute + 4 (r-1)/r parameters / bandwidth) / r, and the tensors alive at either of its
boundaries, there and back, 2 bytes / (bandwidth r); a tensor used further on is relayed. The largest of these over all
stages is the time of a mini-batch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bapipe.graph.downsets import downsets, members, prefixes
from bapipe.graph.layer_graph import Graph, contract, depth_first_order
from bapipe.planner.throughput.min_devices_dp import find_plan_below, min_max_load_homogeneous
from bapipe.planner.throughput.problem import StagePath
from benchmarks.planner.dnn_partitioning import MAX_DOWNSETS, membership

_FIELDS = re.compile(r"(\w+_time|\w+_size)=(\[[\d.; ]*\]|[\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Nodes of a measured graph: seconds of a mini-batch, and bytes.

    Attributes:
        nodes: of each graph node, the source's names.
        outputs: for each graph node, (bytes, the other graph nodes that use them) of what leaves it.
    """

    graph: Graph
    nodes: tuple[tuple[str, ...], ...]
    compute_s: tuple[float, ...]
    params: tuple[float, ...]
    outputs: tuple[tuple[tuple[float, frozenset[int]], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plan: the file's layer names of every stage, and its number of devices."""

    load: float
    bound: float
    stages: tuple[tuple[str, ...], ...]
    replicas: tuple[int, ...]
    num_downsets: int | None


def read(path: Path) -> Workload:
    """Returns the graph as PipeDream's optimizer takes it: without model inputs and without items that nothing uses."""
    figures: dict[str, dict[str, float]] = {}
    kinds: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        parts = line.strip().split(" -- ")
        if line[:1].isspace():
            edges.append((parts[0], parts[1]))
        elif line:
            kinds[parts[0]] = parts[1]
            figures[parts[0]] = {
                key: sum(map(float, value.strip("[]").split(";"))) for key, value in _FIELDS.findall(parts[2])
            }
    targets = {target for _, target in edges}
    dropped = {name for name in kinds if name not in targets and kinds[name].startswith("Input")}
    edges = [edge for edge in edges if edge[0] not in dropped]
    sources = {source for source, _ in edges}
    dropped |= {name for name in kinds if name not in sources and kinds[name].startswith("__getitem__")}
    edges = [edge for edge in edges if edge[1] not in dropped]
    names = [name for name in kinds if name not in dropped]
    place = {name: i for i, name in enumerate(names)}
    users: list[set[int]] = [set() for _ in names]
    for source, target in edges:
        users[place[source]].add(place[target])
    graph = Graph(names=tuple(names), arcs=frozenset((place[a], place[b]) for a, b in edges))
    workload = Workload(
        graph=graph,
        nodes=tuple((name,) for name in names),
        compute_s=tuple(
            (figures[name]["forward_compute_time"] + figures[name]["backward_compute_time"]) / 1e3 for name in names
        ),
        params=tuple(figures[name]["parameter_size"] for name in names),
        outputs=tuple(
            ((figures[name]["activation_size"], frozenset(use)),) for name, use in zip(names, users, strict=True)
        ),
    )
    return reduced(workload)


def reduced(workload: Workload) -> Workload:
    """Returns the workload after contracting nodes that a best plan can keep together.

    A node without compute and parameters moves over a cut to its only predecessor, or its only successor, if after that
    no more crosses the cut than crossed between the two alone.
    """
    while True:
        groups = _contractible(workload)
        if not groups:
            return workload
        graph, parts = contract(workload.graph, groups)
        place = {node: i for i, part in enumerate(parts) for node in part}
        workload = Workload(
            graph=graph,
            nodes=tuple(tuple(n for node in part for n in workload.nodes[node]) for part in parts),
            compute_s=tuple(sum(workload.compute_s[node] for node in part) for part in parts),
            params=tuple(sum(workload.params[node] for node in part) for part in parts),
            outputs=tuple(
                tuple(
                    (num_bytes, now)
                    for node in part
                    for num_bytes, use in workload.outputs[node]
                    for now in [frozenset(place[user] for user in use) - {i}]
                    if now
                )
                for i, part in enumerate(parts)
            ),
        )


def _contractible(workload: Workload) -> list[tuple[int, int]]:
    graph, groups, taken = workload.graph, [], set[int]()
    into: list[list[tuple[float, frozenset[int], int]]] = [[] for _ in workload.nodes]
    for node, outputs in enumerate(workload.outputs):
        for num_bytes, use in outputs:
            for user in use:
                into[user].append((num_bytes, use, node))
    for node in range(graph.num_nodes):
        if workload.compute_s[node] or workload.params[node] or node in taken:
            continue
        sent = sum(num_bytes for num_bytes, _ in workload.outputs[node])
        received = sum(num_bytes for num_bytes, _, _ in into[node])
        sources, targets = members(graph.before[node]), graph.after[node]
        alone = sum(num_bytes for num_bytes, use, _ in into[node] if len(use) == 1)
        if len(sources) == 1 and sources[0] not in taken and sent <= alone:
            pair = (sources[0], node)
        elif len(targets) == 1 and targets[0] not in taken and received <= sent:
            pair = (node, targets[0])
        else:
            continue
        groups.append(pair)
        taken |= set(pair)
    return groups


class Pipelines:
    """Plans of a workload on devices that are all the same, cut at given downsets, as a `HomogeneousLoadProblem`."""

    def __init__(self, workload: Workload, boundaries: Sequence[int], num_devices: int, bytes_per_s: float) -> None:
        self.num_boundaries, self.num_devices, self._rate = len(boundaries), num_devices, bytes_per_s
        inside = membership(boundaries, workload.graph.num_nodes)
        self._compute = inside @ np.array(workload.compute_s)
        self._params = inside @ np.array(workload.params)
        alive = np.zeros(len(boundaries))
        for node, outputs in enumerate(workload.outputs):
            for num_bytes, use in outputs:
                alive += num_bytes * ((inside[:, node] > 0) & (inside[:, sorted(use)].sum(axis=1) < len(use)))
        self._alive_s = 2.0 * alive / bytes_per_s
        self._nested = np.triu(np.ones((len(boundaries), len(boundaries)), dtype=bool), 1)
        if any(smaller & ~larger for smaller, larger in pairwise(boundaries)):  # else they are a chain
            self._nested &= inside @ inside.T == inside.sum(axis=1)[:, None]

    def load(self, devices: int, begin: int, end: int) -> float:
        compute = self._compute[end] - self._compute[begin]
        params = self._params[end] - self._params[begin]
        sent = max(self._alive_s[begin], self._alive_s[end])
        return float(max(compute + 4.0 * (devices - 1) / (self._rate * devices) * params, sent)) / devices

    depends_on_later_devices = False

    def min_devices(self, begin: Any, end: Any, after: Any, available: Any, limit: float) -> Any:
        """Starts from the needs of compute or transfers alone, and adds devices until the sum is below the limit."""
        compute = self._compute[end][None, :] - self._compute[begin][:, None]
        params = (self._params[end][None, :] - self._params[begin][:, None]) * (4.0 / self._rate)
        sent = np.maximum(self._alive_s[begin][:, None], self._alive_s[end][None, :])
        devices = np.maximum(np.floor(np.maximum(compute, sent) / limit), 1.0)
        devices[~self._nested[np.ix_(begin, end)] | (devices > available)] = self.num_devices + 1
        while True:
            load = np.maximum(compute + (devices - 1) / devices * params, sent) / devices
            more = (load >= limit) & (devices <= self.num_devices)
            if not more.any():
                return devices.astype(np.int64)
            devices[more] += 1

    def min_devices_around(self, limit: float) -> Any:
        """Devices for the compute, and more than the tensors' time at the boundary takes below the limit."""
        across = np.where(self._alive_s > 0, np.floor(self._alive_s / limit * (1 - 1e-9)) + 1, 0)
        before = np.ceil(self._compute / limit * (1 - 1e-9))
        after = np.ceil((self._compute[-1] - self._compute) / limit * (1 - 1e-9))
        counts = np.maximum(np.stack([before, after]), across).astype(np.int64)
        return counts[0], counts[1]


def solve(workload: Workload, num_devices: int, bytes_per_s: float) -> Answer:
    """Returns the fastest plan, over all downsets if there are at most `MAX_DOWNSETS`."""
    order = prefixes(depth_first_order(workload.graph))
    pipelines = Pipelines(workload, order, num_devices, bytes_per_s)
    total = sum(workload.compute_s)
    bound, ceiling = total / num_devices, total + 8 * sum(workload.params) / bytes_per_s + 1
    first = min_max_load_homogeneous(pipelines, bound=bound, ceiling=ceiling)
    assert first.best is not None
    boundaries = downsets(workload.graph, MAX_DOWNSETS)
    if boundaries is None:
        return _answer(workload, order, first.best, bound, None)
    if len(boundaries) == len(order):
        return _answer(workload, order, first.best, first.bound, len(order))
    every = Pipelines(workload, boundaries, num_devices, bytes_per_s)
    better = find_plan_below(every, first.best.load * (1 - 1e-9))
    if better is None:
        return _answer(workload, order, first.best, first.best.load, len(boundaries))
    best = min_max_load_homogeneous(every, bound=bound, ceiling=ceiling, best=better)
    assert best.best is not None
    return _answer(workload, boundaries, best.best, best.bound, len(boundaries))


def _answer(
    workload: Workload, boundaries: Sequence[int], path: StagePath, bound: float, num_downsets: int | None
) -> Answer:
    stages = [boundaries[b] & ~boundaries[a] for a, b in zip(path.boundaries, path.boundaries[1:], strict=False)]
    return Answer(
        load=path.load,
        bound=bound,
        stages=tuple(tuple(n for node in members(stage) for n in workload.nodes[node]) for stage in stages),
        replicas=path.states,
        num_downsets=num_downsets,
    )
