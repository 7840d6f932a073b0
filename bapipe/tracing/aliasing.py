"""Finds which operators of a graph write to their inputs, and which return memory of their inputs (views)."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from bapipe.graph.reached import reached
from bapipe.module_state.whose_code import calls_other_code
from bapipe.torch_private.modules import NormBase
from bapipe.torch_private.tensors import OpOverload, argument_schemas, aten_overloads, return_schemas
from bapipe.tracing.kept_calls import is_function_operator
from bapipe.tracing.model import TracedModel, attribute
from bapipe.tracing.recorded_functions import writes_to_a_list

MEMORY = "memory"
"""Key in a node's `meta`: its `Memory`, if the operator was seen running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What an operator did to the memory of tensors when it ran.

    Attributes:
        shares: the inputs whose memory its result shares.
        writes: the inputs that it wrote to.
        returns_written: it returned an input that it wrote to.
    """

    shares: Sequence[fx.Node]
    writes: Sequence[fx.Node]
    returns_written: bool


_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_OPERATORS = frozenset(
    ("alpha_dropout", "atleast_1d", "atleast_2d", "atleast_3d", "bfloat16", "bool", "broadcast_tensors", "cdouble",
     "cfloat", "cpu", "cuda", "double", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
     "float", "getitem", "half", "int", "long", "meshgrid", "type", "type_as")
)  # fmt: skip
"""Functions that may return memory of their input though no schema of torch says so."""

_VIEW_ATTRIBUTES = ("data", "T", "H", "mT", "mH", "real", "imag")
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)


def may_alias(module: fx.GraphModule, node: fx.Node) -> bool:
    """Returns whether the result of an operator may share memory with its first input."""
    if MEMORY in node.meta:
        return bool(node.meta[MEMORY].shares)
    changes = changes_in_place(module, node)
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _MODULES) or changes
    if is_function_operator(node.target):
        return True  # its forward may return a view
    if node.target is getattr:
        return node.args[1] in _VIEW_ATTRIBUTES
    if isinstance(node.target, OpOverload):
        return _returns_memory(node.target) or changes or node.target.overloadpacket.__name__ in _OPERATORS
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _OPERATORS or any(map(_returns_memory, aten_overloads(name))) or changes


def _returns_memory(overload: OpOverload) -> bool:
    """Returns whether an operator's schema says that its result may be a view of an input."""
    results = (result.alias_info for result in return_schemas(overload))
    return any(alias is not None and not alias.is_write for alias in results)


def changes_in_place(module: fx.GraphModule, node: fx.Node) -> bool:
    """Returns whether an operator writes to an input."""
    return next(_written_inputs(module, node), None) is not None


def returns_what_it_changes(node: fx.Node) -> bool:
    """Returns whether an operator that writes to its first input also returns it."""
    if MEMORY in node.meta:
        return bool(node.meta[MEMORY].returns_written)
    return node.target is not operator.setitem and not writes_to_a_list(node.target)


