"""The minimum cut between two nodes of a network (Ford and Fulkerson 1956)."""

from collections.abc import Mapping


def minimum_cut(capacities: Mapping[tuple[int, int], float], source: int, sink: int) -> tuple[int, frozenset[int]]:
    """Returns the least capacity that separates the sink from the source, and the nodes on the source's side.

    Args:
        capacities: of each arc, whole numbers or infinite; no path has infinite capacity only.
    """
    import networkx as nx

    network = nx.DiGraph()
    network.add_nodes_from((source, sink))
    for (start, end), capacity in capacities.items():
        network.add_edge(start, end, capacity=capacity)
    value, (reached, _) = nx.minimum_cut(network, source, sink)
    return int(value), frozenset(reached)
