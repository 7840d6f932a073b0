"""Layers and what flows between them: parts that stay together, orders, and downsets.

A *downset* is a set of nodes that holds every node some member depends on: what may lie before a cut. Sets of nodes
are integers with bit i for node i.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from bapipe.errors import InvalidFile, InvalidModel
from bapipe.formats.profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes and the arcs between them; an arc (a, b) says that b uses what a makes.

    Raises:
        ValueError: an arc joins no two different nodes.
    """

    names: tuple[str, ...]
    arcs: frozenset[tuple[int, int]]

    def __post_init__(self) -> None:
        for source, target in self.arcs:
            if source == target or not (0 <= source < len(self.names) and 0 <= target < len(self.names)):
                raise ValueError(f"arc ({source}, {target}) joins no two of {len(self.names)} nodes")

    @property
    def num_nodes(self) -> int:
        return len(self.names)

    @property
    def everything(self) -> int:
        """The set of all nodes."""
        return (1 << self.num_nodes) - 1

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each node, the set of nodes with an arc to it."""
        sets = [0] * self.num_nodes
        for source, target in self.arcs:
            sets[target] |= 1 << source
        return tuple(sets)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes it has arcs to, ascending."""
        lists: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for source, target in sorted(self.arcs):
            lists[source].append(target)
        return tuple(map(tuple, lists))

    def is_downset(self, nodes: int) -> bool:
        return all(self.before[node] & ~nodes == 0 for node in members(nodes))


def members(nodes: int) -> list[int]:
    """Returns the nodes of a set, ascending."""
    found = []
    while nodes:
        lowest = nodes & -nodes
        found.append(lowest.bit_length() - 1)
        nodes ^= lowest
    return found


def of_layers(profile: ModelProfile) -> Graph:
    """Returns the graph of a profile's layers, which a profile holds in topological order."""
    maker = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.outputs}
    arcs = {(maker[tensor], i) for i, layer in enumerate(profile.layers) for tensor in layer.inputs if tensor in maker}
    return Graph(names=tuple(layer.name for layer in profile.layers), arcs=frozenset(arcs))


def check_connected(graph: Graph, joined: Iterable[Sequence[int]] = ()) -> None:
    """Raises InvalidFile where layers fall into parts that neither an arc nor one of the `joined` groups connects."""
    parent = list(range(graph.num_nodes))
    for group in [*graph.arcs, *joined]:
        for node in group[1:]:
            parent[_root(parent, group[0])] = _root(parent, node)
    parts: dict[int, list[int]] = {}
    for node in range(graph.num_nodes):
        parts.setdefault(_root(parent, node), []).append(node)
    if len(parts) > 1:
        first, second = list(parts.values())[:2]
        raise InvalidFile(
            f"the layers fall into {len(parts)} parts that share no tensor: '{graph.names[first[0]]}' is in one of "
            f"{len(first)}, '{graph.names[second[0]]}' in one of {len(second)}; remove what the loss does not use, or "
            "plan the parts apart",
            f"$.layers[{second[0]}].inputs",
        )


