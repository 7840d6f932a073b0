"""The channels, planes and heads of layers, for `bapipe estimate`: of those whose splits are known."""

import operator
from collections.abc import Mapping, Sequence
from copy import deepcopy
from numbers import Integral

import torch
import torch.nn.functional as F  # noqa: N812
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from torch import Tensor, fx, nn

from bapipe.formats.layer_shape import LayerShape
from bapipe.module_state.python_random import all_generators_restored
from bapipe.torch_device import CPU
from bapipe.tracing.attention_heads import (
    KEEPS_HEADS_APART,
    depending_on_parameters,
    find_attentions,
    linear_sizes,
    queries,
)
from bapipe.tracing.model import TracedLayer, TracedModel
from bapipe.tracing.sizes import meta_values

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
POOLS = nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
ELEMENTWISE_OPERATORS = {
    operator.add, operator.iadd, operator.mul, operator.sub, torch.add, torch.mul, torch.relu, torch.flatten,
    torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, F.leaky_relu, F.dropout, "add", "add_", "mul", "mul_", "sub",
    "relu", "relu_", "flatten",
}  # fmt: skip
"""Operators that may follow a module in its layer: each keeps channels and planes apart, or lines them up in order."""


def layer_shapes(model: TracedModel, inputs: Sequence[Tensor]) -> dict[str, LayerShape]:
    """Returns the shapes of layers whose split is known, by the layers' names: of single modules, and of attention.

    The shapes of tensors come from a pass of the inputs on the meta device; without one there are none.
    """
    operators: dict[str, list[fx.Node]] = {layer.name: [] for layer in model.layers}
    for node, name in model.layer_of.items():
        if node not in model.replicated:
            operators[name].append(node)
    calls = {name: call for name, nodes in operators.items() if (call := _module_call(nodes)) is not None}
    nodes = [node for call in calls.values() for node in (call.all_input_nodes[0], call)] + queries(model.module)
    try:
        values = dict(zip(nodes, meta_values(model.module, inputs, 2, nodes), strict=True))
    except Exception:
        return {}
    found = {name: shape for name, shape in _with_heads(model, operators, values).items() if name in calls}
    for name, call in calls.items():
        if name not in found and _are_elementwise(operators[name]):
            shape = _shape_of(model.module, call, values)
            if shape is not UNSET:
                found[name] = shape
    joined = {layer.name: _elementwise_inputs(model, layer, calls) for layer in model.layers if layer.name in found}
    return {name: replace(_in_ints(shape), elementwise_inputs=joined[name]) for name, shape in found.items()}


def _in_ints(shape: LayerShape) -> LayerShape:
    """Returns a shape whose numbers are Python's; those of a module may be numpy's, if numpy has computed its width."""
    values = ((name, getattr(shape, name)) for name in shape.__struct_fields__)
    return replace(shape, **{name: int(n) for name, n in values if isinstance(n, Integral) and not isinstance(n, bool)})


def _module_call(nodes: list[fx.Node]) -> fx.Node | None:
    """The call of a layer's module."""
    modules = [node for node in nodes if node.op == "call_module"]
    return modules[0] if len(modules) == 1 and modules[0].all_input_nodes else None


def _are_elementwise(nodes: list[fx.Node]) -> bool:
    return all(node.target in ELEMENTWISE_OPERATORS for node in nodes if node.op != "call_module")


def _elementwise_inputs(model: TracedModel, layer: TracedLayer, calls: Mapping[str, fx.Node]) -> tuple[str, ...]:
    """The inputs of a layer that its module does not read."""
    read = set(calls[layer.name].all_input_nodes)
    return tuple(tensor for tensor in layer.inputs if model.node_of[tensor] not in read)


def _with_heads(
    model: TracedModel, operators: Mapping[str, list[fx.Node]], values: Mapping[fx.Node, object]
) -> dict[str, LayerShape]:
    """The shapes of layers that compute queries, keys and values of attentions, or attend."""
    found: dict[str, LayerShape] = {}
    trained = depending_on_parameters(model.module)
    for attention in find_attentions(model.module, values):
        layers = [model.layer_of[node] for node in attention.linears]
        attending = model.layer_of[attention.call]
        known = {*attention.linears, attention.call}
        others = {node for name in layers for node in operators[name] if node in trained and node not in known}
        if attention.heads == 1 or attending not in layers or any(n.target not in KEEPS_HEADS_APART for n in others):
            continue
        for name, (in_channels, out_channels) in zip(layers, attention.sizes, strict=True):
            attends = name == attending
            found[name] = LayerShape(
                in_channels=in_channels,
                out_channels=attention.channels if attends else out_channels,
                heads=attention.heads,
                attends=attends,
            )
    return found


