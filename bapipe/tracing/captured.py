"""A graph of a module's operators, however it was captured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from bapipe.torch_private import TreeSpec

NO_GRAD = "no_grad"
"""Key in a node's `meta`: gradients were off when the operator ran."""

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A graph of a module's operators.

    Attributes:
        module: a module with that graph; it returns what the forward returns as a flat tuple.
        returned: the nodes and constants in that tuple.
        spec: how the forward nests them.
        layer_of_call: the layer of each operator inside the call of a layer's module; others are between layers.
        kinds: class of the module of each layer.
        leaf_reasons: why modules that the caller did not name are leaf modules, by path.
        sizes: numbers, and shapes of tensors, at two batch sizes, if capturing found them: see `bapipe.tracing.sizes`.
    """

    module: fx.GraphModule
    returned: tuple[Any, ...]
    spec: TreeSpec
    layer_of_call: dict[fx.Node, str]
    kinds: dict[str, str]
    leaf_reasons: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[fx.Node, tuple[Any, Any]] | None = None


def is_layer(module: nn.Module, path: str, leaf_modules: frozenset[str] = frozenset()) -> bool:
    """Returns whether a call of a module is one layer: it is of torch.nn, has no children, or is a leaf module."""
    if path in leaf_modules:
        return True
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS):
        return True
    return next(module.children(), None) is None


def output_node(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(node for node in graph.nodes if node.op == "output")
    return output


def call_name(path: str, call: int) -> str:
    """Returns the name of the layer of a module's n-th call, counted from 1."""
    return path if call == 1 else f"{path}#{call}"


def drop_unused(graph: fx.Graph) -> None:
    """Removes operators whose results are unused, except modules and operators that may write to memory."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("call_function", "call_method", "get_attr") or node.users or node.is_impure():
            continue
        if node.op != "call_method" or not str(node.target).endswith("_"):
            graph.erase_node(node)