def topological_order(graph: Graph, prefer: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns an order in which every arc points forward; of nodes that can come next, the least in `prefer` does.

    Raises:
        InvalidModel: there is a cycle; the message names it.
    """
    rank = prefer or range(graph.num_nodes)
    missing = [set_of.bit_count() for set_of in graph.before]
    ready = [(rank[node], node) for node in range(graph.num_nodes) if not missing[node]]
    heapify(ready)
    order = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for target in graph.after[node]:
            missing[target] -= 1
            if not missing[target]:
                heappush(ready, (rank[target], target))
    if len(order) < graph.num_nodes:
        cycle = next(part for part in strong_parts(graph) if len(part) > 1)
        path = " -> ".join(graph.names[node] for node in _cycle(graph, cycle))
        raise InvalidModel(f"the layers depend on each other in a cycle: {path}")
    return tuple(order)


def depth_first_order(graph: Graph, reverse: bool = False) -> tuple[int, ...]:
    """Returns a topological order that finishes one branch before it begins the next.

    Of the nodes that can come next it takes the one that became possible last; among these the one named first, or
    last with `reverse`.
    """
    missing = [set_of.bit_count() for set_of in graph.before]
    stack = [node for node in range(graph.num_nodes) if not missing[node]]
    if not reverse:
        stack.reverse()
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        free = []
        for target in graph.after[node]:
            missing[target] -= 1
            if not missing[target]:
                free.append(target)
        stack += free if reverse else reversed(free)
    return tuple(order)


def strong_parts(graph: Graph) -> list[list[int]]:
    """Returns the strongly connected parts, each ascending, those that others use first (Tarjan 1972)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    open_nodes: list[int] = []
    is_open = [False] * graph.num_nodes
    parts: list[list[int]] = []
    for start in range(graph.num_nodes):
        if start in index:
            continue
        trail = [(start, iter(graph.after[start]))]
        index[start] = low[start] = len(index)
        open_nodes.append(start)
        is_open[start] = True
        while trail:
            node, targets = trail[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    open_nodes.append(target)
                    is_open[target] = True
                    trail.append((target, iter(graph.after[target])))
                    break
                if is_open[target]:
                    low[node] = min(low[node], index[target])
            else:
                trail.pop()
                if trail:
                    low[trail[-1][0]] = min(low[trail[-1][0]], low[node])
                if low[node] == index[node]:
                    part = open_nodes[open_nodes.index(node) :]
                    del open_nodes[-len(part) :]
                    for member in part:
                        is_open[member] = False
                    parts.append(sorted(part))
    parts.reverse()
    return parts


def contract(graph: Graph, groups: Iterable[Sequence[int]]) -> tuple[Graph, tuple[tuple[int, ...], ...]]:
    """Returns the graph with each of `groups` as one node, and the old nodes of each new one.

    Groups that overlap are one, and so are nodes that a group leaves on a cycle. New nodes are in topological order,
    named after their first old node.
    """
    parent = list(range(graph.num_nodes))
    for group in groups:
        for node in group[1:]:
            parent[_root(parent, node)] = _root(parent, group[0])
    roots = [_root(parent, node) for node in range(graph.num_nodes)]
    merged = Graph(
        names=graph.names,
        arcs=frozenset((roots[a], roots[b]) for a, b in graph.arcs if roots[a] != roots[b]),
    )
    part_of = {node: i for i, part in enumerate(strong_parts(merged)) for node in part if roots[node] == node}
    of_part: list[list[int]] = [[] for _ in range(max(part_of.values(), default=-1) + 1)]
    for node, root in enumerate(roots):
        of_part[part_of[root]].append(node)
    kept = [part for part in of_part if part]
    place = {node: i for i, part in enumerate(kept) for node in part}
    rough = Graph(
        names=tuple(graph.names[part[0]] for part in kept),
        arcs=frozenset((place[a], place[b]) for a, b in graph.arcs if place[a] != place[b]),
    )
    order = topological_order(rough, [part[0] for part in kept])
    rank = {node: i for i, node in enumerate(order)}
    return (
        Graph(
            names=tuple(rough.names[node] for node in order),
            arcs=frozenset((rank[a], rank[b]) for a, b in rough.arcs),
        ),
        tuple(tuple(kept[node]) for node in order),
    )


def downsets(graph: Graph, limit: int) -> list[int] | None:
    """Returns every downset, smaller ones first, or None where there are more than `limit`.

    O(downsets * width) set operations. A graph with a cycle has downsets too: they hold all of the cycle or nothing,
    so none of them is ever reached; contract it first.
    """
    first = sum(1 << node for node in range(graph.num_nodes) if not graph.before[node])
    free_after = {0: first}
    found = [0]
    level = [0]
    while level:
        longer: list[int] = []
        for nodes in level:
            free = rest = free_after.pop(nodes)
            while rest:
                lowest = rest & -rest
                rest ^= lowest
                larger = nodes | lowest
                if larger not in free_after:
                    left = free ^ lowest
                    for target in graph.after[lowest.bit_length() - 1]:
                        if graph.before[target] & ~larger == 0:
                            left |= 1 << target
                    free_after[larger] = left
                    longer.append(larger)
        found += longer
        if len(found) > limit:
            return None
        level = longer
    return found


def prefixes(order: Sequence[int]) -> list[int]:
    """Returns the downsets that the beginnings of a topological order are, smaller ones first."""
    sets = [0]
    for node in order:
        sets.append(sets[-1] | 1 << node)
    return sets


def _root(parent: list[int], node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def _cycle(graph: Graph, part: Sequence[int]) -> list[int]:
    """A walk round a cycle within a strongly connected part."""
    inside = set(part)
    walk: list[int] = [part[0]]
    seen: Mapping[int, int] = {}
    while True:
        seen = {node: i for i, node in enumerate(walk)}
        step = next(target for target in graph.after[walk[-1]] if target in inside)
        if step in seen:
            return [*walk[seen[step] :], step]
        walk.append(step)
