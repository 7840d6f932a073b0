"""What cuts of a graph must at least transfer, by the work before them: a lower bound where downsets are too many.

The work before a cut, F + B of a micro-batch, lies in one of some windows. Of all downsets in a window, layers with too
much work up to them are outside, and those without which too little work is left are inside; with these fixed, a
minimum cut of the graph gives the fewest bytes that any of them transfers (Picard 1976, "Maximal closure of a graph",
with a node for each tensor, which is charged once, however many layers use it).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import members
from bapipe.graph.layer_graph import Graph
from bapipe.graph.minimum_cut import minimum_cut
from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.scalable_times import scalable_times

MAX_WINDOWS = 256
"""Windows of equal work, with two minimum cuts each; at most four for each node."""

Tensor = tuple[int, int, int, bool]
"""Bytes, the node that makes it, the set of nodes that use it, and whether a gradient comes back."""

INSIDE, OUTSIDE = -1, -2
"""The two ends of the network: what lies before a cut, and what lies behind it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutWindows:
    """Bounds of what lies before a cut, and of what crosses it, for cuts with work in each window; arrays [windows].

    The last window is the end of the graph, which nothing crosses.

    Attributes:
        least_ns, most_ns: the work before the cuts: F + B of a micro-batch at speed 1.
        send_bytes, grad_bytes: the fewest that cross any of them.
        least_gradient_bytes, most_gradient_bytes: what replicas sum of the layers before them.
        node_sets: downsets with the fewest bytes in some window, as bit sets of nodes.
    """

    least_ns: Ints
    most_ns: Ints
    send_bytes: Ints
    grad_bytes: Ints
    least_gradient_bytes: Ints
    most_gradient_bytes: Ints
    node_sets: tuple[int, ...]

    def backwards(self) -> "CutWindows":
        """Returns the same cuts of the graph with every arc reversed: what lies behind them is before them."""

        def after(values: Ints) -> Ints:
            found: Ints = np.append((values[-1] - values)[:-1][::-1], values[-1])
            return found

        return CutWindows(
            least_ns=after(self.most_ns),
            most_ns=after(self.least_ns),
            send_bytes=np.append(self.send_bytes[:-1][::-1], 0),
            grad_bytes=np.append(self.grad_bytes[:-1][::-1], 0),
            least_gradient_bytes=after(self.most_gradient_bytes),
            most_gradient_bytes=after(self.least_gradient_bytes),
            node_sets=(),
        )


