"""Traces a module: assigns the operators of its graph to layers, and names the tensors between these."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.errors import InvalidModel
from bapipe.graph.reached import reached
from bapipe.module_state.assigned_attributes import may_be_inlined
from bapipe.module_state.python_state import state_restored
from bapipe.tracing.aliasing import (
    alias_set,
    may_alias,
    returns_what_it_changes,
    rewire_inplace_uses,
    writers,
    writes_to_state,
)
from bapipe.tracing.capture import capture
from bapipe.tracing.captured import Captured, autocast_of_training, output_node
from bapipe.tracing.fx_capture import TracingFailed
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.tracing.leaf_modules import matching_paths
from bapipe.tracing.model import Hazard, TracedLayer, TracedModel, attribute, input_name, node_state
from bapipe.tracing.randomness import is_random
from bapipe.tracing.recorded_capture import capture_by_recording
from bapipe.tracing.results import (
    NoTensorReturned,
    check_returns_tensors,
    result_of,
    returns_it,
    with_returned_values,
)
from bapipe.tracing.shared_memory import check_shared_memory
from bapipe.tracing.sizes import (
    UnknownSizes,
    batch_dimension,
    check_batch_size,
    depends_on_batch,
    is_size,
    observe_sizes,
)
from bapipe.tracing.sparse_constants import check_constants_dense

OPERATOR = "op:"
"""Prefix of the name of a layer that is one operator."""


def trace(
    module: nn.Module,
    inputs: Sequence[Tensor] | None = None,
    *,
    leaf_modules: Sequence[str] = (),
    operator_layers: bool = False,
    called_leaves: bool = False,
    microbatch_size: int | None = None,
    autocast: torch.dtype | None = None,
    layers: Sequence[str] = (),
    inlined: Sequence[str] = (),
) -> TracedModel:
    """Returns the layers of a module, on whatever device it lives, the meta device included.

    A layer is a call of a module of `torch.nn`, or of a module without children. An operator outside such modules
    belongs to the last of the layers that feed it. An operator that only the model's inputs and constants feed is
    replicated: every stage that needs it computes it. If it has parameters, draws random numbers or changes a tensor in
    place, it belongs to the first layer that it feeds instead. The module is traced in its current mode, training or
    not.

    Args:
        inputs: examples of the first arguments of its forward, of any batch size, batch first; the other arguments
            keep their defaults. Without examples every argument is an input, only torch.fx is tried, and sizes cannot
            be used across a cut.
        leaf_modules: paths of modules of which each call is one layer; `*` matches any part of a path.
        operator_layers: whether each operator outside modules is a layer, named `op:` and the operator.
        called_leaves: whether leaf modules must be called as they are, instead of as the operators inside them.
        microbatch_size: of the micro-batches that the model will train on, for which what is traced must be right: code
            may do something else for few samples than for many.
        autocast: in which the model will train; its code may ask for that, to turn it off for a part.
        layers: names that layers have had before: of two ways to find layers the one that finds these is taken.
        inlined: paths of modules without children that are no layers: their operators belong to layers as those between
            modules do, unless they cannot be traced, or are leaf modules.

    Raises:
        InvalidModel: the module cannot be traced, has no layers, returns values that are not tensors, uses sparse
            constants, or has trained parameters in memory that other parameters or buffers share.
    """
    with state_restored(module):
        leaves = frozenset(matching_paths(module, leaf_modules))
        choice = LayerChoice(leaf_modules=leaves, inlined=frozenset(inlined))
        check_size = check_batch_size(microbatch_size)
        modules = dict(module.named_modules())
        wanted = frozenset(name for name in layers if name.partition("#")[0] in modules)
        with autocast_of_training(autocast):
            captured = capture(module, inputs, choice, called_leaves, check_size, wanted)
        try:
            model = _traced(module, captured, inputs, operator_layers, check_size)
        except (UnknownSizes, NoTensorReturned) as error:
            with autocast_of_training(autocast):
                captured = _captured_with_sizes(captured, module, inputs, choice, check_size, error)
            model = _traced(module, captured, inputs, operator_layers, check_size)
        check_constants_dense(model)
        check_shared_memory(model)
        return model


def _captured_with_sizes(
    captured: Captured,
    module: nn.Module,
    inputs: Sequence[Tensor] | None,
    choice: LayerChoice,
    check_size: int,
    reason: UnknownSizes | NoTensorReturned,
) -> Captured:
    """Returns what recording captures, which knows the sizes, and takes apart what the model returns.

    If that fails, returns what was captured, without sizes.

    Raises:
        InvalidModel: it fails for a model that returns something else than tensors.
    """
    assert inputs is not None
    try:
        return capture_by_recording(module, inputs, choice, check_size)
    except TracingFailed as error:
        if isinstance(reason, NoTensorReturned):
            raise InvalidModel(str(reason)) from error
        return replace(captured, sizes={})


def _traced(
    module: nn.Module, captured: Captured, inputs: Sequence[Tensor] | None, operator_layers: bool, check_size: int
) -> TracedModel:
    rewire_inplace_uses(captured.module)
    replicated = _replicated_nodes(captured)
    captured = with_returned_values(captured, replicated)
    if operator_layers:
        captured = _with_operators(captured, replicated)
    if not captured.layer_of_call:
        captured = _as_one_layer(module, captured, replicated)
    layer_of = _assign_layers(captured)

    def crosses(node: fx.Node) -> bool:
        return node in replicated or any(layer_of.get(user) != layer_of[node] for user in node.users)

    sizes = captured.sizes
    if sizes is None and inputs is not None:
        sizes = observe_sizes(captured.module, inputs, crosses, check_size)
        check_returns_tensors(captured, inputs)
    return _traced_model(module, captured, sizes or {}, replicated, layer_of)


def granularity(module: nn.Module, layers: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Returns the `leaf_modules`, `inlined` and `operator_layers` with which `trace` gives the named layers."""
    paths = dict(module.named_modules())
    module_names = [name.partition("#")[0] for name in layers]
    leaf_modules = [name for name in module_names if name in paths and not LayerChoice().is_layer(paths[name], name)]
    named = set(module_names)
    inlined = [path for path, part in paths.items() if path and path not in named and may_be_inlined(part)]
    return leaf_modules, inlined, any(name.startswith(OPERATOR) for name in module_names)


