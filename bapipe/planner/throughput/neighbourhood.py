"""Downsets near others: where a graph has too many, those around the best cuts so far are searched next."""

from collections.abc import Iterator, Sequence

from bapipe.graph.layer_graph import Graph


def near(graph: Graph, sets: Sequence[int], most: int) -> list[int]:
    """Returns some downsets, and those that differ from them by few nodes, the nearest first, then by size."""
    found = dict.fromkeys(sets)
    ring = list(sets)
    while ring and len(found) < most:
        following: list[int] = []
        for nodes in ring:
            for other in _next_to(graph, nodes):
                if other not in found and len(found) < most:
                    found[other] = None
                    following.append(other)
        ring = following
    return sorted(found, key=lambda nodes: (nodes.bit_count(), nodes))


def _next_to(graph: Graph, nodes: int) -> Iterator[int]:
    """Yields the downsets with one node more or less."""
    needed = 0
    for node, before in enumerate(graph.before):
        if nodes >> node & 1:
            needed |= before
        elif before & ~nodes == 0:
            yield nodes | 1 << node
    for node in range(graph.num_nodes):
        if nodes >> node & 1 and not needed >> node & 1:
            yield nodes & ~(1 << node)
