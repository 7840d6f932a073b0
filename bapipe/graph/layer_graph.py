"""The graph of a model's layers: connected components, topological orders, and contraction.

Algorithms that are not special to this package are networkx's. It is imported when it is needed, because that takes
longer than planning a small model whose layers are a plain chain.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from bapipe.errors import InvalidFile, InvalidModel
from bapipe.formats.profile import ModelProfile

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes and the arcs between them; an arc (a, b) means that b uses an output of a.

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
    def has_single_order(self) -> bool:
        """Whether the numbers of the nodes are the only topological order, as in a chain."""
        forward = all(source < target for source, target in self.arcs)
        return forward and all(arc in self.arcs for arc in pairwise(range(self.num_nodes)))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each node, the set of its predecessors."""
        sets = [0] * self.num_nodes
        for source, target in self.arcs:
            sets[target] |= 1 << source
        return tuple(sets)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each node, its successors, ascending."""
        lists: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for source, target in sorted(self.arcs):
            lists[source].append(target)
        return tuple(map(tuple, lists))


def of_layers(profile: ModelProfile) -> Graph:
    """Returns the graph of a profile's layers, whose numbers are a topological order."""
    maker = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.outputs}
    arcs = {(maker[tensor], i) for i, layer in enumerate(profile.layers) for tensor in layer.inputs if tensor in maker}
    return Graph(names=tuple(layer.name for layer in profile.layers), arcs=frozenset(arcs))


def check_connected(graph: Graph, groups: Iterable[Sequence[int]]) -> None:
    """Raises InvalidFile if layers fall into parts that neither an arc nor one of the `groups` connects."""
    if graph.has_single_order:
        return
    import networkx as nx

    connections = _digraph(graph)
    connections.add_edges_from(chain.from_iterable(pairwise(group) for group in groups))
    parts = [sorted(part) for part in nx.weakly_connected_components(connections)]
    if len(parts) > 1:
        first, second = parts[:2]
        raise InvalidFile(
            f"the layers fall into {len(parts)} parts that share no tensor: '{graph.names[first[0]]}' is in one of "
            f"{len(first)}, '{graph.names[second[0]]}' in one of {len(second)}; remove what the loss does not use, or "
            "plan the parts apart",
            f"$.layers[{second[0]}].inputs",
        )


def topological_order(graph: Graph, prefer: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns an order in which every arc points forward.

    Of the nodes that can come next it takes the one with the smallest value in `prefer`.

    Raises:
        InvalidModel: there is a cycle; the message names it.
    """
    if graph.has_single_order:
        return tuple(range(graph.num_nodes))
    import networkx as nx

    digraph = _digraph(graph)
    try:
        return tuple(nx.lexicographical_topological_sort(digraph, key=None if prefer is None else prefer.__getitem__))
    except nx.NetworkXUnfeasible:
        nodes = [source for source, _ in nx.find_cycle(digraph)]
        path = " -> ".join(graph.names[node] for node in [*nodes, nodes[0]])
        raise InvalidModel(f"the layers depend on each other in a cycle: {path}") from None


def depth_first_order(graph: Graph, reverse: bool = False) -> tuple[int, ...]:
    """Returns a topological order that finishes one branch before it begins the next.

    Of the nodes that can come next it takes the one that became possible last; of several such nodes the one with
    the smallest number, or the largest with `reverse`.
    """
    num_missing = [predecessors.bit_count() for predecessors in graph.before]
    stack = [node for node in range(graph.num_nodes) if not num_missing[node]]
    if not reverse:
        stack.reverse()
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        free = []
        for target in graph.after[node]:
            num_missing[target] -= 1
            if not num_missing[target]:
                free.append(target)
        stack += free if reverse else reversed(free)
    return tuple(order)


def contract(graph: Graph, groups: Iterable[Sequence[int]]) -> tuple[Graph, tuple[tuple[int, ...], ...]]:
    """Returns the graph with each of `groups` as one node, and the old nodes of each new one.

    Groups that overlap are merged, and so are the nodes of a cycle that merging a group makes. New nodes are in
    topological order, named after their first old node.
    """
    import networkx as nx

    # With arcs in both directions between its members, a group is one strongly connected component, with all cycles.
    digraph = _digraph(graph)
    for a, b in chain.from_iterable(pairwise(group) for group in groups):
        digraph.add_edges_from([(a, b), (b, a)])
    condensed = nx.condensation(digraph)
    parts = {part: tuple(sorted(nodes)) for part, nodes in condensed.nodes("members")}
    order = list(nx.lexicographical_topological_sort(condensed, key=lambda part: parts[part][0]))
    number = {part: i for i, part in enumerate(order)}
    contracted = Graph(
        names=tuple(graph.names[parts[part][0]] for part in order),
        arcs=frozenset((number[a], number[b]) for a, b in condensed.edges),
    )
    return contracted, tuple(parts[part] for part in order)


def _digraph(graph: Graph) -> "nx.DiGraph[int]":
    """Returns a graph of networkx with nodes and arcs in ascending order, which decides ties."""
    import networkx as nx

    digraph: nx.DiGraph[int] = nx.DiGraph()
    digraph.add_nodes_from(range(graph.num_nodes))
    digraph.add_edges_from(sorted(graph.arcs))
    return digraph
