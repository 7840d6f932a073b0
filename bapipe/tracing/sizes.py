"""Values of a graph that are no tensors, such as batch sizes and shapes, and how a stage comes by them.

A size cannot be sent between stages, but it need not be: it is a constant, or an affine function of the batch size,
which every tensor at hand tells.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from bapipe.errors import InvalidModel
from bapipe.torch_private import tree_map

BATCHES = (5, 7)
"""Two batch sizes at which a graph is looked at; odd, so that nothing is taken for the batch that is not."""

_THIRD = 11
"""One more, at which values that are no tensors must be what the first two make expect."""

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Shape:
    """What is kept of a tensor."""

    dims: tuple[int, ...]


def observe(
    module: fx.GraphModule, inputs: Sequence[Tensor], crosses: Callable[[fx.Node], bool]
) -> dict[fx.Node, tuple[Any, Any]]:
    """Returns values at two batch sizes, of a tensor its `Shape`, as far as finding sizes again needs them.

    The graph runs on the meta device, which allocates nothing. Where the model fails there, nothing is known. What
    gives sizes comes first; all the rest, which recurrent layers make slow, only where a size that depends on the batch
    `crosses` from one layer to another.
    """
    try:
        known = _observe(module, inputs, _sizes(module))
        if any(a != b and crosses(node) for node, (a, b) in known.items() if is_size(known, node)):
            every = [node for node in module.graph.nodes if node.op not in ("output", "get_attr")]
            known |= _observe(module, inputs, every)
    except Exception:  # whatever the model's own code raises without values
        return {}
    return known


def _sizes(module: fx.GraphModule) -> list[fx.Node]:
    """The operators that may give something else than tensors: those that ask a tensor for it, and arithmetic on it."""
    found: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        target = node.target
        asks = target in ("size", "dim", "numel", "__len__") if node.op == "call_method" else target is getattr
        asks = asks or getattr(target, "__name__", "").startswith("sym_")
        counts = node.op == "call_function" and getattr(target, "__module__", "") in ("_operator", "builtins", "math")
        if asks or (counts and any(source in found for source in node.all_input_nodes)):
            found[node] = None
    return list(found)


def _observe(
    module: fx.GraphModule, inputs: Sequence[Tensor], nodes: Sequence[fx.Node]
) -> dict[fx.Node, tuple[Any, Any]]:
    first, second = ([_fact(value) for value in shapes(module, inputs, batch, nodes)] for batch in BATCHES)
    known = dict(zip(nodes, zip(first, second, strict=True), strict=True))
    varying = [node for node in nodes if known[node][0] != known[node][1] and is_size(known, node)]
    third = [_fact(value) for value in shapes(module, inputs, _THIRD, varying)] if varying else []
    for node, value in zip(varying, third, strict=True):
        if value != _expected(*known[node]):
            del known[node]
    return known


def _expected(first: Any, second: Any) -> Any:
    if isinstance(first, tuple | list):
        return type(first)(_expected(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):
        return first + (second - first) // (BATCHES[1] - BATCHES[0]) * (_THIRD - BATCHES[0])
    return first


def shapes(module: fx.GraphModule, inputs: Sequence[Tensor], batch: int, nodes: Sequence[fx.Node]) -> tuple[Any, ...]:
    """Returns what some operators of a graph give on the meta device for inputs of a batch size."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed = _with_ancestors(nodes)
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = copy_node(graph, node, env.__getitem__, _META)
    graph.output(tuple(env[node] for node in nodes))
    every = fx.GraphModule(module, graph)
    state = {name: like(tensor, tensor.shape) for name, tensor in (*every.named_parameters(), *every.named_buffers())}
    given = tuple(like(example, (batch, *example.shape[1:])) for example in inputs)
    with torch.enable_grad(), _META, torch.random.fork_rng(devices=[]):
        values: tuple[Any, ...] = torch.func.functional_call(every, state, given)
    return values


def _with_ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def repeat_to_batch(example: Tensor, num_rows: int, device: torch.device) -> Tensor:
    """Returns an example with another batch size on a device, its rows repeated; zeros where it has no values."""
    if example.is_meta and device.type != "meta":
        return torch.zeros((num_rows, *example.shape[1:]), dtype=example.dtype, device=device)
    return example[torch.arange(num_rows, device=example.device) % len(example)].to(device)


