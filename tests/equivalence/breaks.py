"""A model whose stages can go wrong in many ways, and ways to make them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional


class Calls(nn.Module):
    """A layer whose Python code counts its calls, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 1 / self.calls)


class Breakable(nn.Module):
    """Tied weights, dropout, batch norm, an in-place change, a hook, a region without gradients, sizes, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.act, self.b, self.calls = nn.ReLU(), nn.Linear(6, 6), Calls()
        self.shift, self.tied, self.head, self.other = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
            nn.Linear(6, 3),
        )
        self.tied.weight = self.a.weight
        self.act.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.size(0)
        y = self.drop(self.norm(self.a(x)))
        z = self.calls(self.act(self.b(y)))
        with torch.no_grad():
            fixed = self.shift(z)
        z = self.tied(z).add_(fixed / (rows + 1))
        return self.head(z), self.other(z + y)


def two_losses(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(output[0], target) + 0.1 * functional.cross_entropy(output[1], 2 - target)


Edit = Callable[[fx.GraphModule, fx.Node], Callable[..., Any] | None]
"""(a stage, an operator in it) -> what to call instead, or None."""


def edited(stage: fx.GraphModule, edit: Edit) -> fx.GraphModule:
    """Returns the stage, its operators replaced."""
    for node in list(stage.graph.nodes):
        function = edit(stage, node)
        if function is not None:
            with stage.graph.inserting_before(node):
                other = stage.graph.call_function(_plain(function), node.args, node.kwargs)
            node.replace_all_uses_with(other)
            stage.graph.erase_node(node)
    stage.recompile()
    return stage


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return replacement


def _called(stage: fx.GraphModule, node: fx.Node, path: str) -> Any:
    return stage.get_submodule(path) if node.op == "call_module" and node.target == path else None


def other_random_numbers(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    if _called(stage, node, "drop") is None:
        return None
    return lambda x: x * (torch.arange(6) % 2 * 2)


def no_buffer_update(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    norm = _called(stage, node, "norm")
    if norm is None:
        return None
    return lambda x: functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)


def in_place_twice(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    return (lambda x, y: x.add_(y).add_(y)) if node.op == "call_method" and node.target == "add_" else None


def no_hook(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    act = _called(stage, node, "act")
    return None if act is None else act.forward


def forgotten_python_state(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    calls = _called(stage, node, "calls")
    return None if calls is None else lambda x: copy.deepcopy(calls)(x)


def untied_weight(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    tied = _called(stage, node, "tied")
    return None if tied is None else lambda x: functional.linear(x, tied.weight.detach(), tied.bias)


def detached(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    return (lambda x: stage.get_submodule("b")(x.detach())) if _called(stage, node, "b") is not None else None


def straight_through(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    """The same values with another gradient, as of a function whose own backward tracing lost."""
    b = _called(stage, node, "b")
    return None if b is None else lambda x: (lambda y: y.detach() + 2 * (y - y.detach()))(b(x))


def swapped_outputs(stage: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    if _called(stage, node, "head") is None:
        return None
    head = _called(stage, node, "head")
    return lambda x: functional.linear(x, head.weight.flip(0), head.bias)
