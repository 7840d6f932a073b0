"""Piper's objective (Tarnawski et al. 2021): seconds per sample of the slowest stage, tensor-parallel options, memory.

A stage of d replicas on t devices each takes (edges / d + 4 (d-1) parameters / (d N)) / bandwidth + compute / d. Its
devices hold A y + B bytes for y = ceil(replicas of this and later stages / d) micro-batches in flight. Every node
either keeps its activations or recomputes them, which takes more time and changes A and B.

For a limit on the time, a dynamic program over boundaries, from the last one back, keeps of all plans of the nodes
after a boundary only the Pareto front in devices and replicas: the more replicas, the more micro-batches are in flight
before them. The front is a table: the minimum number of devices for each number of replicas.

Tables stay below some hundred megabytes. A graph with more downsets than `MAX_STAGES` allows is cut along three linear
orders only, and with more than `MAX_CHOICES` ways to recompute a stage, nodes recompute in one order, those first that
take least time for the bytes they save. The bound is then that of the work alone, which holds for all plans.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bapipe.formats.files import read_limited
from bapipe.formats.strict_json import decode_json
from bapipe.graph.downsets import downsets, members, prefixes
from bapipe.graph.layer_graph import Graph, depth_first_order, topological_order
from benchmarks.planner.dnn_partitioning import MAX_DOWNSETS, membership

GROWTH = (1.03, 1.1, 1.3, 1.5, 2.0, 16.0, 4096.0)
"""Factors by which the limit is raised, one after another, until a plan is below it."""

CLOSE = 1.002
"""Bisection ends when the best plan is within this factor of the bound; then the next one only has to be better."""

UNLIMITED = 1 << 40

MAX_STAGES = 60_000
"""Pairs of boundaries up to which all downsets are boundaries."""

MAX_CHOICES = 20_000_000
"""Entries of a table of the ways to recompute, for all stages together."""


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
        content: Any = decode_json(read_limited(path), Any)
        nodes = content["nodes"]
        index = {node["id"]: i for i, node in enumerate(nodes)}
        self.ids = [node["id"] for node in nodes]
        arcs = frozenset((index[e["sourceId"]], index[e["destId"]]) for e in content["edges"])
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
        for edge in content["edges"]:
            u, v, size = index[edge["sourceId"]], index[edge["destId"]], edge["communicationCost"]
            entering = [2 * (size + c[0]["syncTimeFw"][str(edge["sourceId"])]) for c in options[v]]
            leaving = [2 * (size + c[0]["syncTimeBw"][str(edge["destId"])]) for c in options[u]]
            self.edges.append((u, v, np.array([entering, leaving])))


class Stages:
    """Every possible stage of a workload: [degree, stage] tables of times and memory, with and without recomputing."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        self.workload, self.setting = workload, setting
        sets = downsets(workload.graph, MAX_DOWNSETS)
        self.is_complete = sets is not None and len(sets) ** 2 // 2 <= MAX_STAGES
        sets = sets if sets is not None and self.is_complete else _prefixes_of_orders(workload.graph)
        self.sets = sets
        pairs = [(i, j) for j in range(len(sets)) for i in range(j) if sets[i] & ~sets[j] == 0]
        self.begin, self.end = np.array(pairs).T
        self.inside = membership([sets[j] & ~sets[i] for i, j in pairs], workload.graph.num_nodes)
        self.compute = workload.time[:, 0] @ self.inside.T
        self.params = workload.params @ self.inside.T
        self.traffic = np.zeros_like(self.compute)
        for u, v, (entering, leaving) in workload.edges:
            self.traffic += entering[:, None] * (self.inside[:, v] * (1 - self.inside[:, u]))
            self.traffic += leaving[:, None] * (self.inside[:, u] * (1 - self.inside[:, v]))
        self.replicas = np.array(
            [d for d in range(1, setting.num_devices + 1) if setting.num_microbatches % d == 0], dtype=np.int64
        )
        d = self.replicas[None, None, :]
        sync = 4 * (d - 1) * self.params[:, :, None] / d / setting.num_microbatches
        sent = (self.traffic[:, :, None] / d + sync) / setting.bytes_per_s
        self.base = sent + self.compute[:, :, None] / d
        self.devices = d * np.array(workload.degrees)[:, None, None]
        self.groups = self._groups()
        self.order: list[int] | None = None
        if prod(len(group) + 1 for group in self.groups) * self.compute.size > MAX_CHOICES:
            self.order, self.is_complete = self._cheapest_first(), False
        self.extra_time, self.max_in_flight = self._recomputation_tables()
        degrees = np.array(workload.degrees)[:, None, None]
        min_work = (workload.time * degrees).min(axis=(0, 1))  # device-seconds of each node
        self.min_work = membership(sets, workload.graph.num_nodes) @ min_work  # of each downset

    def _groups(self) -> list[list[int]]:
        """Returns groups of nodes whose recomputation changes memory by the same amounts, at every degree."""
        groups: dict[tuple[float, ...], list[int]] = {}
        change = np.concatenate([np.diff(self.workload.a, axis=1)[:, 0], np.diff(self.workload.b, axis=1)[:, 0]])
        for node, key in enumerate(map(tuple, change.T)):
            if any(key):
                groups.setdefault(key, []).append(node)
        return list(groups.values())

    def _cheapest_first(self) -> list[int]:
        """Returns the nodes that recomputation changes, those first that take least time for the bytes they save."""
        w = self.workload
        slower, saved = (w.time[0, 1] - w.time[0, 0]), (w.a[0, 0] - w.a[0, 1]) + (w.b[0, 0] - w.b[0, 1])
        useful = np.flatnonzero(saved > 0)
        return [int(node) for node in useful[np.argsort(slower[useful] / saved[useful], kind="stable")]]

    def _recomputation_tables(self) -> tuple[Any, Any]:
        """Returns, for each stage and number of nodes that recompute, the extra time and how many micro-batches fit.

        The last axis is the number of recomputed nodes of the last group; the axis before it enumerates the numbers of
        all other groups. Extra times rise along the last axis.
        """
        w = self.workload
        slower = np.diff(w.time, axis=1)[:, 0]
        change_a, change_b = np.diff(w.a, axis=1)[:, 0], np.diff(w.b, axis=1)[:, 0]
        a, b = (table[:, 0] @ self.inside.T for table in (w.a, w.b))
        if self.order is not None:
            nodes = np.pad(self.inside[:, self.order], ((0, 0), (1, 0)))  # the first choice recomputes nothing
            columns = [0, *self.order]
            extra, a, b = (
                start[:, :, None] + np.cumsum(change[:, None, columns] * nodes, axis=2)
                for change, start in ((slower, np.zeros_like(a)), (change_a, a), (change_b, b))
            )
            fitting = self._num_fitting(extra, a, b)[:, :, None]
            return extra[:, :, None], np.maximum.accumulate(fitting, axis=3)
        shape, extra, a, b = (*a.shape, -1), np.zeros((*a.shape, 1)), a[:, :, None], b[:, :, None]
        for group in self.groups:
            costs = np.where(self.inside[None, :, group] > 0, slower[:, None, group], np.inf)
            sums = np.concatenate([np.zeros((*costs.shape[:2], 1)), np.cumsum(np.sort(costs), axis=2)], axis=2)
            counts = np.arange(sums.shape[2])
            extra = (extra[:, :, :, None] + sums[:, :, None, :]).reshape(shape)
            a = (a[:, :, :, None] + change_a[:, group[0], None, None, None] * counts).reshape(shape)
            b = (b[:, :, :, None] + change_b[:, group[0], None, None, None] * counts).reshape(shape)
        fitting = self._num_fitting(extra, a, b)
        by_last_group = (*a.shape[:2], -1, len(counts))
        return extra.reshape(by_last_group), np.maximum.accumulate(fitting.reshape(by_last_group), axis=3)

    def _num_fitting(self, extra: Any, a: Any, b: Any) -> Any:
        """Returns how many micro-batches fit, y of which hold A y + B bytes; none where the extra time is infinite."""
        available = self.setting.memory - b
        fitting = np.where(available < 0, 0, np.where(a > 0, available / np.maximum(a, 1e-9), UNLIMITED))
        return np.where(np.isfinite(extra), np.floor(np.minimum(fitting, UNLIMITED) * (1 + 1e-12)), 0)

    def candidates(self, limit: float, chosen: Any, max_devices: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the candidates (degree, stage, replicas) that take less than the limit, as four parallel arrays.

        They are the index of the degree, the index in `chosen`, the index in `replicas`, and how many replicas later
        stages may have so that the micro-batches in flight fit. Dominated candidates are left out: those for which
        fewer replicas allow as many later ones.
        """
        slack = (limit - self.base[:, chosen]) * self.replicas
        degree, stage, number = np.nonzero((slack > 0) & (self.devices <= max_devices[None, :, None]))
        fitting = self._fitting(degree, chosen[stage], slack[degree, stage, number])
        max_later = np.full(slack.shape, -1.0)
        max_later[degree, stage, number] = np.where(fitting >= 1, (fitting - 1) * self.replicas[number], -1)
        max_later = max_later.clip(-1, self.setting.num_devices).astype(np.int64)
        with_fewer = np.maximum.accumulate(max_later, axis=2)
        max_later[:, :, 1:][max_later[:, :, 1:] <= with_fewer[:, :, :-1]] = -1
        degree, stage, number = np.nonzero(max_later >= 0)
        return degree, stage, number, max_later[degree, stage, number]

    def _fitting(self, degree: Any, stage: Any, slack: Any) -> Any:
        """Returns how many micro-batches fit if recomputation may take less extra time than `slack`.

        Extra times rise along the last axis, so the last index below `slack` is found by binary search.
        """
        others, size = np.arange(self.extra_time.shape[2]), self.extra_time.shape[3]
        degree, stage, index = degree[:, None], stage[:, None], np.full((len(stage), len(others)), -1)
        step = 1 << size.bit_length()
        while step := step >> 1:
            further = np.minimum(index + step, size - 1)
            index = np.where(self.extra_time[degree, stage, others, further] < slack[:, None], further, index)
        fitting = self.max_in_flight[degree, stage, others, np.maximum(index, 0)]
        return np.where(index >= 0, fitting, 0).max(axis=1, initial=0)


Choice = tuple[int, int, int, int]
"""A stage of a plan: the index of its degree, of the stage, and of its number of replicas; micro-batches in flight."""


def plan_below(stages: Stages, limit: float, later: Any) -> tuple[float, tuple[Choice, ...], Any] | None:
    """Returns a plan whose stages all take less than the limit, and its slowest stage's time; None if there is none.

    `later` is, for every boundary, the minimum number of devices for the nodes after it under a larger limit, or zeros.
    The third part of the result is the same for this limit.
    """
    k, last = stages.setting.num_devices, len(stages.sets) - 1

    # Leave out the stages for which the work before and after them needs too many devices.
    share = stages.min_work / limit * (1 - 1e-9)  # devices that each downset needs, as a real number
    before = np.ceil(share).astype(np.int64)
    after = np.maximum(np.ceil(share[-1] - share).astype(np.int64), later)
    max_devices = k - before[stages.begin] - after[stages.end]
    needed = np.ceil(share[stages.end] - share[stages.begin])
    chosen = np.nonzero(max_devices >= np.maximum(needed, 1))[0]
    degree, stage, number, max_later = stages.candidates(limit, chosen, max_devices[chosen])
    stage = chosen[stage]

    # From the last boundary back: min_devices[boundary, r], with r replicas in the stages after the boundary.
    order = np.argsort(-stages.begin[stage], kind="stable")
    degree, stage, number, max_later = degree[order], stage[order], number[order], max_later[order]
    begin, end, replicas = stages.begin[stage], stages.end[stage], stages.replicas[number]
    devices = replicas * np.array(stages.workload.degrees)[degree]
    totals = np.arange(k + 1)
    min_devices = np.full((last + 1, k + 2), k + 1, dtype=np.int64)  # k + 1: impossible, as is the whole last column
    min_devices[last, 0] = 0
    candidate_of = np.zeros((last + 1, k + 1), dtype=np.int64)
    remaining = totals - replicas[:, None]  # replicas after the candidate
    remaining[(remaining < 0) | (remaining > max_later[:, None])] = k + 1
    first = np.flatnonzero(np.diff(begin, prepend=-1)).tolist()
    for low, high in pairwise([*first, len(begin)]):  # candidates that begin at one boundary
        total = min_devices[end[low:high, None], remaining[low:high]] + devices[low:high, None]
        best = total.argmin(axis=0)
        minimum, boundary = total[best, totals], int(begin[low])
        min_devices[boundary, :-1] = np.where(minimum <= k - before[boundary], minimum, k + 1)
        candidate_of[boundary] = low + best
    if min_devices[0].min() > k:
        return None

    # Follow the choices from the first boundary.
    boundary, replicas_left, slowest, choices = 0, int(min_devices[0].argmin()), 0.0, []
    while boundary < last:
        candidate = int(candidate_of[boundary, replicas_left])
        key, d = (int(degree[candidate]), int(stage[candidate]), int(number[candidate])), int(replicas[candidate])
        in_flight = -(-replicas_left // d)
        extra = stages.extra_time[key[:2]][stages.max_in_flight[key[:2]] >= in_flight].min()
        slowest = max(slowest, float(stages.base[key]) + float(extra) / d)
        choices.append((*key, in_flight))
        boundary, replicas_left = int(end[candidate]), replicas_left - d
    return slowest, tuple(choices), min_devices[:, :-1].min(axis=1)


def _plan(stages: Stages, choices: tuple[Choice, ...]) -> tuple[Stage, ...]:
    w, plan = stages.workload, []
    for degree, stage, number, in_flight in choices:
        recomputed = _recomputed(stages, degree, stage, in_flight)
        nodes = members(stages.sets[int(stages.end[stage])] & ~stages.sets[int(stages.begin[stage])])
        plan.append(
            Stage(
                nodes=tuple(w.ids[node] for node in nodes),
                replicas=int(stages.replicas[number]),
                tensor=w.degrees[degree],
                options={w.ids[node]: w.names[node in recomputed] for node in nodes},
            )
        )
    return tuple(plan)


def _recomputed(stages: Stages, degree: int, stage: int, in_flight: int) -> set[int]:
    """Returns the cheapest nodes to recompute for `in_flight` micro-batches to fit."""
    w, inside = stages.workload, np.nonzero(stages.inside[stage])[0]
    slower, nodes = w.time[degree, 1] - w.time[degree, 0], set(inside.tolist())
    groups = [sorted(set(group) & nodes, key=lambda node: slower[node]) for group in stages.groups]
    best: tuple[float, set[int]] | None = None
    in_order = None if stages.order is None else [node for node in stages.order if node in nodes]
    choices = (
        (_first_of(groups, counts) for counts in _counts(groups))
        if in_order is None
        else (set(in_order[:count]) for count in range(len(in_order) + 1))
    )
    for chosen in choices:
        memory = sum(
            w.a[degree, int(node in chosen), node] * in_flight + w.b[degree, int(node in chosen), node]
            for node in inside.tolist()
        )
        extra = float(slower[sorted(chosen)].sum())
        if memory <= stages.setting.memory and (best is None or extra < best[0]):
            best = extra, chosen
    assert best is not None
    return best[1]


def _counts(groups: list[list[int]]) -> Iterator[tuple[int, ...]]:
    return product(*(range(len(group) + 1) for group in groups))


def _first_of(groups: list[list[int]], counts: tuple[int, ...]) -> set[int]:
    return {node for group, count in zip(groups, counts, strict=True) for node in group[:count]}


def _prefixes_of_orders(graph: Graph) -> list[int]:
    """Returns the downsets along three linear orders, smaller ones first."""
    orders = [topological_order(graph), depth_first_order(graph), depth_first_order(graph, reverse=True)]
    some = {nodes for order in orders for nodes in prefixes(order)}
    return sorted(some, key=lambda nodes: (nodes.bit_count(), nodes))


def solve(workload: Workload, setting: Setting) -> Answer | None:
    """Returns the fastest plan, proven where all stages and all ways to recompute were tried; None if nothing fits."""
    stages = Stages(workload, setting)
    bound = work_bound = float(stages.min_work[-1]) / setting.num_devices
    best, later = None, np.zeros(len(stages.sets), dtype=np.int64)
    for growth in GROWTH:
        limit = bound * growth
        best = plan_below(stages, limit, later)
        if best is not None:
            break
        bound = limit
    while best is not None and bound < best[0]:
        is_close, later = best[0] < bound * CLOSE, best[2]
        limit = best[0] * (1 - 1e-12) if is_close else (best[0] + bound) / 2
        better = plan_below(stages, limit, later)
        if better is None:
            bound = best[0] if is_close else limit
        else:
            best = better
    if best is None:
        return None
    proven = bound if stages.is_complete else work_bound
    return Answer(seconds=best[0], bound=proven, stages=_plan(stages, best[1]))