def like(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    """Returns an empty tensor on the meta device."""
    return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def copy_node(
    graph: fx.Graph, node: fx.Node, source: Callable[[fx.Node], fx.Node], device: torch.device | None
) -> fx.Node:
    """Returns a copy of a node in another graph; devices that tracing wrote into it become `device`, where given."""
    copy = graph.node_copy(node, source)
    if device is not None:
        moved = lambda value: device if isinstance(value, torch.device) else value  # noqa: E731
        copy.args = tree_map(moved, copy.args)
        copy.kwargs = tree_map(moved, copy.kwargs)
    return copy


def _fact(value: Any) -> Any:
    return Shape(tuple(value.shape)) if isinstance(value, Tensor) else value


def is_size(known: Mapping[fx.Node, tuple[Any, Any]], node: fx.Node) -> bool:
    """Returns whether a value is a constant or an affine function of the batch size, or a tuple of such."""
    return node in known and _is_affine(*known[node])


def _is_affine(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(_is_affine(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):
        return isinstance(second, int) and (second - first) % (BATCHES[1] - BATCHES[0]) == 0
    return isinstance(first, torch.device) or _is_constant(first, second)


def _is_constant(first: Any, second: Any) -> bool:
    return first is None or (isinstance(first, bool | int | float | str | torch.dtype) and bool(first == second))


class Sizes:
    """Values of a stage that are no tensors, made in its graph from the batch size of a tensor at hand."""

    def __init__(
        self, graph: fx.Graph, known: Mapping[fx.Node, tuple[Any, Any]], given: Sequence[tuple[fx.Node, fx.Node]]
    ) -> None:
        """`given` holds (node of the model, node of the stage) of the tensors at hand."""
        self._graph, self._known, self._given = graph, known, given
        self._batch: fx.Node | None = None

    def node(self, wanted: fx.Node) -> Any:
        """Returns a value of the model as a node, or a constant, of the stage's graph.

        Raises:
            InvalidModel: it is neither a constant nor a function of the batch size.
        """
        if not is_size(self._known, wanted):
            raise self._lost(wanted)
        return self._made(wanted, *self._known[wanted])

    def _made(self, wanted: fx.Node, first: Any, second: Any) -> Any:
        if isinstance(first, tuple | list):
            return tuple(self._made(wanted, a, b) for a, b in zip(first, second, strict=True))
        if isinstance(first, torch.device):
            return self._graph.call_function(getattr, (self._given[0][1], "device"))
        if _is_constant(first, second):
            return first
        scale = (second - first) // (BATCHES[1] - BATCHES[0])
        return self._affine(wanted, scale, first - scale * BATCHES[0])

    def _affine(self, wanted: fx.Node, scale: int, offset: int) -> fx.Node:
        value = self._batch_size(wanted)
        if scale != 1:
            value = self._graph.call_function(operator.mul, (value, scale))
        return self._graph.call_function(operator.add, (value, offset)) if offset else value

    def _batch_size(self, wanted: fx.Node) -> fx.Node:
        if self._batch is None:
            for original, own in self._given:
                first, second = self._known.get(original, (None, None))
                if not isinstance(first, Shape) or not isinstance(second, Shape):
                    continue
                for dim, (a, b) in enumerate(zip(first.dims, second.dims, strict=True)):
                    if a != b and a % BATCHES[0] == 0 and a // BATCHES[0] * BATCHES[1] == b:
                        self._batch = self._graph.call_method("size", (own, dim))
                        if (times := a // BATCHES[0]) > 1:
                            self._batch = self._graph.call_function(operator.floordiv, (self._batch, times))
                        return self._batch
            raise self._lost(wanted)
        return self._batch

    @staticmethod
    def _lost(wanted: fx.Node) -> InvalidModel:
        return InvalidModel(
            f"'{wanted.name}' ({wanted.target}) is used across a cut but is no tensor: let each layer find sizes from "
            "its own input, as x.flatten(1) does, or plan another cut"
        )
