"""Piper's objective (Tarnawski et al. 2021): seconds per sample of the slowest stage, tensor-parallel options, memory.

A stage of d replicas on t devices each takes (edges / d + 4 (d-1) parameters / (d N)) / bandwidth + compute / d. Its
devices hold A y + B bytes for y = ceil(replicas of this and later stages / d) micro-batches in flight. Every node runs
as it is, or recomputes its activations: more time, another A and B.

For a limit, among all plans of the nodes after a boundary, only the Pareto front in devices and replicas counts:
the more replicas, the more micro-batches are in flight before them. It is a table of the minimal number of devices for
each number of replicas.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bapipe.graph.downsets import downsets, members
from bapipe.graph.layer_graph import Graph
from benchmarks.planner.dnn_partitioning import MAX_DOWNSETS, membership

GROWTH = (1.03, 1.1, 1.3, 1.5, 2.0, 16.0, 4096.0)
"""Factors by which the limit is raised, one after another, until a plan is below it."""

NEAR = 1.002
"""The interval is halved until a plan is this close to its lower end; then the next one need only be better."""

MANY = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Devices, memory per device, micro-batches in a batch, and bytes per second."""

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
    """The best plan found, None if nothing fits, and a lower bound of the time."""

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
        self.groups = self._groups()
        self.extra, self.most = self._recomputing()
        degrees = np.array(workload.degrees)[:, None, None]
        least = (workload.time * degrees).min(axis=(0, 1))
        self.work = membership(sets, workload.graph.num_nodes) @ least  # device-seconds of each downset, at least

    def _groups(self) -> list[list[int]]:
        """Nodes for which recomputing changes memory by the same, whatever the degree."""
        found: dict[tuple[float, ...], list[int]] = {}
        change = np.concatenate([np.diff(self.workload.a, axis=1)[:, 0], np.diff(self.workload.b, axis=1)[:, 0]])
        for node, key in enumerate(map(tuple, change.T)):
            if any(key):
                found.setdefault(key, []).append(node)
        return list(found.values())

    def _recomputing(self) -> tuple[Any, Any]:
        """For each stage, by how many nodes recompute: extra time, and micro-batches that fit.

        The last axis is the number of nodes of the last group, the one before that of all others; extra times rise
        along the last.
        """
        w = self.workload
        slower = np.diff(w.time, axis=1)[:, 0]
        change_a, change_b = np.diff(w.a, axis=1)[:, 0], np.diff(w.b, axis=1)[:, 0]
        a, b = (held[:, 0] @ self.inside.T for held in (w.a, w.b))
        shape, extra, a, b = (*a.shape, -1), np.zeros((*a.shape, 1)), a[:, :, None], b[:, :, None]
        for group in self.groups:
            costs = np.where(self.inside[None, :, group] > 0, slower[:, None, group], np.inf)
            sums = np.concatenate([np.zeros((*costs.shape[:2], 1)), np.cumsum(np.sort(costs), axis=2)], axis=2)
            counts = np.arange(sums.shape[2])
            extra = (extra[:, :, :, None] + sums[:, :, None, :]).reshape(shape)
            a = (a[:, :, :, None] + change_a[:, group[0], None, None, None] * counts).reshape(shape)
            b = (b[:, :, :, None] + change_b[:, group[0], None, None, None] * counts).reshape(shape)
        room = self.setting.memory - b
        most = np.where(room < 0, 0, np.where(a > 0, room / np.maximum(a, 1e-9), MANY))
        most = np.where(np.isfinite(extra), np.floor(np.minimum(most, MANY) * (1 + 1e-12)), 0)
        by_last = (*a.shape[:2], -1, len(counts))
        return extra.reshape(by_last), np.maximum.accumulate(most.reshape(by_last), axis=3)

    def ways(self, limit: float, some: Any, room: Any) -> tuple[Any, Any, Any, Any]:
        """Returns stages that may run below the limit: degrees, numbers among `some`, numbers in `replicas`, and after
        how many replicas at most; not those of which fewer replicas do as well.
        """
        slack = (limit - self.base[:, some]) * self.replicas
        degree, stage, number = np.nonzero((slack > 0) & (self.devices <= room[None, :, None]))
        fitting = self._fitting(degree, some[stage], slack[degree, stage, number])
        after = np.full(slack.shape, -1.0)
        after[degree, stage, number] = np.where(fitting >= 1, (fitting - 1) * self.replicas[number], -1)
        after = after.clip(-1, self.setting.num_devices).astype(np.int64)
        earlier = np.maximum.accumulate(after, axis=2)
        after[:, :, 1:][after[:, :, 1:] <= earlier[:, :, :-1]] = -1
        degree, stage, number = np.nonzero(after >= 0)
        return degree, stage, number, after[degree, stage, number]

    def _fitting(self, degree: Any, stage: Any, slack: Any) -> Any:
        """Returns how many micro-batches fit where less extra time is taken: by halving along the last axis."""
        others, size = np.arange(self.extra.shape[2]), self.extra.shape[3]
        degree, stage, place = degree[:, None], stage[:, None], np.full((len(stage), len(others)), -1)
        step = 1 << size.bit_length()
        while step := step >> 1:
            further = np.minimum(place + step, size - 1)
            place = np.where(self.extra[degree, stage, others, further] < slack[:, None], further, place)
        most = self.most[degree, stage, others, np.maximum(place, 0)]
        return np.where(place >= 0, most, 0).max(axis=1, initial=0)


