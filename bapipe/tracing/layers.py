"""From a graph of operators to layers and the tensors between them."""

import fnmatch
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from bapipe.errors import InvalidModel
from bapipe.tracing.aliasing import alias_set, gives_what_it_changes, rewire_inplace_uses, writers
from bapipe.tracing.capture import Captured, capture, is_layer
from bapipe.tracing.model import Hazard, Result, TracedLayer, TracedModel, node_state
from bapipe.tracing.randomness import is_random
from bapipe.tracing.sizes import is_size, observe

OPERATOR = "op:"
"""How the name of a layer that is one operator begins."""


def trace(
    module: nn.Module,
    inputs: Sequence[Tensor] | None = None,
    *,
    leaf_modules: Sequence[str] = (),
    operator_layers: bool = False,
) -> TracedModel:
    """Returns the layers of a module, on whatever device it lives, the meta device included.

    A layer is a call of a module of `torch.nn` or of one without children. An operator outside such modules belongs to
    the last layer among those that feed it. One that only the model's inputs and constants feed is done by every stage
    that needs it, unless it has parameters, draws random numbers or changes something: then it belongs to the first
    layer that it feeds. The module is traced in the mode, training or not, in which it is.

    Args:
        inputs: examples of the first arguments of its forward, of any batch size, batch first; the other arguments
            keep their defaults. Without them every argument is an input, only torch.fx is tried, and sizes cannot be
            used across a cut.
        leaf_modules: paths of modules of which each call is one layer; `*` stands for any part of a path.
        operator_layers: operators outside modules are layers of their own, named `op:` and the operator.

    Raises:
        InvalidModel: the module cannot be traced, has no layers, or returns something else than tensors.
    """
    captured = capture(module, inputs, _paths(module, leaf_modules))
    rewire_inplace_uses(captured.module)
    replicated = _replicated_nodes(captured)
    if operator_layers:
        captured = _with_operators(captured, replicated)
    layer_of = _assign(captured, replicated)

    def crosses(node: fx.Node) -> bool:
        return node in replicated or any(layer_of.get(user) != layer_of[node] for user in node.users)

    sizes = {} if inputs is None else observe(captured.module, inputs, crosses)
    return _describe(module, captured, sizes, replicated, layer_of)


def granularity(module: nn.Module, layers: Sequence[str]) -> tuple[list[str], bool]:
    """Returns the `leaf_modules` and `operator_layers` with which tracing a module gives the named layers."""
    paths = dict(module.named_modules())
    named = [name.partition("#")[0] for name in layers]
    leaf_modules = [name for name in named if name in paths and not is_layer(paths[name], name)]
    return leaf_modules, any(name.startswith(OPERATOR) for name in named)


def _paths(module: nn.Module, leaf_modules: Sequence[str]) -> list[str]:
    known = [path for path, _ in module.named_modules() if path]
    found: list[str] = []
    for pattern in leaf_modules:
        matching = fnmatch.filter(known, pattern)
        if not matching:
            raise InvalidModel(f"{type(module).__name__} has no module '{pattern}' to take as one layer")
        found += matching
    return list(dict.fromkeys(found))


def _with_operators(captured: Captured, replicated: frozenset[fx.Node]) -> Captured:
    """Makes operators between modules layers; what picks a part of a result stays with it."""
    called: dict[fx.Node, str] = {}
    kinds = dict(captured.kinds)
    for node in captured.module.graph.nodes:
        if node in captured.called:
            called[node] = captured.called[node]
        elif (
            node.op in ("call_function", "call_method")
            and node not in replicated
            and node.target is not operator.getitem
        ):
            called[node] = f"{OPERATOR}{node.name}"
            kinds[called[node]] = getattr(node.target, "__name__", str(node.target))
    return replace(captured, called=called, kinds=kinds)


def _replicated_nodes(captured: Captured) -> frozenset[fx.Node]:
    """Operators that every stage may do for itself: what they need is there, and they give the same each time."""
    module = captured.module
    changed: set[fx.Node] = set()
    for node, tensor in writers(module):
        changed |= {node, *alias_set(module, tensor)}
    replicated: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method") or node in captured.called or node in changed:
            continue
        if is_random(module, node) or any(_is_state(captured, tensor) for _, tensor in node_state(module, node)):
            continue
        if all(source.op in ("placeholder", "get_attr") or source in replicated for source in node.all_input_nodes):
            replicated.add(node)
    return frozenset(replicated)


