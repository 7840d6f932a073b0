"""A backward split into I and W by the same functions of torch with which the runtime splits it.

Torch finds, for each parameter, where its gradient leaves the path from the loss to the inputs. I runs that path and
keeps what arrives at these places; W begins there, once for each group of parameters that meet.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups, stage_backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Parameters whose W begins at the same places.

    Attributes:
        at_root: whether it begins where I ends, so that I does not reach it.
        held: torch's own record: the places, and after I what arrived there. W empties it.
    """

    parameters: tuple[nn.Parameter, ...]
    at_root: bool
    held: dict[str, Any]

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What I leaves for this W."""
        return tuple(grad for grads in self.held["grads"] for grad in grads if grad is not None)

    def run(self) -> None:
        """Runs W: adds the gradients of the parameters to those they have."""
        stage_backward_weight(iter(self.parameters), [self.held])


def find_weight_groups(
    loss: Tensor, roots: Sequence[GradientEdge], parameters: Iterable[nn.Parameter]
) -> tuple[WeightGroup, ...]:
    """Returns the groups of the parameters that a loss depends on, where I goes from the loss to `roots`."""
    parameter_of = {get_gradient_edge(p).node: p for p in parameters if p.requires_grad}
    assert loss.grad_fn is not None
    found = get_param_groups([edge.node for edge in roots], list(parameter_of), construct_reverse_graph([loss.grad_fn]))
    return tuple(_group(held, parameter_of, {edge.node for edge in roots}) for held in found)


def _group(held: dict[str, Any], parameter_of: Mapping[Node, nn.Parameter], ends: set[Node]) -> WeightGroup:
    places = list(held["intermediates"])
    held |= {"intermediates": places, "grads": [()] * len(places)}
    return WeightGroup(
        parameters=tuple(parameter_of[node] for node in held["params"]), at_root=ends.issuperset(places), held=held
    )


def run_input_grads(loss: Tensor, roots: Sequence[GradientEdge], groups: Sequence[WeightGroup]) -> None:
    """Runs I, and keeps in the groups what arrives where their W begins."""
    hooks = [
        node.register_prehook(_keeper(group.held["grads"], index))
        for group in groups
        for index, node in enumerate(group.held["intermediates"])
    ]
    try:
        gradients = torch.autograd.grad(loss, roots, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    arrived: dict[Node, dict[int, Tensor | None]] = {}  # where I ends; it does not run these operators
    for edge, gradient in zip(roots, gradients, strict=True):
        arrived.setdefault(edge.node, {})[edge.output_nr] = gradient
    for group in groups:
        for index, node in enumerate(group.held["intermediates"]):
            if node in arrived and not group.held["grads"][index]:
                own = arrived[node]
                group.held["grads"][index] = tuple(own.get(i) for i in range(max(own) + 1))


def _keeper(kept: list[tuple[Tensor | None, ...]], index: int) -> Callable[[tuple[Tensor | None, ...]], None]:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        kept[index] = gradients

    return keep
