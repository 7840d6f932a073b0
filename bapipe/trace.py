"""From an `nn.Module` to a graph of named layers and tensors, and from some of its layers back to a module."""

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bapipe.errors import InvalidModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """A layer: one leaf module and the operators attached to it.

    Attributes:
        name: path of the module, `path#2` where a module without parameters is called a second time.
        kind: class of the module.
        inputs, outputs: names of the tensors that enter and that other layers, or the caller, use.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model as layers in topological order.

    Attributes:
        module: the traced module; it shares parameters and buffers with the original.
        inputs: names of the model's inputs, in the order of its `forward`.
        outputs: names of the tensors it returns, in the order in which it does.
        node_of: the graph node that gives each tensor.
        layer_of: the name of the layer that each operator belongs to.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[TracedLayer, ...]
    node_of: dict[str, fx.Node]
    layer_of: dict[fx.Node, str]

    @property
    def returned(self) -> Any:
        """What the model's forward returns: a graph node, or a tuple of them."""
        return next(node for node in self.module.graph.nodes if node.op == "output").args[0]


def trace(module: nn.Module, num_inputs: int | None = None) -> TracedModel:
    """Returns the layers of a module, on whatever device it lives, the meta device included.

    The first `num_inputs` arguments of its forward are the model's inputs, and others keep their defaults; all of them
    are inputs where it is None.

    A layer is a call of a module of `torch.nn`; an operator outside such modules belongs to the last layer among those
    that feed it, or to the first layer that it feeds.

    Raises:
        InvalidModel: the module cannot be traced, uses a layer with parameters twice, has none, or returns something
            else than tensors.
    """
    fixed = _defaults(module, num_inputs)
    try:
        graph = fx.Tracer().trace(module, concrete_args=fixed)
    except Exception as error:  # whatever the model's own code raises on symbolic values
        raise InvalidModel(
            f"{type(module).__name__} cannot be traced: {error}; a forward is traced without values, so it cannot "
            "branch on tensors or make new ones of their sizes"
        ) from error
    _drop(graph, fixed)
    graph_module = fx.GraphModule(module, graph)
    graph.eliminate_dead_code()
    layer_of = _assign(graph_module)
    model = _describe(graph_module, layer_of)
    _check_returned(model)
    return model


def _check_returned(model: TracedModel) -> None:
    nodes = (model.returned,) if isinstance(model.returned, fx.Node) else model.returned
    names = (
        dict.fromkeys(nodes) if isinstance(nodes, tuple | list) and all(isinstance(n, fx.Node) for n in nodes) else {}
    )
    if not names or len(names) != len(nodes) or len(names) != len(model.outputs):
        raise InvalidModel("the model must return a tensor, or a tuple of different tensors that its layers make")


def _defaults(module: nn.Module, num_inputs: int | None) -> dict[str, Any]:
    """The arguments of `forward` beyond the inputs given, which keep their defaults."""
    if num_inputs is None:
        return {}
    parameters = list(inspect.signature(module.forward).parameters.values())
    return {p.name: p.default for p in parameters[num_inputs:] if p.default is not p.empty}