def _is_state(captured: Captured, tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _assign(captured: Captured, replicated: frozenset[fx.Node]) -> dict[fx.Node, str]:
    """Gives every operator a layer."""
    nodes = [node for node in captured.module.graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    place = {name: index for index, name in enumerate(dict.fromkeys(captured.called.values()))}
    if not place:
        raise InvalidModel(
            "the model calls no module of torch.nn, so it has no layers to cut between; put what it does into modules, "
            "or the one that it is into an nn.Sequential"
        )
    layer_of: dict[fx.Node, str] = {}
    early: list[fx.Node] = []  # operators that no layer feeds
    for node in nodes:
        feeding = [layer_of[source] for source in node.all_input_nodes if source in layer_of]
        if node in captured.called:
            layer_of[node] = captured.called[node]
        elif feeding:
            layer_of[node] = max(feeding, key=place.__getitem__)
        else:
            early.append(node)
    later = _later_users(captured.module)
    for node in reversed(early):
        fed = [layer_of[user] for user in (*node.users, *later.get(node, ())) if user in layer_of]
        layer_of[node] = min(fed, key=place.__getitem__) if fed else next(iter(place))
    return layer_of


def _later_users(module: fx.GraphModule) -> dict[fx.Node, set[fx.Node]]:
    """The operators that see what an operator without a result of its own changed in place."""
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    return {
        node: {user for same in alias_set(module, tensor) for user in same.users if place[user] > place[node]}
        for node, tensor in writers(module)
    }


def _describe(
    root: nn.Module,
    captured: Captured,
    sizes: Mapping[fx.Node, tuple[Any, Any]],
    replicated: frozenset[fx.Node],
    layer_of: dict[fx.Node, str],
) -> TracedModel:
    module = captured.module
    nodes = list(module.graph.nodes)
    members: dict[str, list[fx.Node]] = {name: [] for name in dict.fromkeys(captured.called.values())}
    for node in nodes:
        if node in layer_of and node not in replicated:
            members[layer_of[node]].append(node)
    unsendable = {node for node in layer_of if is_size(sizes, node)}
    names = _Names(members, captured, replicated, unsendable, layer_of)
    entering = {name: tuple(dict.fromkeys(names.entering(own, name))) for name, own in members.items()}
    result, outputs = _result(captured, names.of)
    return TracedModel(
        root=root,
        module=module,
        inputs=tuple(names.of[node] for node in nodes if node.op == "placeholder"),
        outputs=outputs,
        result=result,
        layers=tuple(
            TracedLayer(
                name=name,
                kind=captured.kinds[name],
                inputs=entering[name],
                outputs=tuple(names.of[node] for node in own if node in names.of),
            )
            for name, own in members.items()
        ),
        node_of={name: node for node, name in names.of.items()},
        layer_of=layer_of,
        replicated=replicated,
        sizes=sizes,
        hazards=tuple(dict.fromkeys(_hazards(module, layer_of))),
    )


class _Names:
    """Names of the tensors between layers: a layer's own where it gives one, else `layer:operator`."""

    def __init__(
        self,
        members: Mapping[str, Sequence[fx.Node]],
        captured: Captured,
        replicated: frozenset[fx.Node],
        unsendable: set[fx.Node],
        layer_of: Mapping[fx.Node, str],
    ) -> None:
        self._replicated, self._unsendable, self._layer_of = replicated, unsendable, layer_of
        self.of: dict[fx.Node, str] = {}
        for node in captured.module.graph.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                self.of[node] = f"input:{name}" if name in members else name
        returned = {leaf for leaf in captured.returned if isinstance(leaf, fx.Node)}
        for name, own in members.items():
            leaving = [node for node in own if node in returned or self._leaves(node, name)]
            for node in leaving:
                self.of[node] = name if len(leaving) == 1 else f"{name}:{node.name}"

    def _leaves(self, node: fx.Node, layer: str) -> bool:
        """Whether another layer uses what an operator gives."""
        if node in self._unsendable:
            return False
        return any(self._layer_of.get(user, layer) != layer for user in node.users)

    def entering(self, nodes: Sequence[fx.Node], layer: str) -> Iterator[str]:
        """Yields the tensors that a layer's operators need from outside, also through replicated operators."""
        seen: set[fx.Node] = set()
        todo = [source for node in nodes for source in node.all_input_nodes]
        while todo:
            node = todo.pop(0)
            if node in seen or node in self._unsendable:
                continue
            seen.add(node)
            if node in self._replicated:
                todo += node.all_input_nodes
            elif node in self.of and self._layer_of.get(node) != layer:
                yield self.of[node]


def _result(captured: Captured, name_of: Mapping[fx.Node, str]) -> tuple[Result, tuple[str, ...]]:
    places: dict[str, int] = {}
    leaves: list[int | None] = []
    for leaf in captured.returned:
        if leaf is not None and not (isinstance(leaf, fx.Node) and leaf in name_of and leaf.op != "placeholder"):
            raise InvalidModel(
                f"the model returns '{leaf}', which none of its layers makes: return only tensors that layers make, "
                "alone or nested in tuples, lists and dictionaries"
            )
        leaves.append(None if leaf is None else places.setdefault(name_of[leaf], len(places)))
    if not places:
        raise InvalidModel("the model returns nothing: return the tensors that the loss is made of")
    constants = tuple(leaf for leaf in captured.returned if leaf is None)
    return Result(spec=captured.spec, leaves=tuple(leaves), constants=constants), tuple(places)


def _hazards(module: fx.GraphModule, layer_of: Mapping[fx.Node, str]) -> Iterator[Hazard]:
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    for writer, tensor in writers(module):
        if writer not in layer_of:
            continue
        after = _descendants(writer) if gives_what_it_changes(writer) else {writer}
        # A view of what the writer returned holds the change, wherever it goes.
        for same in alias_set(module, tensor) - after:
            for user in same.users:
                if user in after or layer_of.get(user, layer_of[writer]) == layer_of[writer]:
                    continue
                yield Hazard(reader=layer_of[user], writer=layer_of[writer], same_stage=place[user] > place[writer])


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += one.users
    return found
