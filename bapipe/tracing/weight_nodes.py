"""Which nodes of the autograd graph the W of some parameters runs.

torch's W begins at the nodes at which the gradient of a parameter leaves the path to the inputs, once for each group of
parameters that have such nodes in common, and frees what it runs through. It is wrong where two groups run the same
node, as for the cell of an unrolled recurrent network: the second finds it freed. That one node of a group leads to
another is no harm, because torch sets the gradients that arrive there to those that I has kept.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.autograd.graph import Node

from bapipe.graph.reached import reached


def weight_nodes(group: Mapping[str, Any], reverse: Mapping[Node, Iterable[Node | None]]) -> set[Node]:
    """Returns the nodes that the W of a group runs.

    Args:
        group: torch's record of a group: its parameters' nodes as "params", where W begins as "intermediates".
        reverse: for each node those that lead to it in a backward.
    """

    def before(node: Node) -> list[Node]:
        return [other for other in reverse[node] if other is not None]

    begins = group["intermediates"]
    if len(begins) == 1:  # as of most layers: a walk back from the parameters ends there, after a few nodes
        found = reached(group["params"], lambda node: [] if node in begins else before(node))
        if all(node in begins or before(node) for node in found):  # no path to them begins elsewhere
            return set(found)

    # The nodes from which a backward gets to the parameters.
    leading = set(reached(group["params"], before))

    def after(node: Node) -> list[Node]:
        return [other for other, _ in node.next_functions if other is not None and other in leading]

    return set(reached([node for node in begins if node in leading], after))