def _shape_of(module: nn.Module, call: fx.Node, values: Mapping[fx.Node, object]) -> LayerShape | UnsetType:
    called, given, made = module.get_submodule(str(call.target)), values[call.all_input_nodes[0]], values[call]
    if not isinstance(given, Tensor) or not isinstance(made, Tensor):
        return UNSET
    if (sizes := linear_sizes(called)) is not None:
        return _linear(*sizes, given)
    if isinstance(called, nn.LayerNorm):
        return _layer_norm(called, given)
    if isinstance(called, nn.Embedding):
        return _embedding(called, given)
    if given.dim() < 2 or made.dim() < 2:
        return UNSET
    shape = LayerShape(
        in_channels=given.shape[1],
        out_channels=made.shape[1],
        mixes_channels=False,
        in_planes=given.shape[2] if given.dim() > 2 else UNSET,
        out_planes=made.shape[2] if made.dim() > 2 else UNSET,
    )
    if _is_elementwise(called) and _channels_are_last(module, call.all_input_nodes[0]):
        return replace(_linear(given.shape[-1], made.shape[-1], given), mixes_channels=False)
    return _with_window(called, shape)


def _channels_are_last(module: nn.Module, node: fx.Node) -> bool:
    """Returns whether a tensor comes from a layer that works on the last axis, perhaps through elementwise ones."""
    while node.op != "placeholder" and node.all_input_nodes:
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            if linear_sizes(called) is not None or isinstance(called, nn.LayerNorm | nn.Embedding):
                return True
            if not _is_elementwise(called):
                return False
        elif node.target not in ELEMENTWISE_OPERATORS:
            return False
        node = node.all_input_nodes[0]
    return False


def _linear(in_channels: int, out_channels: int, given: Tensor) -> LayerShape:
    """A linear layer works on the last axis, at each place of the others by itself."""
    planes = given.shape[1] if given.dim() > 2 else UNSET
    return LayerShape(in_channels=in_channels, out_channels=out_channels, in_planes=planes, out_planes=planes)


def _layer_norm(called: nn.LayerNorm, given: Tensor) -> LayerShape | UnsetType:
    """A layer norm needs all values of the last axes; places before those are apart from one another."""
    if given.dim() - len(called.normalized_shape) < 2:
        return UNSET
    return LayerShape(in_planes=given.shape[1], out_planes=given.shape[1])


def _embedding(called: nn.Embedding, given: Tensor) -> LayerShape:
    """An embedding is a linear layer of one-hot inputs: its filters are parts of the vectors, its channels parts of the
    vocabulary, for which each member looks up what it has and the members sum the vectors.
    """
    planes = given.shape[1] if given.dim() > 1 else UNSET
    return LayerShape(
        in_channels=called.num_embeddings, out_channels=called.embedding_dim, in_planes=planes, out_planes=planes
    )


def _with_window(called: nn.Module, shape: LayerShape) -> LayerShape | UnsetType:
    """The shape with what an output plane reads; UNSET for modules whose splits are not known."""
    if isinstance(called, CONVOLUTIONS) and not isinstance(called.padding, str) and called.padding_mode == "zeros":
        if called.groups not in (1, called.in_channels):
            return UNSET
        window = (called.kernel_size[0] - 1) * called.dilation[0] + 1
        return replace(
            shape,
            mixes_channels=called.groups == 1,
            window=window,
            stride=called.stride[0],
            padding=called.padding[0],
        )
    if isinstance(called, POOLS) and not getattr(called, "ceil_mode", False):
        window, stride, padding = (_first(getattr(called, name)) for name in ("kernel_size", "stride", "padding"))
        dilation = _first(getattr(called, "dilation", 1))
        return replace(shape, window=(window - 1) * dilation + 1, stride=stride, padding=padding)
    if isinstance(called, BATCH_NORMS):
        return replace(shape, sums_samples=True)
    return shape if _is_elementwise(called) else UNSET


def _is_elementwise(called: nn.Module) -> bool:
    """Returns whether a module computes each value from the one at its place alone: that is tried on a small tensor."""
    if isinstance(called, nn.Dropout):
        return True
    if any(True for _ in (*called.parameters(), *called.buffers())):
        return False
    values = torch.linspace(-2, 2, 24, device=CPU).reshape(2, 3, 4)
    changed = values.repeat(24, 1, 1, 1) + torch.eye(24, device=CPU).reshape(24, 2, 3, 4)
    try:
        with torch.no_grad(), all_generators_restored():
            tried = deepcopy(called)
            before, after = tried(values), torch.stack([tried(one) for one in changed])
    except Exception:  # whatever a module raises that wants something else
        return False
    if before.shape != values.shape:
        return False
    same = (after == before).reshape(24, 24)
    return bool(same.logical_or(torch.eye(24, dtype=torch.bool, device=CPU)).all())


def _first(value: int | tuple[int, ...]) -> int:
    return value if isinstance(value, int) else value[0]