def _drop(graph: fx.Graph, fixed: Mapping[str, Any]) -> None:
    """Removes the placeholders of arguments that keep their defaults, and the checks that they do."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).rpartition("_")[0] in fixed:
            checks = [node]
            for check in checks:
                checks += [user for user in check.users if user not in checks]
            for check in reversed(checks):
                graph.erase_node(check)


def extract(model: TracedModel, layers: Iterable[str], inputs: Sequence[str], outputs: Sequence[str]) -> fx.GraphModule:
    """Returns a module of some layers that maps the tensors `inputs` to a tuple of the tensors `outputs`.

    An output that none of the layers makes is an input passed on. Parameters keep their names and are shared with the
    model. An input that a layer would change in place, itself or through a view, is copied first, because autograd
    refuses to change a leaf and whoever gave it may still be using it. Outputs are as the layers give them, strides and
    all.
    """
    chosen = set(layers)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for name in inputs:
        node = model.node_of[name]
        env[node] = graph.placeholder(node.name)
    for name in inputs:
        node = model.node_of[name]
        if _is_changed_in_place(model, node, chosen):
            env[node] = graph.call_function(torch.clone, (env[node],))
    for node in model.module.graph.nodes:
        if model.layer_of.get(node) not in chosen:
            continue
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in env:
                env[source] = graph.node_copy(source)
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[model.node_of[name]] for name in outputs))
    graph.lint()
    return fx.GraphModule(model.module, graph)


_ALIASING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ALIASING_OPERATORS = frozenset(
    ("chunk", "contiguous", "expand", "flatten", "getitem", "narrow", "permute", "reshape", "select", "split",
     "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as")
)  # fmt: skip


def _is_changed_in_place(model: TracedModel, tensor: fx.Node, layers: set[str]) -> bool:
    """Returns whether one of the layers writes to a tensor or to what may share its memory."""
    users = [user for user in tensor.users if model.layer_of.get(user) in layers]
    return any(changes_in_place(model.module, user, tensor) for user in users) or any(
        _is_changed_in_place(model, user, layers) for user in users if _may_alias(model.module, user)
    )


def _may_alias(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _ALIASING_MODULES)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _ALIASING_OPERATORS


def changes_in_place(module: fx.GraphModule, node: fx.Node, tensor: fx.Node) -> bool:
    """Returns whether an operator writes to one of its inputs."""
    if not node.args or node.args[0] is not tensor:
        return False
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return bool(node.kwargs.get("inplace")) or node.target in (
        operator.iadd, operator.isub, operator.imul, operator.itruediv,
    )  # fmt: skip


def _assign(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Gives every operator a layer."""
    layer_of: dict[fx.Node, str] = {}
    place: dict[str, int] = {}
    calls: dict[str, int] = {}
    early: list[fx.Node] = []  # operators that no layer feeds
    for node in module.graph.nodes:
        if node.op == "call_module":
            target = str(node.target)
            calls[target] = calls.get(target, 0) + 1
            if calls[target] > 1 and any(True for _ in module.get_submodule(target).parameters()):
                raise InvalidModel(f"layer '{target}' has parameters and is called more than once; call a layer once")
            name = target if calls[target] == 1 else f"{target}#{calls[target]}"
            place[name] = len(place)
            layer_of[node] = name
        elif node.op in ("call_function", "call_method"):
            feeding = [layer_of[source] for source in node.all_input_nodes if source in layer_of]
            if feeding:
                layer_of[node] = max(feeding, key=place.__getitem__)
            else:
                early.append(node)
    if not place:
        raise InvalidModel(
            "the model calls no module of torch.nn, so it has no layers to cut between; put what it does into modules, "
            "or the one that it is into an nn.Sequential"
        )
    for node in reversed(early):
        fed = [layer_of[user] for user in node.users if user in layer_of]
        layer_of[node] = min(fed, key=place.__getitem__) if fed else next(iter(place))
    return layer_of


def _describe(module: fx.GraphModule, layer_of: dict[fx.Node, str]) -> TracedModel:
    nodes = list(module.graph.nodes)
    returned = dict.fromkeys(next(node for node in nodes if node.op == "output").all_input_nodes)
    members: dict[str, list[fx.Node]] = {}
    kinds: dict[str, str] = {}
    for node in nodes:
        if node in layer_of:
            members.setdefault(layer_of[node], []).append(node)
            if node.op == "call_module":
                kinds[layer_of[node]] = type(module.get_submodule(str(node.target))).__name__
    taken = set(layer_of.values())
    name_of = {}
    for node in nodes:
        if node.op == "placeholder":
            name = str(node.target)
            name_of[node] = f"input:{name}" if name in taken else name
    for name, own in members.items():
        leaving = [n for n in own if n in returned or any(layer_of.get(user, name) != name for user in n.users)]
        for node in leaving:
            name_of[node] = name if len(leaving) == 1 else f"{name}:{node.name}"
    return TracedModel(
        module=module,
        inputs=tuple(name_of[node] for node in nodes if node.op == "placeholder"),
        outputs=tuple(name_of[node] for node in returned if node in name_of),
        layers=tuple(
            TracedLayer(
                name=name,
                kind=kinds[name],
                inputs=_entering(own, name, name_of, layer_of),
                outputs=_leaving(own, name_of),
            )
            for name, own in _in_call_order(members, nodes, layer_of)
        ),
        node_of={name: node for node, name in name_of.items()},
        layer_of=layer_of,
    )


def _in_call_order(
    members: dict[str, list[fx.Node]], nodes: list[fx.Node], layer_of: dict[fx.Node, str]
) -> list[tuple[str, list[fx.Node]]]:
    return [(layer_of[node], members[layer_of[node]]) for node in nodes if node.op == "call_module"]


def _entering(
    own: list[fx.Node], name: str, name_of: dict[fx.Node, str], layer_of: dict[fx.Node, str]
) -> tuple[str, ...]:
    sources = (source for node in own for source in node.all_input_nodes if layer_of.get(source) != name)
    return tuple(dict.fromkeys(name_of[source] for source in sources if source in name_of))


def _leaving(own: list[fx.Node], name_of: dict[fx.Node, str]) -> tuple[str, ...]:
    return tuple(name_of[node] for node in own if node in name_of)