def _with_operators(captured: Captured, replicated: frozenset[fx.Node]) -> Captured:
    """Makes operators between modules layers; `getitem`, which selects a part of a result, stays in its layer."""
    layer_of_call: dict[fx.Node, str] = {}
    kinds = dict(captured.kinds)
    for node in captured.module.graph.nodes:
        if node in captured.layer_of_call:
            layer_of_call[node] = captured.layer_of_call[node]
        elif (
            node.op in ("call_function", "call_method")
            and node not in replicated
            and node.target is not operator.getitem
        ):
            layer_of_call[node] = f"{OPERATOR}{node.name}"
            kinds[layer_of_call[node]] = getattr(node.target, "__name__", str(node.target))
    return replace(captured, layer_of_call=layer_of_call, kinds=kinds)


def _as_one_layer(module: nn.Module, captured: Captured, replicated: frozenset[fx.Node]) -> Captured:
    """Makes all operators one layer, of a model that calls no modules, such as a single module of torch."""
    name = type(module).__name__
    calls = [node for node in captured.module.graph.nodes if node.op in ("call_function", "call_method")]
    layer_of_call = {node: name for node in calls if node not in replicated}
    if all(returns_it(node) for node in layer_of_call):
        raise InvalidModel(f"{name} has no layers: it calls no modules, and computes nothing from its parameters")
    return replace(captured, layer_of_call=layer_of_call, kinds={name: name})


def _replicated_nodes(captured: Captured) -> frozenset[fx.Node]:
    """Returns the operators that every stage can compute for itself, with the same result in each stage."""
    module = captured.module
    changed: set[fx.Node] = set()
    for node, tensor in writers(module):
        changed |= {node, *alias_set(module, tensor)}
    changing = {id(attribute(module, name)) for _, names in _changes_of_state(module) for name in names}
    replicated: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method") or node in captured.layer_of_call or node in changed:
            continue
        if returns_it(node) or is_random(module, node):
            continue
        if any(_is_trained(tensor) or id(tensor) in changing for _, tensor in node_state(module, node)):
            continue
        if all(source.op in ("placeholder", "get_attr") or source in replicated for source in node.all_input_nodes):
            replicated.add(node)
    return frozenset(replicated)


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _assign_layers(captured: Captured) -> dict[fx.Node, str]:
    """Returns the layer of every operator, see `trace`."""
    nodes = [node for node in captured.module.graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    position = {name: index for index, name in enumerate(dict.fromkeys(captured.layer_of_call.values()))}
    layer_of: dict[fx.Node, str] = {}
    early: list[fx.Node] = []  # operators that no layer feeds
    for node in nodes:
        feeding = [layer_of[source] for source in node.all_input_nodes if source in layer_of]
        if node in captured.layer_of_call:
            layer_of[node] = captured.layer_of_call[node]
        elif returns_it(node):
            layer_of[node] = next(reversed(position))
        elif feeding:
            layer_of[node] = max(feeding, key=position.__getitem__)
        else:
            early.append(node)
    later = _later_users(captured.module)
    for node in reversed(early):
        fed = [layer_of[user] for user in (*node.users, *later.get(node, ())) if user in layer_of]
        layer_of[node] = min(fed, key=position.__getitem__) if fed else next(iter(position))
    for node in early:
        if _is_one_of_several(node):  # several results cannot cross a cut together
            layer_of[node] = layer_of.get(node.all_input_nodes[0], layer_of[node])
    return layer_of


def _is_one_of_several(node: fx.Node) -> bool:
    """Returns whether an operator takes a result by its number, as of `topk` or `chunk`."""
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _later_users(module: fx.GraphModule) -> dict[fx.Node, set[fx.Node]]:
    """Returns for each operator that writes to a tensor the operators after it that may read this memory."""
    nodes = list(module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    later = {
        node: {user for alias in alias_set(module, tensor) for user in alias.users if position[user] > position[node]}
        for node, tensor in writers(module)
    }
    for node, names in _changes_of_state(module):
        written = {id(attribute(module, name)) for name in names}
        users = (user for user in nodes[position[node] + 1 :] if user.op != "get_attr")
        reading = {user for user in users if any(id(tensor) in written for _, tensor in node_state(module, user))}
        later[node] = later.get(node, set()) | reading
    return later


def _changes_of_state(module: fx.GraphModule) -> Iterator[tuple[fx.Node, list[str]]]:
    """Yields (operator, names of the parameters and buffers whose values it changes)."""
    return ((node, names) for node, names in writes_to_state(module) if node.target != "requires_grad_")


def _traced_model(
    root: nn.Module,
    captured: Captured,
    sizes: Mapping[fx.Node, tuple[Any, Any]],
    replicated: frozenset[fx.Node],
    layer_of: dict[fx.Node, str],
) -> TracedModel:
    module = captured.module
    nodes = list(module.graph.nodes)
    members: dict[str, list[fx.Node]] = {name: [] for name in dict.fromkeys(captured.layer_of_call.values())}
    for node in nodes:
        if node in layer_of and node not in replicated:
            members[layer_of[node]].append(node)
    unsendable = {node for node in layer_of if is_size(sizes, node)}
    names = _TensorNames(members, captured, replicated, unsendable, layer_of)
    batch = [n for n in nodes if n.op == "placeholder" and batch_dimension(sizes, n)]
    entering = {name: names.entering(inside, name, batch[:1], sizes) for name, inside in members.items()}
    result, outputs = result_of(captured, names.of)
    node_of = {name: node for node, name in names.of.items()}
    output_node(module.graph).args = (tuple(node_of[name] for name in outputs),)
    module.recompile()
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
                outputs=tuple(names.of[node] for node in inside if node in names.of),
            )
            for name, inside in members.items()
        ),
        node_of=node_of,
        layer_of=layer_of,
        replicated=replicated,
        sizes=sizes,
        writes=tuple(writers(module)),
        hazards=tuple(dict.fromkeys(_hazards(module, layer_of))),
        leaf_reasons=captured.leaf_reasons,
    )


