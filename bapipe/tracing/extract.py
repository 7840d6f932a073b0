"""Extracts some layers of a traced model as a module."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import fx

from bapipe.tracing.aliasing import alias_set
from bapipe.tracing.captured import AUTOCAST, NO_GRAD, Autocast
from bapipe.tracing.model import TracedModel
from bapipe.tracing.randomness import is_random, runs_other_code
from bapipe.tracing.recorded_functions import plain_function
from bapipe.tracing.sizes import StageSizes, copy_node, is_size
from bapipe.tracing.structure import add_structure_check

BeforeRandom = Callable[[str, bool], None]
"""(the operator's name, whether it runs code from outside torch, which may draw from generators of Python and numpy)"""


def extract(
    model: TracedModel,
    layers: Iterable[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    device: torch.device | None = None,
    before_random: BeforeRandom | None = None,
) -> fx.GraphModule:
    """Returns a module of some layers that maps the tensors `inputs` to a tuple of the tensors `outputs`.

    An output that none of the layers computes is an input passed on. Parameters keep their names and are shared with
    the model. An input that a layer would change in place, directly or through a view, is copied first, because
    autograd refuses to change a leaf, and the caller may still use it. Outputs have the strides that the layers give
    them. Replicated operators (see `TracedModel`) are computed again; sizes are computed from the inputs.

    Args:
        device: replaces the device that tracing recorded for operators such as torch.zeros.
        before_random: called before each operator that draws random numbers.

    Raises:
        InvalidModel: a layer needs a value that is neither a tensor nor a function of the batch size.
    """
    return _Extraction(model, set(layers), inputs, device, before_random).module(outputs)


class GradMode:
    """Adds operators to a graph that set gradients and autocast as they were when the model was traced.

    The graph is to be that of a `ModesModule`: where an operator raises, the graph does not reach its own end, at which
    it leaves the modes. What was traced on a CPU and runs on a GPU sets autocast for the GPU: code that turns it off
    does so for the device of its tensors.
    """

    def __init__(self, graph: fx.Graph, device: torch.device | None = None) -> None:
        """`device` is where the graph will run, by default where the model was traced."""
        self._graph, self._device = graph, device
        self._outside: fx.Node | None = None  # while gradients are off: whether they were on before
        self._autocast: tuple[Autocast, fx.Node] | None = None  # the mode of the model's own, and its context

    def enter(self, node: fx.Node) -> None:
        """Sets the modes of a node of the model; to be called before its copy is added."""
        self._set_gradients(on=not node.meta.get(NO_GRAD))
        self._set_autocast(node.meta.get(AUTOCAST))

    def leave(self) -> None:
        """Sets the modes that the graph was called in."""
        self._set_gradients(on=True)
        self._set_autocast(None)

    def _set_gradients(self, *, on: bool) -> None:
        if not on and self._outside is None:
            self._outside = self._graph.call_function(torch.is_grad_enabled)
            self._graph.call_function(torch.set_grad_enabled, (False,))
        elif on and self._outside is not None:
            self._graph.call_function(torch.set_grad_enabled, (self._outside,))
            self._outside = None

    def _set_autocast(self, mode: Autocast | None) -> None:
        if self._autocast is not None and mode != self._autocast[0]:
            self._graph.call_function(_leave_autocast, (self._autocast[1],))
            self._autocast = None
        if mode is not None and self._autocast is None:
            kind = mode.device_type
            if self._device is not None and kind == "cpu":
                kind = self._device.type
            arguments = (kind, mode.dtype, mode.enabled)
            self._autocast = mode, self._graph.call_function(_enter_autocast, arguments)


class _Entered(threading.local):
    """The contexts of autocast that graphs have entered in this thread and not left yet."""

    def __init__(self) -> None:
        self.contexts: list[torch.autocast] = []


_entered = _Entered()


def _enter_autocast(device_type: str, dtype: torch.dtype, enabled: bool) -> torch.autocast:
    context = torch.autocast(device_type, dtype, enabled)
    context.__enter__()  # type: ignore[no-untyped-call]
    _entered.contexts.append(context)
    return context


def _leave_autocast(context: torch.autocast) -> None:
    _entered.contexts.remove(context)
    context.__exit__(None, None, None)


@contextmanager
def _modes_left() -> Iterator[None]:
    """Leaves the modes that a graph enters in this context, also if it raises.

    torch counts how deeply contexts of autocast are nested, and keeps what they have cast until the outermost is left.
    If one were never left, each later one in the process would compute with the weights of the first.
    """
    has_gradients, num_before = torch.is_grad_enabled(), len(_entered.contexts)
    try:
        yield
    finally:
        while len(_entered.contexts) > num_before:
            _leave_autocast(_entered.contexts[-1])
        if torch.is_grad_enabled() != has_gradients:
            torch.set_grad_enabled(has_gradients)


class ModesModule(fx.GraphModule):
    """A module of a graph with the operators of `GradMode`, whose forward leaves its modes also by an error."""

    def recompile(self) -> Any:
        code = super().recompile()  # which sets the class's forward; the class is this module's own
        generated = type(self).forward

        @wraps(generated)
        def forward(module: ModesModule, *args: Any, **kwargs: Any) -> Any:
            with _modes_left():
                return generated(module, *args, **kwargs)

        type(self).forward = forward
        return code


class _Extraction:
    """Builds the graph of an extracted module."""

    def __init__(
        self,
        model: TracedModel,
        layers: set[str],
        inputs: Sequence[str],
        device: torch.device | None,
        before_random: BeforeRandom | None,
    ) -> None:
        self._model, self._layers, self._device = model, layers, device
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._gradients = GradMode(self._graph, device)
        self._before_random = None if before_random is None else plain_function(before_random, "before_random")
        input_nodes = [model.node_of[name] for name in inputs]
        for node in input_nodes:
            self._env[node] = self._graph.placeholder(node.name)
        self._stage_sizes = StageSizes(self._graph, model.sizes, [(node, self._env[node]) for node in input_nodes])
        changed = self._changed_in_place(input_nodes)
        for node in input_nodes:
            if node in changed:
                self._env[node] = self._graph.call_function(torch.clone, (self._env[node],))

    def module(self, outputs: Sequence[str]) -> fx.GraphModule:
        model = self._model
        for node in model.module.graph.nodes:
            if model.layer_of.get(node) in self._layers and node not in model.replicated:
                self._add(node)
        results = tuple(self._source(model.node_of[name]) for name in outputs)
        self._gradients.leave()
        self._graph.output(results)
        self._graph.lint()
        return ModesModule(model.module, self._graph)

    def _add(self, node: fx.Node) -> fx.Node:
        for source in node.all_input_nodes:
            self._source(source)
        self._gradients.enter(node)
        if self._before_random is not None:
            other_code = runs_other_code(self._model.module, node)
            if other_code or is_random(self._model.module, node):
                self._graph.call_function(self._before_random, (node.name, other_code))
        self._env[node] = copy_node(self._graph, node, self._env.__getitem__, self._device)
        add_structure_check(self._graph, node, self._env[node], self._model.layer_of.get(node, ""))
        return self._env[node]

    def _source(self, node: fx.Node) -> fx.Node:
        """Returns the node of the extracted graph that computes a node of the model, added if it is not there."""
        if node in self._env:
            return self._env[node]
        if node.op == "get_attr":
            self._env[node] = self._graph.node_copy(node)
        elif node in self._model.replicated and (not is_size(self._model.sizes, node) or self._is_computable(node)):
            self._add(node)
        else:
            self._env[node] = self._stage_sizes.node(node)
        return self._env[node]

    def _is_computable(self, node: fx.Node) -> bool:
        """Returns whether the extracted module has all that a replicated operator reads."""
        return all(
            source in self._env
            or source.op == "get_attr"
            or (source.op != "placeholder" and self._is_computable(source))
            for source in node.all_input_nodes
        )

    def _changed_in_place(self, input_nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Returns the inputs whose memory the extracted layers write to."""
        changed: set[fx.Node] = set()
        for writer, tensor in self._model.writes:
            if self._is_inside(writer):
                changed |= self._same_memory(tensor)
        return changed & set(input_nodes)

    def _same_memory(self, tensor: fx.Node) -> set[fx.Node]:
        """Returns the alias set of a tensor, as far as operators of the extracted layers and inputs belong to it."""
        return {node for node in alias_set(self._model.module, tensor) if node in self._env or self._is_inside(node)}

    def _is_inside(self, node: fx.Node) -> bool:
        return self._model.layer_of.get(node) in self._layers
