"""Where the tensors that a split model returns have their samples, and which of its numbers are means over these."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from bapipe.equivalence.sample_dims import (
    BY_ROWS,
    CONSTANT,
    MEAN,
    OF_BATCH,
    UNKNOWN,
    SampleDim,
    sample_dim,
)
from bapipe.errors import InvalidModel
from bapipe.graph.reached import reached
from bapipe.torch_device import CPU
from bapipe.tracing.model import TracedModel
from bapipe.tracing.randomness import is_random
from bapipe.tracing.sizes import copy_node, is_size, meta_values
from bapipe.tracing.stages import Split, at_size

_NUM, _NUM_OTHER = 4, 2
"""Samples of which a number is computed to see whether it is a mean over them, and those of a half."""

_NUM_TRIALS = 8
"""With other samples each: in one, halves may be alike by chance."""

_TOLERANCE = 1e-4
"""Of the mean over halves, relative to the number."""


def sample_dims_of_model(parts: Split) -> list[SampleDim]:
    """Returns where the tensors that a split model returns have their samples.

    Shapes for another number of samples come from a pass without values, or on the model's device if its code needs
    some. Of a model that runs on no other number all tensors are by rows that have as many.
    """
    names, model = parts.stages[-1].outputs, parts.model
    num_samples = len(parts.examples[model.inputs[0]])
    # Not 1, which code may take for a size to broadcast; nor twice as many where a pass with values may take memory.
    num_other = num_samples // 2 if num_samples >= 4 else 2 * num_samples
    try:
        others = at_size(parts, num_other)
    except InvalidModel:
        others = None

    def found(name: str) -> SampleDim:
        shape = parts.examples[name].shape
        if not _depends_on_inputs(model.node_of[name]):
            return CONSTANT
        if others is None:
            return BY_ROWS if shape[:1] == (num_samples,) else UNKNOWN if shape else OF_BATCH
        where = sample_dim(shape, others[name].shape, num_samples, num_other)
        is_mean = where == OF_BATCH and is_mean_over_samples(model, model.node_of[name], parts.inputs)
        return MEAN if is_mean else where

    return [found(name) for name in names]


def _depends_on_inputs(node: fx.Node) -> bool:
    return any(one.op == "placeholder" for one in reached([node], lambda one: one.all_input_nodes))


def is_mean_over_samples(model: TracedModel, node: fx.Node, inputs: Sequence[Tensor]) -> bool:
    """Returns whether a tensor is a number, the mean of what it is of the halves of a micro-batch.

    It is computed of random tensors, and of their halves, in place of what the last modules, random operators and
    inputs before it give. False also if that cannot be told, as where one of these holds no floats: it may be a mask,
    or labels of which some are ignored. A module that compares samples itself counts as one that does not.
    """
    try:
        return _is_mean_over_halves(model, node, inputs)
    except Exception:  # whatever operators raise without values, or of other values than the model's
        return False


def _is_mean_over_halves(model: TracedModel, node: fx.Node, inputs: Sequence[Tensor]) -> bool:
    behind = reached([node], lambda one: [] if _is_given(model, one) else one.all_input_nodes)
    given = [one for one in behind if _is_given(model, one)]
    computed = [one for one in behind if one not in given]
    values, others = (meta_values(model.module, inputs, num, given) for num in (_NUM, _NUM_OTHER))
    dims: list[int | None] = []
    for one, value, other in zip(given, values, others, strict=True):
        is_read = any(user in computed and not is_size(model.sizes, user) for user in one.users)
        where = OF_BATCH if one.op == "get_attr" else sample_dim(value.shape, other.shape, _NUM, _NUM_OTHER)
        if (is_read and not value.is_floating_point()) or not (where.is_own or one.op == "get_attr"):
            return False
        dims.append(where.dim)
    compute = _as_function(model, given, computed, node)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return all(_is_mean_once(compute, values, dims, generator) for _ in range(_NUM_TRIALS))


def _is_mean_once(
    compute: Callable[..., Tensor], like: Sequence[Tensor], dims: Sequence[int | None], generator: torch.Generator
) -> bool:
    """Returns whether a number of random tensors like some others is the mean of that of their halves."""
    whole = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in like]
    halves = [(one,) * 2 if dim is None else one.chunk(2, dim) for one, dim in zip(whole, dims, strict=True)]
    number, parts = compute(*whole), [float(compute(*half)) for half in zip(*halves, strict=True)]
    is_number = number.numel() == 1 and number.is_floating_point()
    return is_number and abs(float(number) - sum(parts) / 2) <= _TOLERANCE * abs(float(number))


def _is_given(model: TracedModel, node: fx.Node) -> bool:
    """Returns whether a node gives what a module gives, a random operator, an input, or a part of that."""
    if node.target is operator.getitem and _is_given(model, node.all_input_nodes[0]):
        return True
    return node.op not in ("call_function", "call_method") or is_random(model.module, node)


def _as_function(
    model: TracedModel, given: Sequence[fx.Node], computed: Sequence[fx.Node], node: fx.Node
) -> Callable[..., Tensor]:
    """Returns a function from the values of some nodes to that of another, by way of those that are computed."""
    graph = fx.Graph()
    copies = {one: graph.placeholder(one.name) for one in given}
    for one in model.module.graph.nodes:
        if one in computed:
            copies[one] = copy_node(graph, one, copies.__getitem__, CPU)
    graph.output(copies[node])
    return fx.GraphModule(nn.Module(), graph)