class _TensorNames:
    """Names of the tensors between layers: the layer's if it has one output, else `layer:operator`."""

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
                self.of[node] = input_name(str(node.target), members)
        returned = {leaf for leaf in captured.returned if isinstance(leaf, fx.Node)}
        for name, inside in members.items():
            leaving = [node for node in inside if node in returned or self._leaves(node, name)]
            for node in leaving:
                self.of[node] = name if len(leaving) == 1 else f"{name}:{node.name}"

    def _leaves(self, node: fx.Node, layer: str) -> bool:
        """Returns whether another layer uses the result of an operator."""
        if node in self._unsendable:
            return False
        return any(self._layer_of.get(user, layer) != layer for user in node.users)

    def entering(
        self,
        nodes: Sequence[fx.Node],
        layer: str,
        batch: Sequence[fx.Node],
        sizes: Mapping[fx.Node, tuple[Any, Any]],
    ) -> tuple[str, ...]:
        """Returns the tensors that a layer's operators need from outside, also through replicated operators.

        A layer that needs the batch size alone, as for the first state of a recurrent one, reads it from `batch`.
        """
        needed, reads_batch = dict[fx.Node, None](), False
        seen: set[fx.Node] = set()
        todo = [source for node in nodes for source in node.all_input_nodes]
        while todo:
            node = todo.pop(0)
            if node in seen:
                continue
            seen.add(node)
            if node in self._unsendable:
                elsewhere = node in self._replicated or self._layer_of.get(node) != layer
                reads_batch |= elsewhere and depends_on_batch(sizes, node)
            elif node in self._replicated:
                todo += node.all_input_nodes
            elif node in self.of and self._layer_of.get(node) != layer:
                needed[node] = None
        if reads_batch and not any(batch_dimension(sizes, node) for node in needed):
            needed |= dict.fromkeys(batch)
        return tuple(dict.fromkeys(self.of[node] for node in needed))


def _hazards(module: fx.GraphModule, layer_of: Mapping[fx.Node, str]) -> Iterator[Hazard]:
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    for writer, tensor in writers(module):
        if writer not in layer_of:
            continue
        after = set(reached([writer], lambda node: node.users)) if returns_what_it_changes(writer) else {writer}
        # A view of what the writer returned holds the change, wherever it goes.
        aliases = alias_set(module, tensor)
        for alias in aliases - after:
            for user in alias.users:
                if user in after or layer_of.get(user, layer_of[writer]) == layer_of[writer]:
                    continue
                yield Hazard(
                    reader=layer_of[user], writer=layer_of[writer], same_stage=position[user] > position[writer]
                )
        later = (user for alias in aliases - after for user in alias.users if user not in after)
        if any(position[user] > position[writer] for user in later):
            # A stage that received a tensor and its view would have two tensors.
            views = {layer_of[node] for node in aliases - after if node in layer_of and may_alias(module, node)}
            for layer in sorted(views - {layer_of[writer]}):
                yield Hazard(reader=layer, writer=layer_of[writer], same_stage=True)
