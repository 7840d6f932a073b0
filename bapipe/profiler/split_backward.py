"""Splits a backward into I and W with the functions that the runtime uses too.

Torch finds, for each parameter, the nodes of the autograd graph at which its gradient leaves the path from the loss to
the inputs. I runs that path and keeps the gradients that arrive at these nodes; W begins there, once for each group of
parameters whose paths meet.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from bapipe.torch_private.split_backward import (
    can_begin_at,
    construct_reverse_graph,
    get_param_groups,
    num_outputs,
    stage_backward_weight,
)
from bapipe.tracing.weight_nodes import weight_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Parameters whose W begins at the same nodes.

    Attributes:
        starts_at_root: whether W begins at nodes at which I ends, which I does not run.
        is_whole: whether torch cannot run this W apart: it runs a node that the W of another group runs too, as where
            several layers use a bias that one layer makes (see `bapipe.tracing.weight_nodes`), or cannot begin.
        param_group: torch's own record: the nodes as "intermediates", and after I the gradients that arrived there as
            "grads". W empties it.
        arrived_in: for each of these nodes, the layer that ran when its gradients arrived in I; None if I ends there.
    """

    parameters: tuple[nn.Parameter, ...]
    starts_at_root: bool
    is_whole: bool
    param_group: dict[str, Any]
    arrived_in: list[int | None]

    @property
    def saved_gradients(self) -> tuple[tuple[Tensor, int | None], ...]:
        """The gradients that I keeps for this W, each with its layer of `arrived_in`."""
        arrived = zip(self.param_group["grads"], self.arrived_in, strict=True)
        return tuple((grad, layer) for grads, layer in arrived for grad in grads if grad is not None)

    def run(self) -> None:
        """Runs W, adding to the gradients of the parameters."""
        stage_backward_weight(iter(self.parameters), [self.param_group])


def find_weight_groups(
    loss: Tensor, roots: Sequence[GradientEdge], parameters: Iterable[nn.Parameter]
) -> tuple[WeightGroup, ...]:
    """Returns the groups of the parameters that a loss depends on, if I runs from the loss to `roots`."""
    parameter_of = {get_gradient_edge(p).node: p for p in parameters if p.requires_grad}
    assert loss.grad_fn is not None
    root_nodes = [edge.node for edge in roots]
    reverse = construct_reverse_graph([loss.grad_fn])
    groups = get_param_groups(root_nodes, list(parameter_of), reverse)
    nodes_of_groups = [weight_nodes(group, reverse) for group in groups]
    num_uses = Counter(node for nodes in nodes_of_groups for node in nodes)
    shared = {node for node, count in num_uses.items() if count > 1}
    return tuple(
        _weight_group(group, parameter_of, set(root_nodes), shares=not shared.isdisjoint(nodes))
        for group, nodes in zip(groups, nodes_of_groups, strict=True)
    )


def _weight_group(
    param_group: dict[str, Any], parameter_of: Mapping[Node, nn.Parameter], roots: set[Node], *, shares: bool
) -> WeightGroup:
    nodes = list(param_group["intermediates"])
    param_group |= {"intermediates": nodes, "grads": [()] * len(nodes)}
    return WeightGroup(
        parameters=tuple(parameter_of[node] for node in param_group["params"]),
        starts_at_root=roots.issuperset(nodes),
        is_whole=shares or not all(map(can_begin_at, nodes)),
        param_group=param_group,
        arrived_in=[None] * len(nodes),
    )


def run_input_grads(
    loss: Tensor, roots: Sequence[GradientEdge], groups: Sequence[WeightGroup], running: Callable[[], int]
) -> None:
    """Runs I, and keeps in each group the gradients that arrive where its W begins; `running`: the layer that runs."""
    hooks = [
        node.register_prehook(_keep_gradients(group, index, running))
        for group in groups
        for index, node in enumerate(group.param_group["intermediates"])
    ]
    # Of the nodes at which I ends all outputs are asked for: of a tensor that is split, one part may be a root and
    # another one get its gradient from a later root.
    ends = [GradientEdge(n, i) for n in dict.fromkeys(edge.node for edge in roots) for i in range(num_outputs(n))]
    try:
        gradients = torch.autograd.grad(loss, ends, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    # I does not run these nodes, so their hooks were not called.
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    for edge, gradient in zip(ends, gradients, strict=True):
        arrived[edge.node] = (*arrived.get(edge.node, ()), gradient)
    for group in groups:
        for index, node in enumerate(group.param_group["intermediates"]):
            if node in arrived and not group.param_group["grads"][index]:
                group.param_group["grads"][index] = arrived[node]


def _keep_gradients(
    group: WeightGroup, index: int, running: Callable[[], int]
) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Returns a hook that stores the gradients arriving at a node."""

    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        group.param_group["grads"][index] = gradients
        group.arrived_in[index] = running()

    return keep
