"""Which layers compute the queries, keys and values of which attention, and in how many heads members can share it.

Found are calls of `scaled_dot_product_attention` whose queries, keys and values come from linear layers through
operators that keep heads apart. In all others a head may depend on another one.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn

from bapipe.tracing.model import attribute

KEEPS_HEADS_APART = {
    operator.add, operator.mul, operator.sub, operator.neg, operator.getitem, operator.truediv,
    torch.add, torch.mul, torch.sub, torch.neg, torch.cat, torch.transpose, torch.permute, torch.reshape, torch.chunk,
    torch.split, torch.unbind, F.dropout,
    "add", "mul", "sub", "neg", "div", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous",
    "expand", "repeat_interleave", "chunk", "split", "unbind", "squeeze", "unsqueeze", "to", "type_as", "float",
}  # fmt: skip


TRANSPOSES = {torch.transpose, torch.permute, "transpose", "permute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention whose heads are apart from one another.

    Attributes:
        call: the attention itself.
        linears: the calls of the linear layers that its queries, keys and values come from.
        sizes: the input and output features of each of these.
        heads: its heads of keys and values; several of queries may read each.
        channels: its output channels, those of all heads of queries.
    """

    call: fx.Node
    linears: tuple[fx.Node, ...]
    sizes: tuple[tuple[int, int], ...]
    heads: int
    channels: int


def find_attentions(module: fx.GraphModule, value_of: Mapping[fx.Node, object]) -> Iterator[Attention]:
    """Yields the attentions of a graph whose heads are apart; `value_of` has tensors in the shapes of all queries."""
    trained = depending_on_parameters(module)
    for call in _calls(module):
        linears = tuple(dict.fromkeys(_sources(_operands(call), trained)))
        query = value_of[_operands(call)[0]]
        if not all(_is_transposed(operand) for operand in _operands(call)):
            continue  # then its second axis is not that of heads
        sizes = [None if node is None else linear_sizes(module.get_submodule(str(node.target))) for node in linears]
        if isinstance(query, Tensor) and query.dim() == 4 and None not in sizes:
            num_queries, width = query.shape[1], query.shape[3]
            num_outputs = sum(size[1] for size in sizes if size is not None)
            num_keys = (num_outputs // width - num_queries) // 2  # the outputs are queries, as many keys as values
            if num_keys > 0 and num_outputs == (num_queries + 2 * num_keys) * width and num_queries % num_keys == 0:
                yield Attention(
                    call=call,
                    linears=tuple(node for node in linears if node is not None),
                    sizes=tuple(size for size in sizes if size is not None),
                    heads=num_keys,
                    channels=num_queries * width,
                )


def queries(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the nodes that compute the queries of attentions."""
    return [_operands(call)[0] for call in _calls(module)]


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Returns the input and output features of a linear layer; transformers' `Conv1D` is one, too. None for others."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":
        features = getattr(module, "nx", None), getattr(module, "nf", None)
        if isinstance(features[0], int) and isinstance(features[1], int):
            return features[0], features[1]
    return None


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in module.graph.nodes
        if node.target is F.scaled_dot_product_attention and len(_operands(node)) == 3
    ]


def _operands(call: fx.Node) -> list[fx.Node]:
    """The queries, keys and values of an attention, if they are given by place or by name."""
    named = [call.kwargs.get(name) for name in ("query", "key", "value")[len(call.args[:3]) :]]
    return [node for node in (*call.args[:3], *named) if isinstance(node, fx.Node)]


def _sources(nodes: Sequence[fx.Node], trained: Collection[fx.Node]) -> Iterator[fx.Node | None]:
    """Yields the modules that tensors come from through operators that keep heads apart; None for another operator."""
    seen, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node in seen or node not in trained:  # masks and positions: every member has them
            continue
        seen.add(node)
        if node.op == "call_module":
            yield node
        elif node.target in KEEPS_HEADS_APART:
            left += node.all_input_nodes
        else:
            yield None


def _is_transposed(node: fx.Node) -> bool:
    """Returns whether axes of what a module gave are swapped on the way to a node, as those of places and heads are."""
    while node.op != "call_module" and node.all_input_nodes:
        if node.target in TRANSPOSES:
            return True
        node = node.all_input_nodes[0]
    return False


def depending_on_parameters(module: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes whose values come from modules with parameters, or from parameters, through operators.

    Those of masks, sizes and positions do not: modules that compute them have no parameters.
    """
    found = set[fx.Node]()
    for node in module.graph.nodes:
        if node.op == "call_module":
            depends = next(module.get_submodule(str(node.target)).parameters(), None) is not None
        elif node.op == "get_attr":
            depends = isinstance(attribute(module, str(node.target)), nn.Parameter)
        else:
            depends = any(source in found for source in node.all_input_nodes)
        if depends:
            found.add(node)
    return found
