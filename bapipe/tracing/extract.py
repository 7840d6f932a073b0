"""From some layers of a traced model back to a module."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from bapipe.tracing.aliasing import alias_set, writers
from bapipe.tracing.capture import NO_GRAD
from bapipe.tracing.model import TracedModel
from bapipe.tracing.randomness import is_random
from bapipe.tracing.sizes import Sizes, copy_node, is_size


def extract(
    model: TracedModel,
    layers: Iterable[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    device: torch.device | None = None,
    before_random: Callable[[str], None] | None = None,
) -> fx.GraphModule:
    """Returns a module of some layers that maps the tensors `inputs` to a tuple of the tensors `outputs`.

    An output that none of the layers makes is an input passed on. Parameters keep their names and are shared with the
    model. An input that a layer would change in place, itself or through a view, is copied first, because autograd
    refuses to change a leaf and whoever gave it may still be using it. Outputs are as the layers give them, strides and
    all. What depends on the model's inputs and constants alone is done again; sizes are found from the inputs at hand.

    Args:
        device: what takes the place of a device that the model's code found out while it was traced.
        before_random: called with the name of each operator that draws random numbers, before it runs.

    Raises:
        InvalidModel: a layer needs something that is no tensor and no function of the batch size.
    """
    return _Extraction(model, set(layers), inputs, device, before_random).module(outputs)


class GradMode:
    """Turns gradients off in a graph for the operators that the model ran without."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._outside: fx.Node | None = None  # whether they were on before, while they are off

    def enter(self, node: fx.Node) -> None:
        """To be called before the copy of a model's node is added."""
        self.set(on=not node.meta.get(NO_GRAD))

    def set(self, *, on: bool) -> None:
        if not on and self._outside is None:
            self._outside = self._graph.call_function(torch.is_grad_enabled)
            self._graph.call_function(torch.set_grad_enabled, (False,))
        elif on and self._outside is not None:
            self._graph.call_function(torch.set_grad_enabled, (self._outside,))
            self._outside = None


class _Extraction:
    """A graph in the making."""

    def __init__(
        self,
        model: TracedModel,
        layers: set[str],
        inputs: Sequence[str],
        device: torch.device | None,
        before_random: Callable[[str], None] | None,
    ) -> None:
        self._model, self._layers, self._device = model, layers, device
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._gradients = GradMode(self._graph)
        self._announce = _plain(before_random) if before_random is not None else None
        given = [model.node_of[name] for name in inputs]
        for node in given:
            self._env[node] = self._graph.placeholder(node.name)
        self._sizes = Sizes(self._graph, model.sizes, [(node, self._env[node]) for node in given])
        changed = self._changed_in_place(given)
        for node in given:
            if node in changed:
                self._env[node] = self._graph.call_function(torch.clone, (self._env[node],))

    def module(self, outputs: Sequence[str]) -> fx.GraphModule:
        model = self._model
        for node in model.module.graph.nodes:
            if model.layer_of.get(node) in self._layers and node not in model.replicated:
                self._add(node)
        found = tuple(self._source(model.node_of[name]) for name in outputs)
        self._gradients.set(on=True)
        self._graph.output(found)
        self._graph.lint()
        return fx.GraphModule(model.module, self._graph)

    def _add(self, node: fx.Node) -> fx.Node:
        for source in node.all_input_nodes:
            self._source(source)
        self._gradients.enter(node)
        if self._announce is not None and is_random(self._model.module, node):
            self._graph.call_function(self._announce, (node.name,))
        self._env[node] = copy_node(self._graph, node, self._env.__getitem__, self._device)
        return self._env[node]

    def _source(self, node: fx.Node) -> fx.Node:
        if node in self._env:
            return self._env[node]
        if node.op == "get_attr":
            self._env[node] = self._graph.node_copy(node)
        elif node in self._model.replicated and not is_size(self._model.sizes, node):
            self._add(node)
        else:
            self._env[node] = self._sizes.node(node)
        return self._env[node]

    def _changed_in_place(self, given: Sequence[fx.Node]) -> set[fx.Node]:
        model = self._model
        own = [(node, t) for node, t in writers(model.module) if model.layer_of.get(node) in self._layers]
        touched: set[fx.Node] = set()
        for _, tensor in own:
            touched |= self._same_memory(tensor)
        return touched & set(given)

    def _same_memory(self, tensor: fx.Node) -> set[fx.Node]:
        """The tensor and what it is a view of, as far as this graph's own operators made it so."""
        return {node for node in alias_set(self._model.module, tensor) if node in self._env or self._inside(node)}

    def _inside(self, node: fx.Node) -> bool:
        return self._model.layer_of.get(node) in self._layers


def _plain(call: Callable[[str], None]) -> Callable[[str], None]:
    def before_random(name: str) -> None:  # torch.fx calls plain functions only
        call(name)

    return before_random
