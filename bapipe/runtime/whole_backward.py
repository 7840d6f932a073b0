"""Which backwards of a stage torch can split into I and W without an error in the gradients.

The whole backward runs in I, and W does nothing, if

- the W of two groups of parameters would run the same node of the autograd graph (`bapipe.tracing.weight_nodes`),
  because a layer is called several times, such as the cell of an unrolled recurrent network;
- W would begin at a node at which the installed torch cannot begin (`torch_private.split_backward.can_begin_at`);
- a parameter's gradient, or a part of it, flows on a path that meets no path to the stage's inputs, as behind a
  `detach()`: torch lets no W begin there;
- a parameter has hooks of the model's own, which W would call for parts of a gradient, or not at all.

The whole backward runs in W, and I does nothing, if no input of the stage needs a gradient, as in the first stage:
there is no path to an input, and no stage waits for I.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from bapipe.graph.reached import reached
from bapipe.runtime.replicas import BucketHook
from bapipe.torch_private.split_backward import can_begin_at, construct_reverse_graph, get_param_groups
from bapipe.torch_private.tensors import parameter_hooks
from bapipe.tracing.weight_nodes import weight_nodes


def has_hooks_of_the_model(module: nn.Module) -> bool:
    """Returns whether a parameter has hooks other than those by which replicas start their all-reduces."""
    hooks = (hook for parameter in module.parameters() for hook in parameter_hooks(parameter))
    return any(not isinstance(hook, BucketHook) for hook in hooks)


def can_split(outputs: Iterable[Tensor], inputs: Iterable[Any], parameters: Iterable[nn.Parameter]) -> bool:
    """Returns whether torch's I and W give the gradients of the whole backward of some outputs."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    starts = [_node(value) for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    weights = [_node(parameter) for parameter in parameters if parameter.requires_grad]
    reverse = construct_reverse_graph(roots)
    trained = {weight for weight in weights if reverse.get(weight) or weight in roots}
    seen: set[Node] = set()
    for group in get_param_groups(starts, weights, reverse):
        nodes = weight_nodes(group, reverse)
        if seen & nodes or not all(map(can_begin_at, group["intermediates"])) or _misses_paths(group, roots, reverse):
            return False
        seen |= nodes
        trained -= group["params"]
    return not trained


def _misses_paths(group: Mapping[str, Any], roots: Collection[Node], reverse: Mapping[Node, Iterable[Any]]) -> bool:
    """Returns whether a path from a root to the parameters of a group meets no node at which their W begins."""
    begins = set(group["intermediates"])

    def before(node: Node) -> list[Node]:
        return [] if node in begins else [other for other in reverse.get(node, ()) if other is not None]

    return any(node not in begins and node in roots for node in reached(group["params"], before))


def _node(tensor: Tensor) -> Node:
    node: Node = get_gradient_edge(tensor).node
    return node
