"""What a model's forward returns: which tensors of which layers, and how they are nested."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from bapipe.errors import InvalidModel
from bapipe.module_state.whose_code import is_of_torch
from bapipe.tracing.captured import Captured, output_node
from bapipe.tracing.model import Result
from bapipe.tracing.recorded_functions import PLAIN
from bapipe.tracing.sizes import BATCH_SIZES, meta_values


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
            raise no_tensor(str(leaf), leaf)
    if not places:
        raise InvalidModel("the model returns no tensors: return the tensors that the loss is made of")
    constants = tuple(leaf for leaf, place in zip(captured.returned, leaves, strict=True) if place is None)
    return Result(spec=captured.spec, leaves=tuple(leaves), constants=constants), tuple(places)


def no_tensor(name: str, value: object) -> InvalidModel:
    """Returns the error of a model that returns a value which is neither a tensor nor a constant."""
    return InvalidModel(
        f"the model returns '{name}', of type {type(value).__name__}, which is neither a tensor of its layers nor a "
        "constant: return tensors, None, and numbers and texts that are the same for every batch, alone or nested in "
        "tuples, lists, dictionaries and dataclasses; a loss can read sizes from a tensor"
    )


class NoTensorReturned(Exception):
    """The model returns the value of an operator that is no tensor, but a tuple of some, or a number."""


def check_returns_tensors(captured: Captured, inputs: Sequence[Tensor]) -> None:
    """Raises NoTensorReturned if a graph without values returns something else; if the model needs values, no error."""
    leaves = dict.fromkeys(leaf for leaf in captured.returned if isinstance(leaf, fx.Node))
    nodes = [leaf for leaf in leaves if not _is_tensor(captured.module, leaf)]
    try:
        values = meta_values(captured.module, inputs, BATCH_SIZES[0], nodes) if nodes else ()
    except Exception:  # whatever the model's own code raises without values
        return
    for node, value in zip(nodes, values, strict=True):
        if not isinstance(value, Tensor):
            raise NoTensorReturned(str(no_tensor(node.name, value)))


def _is_tensor(module: fx.GraphModule, node: fx.Node) -> bool:
    """Returns whether a node is known to be a tensor: it calls one of torch's modules that return no tuples."""
    if node.op != "call_module":
        return False
    called = module.get_submodule(str(node.target))
    return is_of_torch(called) and not isinstance(called, nn.RNNBase | nn.MultiheadAttention)