Way = tuple[int, int, int, int]
"""Of a stage: degree, stage, number of replicas, all by number, and micro-batches in flight."""


def below(stages: Stages, limit: float, after: Any) -> tuple[float, tuple[Way, ...], Any] | None:
    """Returns a plan with every stage below the limit, and its slowest stage's time; None where there is none.

    `after` holds the fewest devices after every boundary below a larger limit, or zeros; and so does the last result.
    """
    k, last = stages.setting.num_devices, len(stages.sets) - 1
    least = stages.work / limit * (1 - 1e-9)
    before, later = np.ceil(least).astype(np.int64), np.ceil(least[-1] - least).astype(np.int64)
    later = np.maximum(later, after)
    room = k - before[stages.begin] - later[stages.end]
    needs = np.ceil(least[stages.end] - least[stages.begin])
    some = np.nonzero(room >= np.maximum(needs, 1))[0]
    degree, stage, number, most = stages.ways(limit, some, room[some])
    stage = some[stage]
    order = np.argsort(-stages.begin[stage], kind="stable")
    degree, stage, number, most = degree[order], stage[order], number[order], most[order]
    begin, end, replicas = stages.begin[stage], stages.end[stage], stages.replicas[number]
    devices = replicas * np.array(stages.workload.degrees)[degree]
    numbers = np.arange(k + 1)
    fewest = np.full((last + 1, k + 2), k + 1, dtype=np.int64)  # of no replicas at all in the last column
    fewest[last, 0] = 0
    came = np.zeros((last + 1, k + 1), dtype=np.int64)
    rests = numbers - replicas[:, None]
    rests[(rests < 0) | (rests > most[:, None])] = k + 1
    first = np.flatnonzero(np.diff(begin, prepend=-1)).tolist()
    for low, high in pairwise([*first, len(begin)]):
        total = fewest[end[low:high, None], rests[low:high]] + devices[low:high, None]
        choice = total.argmin(axis=0)
        least_devices, at = total[choice, numbers], int(begin[low])
        fewest[at, :-1] = np.where(least_devices <= k - before[at], least_devices, k + 1)
        came[at] = low + choice
    if fewest[0].min() > k:
        return None
    boundary, left, slowest, found = 0, int(fewest[0].argmin()), 0.0, []
    while boundary < last:
        way = int(came[boundary, left])
        own, d = (int(degree[way]), int(stage[way]), int(number[way])), int(replicas[way])
        flight = -(-left // d)
        extra = stages.extra[own[:2]][stages.most[own[:2]] >= flight].min()
        slowest = max(slowest, float(stages.base[own]) + float(extra) / d)
        found.append((*own, flight))
        boundary, left = int(end[way]), left - d
    return slowest, tuple(found), fewest[:, :-1].min(axis=1)


def _plan(stages: Stages, ways: tuple[Way, ...]) -> tuple[Stage, ...]:
    w, found = stages.workload, []
    for degree, stage, number, flight in ways:
        recomputed = _recomputed(stages, degree, stage, flight)
        nodes = members(stages.sets[int(stages.end[stage])] & ~stages.sets[int(stages.begin[stage])])
        found.append(
            Stage(
                nodes=tuple(w.ids[node] for node in nodes),
                replicas=int(stages.replicas[number]),
                tensor=w.degrees[degree],
                options={w.ids[node]: w.names[node in recomputed] for node in nodes},
            )
        )
    return tuple(found)


def _recomputed(stages: Stages, degree: int, stage: int, flight: int) -> set[int]:
    """The cheapest nodes to recompute so that so many micro-batches fit."""
    w, inside = stages.workload, np.nonzero(stages.inside[stage])[0]
    slower, held_nodes = w.time[degree, 1] - w.time[degree, 0], set(inside.tolist())
    groups = [sorted(set(group) & held_nodes, key=lambda node: slower[node]) for group in stages.groups]
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
    return best[1]


def solve(workload: Workload, setting: Setting) -> Answer | None:
    """Returns the fastest plan, proven; None if nothing fits."""
    stages = Stages(workload, setting)
    bound = float(stages.work[-1]) / setting.num_devices
    best, after = None, np.zeros(len(stages.sets), dtype=np.int64)
    for growth in GROWTH:
        limit = bound * growth
        best = below(stages, limit, after)
        if best is not None:
            break
        bound = limit
    while best is not None and bound < best[0]:
        near, after = best[0] < bound * NEAR, best[2]
        limit = best[0] * (1 - 1e-12) if near else (best[0] + bound) / 2
        found = below(stages, limit, after)
        if found is None:
            bound = best[0] if near else limit
        else:
            best = found
    return None if best is None else Answer(seconds=best[0], bound=bound, stages=_plan(stages, best[1]))
