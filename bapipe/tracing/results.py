"""What a model's forward returns: which tensors of which layers, and how they are nested."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from bapipe.errors import InvalidModel
from bapipe.tracing.captured import Captured, output_node
from bapipe.tracing.model import Result
from bapipe.tracing.recorded_functions import PLAIN


def returned(value: Any) -> Any:
    """Returns a tensor that no layer computes, as a tensor of the layer to which this call belongs."""
    return value.view_as(value) if isinstance(value, Tensor) else value


def returns_it(node: fx.Node) -> bool:
    """Returns whether an operator only returns what no layer computes."""
    return node.op == "call_function" and node.target is returned


def with_returned_values(captured: Captured, replicated: Iterable[fx.Node]) -> Captured:
    """Adds an operator for each input, constant or value of inputs alone that the model returns."""
    computed_by_none = set(replicated)
    output = output_node(captured.module.graph)
    added: dict[fx.Node, fx.Node] = {}
    for leaf in dict.fromkeys(leaf for leaf in captured.returned if isinstance(leaf, fx.Node)):
        if leaf.op in ("placeholder", "get_attr") or leaf in computed_by_none:
            with captured.module.graph.inserting_before(output):
                added[leaf] = captured.module.graph.call_function(returned, (leaf,))
            output.replace_input_with(leaf, added[leaf])
    if not added:
        return captured
    captured.module.recompile()
    leaves = tuple(added.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf for leaf in captured.returned)
    return replace(captured, returned=leaves)


def result_of(captured: Captured, name_of: Mapping[fx.Node, str]) -> tuple[Result, tuple[str, ...]]:
    """Returns how the forward nests what it returns, and the names of the tensors in it, each once.

    Raises:
        InvalidModel: it returns no tensors, or values that are neither tensors nor constants.
    """
    places: dict[str, int] = {}
    leaves: list[int | None] = []
    for leaf in captured.returned:
        if isinstance(leaf, fx.Node) and leaf in name_of:
            leaves.append(places.setdefault(name_of[leaf], len(places)))
        elif leaf is None or isinstance(leaf, PLAIN):
            leaves.append(None)
        else:
            raise InvalidModel(
                f"the model returns '{leaf}', which is no tensor of its layers: return tensors, None, numbers and "
                "texts, alone or nested in tuples, lists, dictionaries and dataclasses"
            )
    if not places:
        raise InvalidModel("the model returns no tensors: return the tensors that the loss is made of")
    constants = tuple(leaf for leaf, place in zip(captured.returned, leaves, strict=True) if place is None)
    return Result(spec=captured.spec, leaves=tuple(leaves), constants=constants), tuple(places)


def may_be_nests(captured: Captured) -> list[fx.Node]:
    """Returns the nodes that the model returns whose values may be tuples: recurrent layers, layers of its own."""
    leaves = dict.fromkeys(leaf for leaf in captured.returned if isinstance(leaf, fx.Node))
    return [leaf for leaf in leaves if _may_be_nest(captured.module, leaf)]


def _may_be_nest(module: fx.GraphModule, node: fx.Node) -> bool:
    while node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        node = node.all_input_nodes[0]
    if node.op != "call_module":
        return False
    called = module.get_submodule(str(node.target))
    is_torchs = type(called).__module__.startswith("torch.nn.")
    return not is_torchs or isinstance(called, nn.RNNBase | nn.MultiheadAttention)
