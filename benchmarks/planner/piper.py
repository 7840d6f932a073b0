"""Piper's objective (Tarnawski et al. 2021): seconds a sample of the slowest stage, tensor-parallel options, memory.

A stage of d replicas on t devices each takes (edges / d + 4 (d-1) parameters / (d N)) / bandwidth + compute / d. Its
devices hold A y + B bytes for y = ceil(replicas of this and later stages / d) micro-batches in flight. Every node runs
as it is, or recomputes its activations: more time, another A and B.

For a limit, of all ways to run what follows a boundary those count that no other beats in both devices and replicas:
the more replicas, the more micro-batches are in flight before them. A table of the fewest devices for each number of
replicas holds them.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bapipe.graph import Graph, downsets, members
from benchmarks.planner.dnn_partitioning import MAX_DOWNSETS, membership

GROWTH = (1.03, 1.1, 1.3, 1.5, 2.0, 16.0, 4096.0)
"""By what the limit is raised, one after another, until a plan is below it."""

MANY = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Devices, bytes each may hold, micro-batches in a batch, and bytes a second."""

    num_devices: int
    memory: float
    num_microbatches: int
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Node numbers, replicas, devices of each replica, and the option each node runs with."""

    nodes: tuple[int, ...]
    replicas: int
    tensor: int
    options: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plan found, None where nothing fits, and a time that none is below."""

    seconds: float
    bound: float
    stages: tuple[Stage, ...]


class Workload:
    """A graph of nodes with two options for each tensor-parallel degree; the second recomputes."""

    def __init__(self, path: Path) -> None:
        found = msgspec.json.decode(path.read_bytes())
        nodes = found["nodes"]
        place = {node["id"]: i for i, node in enumerate(nodes)}
        self.ids = [node["id"] for node in nodes]
        arcs = frozenset((place[e["sourceId"]], place[e["destId"]]) for e in found["edges"])
        self.graph = Graph(names=tuple(map(str, self.ids)), arcs=arcs)
        self.degrees = sorted(map(int, nodes[0]["TMPCs"]))
        self.names = tuple(option["id"] for option in nodes[0]["TMPCs"][str(self.degrees[0])])
        shape = len(self.degrees), len(self.names), len(nodes)
        self.time, self.a, self.b = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.params = np.zeros((len(self.degrees), len(nodes)))
        self.edges: list[tuple[int, int, Any]] = []
        options = [[node["TMPCs"][str(t)] for t in self.degrees] for node in nodes]
        for i, by_degree in enumerate(options):
            for t, choices in enumerate(by_degree):
                assert tuple(c["id"] for c in choices) == self.names
                assert len({(c["parameterSize"], str(c["syncTimeFw"]), str(c["syncTimeBw"])) for c in choices}) == 1
                self.params[t, i] = choices[0]["parameterSize"]
                for o, choice in enumerate(choices):
                    self.time[t, o, i] = choice["timePerSample"]
                    self.a[t, o, i], self.b[t, o, i] = choice["memoryUsageA"], choice["memoryUsageB"]
        for edge in found["edges"]:
            u, v, size = place[edge["sourceId"]], place[edge["destId"]], edge["communicationCost"]
            into = [2 * (size + c[0]["syncTimeFw"][str(edge["sourceId"])]) for c in options[v]]
            out = [2 * (size + c[0]["syncTimeBw"][str(edge["destId"])]) for c in options[u]]
            self.edges.append((u, v, np.array([into, out])))


