"""Makes one graph of what a forward called at three batch sizes, with numbers as functions of the batch size."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from bapipe.tracing.aliasing import MEMORY, Memory
from bapipe.tracing.captured import AUTOCAST, NO_GRAD, Captured, call_name, drop_unused
from bapipe.tracing.fx_capture import TracingFailed
from bapipe.tracing.reasons import Reason
from bapipe.tracing.recording import Call, NotRecorded, Recording, Ref
from bapipe.tracing.sizes import BATCH_SIZES, TensorShape
from bapipe.tracing.structure import STRUCTURE

Three = tuple[Any, Any, Any]
"""A value at the two batch sizes, and at the one that checks."""

_COMPUTE_FROM_SAMPLES = "let torch compute from the samples, as by `mean`, what the code computes from their number"


@dataclass(frozen=True, slots=True)
class _Size:
    """A number that is `scale` times the batch size, plus `offset`."""

    scale: int
    offset: int


def merge(module: nn.Module, recordings: Sequence[Recording], check_size: int) -> Captured:
    """Returns the graph of a module from recordings at `BATCH_SIZES` and at `check_size`.

    Raises:
        TracingFailed: the recordings differ in more than numbers that are affine in the batch size.
    """
    calls = _aligned([recording.calls for recording in recordings])
    returned = [recording.returned for recording in recordings]
    if any(leaves[0] != leaves[1] or leaves[0] != leaves[2] for leaves in zip(*returned, strict=True)):
        raise TracingFailed("", NotRecorded(Reason("what the model returns depends on the batch size")))
    first = recordings[0]
    graph = _Graph(calls, check_size)
    leaves = tuple(graph.nodes[leaf.index] if isinstance(leaf, Ref) else leaf for leaf in first.returned)
    graph.graph.output(tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node)))
    root = _with_constants(module, first.constants)
    traced = fx.GraphModule(root, graph.graph, type(module).__name__)
    drop_unused(traced)
    traced.recompile()
    return Captured(
        module=traced,
        returned=leaves,
        spec=first.spec,
        layer_of_call=graph.layer_of_call,
        kinds={name: type(module.get_submodule(path)).__name__ for name, path in graph.paths.items()},
        sizes=graph.sizes,
    )


def _aligned(calls: Sequence[Sequence[Call]]) -> list[tuple[Call, Call, Call]]:
    """Returns the calls of three recordings side by side."""
    for a, b, c in zip(*calls, strict=False):
        if not (_same(a, b) and _same(a, c)):
            raise TracingFailed(a.path, _depends_on_batch(a))
    if len({len(recorded) for recorded in calls}) > 1:
        shortest = min(calls, key=len)
        raise TracingFailed(shortest[-1].path, _depends_on_batch(shortest[-1]))
    return list(zip(*calls, strict=True))


def _depends_on_batch(call: Call) -> NotRecorded:
    return NotRecorded(
        Reason(
            f"what the forward calls depends on the batch size{call.line or ''}",
            "call the same functions for any number of samples, or put that code into a module of its own",
        )
    )


def _same(a: Call, b: Call) -> bool:
    """Returns whether two calls are of the same function, in the same layer."""
    names = [getattr(call.target, "__name__", call.target) for call in (a, b)]
    return (a.op, names[0], a.path, a.layer, a.no_grad) == (b.op, names[1], b.path, b.layer, b.no_grad)


class _Graph:
    """The graph that is built, its nodes by index of the call, and what is known of them."""

    def __init__(self, calls: Sequence[tuple[Call, Call, Call]], check_size: int) -> None:
        self._check_size = check_size
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        self.layer_of_call: dict[fx.Node, str] = {}
        self.paths: dict[str, str] = {}  # of layers
        self.sizes: dict[fx.Node, tuple[Any, Any]] = {}
        self._size_nodes: dict[_Size, fx.Node] = {}
        self._shapes: list[tuple[TensorShape, TensorShape] | None] = []
        for three in calls:
            self._add(three)

    def _add(self, three: tuple[Call, Call, Call]) -> None:
        call = three[0]
        try:
            args = self._value((three[0].args, three[1].args, three[2].args))
            kwargs = self._value((dict(three[0].kwargs), dict(three[1].kwargs), dict(three[2].kwargs)))
        except ValueError as error:
            reason = Reason(f"{error}{call.line or ''}", _COMPUTE_FROM_SAMPLES)
            raise TracingFailed(call.path, NotRecorded(reason)) from error
        node = self.graph.create_node(call.op, call.target, args, kwargs, name=_name(call))
        self.nodes.append(node)
        if call.shape is not None and call.op != "get_attr":
            assert three[1].shape is not None
            self.sizes[node] = (TensorShape(call.shape), TensorShape(three[1].shape))
        if call.structure is not None and all(other.structure == call.structure for other in three):
            node.meta[STRUCTURE] = call.structure
        if call.no_grad:
            node.meta[NO_GRAD] = True
        if call.autocast is not None:
            node.meta[AUTOCAST] = call.autocast
        if call.layer is not None:
            self.layer_of_call[node] = call_name(*call.layer)
            self.paths[call_name(*call.layer)] = call.layer[0]
        node.meta[MEMORY] = Memory(
            shares=tuple(self.nodes[i] for i in call.shares),
            writes=tuple(self.nodes[i] for i in call.writes),
            returns_written=call.returns_written,
        )

    def _value(self, three: Three) -> Any:
        """Returns an argument of a node."""
        first = three[0]
        if any(type(other) is not type(first) for other in three[1:]):
            raise ValueError(f"an argument is {first!r} or {three[1]!r}, depending on the batch size")
        if isinstance(first, list | tuple):
            if len({len(value) for value in three}) > 1:
                raise ValueError(f"an argument has {len(first)} or {len(three[1])} parts, depending on the batch size")
            return type(first)(self._value(parts) for parts in zip(*three, strict=True))
        if isinstance(first, dict):
            return {key: self._value((first[key], three[1][key], three[2][key])) for key in first}
        if isinstance(first, slice):
            ends = zip(*((value.start, value.stop, value.step) for value in three), strict=True)
            return slice(*(self._value(end) for end in ends))
        if all(value == first for value in three[1:]) or first != first:
            return self.nodes[first.index] if isinstance(first, Ref) else first
        if isinstance(first, int) and not isinstance(first, bool):
            return self._size_node(_affine(three, self._check_size))
        raise ValueError(f"an argument is {first!r} or {three[1]!r}, depending on the batch size")

    def _size_node(self, size: _Size) -> fx.Node:
        if size not in self._size_nodes:
            if size.offset:
                base = self._size_node(_Size(size.scale, 0))
                node = self.graph.call_function(operator.add, (base, size.offset))
            elif size.scale != 1:
                node = self.graph.call_function(operator.mul, (self._size_node(_Size(1, 0)), size.scale))
            else:
                node = self.graph.call_method("size", (self.nodes[0], 0))
            small, large = BATCH_SIZES
            self.sizes[node] = (size.scale * small + size.offset, size.scale * large + size.offset)
            self._size_nodes[size] = node
        return self._size_nodes[size]


def _affine(three: Three, check_size: int) -> _Size:
    small, large = BATCH_SIZES
    scale, rest = divmod(three[1] - three[0], large - small)
    offset = three[0] - scale * small
    if rest or three[2] != scale * check_size + offset:
        sizes = f"{small}, {large} and {check_size}"
        raise ValueError(f"a number is {three[0]}, {three[1]} and {three[2]} at batches of {sizes}")
    return _Size(scale, offset)


def _name(call: Call) -> str:
    """Returns the wish for a node's name, as torch.fx makes it."""
    target = call.target if isinstance(call.target, str) else getattr(call.target, "__name__", "operator")
    return target.replace(".", "_").strip("_") or "operator"


def _with_constants(module: nn.Module, constants: Mapping[str, Any]) -> nn.Module:
    """Returns a module with the parts of another and more attributes; the other does not change."""
    root = nn.Module()
    root.training = module.training
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path and "." not in path]
    for path in paths:  # named_children would leave out a second name of a module
        root.add_module(path, module.get_submodule(path))
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        root.register_parameter(name, parameter)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        root.register_buffer(name, buffer)
    for name, value in constants.items():
        if isinstance(value, Tensor):
            # A parameter that a plain list holds is none of the model's: torch.fx would make it one of the stage's.
            constant = value.detach() if isinstance(value, nn.Parameter) else value
            root.register_buffer(name, constant, persistent=False)
        else:
            setattr(root, name, value)
    return root
