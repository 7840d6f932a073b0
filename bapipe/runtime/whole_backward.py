"""Which backwards of a stage torch can split into I and W without an error in the gradients.

torch's W begins at the nodes of the autograd graph at which the gradient of a parameter leaves the path to the inputs,
once for each group of parameters that have such nodes in common, and frees what it runs through. A backward is run
whole, and its W does nothing, if

- two groups would run the same node: a layer is called several times, as the cell of an unrolled recurrent network;
- the stage receives nothing that needs a gradient, so that no gradient leaves a path;
- a parameter has hooks of the model's own, which W would call for parts of a gradient, or not at all.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from bapipe.torch_private import construct_reverse_graph, get_param_groups, parameter_hooks


def has_hooks_of_the_model(module: nn.Module) -> bool:
    """Returns whether a parameter has hooks other than those by which replicas start their all-reduces."""
    hooks = (hook for parameter in module.parameters() for hook in parameter_hooks(parameter))
    return any(not isinstance(hook, partial) for hook in hooks)


def can_split(outputs: Iterable[Tensor], inputs: Iterable[Any], parameters: Iterable[nn.Parameter]) -> bool:
    """Returns whether torch's I and W give the gradients of the whole backward of some outputs."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    starts = [_node(value) for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    weights = [_node(parameter) for parameter in parameters if parameter.requires_grad]
    reverse = construct_reverse_graph(roots)
    seen: set[Node] = set()
    for group in get_param_groups(starts, weights, reverse):
        nodes = _reached(group["intermediates"], _leading_to(group["params"], reverse))
        if seen & nodes:
            return False
        seen |= nodes
    return True


def _node(tensor: Tensor) -> Node:
    node: Node = get_gradient_edge(tensor).node
    return node


def _leading_to(params: Iterable[Node], reverse: Any) -> set[Node]:
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
    """Returns the nodes that a W runs, which begins at `intermediates`."""
    reached: set[Node] = set()
    todo = list(intermediates)
    while todo:
        node = todo.pop()
        if node not in reached and node in within:
            reached.add(node)
            todo += [after for after, _ in node.next_functions if after is not None]
    return reached