class Stages:
    """All stages of a workload: [degree, stage] tables of what they take, and how they may recompute."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        self.workload, self.setting = workload, setting
        sets = downsets(workload.graph, MAX_DOWNSETS)
        assert sets is not None
        self.sets = sets
        pairs = [(i, j) for j in range(len(sets)) for i in range(j) if sets[i] & ~sets[j] == 0]
        self.begin, self.end = np.array(pairs).T
        self.inside = membership([sets[j] & ~sets[i] for i, j in pairs], workload.graph.num_nodes)
        self.compute = workload.time[:, 0] @ self.inside.T
        self.params = workload.params @ self.inside.T
        self.traffic = np.zeros_like(self.compute)
        for u, v, (into, out) in workload.edges:
            self.traffic += into[:, None] * (self.inside[:, v] * (1 - self.inside[:, u]))
            self.traffic += out[:, None] * (self.inside[:, u] * (1 - self.inside[:, v]))
        self.replicas = np.array(
            [d for d in range(1, setting.num_devices + 1) if setting.num_microbatches % d == 0], dtype=np.int64
        )
        d = self.replicas[None, None, :]
        sync = 4 * (d - 1) * self.params[:, :, None] / d / setting.num_microbatches
        sent = (self.traffic[:, :, None] / d + sync) / setting.bytes_per_s
        self.base = sent + self.compute[:, :, None] / d
        self.devices = d * np.array(workload.degrees)[:, None, None]
        self.extra, self.most = self._recomputing()
        degrees = np.array(workload.degrees)[:, None, None]
        least = (workload.time * degrees).min(axis=(0, 1))
        self.work = membership(sets, workload.graph.num_nodes) @ least  # device-seconds of each downset, at least

    def groups(self) -> list[list[int]]:
        """Nodes for which recomputing changes memory by the same, whatever the degree."""
        found: dict[tuple[float, ...], list[int]] = {}
        change = np.concatenate([np.diff(self.workload.a, axis=1)[:, 0], np.diff(self.workload.b, axis=1)[:, 0]])
        for node, key in enumerate(map(tuple, change.T)):
            if any(key):
                found.setdefault(key, []).append(node)
        return list(found.values())

    def _recomputing(self) -> tuple[Any, Any]:
        """For each stage, ways to recompute by rising extra time, and the most micro-batches in flight so far."""
        w = self.workload
        slower = np.diff(w.time, axis=1)[:, 0]
        change_a, change_b = np.diff(w.a, axis=1)[:, 0], np.diff(w.b, axis=1)[:, 0]
        a, b = w.a[:, 0] @ self.inside.T, w.b[:, 0] @ self.inside.T
        sums = []
        for group in self.groups():
            costs = np.where(self.inside[None, :, group] > 0, slower[:, None, group], np.inf)
            sums.append(np.concatenate([np.zeros((*costs.shape[:2], 1)), np.cumsum(np.sort(costs), axis=2)], axis=2))
        firsts = [group[0] for group in self.groups()]
        extras, mosts = [], []
        for counts in product(*(range(s.shape[2]) for s in sums)):
            extra = sum((s[:, :, c] for s, c in zip(sums, counts, strict=True)), np.zeros_like(a))
            total_a = a + sum(c * change_a[:, node, None] for c, node in zip(counts, firsts, strict=True))
            total_b = b + sum(c * change_b[:, node, None] for c, node in zip(counts, firsts, strict=True))
            room = self.setting.memory - total_b
            most = np.where(room < 0, 0, np.where(total_a > 0, room / np.maximum(total_a, 1e-9), MANY))
            extras.append(extra)
            mosts.append(np.floor(np.minimum(most, MANY) * (1 + 1e-12)))
        extra, most = np.stack(extras, axis=2), np.stack(mosts, axis=2)
        order = np.argsort(extra, axis=2, kind="stable")
        most = np.take_along_axis(np.where(np.isfinite(extra), most, 0), order, axis=2)
        return np.take_along_axis(extra, order, axis=2), np.maximum.accumulate(most, axis=2)

    def ways(self, limit: float, some: Any) -> Any:
        """For each degree, stage and number of replicas: after how many replicas it runs below the limit at most.

        Below 0 where it never does, or fewer replicas do as well.
        """
        slack = (limit - self.base[:, some]) * self.replicas
        extra = self.extra[:, some]
        last = np.zeros(slack.shape, dtype=np.int64)
        for choice in range(extra.shape[2]):
            last += extra[:, :, choice, None] < slack
        most = np.take_along_axis(self.most[:, some], np.maximum(last - 1, 0), axis=2)
        after = np.where((last > 0) & (most >= 1), (most - 1) * self.replicas, -1).clip(-1, self.setting.num_devices)
        earlier = np.maximum.accumulate(after, axis=2)
        after[:, :, 1:][after[:, :, 1:] <= earlier[:, :, :-1]] = -1
        return after.astype(np.int64)


def below(stages: Stages, limit: float) -> tuple[float, tuple[Stage, ...]] | None:
    """Returns a plan with every stage below the limit, and its slowest stage's time; None where there is none."""
    k, last = stages.setting.num_devices, len(stages.sets) - 1
    least = stages.work / limit * (1 - 1e-9)
    before, later = np.ceil(least).astype(np.int64), np.ceil(least[-1] - least).astype(np.int64)
    room = k - before[stages.begin] - later[stages.end]
    needs = np.ceil(least[stages.end] - least[stages.begin])
    some = np.nonzero(room >= np.maximum(needs, 1))[0]
    after = stages.ways(limit, some)
    degree_at, stage_at, number_at = np.nonzero((after >= 0) & (stages.devices <= room[None, some, None]))
    most_at, stage_at = after[degree_at, stage_at, number_at], some[stage_at]
    order = np.argsort(-stages.begin[stage_at], kind="stable")
    fewest = np.full((last + 1, k + 1), k + 1, dtype=np.int64)
    fewest[last, 0] = 0
    came = np.zeros((last + 1, k + 1, 3), dtype=np.int64)
    for degree, stage, number, most in np.stack([degree_at, stage_at, number_at, most_at], axis=1)[order].tolist():
        begin, end, d = int(stages.begin[stage]), int(stages.end[stage]), int(stages.replicas[number])
        most = min(most, k - d)
        devices = d * stages.workload.degrees[degree]
        total = fewest[end, : most + 1] + devices
        now = fewest[begin, d : d + most + 1]
        better = (total < now) & (total <= k - before[begin])
        if better.any():
            now[better] = total[better]
            came[begin, d : d + most + 1][better] = degree, stage, number
    if fewest[0].min() > k:
        return None
    return _path(stages, fewest, came)


