"""The layer graph with the layers that stay together merged, and the sets of boundaries along which it is searched."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import prefixes
from bapipe.graph.layer_graph import Graph, contract, depth_first_order, of_layers, topological_order
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.throughput.load_search import LoadSolution
from bapipe.planner.throughput.loads import Boundaries
from bapipe.planner.throughput.neighbourhood import neighbouring_downsets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContractedGraph:
    """A graph whose nodes are groups of layers that share parameters, or single layers.

    Attributes:
        layers_of_node: the numbers of the layers of each node.
    """

    graph: Graph
    layers_of_node: Sequence[Sequence[int]]
    num_layers: int

    @property
    def has_merged_layers(self) -> bool:
        """Whether some layers share parameters."""
        return len(self.layers_of_node) < self.num_layers

    def boundaries(self, node_sets: Sequence[int], deadline: Deadline = UNLIMITED) -> Boundaries:
        """Returns the boundaries at some downsets, given as bit sets of nodes."""
        return Boundaries(node_sets, self.layers_of_node, self.num_layers, deadline)

    def evenly_spaced(self, num_boundaries: int) -> Boundaries:
        """Returns so many boundaries at most, evenly spaced along the topological order."""
        along = prefixes(topological_order(self.graph))
        num_steps = min(num_boundaries, len(along)) - 1
        return self.boundaries([along[i * (len(along) - 1) // num_steps] for i in range(num_steps + 1)])

    def prefixes_of_layers(self) -> list[int]:
        """Returns the downsets that are the first layers of the profile: no group of layers lies on both sides."""
        found, nodes, num_layers = [0], 0, 0
        for last, node in sorted((max(layers), node) for node, layers in enumerate(self.layers_of_node)):
            nodes |= 1 << node
            num_layers += len(self.layers_of_node[node])
            if num_layers == last + 1:  # all layers up to this one
                found.append(nodes)
        return found

    def prefixes_of_orders(self) -> list[int]:
        """Returns the downsets that are prefixes of one of three linear orders."""
        graph = self.graph
        orders = [topological_order(graph), depth_first_order(graph), depth_first_order(graph, reverse=True)]
        some = {nodes for order in orders for nodes in prefixes(order)}
        return sorted(some, key=lambda nodes: (nodes.bit_count(), nodes))

    def near(self, solution: LoadSolution, max_boundaries: int) -> Boundaries:
        """Returns the boundaries at the downsets next to the cuts of a plan."""
        node_of = {layer: node for node, layers in enumerate(self.layers_of_node) for layer in layers}
        node_sets = (sum({1 << node_of[layer] for layer in layers}) for layers, _ in solution.stages)
        cuts = list(accumulate(node_sets, initial=0))  # the downset before the first stage, and after each stage
        return self.boundaries(neighbouring_downsets(self.graph, cuts, max_boundaries))


def contracted_graph(profile: ModelProfile) -> ContractedGraph:
    """Returns the graph of a profile's layers."""
    graph = of_layers(profile)
    index = {layer.name: i for i, layer in enumerate(profile.layers)}
    tied = [(i, *(index[name] for name in layer.shares)) for i, layer in enumerate(profile.layers) if layer.shares]
    contracted, layers_of_node = contract(graph, tied)
    return ContractedGraph(graph=contracted, layers_of_node=layers_of_node, num_layers=graph.num_nodes)
