"""Values of a graph that are not tensors, such as batch sizes and shapes, and how a stage computes them.

Such a value cannot be sent between stages. It need not be: it is a constant or an affine function of the batch size,
which a stage reads from the shape of any of its inputs. To find the function, the graph runs at two batch sizes without
values; a third one checks it.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from bapipe.errors import InvalidModel
from bapipe.graph.reached import reached
from bapipe.module_state.cached_functions import caches_bypassed
from bapipe.module_state.python_random import all_generators_restored
from bapipe.module_state.python_state import state_restored
from bapipe.torch_private.tensors import tree_map

BATCH_SIZES = (5, 7)
"""The two batch sizes; odd, so that other dimensions, mostly even, are not mistaken for the batch."""

CHECK_BATCH_SIZE = 11
"""The third batch size, at which values must be those that the first two predict; see `check_batch_size`."""


def check_batch_size(microbatch_size: int | None) -> int:
    """Returns the third batch size for a model that will train on micro-batches of some size: that one, if it can be.

    Micro-batches of 1 and 2 samples, of which code may take 1 for a size to broadcast, are compared with the model.
    """
    if microbatch_size is None or microbatch_size in (1, 2, *BATCH_SIZES):
        return CHECK_BATCH_SIZE
    return microbatch_size


_META = torch.device("meta")


class UnknownSizes(Exception):
    """The graph cannot run without values."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The shape of a tensor, in place of its values."""

    dims: tuple[int, ...]


def observe_sizes(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    crosses: Callable[[fx.Node], bool],
    check_size: int = CHECK_BATCH_SIZE,
) -> dict[fx.Node, tuple[Any, Any]]:
    """Returns the values of nodes at the two batch sizes, for tensors their `TensorShape`.

    The graph runs on the meta device, which allocates nothing. Nodes that may be sizes are observed first. All others,
    which are slow for recurrent layers, are observed only if a size that depends on the batch `crosses` from one layer
    to another, because the stage of the other layer must then find the batch size in a tensor.

    Args:
        check_size: the third batch size.

    Raises:
        UnknownSizes: the model fails without values.
    """
    try:
        known = _observe_nodes(module, inputs, _size_nodes(module), check_size)
        if any(a != b and crosses(node) for node, (a, b) in known.items() if is_size(known, node)):
            every = [node for node in module.graph.nodes if node.op not in ("output", "get_attr")]
            known |= _observe_nodes(module, inputs, every, check_size)
    except Exception as error:  # whatever the model's own code raises without values
        raise UnknownSizes(str(error)) from error
    return known


def _size_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the operators that may return sizes: those that read a tensor's size, and arithmetic on such."""
    sizes: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        target = node.target
        reads_size = target in ("size", "dim", "numel", "__len__") if node.op == "call_method" else target is getattr
        reads_size = reads_size or getattr(target, "__name__", "").startswith("sym_")
        is_arithmetic = node.op == "call_function" and getattr(target, "__module__", "") in (
            "_operator",
            "builtins",
            "math",
        )
        if reads_size or (is_arithmetic and any(source in sizes for source in node.all_input_nodes)):
            sizes[node] = None
    return list(sizes)


def _observe_nodes(
    module: fx.GraphModule, inputs: Sequence[Tensor], nodes: Sequence[fx.Node], check_size: int
) -> dict[fx.Node, tuple[Any, Any]]:
    first, second = (
        [_without_values(value) for value in meta_values(module, inputs, batch, nodes)] for batch in BATCH_SIZES
    )
    known = dict(zip(nodes, zip(first, second, strict=True), strict=True))
    varying = [node for node in nodes if known[node][0] != known[node][1] and is_size(known, node)]
    third = [_without_values(value) for value in meta_values(module, inputs, check_size, varying)] if varying else []
    for node, value in zip(varying, third, strict=True):
        if value != _predicted(*known[node], check_size):
            del known[node]
    return known


