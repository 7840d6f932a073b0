"""The workloads of dnn-partitioning (Tarnawski et al. 2020): graphs whose nodes share a device, and their reduction."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from bapipe.formats.files import read_limited
from bapipe.formats.strict_json import decode_json
from bapipe.graph.downsets import members
from bapipe.graph.layer_graph import Graph, contract


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A graph whose nodes stand for groups of layers; the layers of a node must share a device.

    Attributes:
        nodes: of each graph node, the source's node numbers.
        compute, on_cpu, size: of each graph node.
        tensors: (graph nodes that make or use it, transfer time), for tensors that two or more of them use.
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


def read(path: Path) -> Workload:
    """Returns the workload of a file: one graph node per colour, cycles contracted."""
    content: Any = decode_json(read_limited(path), Any)
    number: dict[object, int] = {}
    colour_of = {}
    for node in content["nodes"]:
        colour = node.get("colorClass", ("alone", node["id"]))
        colour_of[node["id"]] = number.setdefault(colour, len(number))
    inside: list[list[int]] = [[] for _ in number]
    compute, on_cpu, size = [0.0] * len(number), [0.0] * len(number), [0.0] * len(number)
    has_forward = [False] * len(number)
    backward = {node["id"] for node in content["nodes"] if node["isBackwardNode"]}
    for node in content["nodes"]:
        i = colour_of[node["id"]]
        inside[i].append(node["id"])
        compute[i] += node["fpgaLatency"] if node["supportedOnFpga"] else inf
        on_cpu[i] += node["cpuLatency"]
        size[i] += node.get("size", 0.0)
        has_forward[i] |= node["id"] not in backward
    arcs: set[tuple[int, int]] = set()
    users: dict[int, set[int]] = {}
    cost = {}
    for edge in content["edges"]:
        source, target = edge["sourceId"], edge["destId"]
        a, b = colour_of[source], colour_of[target]
        users.setdefault(source, {a}).add(b)
        cost[source] = edge["cost"]
        if a == b:
            continue
        if target not in backward:
            arcs.add((a, b))
        elif source in backward and not (has_forward[a] and has_forward[b]):
            arcs.add((b, a))  # if only the backward exists, its mirror image replaces the forward
    workload = Workload(
        graph=Graph(names=tuple(map(str, range(len(number)))), arcs=frozenset(arcs)),
        nodes=tuple(map(tuple, inside)),
        compute=tuple(compute),
        on_cpu=tuple(on_cpu),
        size=tuple(size),
        tensors=tuple((frozenset(seen), cost[source]) for source, seen in users.items() if len(seen) > 1),
        num_devices=content["maxFPGAs"],
        num_cpus=content["maxCPUs"],
        memory=content["maxSizePerFPGA"],
    )
    return contracted(workload, ())


def contracted(workload: Workload, groups: Iterable[Sequence[int]]) -> Workload:
    """Returns the workload with groups of graph nodes, and the cycles that result, contracted to one node each."""
    graph, parts = contract(workload.graph, groups)
    index = {node: i for i, part in enumerate(parts) for node in part}
    tensors: dict[frozenset[int], float] = defaultdict(float)
    for seen, cost in workload.tensors:
        remaining = frozenset(index[node] for node in seen)
        if len(remaining) > 1:
            tensors[remaining] += cost
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
    """Returns the workload with nodes contracted that a best plan below the limit can keep together.

    - A tensor that takes longer than the limit is never cut if at most one end is a CPU.
    - A node v whose only predecessor (or only successor) is u moves to u's stage: that stage gains v's compute and the
      tensors v shares with others, and loses those that only u and v use. If this does not slow down the stage that v
      moves to, it slows down no stage.
    """
    while True:
        groups = _contractible(workload, limit)
        if not groups:
            return workload
        workload = contracted(workload, groups)


def _contractible(workload: Workload, limit: float) -> list[tuple[int, ...]]:
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
            nodes[0]
            for nodes in (members(workload.graph.before[node]), workload.graph.after[node])
            if len(nodes) == 1 and nodes[0] not in taken
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
