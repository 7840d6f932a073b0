"""Which nodes of the autograd graph the W of some parameters runs.

torch's W begins at the nodes at which the gradient of a parameter leaves the path to the inputs, once for each group of
parameters that have such nodes in common, and frees what it runs through. It is wrong where two groups run the same
node, as for the cell of an unrolled recurrent network: the second finds it freed. That one node of a group leads to
another is no harm, because torch sets the gradients that arrive there to those that I has kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.autograd.graph import Node


def weight_nodes(group: Mapping[str, Any], reverse: Mapping[Node, Iterable[Node | None]]) -> set[Node]:
    """Returns the nodes that the W of a group runs.

    Args:
        group: torch's record of a group: its parameters' nodes as "params", where W begins as "intermediates".
        reverse: for each node those that lead to it in a backward.
    """
    return _reached(group["intermediates"], _leading_to(group["params"], reverse))


def _leading_to(params: Iterable[Node], reverse: Mapping[Node, Iterable[Node | None]]) -> set[Node]:
    """Returns the nodes from which a backward gets to some parameters."""
    leading: set[Node] = set()
    todo = list(params)
    while todo:
        node = todo.pop()
        if node not in leading:
            leading.add(node)
            todo += [before for before in reverse[node] if before is not None]
    return leading


def _reached(intermediates: Sequence[Node], within: set[Node]) -> set[Node]:
    """Returns the nodes within some that a backward from `intermediates` runs."""
    reached: set[Node] = set()
    todo = list(intermediates)
    while todo:
        node = todo.pop()
        if node not in reached and node in within:
            reached.add(node)
            todo += [after for after, _ in node.next_functions if after is not None]
    return reached