def _path(stages: Stages, fewest: Any, came: Any) -> tuple[float, tuple[Stage, ...]]:
    boundary, replicas, found, slowest = 0, int(fewest[0].argmin()), [], 0.0
    while boundary < len(stages.sets) - 1:
        degree, stage, number = came[boundary, replicas].tolist()
        d = int(stages.replicas[number])
        flight = -(-replicas // d)
        recomputed, extra = _recomputed(stages, degree, stage, flight)
        w = stages.workload
        nodes = members(stages.sets[int(stages.end[stage])] & ~stages.sets[boundary])
        slowest = max(slowest, float(stages.base[degree, stage, number]) + extra / d)
        found.append(
            Stage(
                nodes=tuple(w.ids[node] for node in nodes),
                replicas=d,
                tensor=w.degrees[degree],
                options={w.ids[node]: w.names[node in recomputed] for node in nodes},
            )
        )
        boundary, replicas = int(stages.end[stage]), replicas - d
    return slowest, tuple(found)


def _recomputed(stages: Stages, degree: int, stage: int, flight: int) -> tuple[set[int], float]:
    """The cheapest nodes to recompute so that so many micro-batches fit, and the time that takes."""
    w, inside = stages.workload, np.nonzero(stages.inside[stage])[0]
    slower, held_nodes = w.time[degree, 1] - w.time[degree, 0], set(inside.tolist())
    groups = [sorted(set(group) & held_nodes, key=lambda node: slower[node]) for group in stages.groups()]
    best: tuple[float, set[int]] | None = None
    for counts in product(*(range(len(group) + 1) for group in groups)):
        chosen = {node for group, count in zip(groups, counts, strict=True) for node in group[:count]}
        held = sum(
            w.a[degree, int(node in chosen), node] * flight + w.b[degree, int(node in chosen), node]
            for node in inside.tolist()
        )
        extra = float(slower[sorted(chosen)].sum())
        if held <= stages.setting.memory and (best is None or extra < best[0]):
            best = extra, chosen
    assert best is not None
    return best[1], best[0]


def solve(workload: Workload, setting: Setting) -> Answer | None:
    """Returns the plan of least time, proven; None where nothing fits."""
    stages = Stages(workload, setting)
    bound = float(stages.work[-1]) / setting.num_devices
    best = None
    for growth in GROWTH:
        limit = bound * growth
        best = below(stages, limit)
        if best is not None:
            break
        bound = limit
    halves = False
    while best is not None and bound < best[0]:
        limit = (best[0] + bound) / 2 if halves else best[0] * (1 - 1e-12)
        found = below(stages, limit)
        if found is None:
            bound = limit if halves else best[0]
        else:
            best = found
        halves = not halves
    return None if best is None else Answer(seconds=best[0], bound=bound, stages=best[1])
