"""The neighbourhood of a plan: downsets that differ by one node from those at its cuts, then by two nodes, and so on.

Used if a graph has too many downsets to search them all: the cuts of the best plan are then searched again among
their neighbours, until that no longer helps.
"""

from collections.abc import Iterator, Sequence

from bapipe.graph.layer_graph import Graph


def neighbouring_downsets(graph: Graph, start: Sequence[int], max_downsets: int) -> list[int]:
    """Returns at most `max_downsets` downsets, those nearest to the ones in `start`, sorted by size.

    A breadth-first search in the lattice of downsets; those of `start` are always included. With a large enough
    `max_downsets` it returns all downsets of the graph, because adding and removing single nodes connects the lattice.
    """
    reached = dict.fromkeys(start)
    frontier = list(start)
    # Breadth first, so that a truncated result holds the nearest downsets.
    while frontier and len(reached) < max_downsets:
        next_frontier: list[int] = []
        for nodes in frontier:
            for neighbour in adjacent_downsets(graph, nodes):
                if neighbour not in reached and len(reached) < max_downsets:
                    reached[neighbour] = None
                    next_frontier.append(neighbour)
        frontier = next_frontier
    return sorted(reached, key=lambda nodes: (nodes.bit_count(), nodes))


def adjacent_downsets(graph: Graph, nodes: int) -> Iterator[int]:
    """Yields the downsets with one node more, then those with one node less."""
    predecessors = 0  # predecessors of the nodes inside, which cannot be removed
    for node, before in enumerate(graph.before):
        if nodes >> node & 1:
            predecessors |= before
        elif before & ~nodes == 0:
            # A node can be added if all its predecessors are inside.
            yield nodes | 1 << node
    for node in range(graph.num_nodes):
        if nodes >> node & 1 and not predecessors >> node & 1:
            yield nodes & ~(1 << node)