def _predicted(first: Any, second: Any, check_size: int) -> Any:
    """Returns the value at the third batch size, if the value is affine in the batch size."""
    if isinstance(first, tuple | list):
        return type(first)(_predicted(a, b, check_size) for a, b in zip(first, second, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):
        return first + (second - first) // (BATCH_SIZES[1] - BATCH_SIZES[0]) * (check_size - BATCH_SIZES[0])
    return first


def meta_values(
    module: fx.GraphModule, inputs: Sequence[Tensor], batch: int, nodes: Sequence[fx.Node]
) -> tuple[Any, ...]:
    """Returns the values of some nodes of a graph on the meta device, for inputs of a batch size."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed = set(reached(nodes, lambda node: node.all_input_nodes))
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = copy_node(graph, node, env.__getitem__, _META)
    graph.output(tuple(env[node] for node in nodes))
    traced = fx.GraphModule(module, graph)
    state = {
        name: empty_meta_like(tensor, tensor.shape)
        for name, tensor in (*traced.named_parameters(), *traced.named_buffers())
    }
    meta_inputs = tuple(empty_meta_like(example, (batch, *example.shape[1:])) for example in inputs)
    with caches_bypassed(traced), torch.enable_grad(), _META, all_generators_restored(), state_restored(traced):
        values: tuple[Any, ...] = torch.func.functional_call(traced, state, meta_inputs)
    return values


def repeat_to_batch(example: Tensor, num_rows: int, device: torch.device) -> Tensor:
    """Returns an example with another batch size on a device, its rows repeated; zeros if it is on the meta device."""
    if example.is_meta and device.type != "meta":
        return torch.zeros((num_rows, *example.shape[1:]), dtype=example.dtype, device=device)
    return example[torch.arange(num_rows, device=example.device) % len(example)].to(device)


def empty_meta_like(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    """Returns a tensor without values on the meta device, of the dtype of another and of a given shape."""
    return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def copy_node(
    graph: fx.Graph, node: fx.Node, source: Callable[[fx.Node], fx.Node], device: torch.device | None
) -> fx.Node:
    """Returns a copy of a node in another graph; devices that tracing recorded in it become `device`, if given."""
    copy = graph.node_copy(node, source)
    if device is not None:
        moved = lambda value: device if isinstance(value, torch.device) else value  # noqa: E731
        copy.args = tree_map(moved, copy.args)
        copy.kwargs = tree_map(moved, copy.kwargs)
    return copy


def _without_values(value: Any) -> Any:
    return TensorShape(tuple(value.shape)) if isinstance(value, Tensor) else value


def is_size(known: Mapping[fx.Node, tuple[Any, Any]], node: fx.Node) -> bool:
    """Returns whether a value is a constant or an affine function of the batch size, or a tuple of such."""
    return node in known and _is_affine(*known[node])


def depends_on_batch(known: Mapping[fx.Node, tuple[Any, Any]], node: fx.Node) -> bool:
    """Returns whether a value is a size, or a tuple of such, that is not the same for every batch size."""
    return is_size(known, node) and known[node][0] != known[node][1]


def batch_dimension(known: Mapping[fx.Node, tuple[Any, Any]], node: fx.Node) -> tuple[int, int] | None:
    """Returns the first dimension of a tensor that is proportional to the batch size, and how many times it is that."""
    first, second = known.get(node, (None, None))
    if not isinstance(first, TensorShape) or not isinstance(second, TensorShape):
        return None
    return proportional_dimension(first.dims, second.dims, *BATCH_SIZES)


def proportional_dimension(
    shape: Sequence[int], other: Sequence[int], batch: int, other_batch: int
) -> tuple[int, int] | None:
    """Returns the first dimension that is proportional to the batch size, of shapes for two, and how many times it."""
    if len(shape) != len(other):
        return None
    for dim, (a, b) in enumerate(zip(shape, other, strict=True)):
        if a != b and a % batch == 0 and a // batch * other_batch == b:
            return dim, a // batch
    return None


def _is_affine(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(_is_affine(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):
        return isinstance(second, int) and (second - first) % (BATCH_SIZES[1] - BATCH_SIZES[0]) == 0
    return isinstance(first, torch.device) or _is_constant(first, second)


def _is_constant(first: Any, second: Any) -> bool:
    return first is None or (isinstance(first, bool | int | float | str | torch.dtype) and bool(first == second))


class StageSizes:
    """Adds operators to a stage's graph that compute its sizes from the batch size of one of its inputs."""

    def __init__(
        self, graph: fx.Graph, known: Mapping[fx.Node, tuple[Any, Any]], inputs: Sequence[tuple[fx.Node, fx.Node]]
    ) -> None:
        """`inputs` are the stage's inputs, each as (node of the model, node of the stage)."""
        self._graph, self._known, self._inputs = graph, known, inputs
        self._batch: fx.Node | None = None

    def node(self, wanted: fx.Node) -> Any:
        """Returns a value of the model as a node, or a constant, of the stage's graph.

        Raises:
            InvalidModel: it is neither a constant nor a function of the batch size.
        """
        if not is_size(self._known, wanted):
            raise self._no_size_error(wanted)
        return self._value(wanted, *self._known[wanted])

    def _value(self, wanted: fx.Node, first: Any, second: Any) -> Any:
        if isinstance(first, tuple | list):
            return tuple(self._value(wanted, a, b) for a, b in zip(first, second, strict=True))
        if isinstance(first, torch.device):
            return self._graph.call_function(getattr, (self._inputs[0][1], "device"))
        if _is_constant(first, second):
            return first
        scale = (second - first) // (BATCH_SIZES[1] - BATCH_SIZES[0])
        return self._affine(wanted, scale, first - scale * BATCH_SIZES[0])

    def _affine(self, wanted: fx.Node, scale: int, offset: int) -> fx.Node:
        value = self._batch_size(wanted)
        if scale != 1:
            value = self._graph.call_function(operator.mul, (value, scale))
        return self._graph.call_function(operator.add, (value, offset)) if offset else value

    def _batch_size(self, wanted: fx.Node) -> fx.Node:
        """Returns a node that computes the batch size from the first input with a dimension proportional to it."""
        if self._batch is None:
            for original, stage_node in self._inputs:
                found = batch_dimension(self._known, original)
                if found is not None:
                    dim, times = found
                    self._batch = self._graph.call_method("size", (stage_node, dim))
                    if times > 1:
                        self._batch = self._graph.call_function(operator.floordiv, (self._batch, times))
                    return self._batch
            raise self._no_size_error(wanted)
        return self._batch

    @staticmethod
    def _no_size_error(wanted: fx.Node) -> InvalidModel:
        return InvalidModel(
            f"'{wanted.name}' ({wanted.target}) is used across a cut but is not a tensor: let each layer compute sizes "
            "from its own input, as x.flatten(1) does, or plan another cut"
        )