def cut_windows(
    graph: Graph,
    layers_of_node: Sequence[Sequence[int]],
    profile: ModelProfile,
    cluster: Cluster,
    microbatch_size: int,
    *,
    max_windows: int = MAX_WINDOWS,
    deadline: Deadline = UNLIMITED,
) -> CutWindows:
    """Returns the windows of a graph of layers. One minimum cut each, of the nodes that may be on either side.

    Raises:
        OutOfTime: the deadline passed before all windows were looked at.
    """
    node_ns = work_of_nodes(profile, cluster, microbatch_size, layers_of_node)
    summed = [layer.gradient_bytes - layer.group_gradient_bytes for layer in profile.layers]
    gradients = [sum(summed[i] for i in layers) for layers in layers_of_node]
    every, total_ns = (1 << graph.num_nodes) - 1, sum(node_ns)
    ancestors, descendants = _reached(graph)
    until_ns = [_sum(node_ns, nodes) for nodes in ancestors]
    from_ns = [_sum(node_ns, nodes) for nodes in descendants]
    tensors = crossing_tensors(profile, microbatch_size, layers_of_node)
    num_windows = min(max_windows, 4 * graph.num_nodes)
    edges = [total_ns * i // num_windows for i in range(num_windows + 1)]
    rows: list[tuple[int, ...]] = []
    node_sets: dict[int, None] = {}
    for least_ns, most_ns in pairwise(edges):
        deadline.check()
        # A downset with a node has all before it; one without a node has nothing that follows it.
        outside = sum(1 << v for v in range(graph.num_nodes) if until_ns[v] > most_ns)
        inside = sum(1 << v for v in range(graph.num_nodes) if total_ns - from_ns[v] < least_ns)
        if inside & outside:
            continue  # no downset has so much work
        cuts = [_fewest_bytes(graph, tensors, inside, outside, is_gradient) for is_gradient in (False, True)]
        node_sets |= dict.fromkeys(nodes for _, nodes in cuts)
        fixed_bytes = _sum(gradients, inside), _sum(gradients, every & ~outside)
        rows.append((least_ns, most_ns, *(num_bytes for num_bytes, _ in cuts), *fixed_bytes))
    rows.append((total_ns, total_ns, 0, 0, sum(gradients), sum(gradients)))
    columns: list[Ints] = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    return CutWindows(
        least_ns=columns[0],
        most_ns=columns[1],
        send_bytes=columns[2],
        grad_bytes=columns[3],
        least_gradient_bytes=columns[4],
        most_gradient_bytes=columns[5],
        node_sets=tuple(node_sets),
    )


def work_of_nodes(
    profile: ModelProfile, cluster: Cluster, microbatch_size: int, layers_of_node: Sequence[Sequence[int]]
) -> list[int]:
    """Returns the least F + B of a micro-batch of each node at speed 1."""
    measured = scalable_times(profile, microbatch_size, cluster)
    layer_ns = [m.forward_ns + m.min_backward_ns for m in measured]
    return [sum(layer_ns[i] for i in layers) for layers in layers_of_node]


def _reached(graph: Graph) -> tuple[list[int], list[int]]:
    """Returns for each node the set of itself and all before it, and of itself and all after it."""
    ancestors = [1 << v for v in range(graph.num_nodes)]
    descendants = list(ancestors)
    for v in range(graph.num_nodes):
        for before in members(graph.before[v]):
            ancestors[v] |= ancestors[before]
    for v in reversed(range(graph.num_nodes)):
        for after in graph.after[v]:
            descendants[v] |= descendants[after]
    return ancestors, descendants


def _sum(values: Sequence[int], nodes: int) -> int:
    return sum(values[v] for v in members(nodes))


def crossing_tensors(
    profile: ModelProfile, microbatch_size: int, layers_of_node: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """Returns the tensors that other nodes use than the one that makes them."""
    node_of = {layer: node for node, layers in enumerate(layers_of_node) for layer in layers}
    users: dict[str, set[int]] = {}
    for i, layer in enumerate(profile.layers):
        for name in layer.inputs:
            users.setdefault(name, set()).add(node_of[i])
    return tuple(
        (num_bytes, node_of[i], sum(1 << user for user in users[name] - {node_of[i]}), name not in layer.no_gradient)
        for i, (layer, m) in enumerate(zip(profile.layers, profile.at(microbatch_size), strict=True))
        for name, num_bytes in zip(layer.outputs, m.output_bytes, strict=True)
        if users.get(name, set()) - {node_of[i]}
    )


def _fewest_bytes(
    graph: Graph, tensors: Iterable[Tensor], inside: int, outside: int, is_gradient: bool
) -> tuple[int, int]:
    """Returns the fewest bytes of a downset with all nodes of one set and none of another, and such a downset."""
    capacities: dict[tuple[int, int], float] = {}

    def add(source: int, target: int, capacity: float) -> None:
        if source != target:
            capacities[source, target] = capacities.get((source, target), 0) + capacity

    def side(node: int) -> int:
        return INSIDE if inside >> node & 1 else OUTSIDE if outside >> node & 1 else node

    # Nodes on the side of INSIDE lie before the cut. Numbers beyond the graph's nodes are tensors, which can be there
    # only if all their users are.
    for number, (num_bytes, maker, users, has_gradient) in enumerate(tensors, start=graph.num_nodes):
        ends = {side(user) for user in members(users)}
        if (is_gradient and not has_gradient) or side(maker) == OUTSIDE or ends == {INSIDE}:
            continue
        if OUTSIDE in ends:  # it crosses wherever its maker is inside
            add(side(maker), OUTSIDE, num_bytes)
            continue
        add(side(maker), number, num_bytes)
        for end in sorted(ends):
            add(number, end, inf)
    for node in range(graph.num_nodes):
        if side(node) == node:
            for before in members(graph.before[node] & ~inside):
                add(node, before, inf)
    least_bytes, reached = minimum_cut(capacities, INSIDE, OUTSIDE)
    return least_bytes, inside | sum(1 << node for node in reached if 0 <= node < graph.num_nodes)
