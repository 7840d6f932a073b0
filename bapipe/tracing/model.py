"""A model as named layers and tensors over a graph of operators."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from bapipe.torch_private.tensors import TreeSpec, tree_unflatten
from bapipe.tracing.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """A layer: one call of a module and the operators attached to it.

    Attributes:
        name: path of the module, `path#2` if it is called a second time.
        kind: class of the module.
        inputs, outputs: names of the tensors that enter and that other layers, or the caller, use.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a model's forward nests the tensors that it returns.

    Attributes:
        leaves: for each leaf of the nest, the place of its tensor in `TracedModel.outputs`, or None for a constant.
        constants: the leaves that are not tensors, in order.
    """

    spec: TreeSpec
    leaves: tuple[int | None, ...]
    constants: tuple[Any, ...]

    def rebuild(self, outputs: Sequence[Tensor]) -> Any:
        """Returns the model's result from its output tensors."""
        constants = iter(self.constants)
        leaves = [next(constants) if place is None else outputs[place] for place in self.leaves]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """An operator of layer `reader` reads memory that an operator of `writer` changes, which restricts the cuts.

    Attributes:
        same_stage: True if the reader comes after the writer and sees the change through another view, or makes such a
            view: they must be in one stage. False if the reader comes before: its stage must not be after the writer's.
    """

    reader: str
    writer: str
    same_stage: bool

    def is_broken(self, places: Mapping[str, int]) -> bool:
        """Returns whether the two layers must not be at these places along the pipeline; one may be nowhere in it."""
        reader, writer = places.get(self.reader), places.get(self.writer)
        if reader is None or writer is None:
            return False
        return reader > writer or (self.same_stage and reader != writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model as layers in topological order.

    Attributes:
        root: the module that was traced.
        module: its graph, which returns a flat tuple of the output tensors; it shares parameters and buffers with the
            root.
        inputs: names of the model's inputs, in the order of its `forward`.
        outputs: names of the tensors it returns, each once.
        result: how the forward nests them in tuples, lists and dictionaries.
        node_of: the graph node that computes each tensor.
        layer_of: the name of the layer that each operator belongs to.
        replicated: operators on the model's inputs and constants alone, which every stage that needs them computes for
            itself; each belongs to the first layer that uses it.
        sizes: numbers, shapes and other values that are not tensors, at two batch sizes: see `bapipe.tracing.sizes`.
        writes: (operator, the tensor it writes to), except for constants and buffers.
        hazards: the cuts that in-place changes forbid.
        leaf_reasons: modules that are one layer although nobody asked for it, by path, and why.
        inlined: modules without children that are no layers: see `bapipe.tracing.layers.trace`.
        changed: names of the buffers that its forwards were seen to change; None if none were run for that.
    """

    root: nn.Module
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    result: Result
    layers: tuple[TracedLayer, ...]
    node_of: dict[str, fx.Node]
    layer_of: dict[fx.Node, str]
    replicated: frozenset[fx.Node]
    sizes: Mapping[fx.Node, tuple[Any, Any]]
    writes: tuple[tuple[fx.Node, fx.Node], ...]
    hazards: tuple[Hazard, ...]
    leaf_reasons: Mapping[str, Reason] = field(default_factory=dict)
    inlined: frozenset[str] = frozenset()
    changed: frozenset[str] | None = None


def input_name(name: str, layers: Container[str]) -> str:
    """Returns the name among the tensors of one that no layer makes: another name if a layer has its own."""
    return f"input:{name}" if name in layers else name


def state_names(root: nn.Module) -> dict[int, tuple[str, ...]]:
    """Returns all names of each parameter and buffer of a module, by `id`; tied ones have several."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in (
        *root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)
    ):  # fmt: skip
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def layer_states(model: TracedModel) -> dict[str, dict[str, Tensor]]:
    """Returns the parameters, buffers and constants of each layer, by name: for tied ones, a name inside the layer."""
    names = state_names(model.root)
    states: dict[str, dict[str, Tensor]] = {layer.name: {} for layer in model.layers}
    for node, layer in model.layer_of.items():
        inside = layer.partition("#")[0] + "."
        for node_name, tensor in node_state(model.module, node):
            all_names = names.get(id(tensor), (node_name,))
            states[layer][next((name for name in all_names if name.startswith(inside)), all_names[0])] = tensor
    return states


def persistent_state(root: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a module's state dict, by name: all of it but extra state."""
    names, state = state_names(root), root.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name in names.get(id(tensor), ())}


def unused_state(model: TracedModel) -> dict[str, Tensor]:
    """Returns the parameters and buffers of the module's state dict that no layer uses."""
    used = {id(tensor) for state in layer_states(model).values() for tensor in state.values()}
    return {name: tensor for name, tensor in persistent_state(model.root).items() if id(tensor) not in used}


def node_state(module: fx.GraphModule, node: fx.Node) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the model, value) of the parameters, buffers and constants that an operator uses."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        for name, tensor in (*called.named_parameters(), *called.named_buffers()):
            yield f"{node.target}.{name}", tensor
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            value = attribute(module, str(source.target))
            if isinstance(value, Tensor):
                yield str(source.target), value


def attribute(module: nn.Module, path: str) -> Any:
    """Returns the attribute at a dotted path of a module."""
    parent, _, name = path.rpartition(".")
    return getattr(module.get_submodule(parent), name)
