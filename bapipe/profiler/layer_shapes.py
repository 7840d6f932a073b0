"""The channels and planes of layers, for `bapipe estimate`: those of single modules whose splits are known."""

import operator
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from torch import Tensor, fx, nn

from bapipe.formats.layer_shape import LayerShape
from bapipe.profiler.instrument import TrainingPass
from bapipe.tracing.sizes import meta_values

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
POOLS = nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.ELU,
    nn.Hardswish,
    nn.Dropout,
    nn.Identity,
)

ELEMENTWISE_OPERATORS = {
    operator.add, operator.iadd, operator.mul, operator.sub, torch.add, torch.mul, torch.relu, torch.flatten,
    torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, F.leaky_relu, F.dropout, "add", "add_", "relu", "relu_",
    "flatten",
}  # fmt: skip
"""Operators that may follow a module in its layer: each keeps channels and planes apart, or lines them up in order."""


def layer_shapes(training_pass: TrainingPass) -> dict[str, LayerShape]:
    """Returns the shapes of the layers that are one module of a known kind, by the layers' names.

    The shapes of tensors come from a pass on the meta device; without one there are none.
    """
    model = training_pass.model
    calls = {
        layer.name: call
        for layer in model.layers
        if (call := _only_call([node for node, name in model.layer_of.items() if name == layer.name])) is not None
    }
    nodes = [node for call in calls.values() for node in (call.all_input_nodes[0], call)]
    try:
        values = dict(zip(nodes, meta_values(model.module, training_pass.inputs, 2, nodes), strict=True))
    except Exception:
        return {}
    found = {name: _shape_of(model.module, call, values) for name, call in calls.items()}
    return {name: shape for name, shape in found.items() if shape is not UNSET}


def _only_call(nodes: list[fx.Node]) -> fx.Node | None:
    """The call of a layer's module, if only elementwise operators follow it."""
    modules = [node for node in nodes if node.op == "call_module"]
    others_known = all(node.target in ELEMENTWISE_OPERATORS for node in nodes if node.op != "call_module")
    return modules[0] if len(modules) == 1 and others_known and modules[0].all_input_nodes else None


def _shape_of(module: nn.Module, call: fx.Node, values: Mapping[fx.Node, object]) -> LayerShape | UnsetType:
    called, given, made = module.get_submodule(str(call.target)), values[call.all_input_nodes[0]], values[call]
    if not isinstance(given, Tensor) or not isinstance(made, Tensor):
        return UNSET
    if isinstance(called, nn.Linear):
        return _linear(called, given)
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
    return _with_window(called, shape)


def _linear(called: nn.Linear, given: Tensor) -> LayerShape:
    """A linear layer works on the last axis, at each place of the others by itself."""
    planes = given.shape[1] if given.dim() > 2 else UNSET
    return LayerShape(
        in_channels=called.in_features, out_channels=called.out_features, in_planes=planes, out_planes=planes
    )


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
    return shape if isinstance(called, ELEMENTWISE) else UNSET


def _first(value: int | tuple[int, ...]) -> int:
    return value if isinstance(value, int) else value[0]
