"""A backward in two parts: I and W."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

if TYPE_CHECKING:
    pass

from bapipe.torch_private.tensors import hooks_behind_gradient
from bapipe.torch_private.torch_version import is_before_2_13


def stage_backward_input(
    outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor], weights: Iterable[nn.Parameter]
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Runs I; returns the gradients of the inputs, and the groups of weights for `stage_backward_weight`."""
    if is_before_2_13():
        from bapipe.torch_private import older

        return older.stage_backward_input(outputs, grads, inputs, weights)
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input(outputs, grads, inputs, iter(weights))


def stage_backward_weight(weights: Iterable[nn.Parameter], groups: Iterable[dict[str, Any]]) -> None:
    """Runs W of the groups that I has left, which it empties, and adds to the gradients of the weights.

    It calls the hooks of a weight that follow its gradient, as a backward does: replicas start all-reduces in them.

    torch's own calls none. It is wrong before torch 2.13, where it counts a gradient twice if a node at which W begins
    leads to another; and in all versions where the gradients of two weights are one tensor, or W begins at a tensor
    with a hook.
    """
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights if weight.requires_grad}
    for group in groups:
        nodes, kept = group.pop("intermediates"), group.pop("grads")
        starts = [
            (GradientEdge(node, number), grad)
            for node, by_output in zip(nodes, kept, strict=True)
            for number, grad in enumerate(by_output)
            if grad is not None
        ]
        if not starts:
            continue
        params = list(group["params"])
        with ExitStack() as hooks:
            # A node gets what I has kept: not a second time what comes from a node that leads to it, nor what hooks of
            # its output, which I has called, make of that.
            for node, by_output in zip(nodes, kept, strict=True):
                hooks.callback(node.register_prehook(_replace(by_output)).remove)
            found = torch.autograd.grad(
                [edge for edge, _ in starts],
                [*(GradientEdge(param, 0) for param in params), *_inputs_asked_for(nodes)],
                [grad for _, grad in starts],
                allow_unused=True,
            )
        for param, grad in zip(params, found, strict=False):
            weight = weight_of[param]
            if grad is not None:
                # A copy, as it may be the gradient of another weight, too (w + u), or one that I has handed on.
                weight.grad = grad.clone() if weight.grad is None else weight.grad.add_(grad)
                with torch.no_grad():
                    for hook in hooks_behind_gradient(weight):
                        hook(weight)


def _replace(by_output: tuple[Tensor | None, ...]) -> Callable[[Any], Any]:
    return lambda _: by_output


def _inputs_asked_for(nodes: Iterable[Node]) -> list[GradientEdge]:
    """Returns the inputs of nodes whose gradients must be computed for those of the weights.

    On CPUs, torch's group norm in channels-last memory dies of a segmentation fault if asked for the latter alone.
    """
    norms = [node for node in nodes if node.name() == "NativeGroupNormBackward0"]
    inputs = [
        node.next_functions[0]
        for node in norms
        if (saved := node._saved_input).device.type == "cpu"  # type: ignore[attr-defined]
        and suggest_memory_format(saved) != torch.contiguous_format
    ]
    return [GradientEdge(node, number) for node, number in inputs if node is not None]


def construct_reverse_graph(roots: list[Node]) -> Any:
    """Returns which nodes of the autograd graph lead to each node."""
    from torch.distributed.pipelining import _backward

    return _backward.construct_reverse_graph(roots)


def get_param_groups(inputs: list[Node], weights: list[Node], reverse_graph: Any) -> list[dict[str, Any]]:
    """Returns the groups of weights that have nodes in common where their gradients leave the path to the inputs."""
    from torch.distributed.pipelining import _backward

    return _backward.get_param_groups(inputs, weights, reverse_graph)


def num_outputs(node: Node) -> int:
    """Returns how many results the operator of a node of the autograd graph has, each of which may have a gradient."""
    return len(node._input_metadata)


def can_begin_at(node: Node) -> bool:
    """Whether W can begin at a node of the autograd graph: before torch 2.13 not at one of an `autograd.Function`."""
    return not is_before_2_13() or not isinstance(node, torch.autograd.function.BackwardCFunction)
