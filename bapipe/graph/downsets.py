"""Downsets of a graph as bit sets: a set of nodes is an integer with bit i for node i.

A *downset* is a set of nodes that contains every predecessor of its members: the layers that may lie before a cut.
Python's integers hold sets of any size, compare and hash fast, and need no library.
"""

from collections.abc import Callable, Sequence

from bapipe.graph.layer_graph import Graph


def members(nodes: int) -> list[int]:
    """Returns the nodes of a set, ascending."""
    ascending = []
    while nodes:
        lowest = nodes & -nodes
        ascending.append(lowest.bit_length() - 1)
        nodes ^= lowest
    return ascending


def downsets(graph: Graph, limit: int, check: Callable[[], None] = lambda: None) -> list[int] | None:
    """Returns every downset, smaller ones first, or None if there are more than `limit`.

    `check` is called between two levels, and may end the search by an exception.

    Level by level: a downset of n + 1 nodes is one of n nodes and a node whose predecessors all are in it, which is
    called free. O(downsets * width) set operations. The graph must have no cycle: no node of a cycle, and none after
    it, ever becomes free. Contract cycles first.
    """
    sources = sum(1 << node for node in range(graph.num_nodes) if not graph.before[node])
    free_nodes = {0: sources}  # of each downset of the last two levels
    all_sets = [0]
    level = [0]
    while level:
        check()
        next_level: list[int] = []
        for nodes in level:
            free = remaining = free_nodes.pop(nodes)
            while remaining:
                lowest = remaining & -remaining
                remaining ^= lowest
                larger = nodes | lowest
                if larger not in free_nodes:
                    still_free = free ^ lowest
                    for target in graph.after[lowest.bit_length() - 1]:
                        if graph.before[target] & ~larger == 0:
                            still_free |= 1 << target
                    free_nodes[larger] = still_free
                    next_level.append(larger)
        all_sets += next_level
        if len(all_sets) > limit:
            return None
        level = next_level
    return all_sets


def prefixes(order: Sequence[int]) -> list[int]:
    """Returns the downsets that are prefixes of a topological order, smaller ones first."""
    sets = [0]
    for node in order:
        sets.append(sets[-1] | 1 << node)
    return sets