def _shared_inputs(module: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Returns the inputs whose memory an operator's result may share."""
    if node.op in ("placeholder", "output", "get_attr"):
        return []
    if MEMORY in node.meta:
        return [source for source in node.meta[MEMORY].shares if source in node.all_input_nodes]
    if not may_alias(module, node):
        return []
    return [*_nodes(node.args[0] if node.args else None), *_nodes(node.kwargs.get("out"))]


def _written_inputs(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    if MEMORY in node.meta:
        yield from node.meta[MEMORY].writes
        return
    if isinstance(node.target, OpOverload):
        arguments = argument_schemas(node.target)
        given = [*zip(arguments, node.args, strict=False)]
        given += [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _nodes(value)
        return
    yield from _nodes(node.kwargs.get("out"))
    if writes_to_a_list(node.target):
        yield from _nodes(node.args[0])
    if node.args and isinstance(node.args[0], fx.Node) and _changes_first_input(module, node):
        yield node.args[0]


def _changes_first_input(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    name = getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or node.target in _IN_PLACE or (name.endswith("_") and name[:1] != "_")


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _nodes(one)


def rewire_inplace_uses(module: fx.GraphModule) -> None:
    """Rewires uses of a tensor after an in-place change to the result of that change.

    The values are the same, but now the edges of the graph say that these uses come after the change.
    """
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or not returns_what_it_changes(node):
            continue
        if MEMORY in node.meta:  # recorded in this order
            continue
        for tensor in set(_written_inputs(module, node)):
            if tensor.op == "get_attr":
                continue
            for user in list(tensor.users):
                if position[user] > position[node]:
                    user.replace_input_with(tensor, node)


def alias_set(module: fx.GraphModule, tensor: fx.Node) -> set[fx.Node]:
    """Returns the tensor and all nodes that may share its memory: views of it, and what it is a view of."""

    def aliases_of(node: fx.Node) -> list[fx.Node]:
        views = [user for user in node.users if node in _shared_inputs(module, user)]
        return [other for other in [*_shared_inputs(module, node), *views] if other.op != "get_attr"]

    return set() if tensor.op == "get_attr" else set(reached([tensor], aliases_of))


def written_state(module: fx.GraphModule, tensor: fx.Node) -> list[str]:
    """Returns the parameters and buffers that share memory with a tensor: it is one, or a view of one."""
    nodes = reached([tensor], lambda node: _shared_inputs(module, node))
    return [str(node.target) for node in nodes if node.op == "get_attr"]


def writes_to_state(module: fx.GraphModule) -> Iterator[tuple[fx.Node, list[str]]]:
    """Yields (operator, names of the parameters and buffers that it writes to)."""
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_function", "call_method"):
            names = [name for tensor in _written_inputs(module, node) for name in written_state(module, tensor)]
            if names:
                yield node, names


def writers(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields (operator, the tensor it writes to), except for constants and buffers."""
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_function", "call_method"):
            for tensor in dict.fromkeys(_written_inputs(module, node)):
                if tensor.op != "get_attr":
                    yield node, tensor


def written_buffers(model: TracedModel) -> dict[int, Tensor]:
    """Returns the buffers that operators of torch change while the model trains, by id."""
    return _buffers_of(model, _written_by)


def maybe_written_buffers(model: TracedModel) -> dict[int, Tensor]:
    """Returns the buffers that may be changed besides, by id.

    These are those of the modules that code from outside torch belongs to, and those of which an operator changes what
    may be a view: `to` and others give the buffer itself, or a copy.
    """
    return _buffers_of(model, _maybe_written_by)


def _buffers_of(model: TracedModel, found: Callable[[fx.GraphModule, fx.Node], Iterator[object]]) -> dict[int, Tensor]:
    every = (one for node in model.layer_of for one in found(model.module, node))
    return {id(one): one for one in every if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)}


def _written_by(module: fx.GraphModule, node: fx.Node) -> Iterator[object]:
    if node.op == "call_module":
        for part in module.get_submodule(str(node.target)).modules():
            # No other module of torch changes its buffers; the old spectral norm is a hook.
            if isinstance(part, NormBase) or type(part).__name__ == "_SpectralNorm":
                yield from part.buffers(recurse=False)
        return
    for tensor in node.all_input_nodes if _is_batch_norm(node) else _written_inputs(module, node):
        if tensor.op == "get_attr":
            yield attribute(module, str(tensor.target))


def _maybe_written_by(module: fx.GraphModule, node: fx.Node) -> Iterator[object]:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        if any(map(calls_other_code, called.modules())):
            yield from called.buffers()
        return
    for tensor in _written_inputs(module, node):
        yield from (attribute(module, name) for name in written_state(module, tensor))


def _is_batch_norm(node: fx.Node) -> bool:
    """Returns whether an operator is a batch norm, whose schema does not say that it writes to its statistics."""
    name = getattr(node.target, "__name__", "")
    return "batch_norm" in name or "instance_norm" in name
