"""A traced model that tells an observer which of its layers runs, forward and backward, while the whole of it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bapipe.errors import InvalidModel
from bapipe.profile import LOSS
from bapipe.trace import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured: a traced model, its loss, and a batch.

    Attributes:
        inputs: the batch, in the order of the model's inputs.
    """

    model: TracedModel
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: tuple[Tensor, ...]
    target: Tensor

    @property
    def device(self) -> torch.device:
        return self.target.device


@dataclass(slots=True, kw_only=True)
class Watched:
    """A subject whose layers report to `enter` when they begin; layer number `num_layers` is the loss.

    Backward, a layer begins when the first operator that made one of its outputs does. Layers that run in turns report
    at each turn, so the time between two reports belongs to the layer of the earlier one.

    Attributes:
        tensors: the output tensors of the layers in the latest forward, by name; they are kept only by their sizes.
        roots: where gradients stop that no parameter needs: outputs of layers that no gradient leaves.
    """

    subject: Subject
    enter: Callable[[int], None]
    module: fx.GraphModule = field(init=False)
    running: int = 0
    tensors: dict[str, "TensorFacts"] = field(default_factory=dict)
    roots: list[GradientEdge] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = _instrument(self.subject.model, self._enter, self._made)

    @property
    def num_layers(self) -> int:
        return len(self.subject.model.layers)

    def forward(self) -> Tensor:
        """Returns the loss; the layers and the loss report."""
        self.tensors.clear()
        self.roots.clear()
        try:
            output = self.module.forward(*self.subject.inputs)
            self._enter(self.num_layers)
            return self.subject.loss(output, self.subject.target)
        except InvalidModel:
            raise
        except Exception as error:  # whatever a layer raises
            raise self._failed("forward", error) from error

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of the parameters to those they have; the layers report."""
        self._run_backward(loss.backward)

    def backward_inputs(self, loss: Tensor) -> None:
        """Computes the gradients of what layers give one another, and none of parameters; the layers report."""
        self._run_backward(lambda: torch.autograd.grad(loss, self.roots))

    def _run_backward(self, run: Callable[[], object]) -> None:
        try:
            self._enter(self.num_layers)
            run()
        except Exception as error:  # whatever a layer raises
            raise self._failed("backward", error) from error

    def _enter(self, layer: int) -> None:
        self.running = layer
        self.enter(layer)

    def _made(self, layer: int, name: str, value: object) -> None:
        own = self.subject.model.layers[layer]
        if not isinstance(value, Tensor):
            raise InvalidModel(
                f"layer '{own.name}' gives other layers {value!r} ({type(value).__name__}); only tensors can "
                "cross between layers: compute it from a tensor where it is used"
            )
        self.tensors[name] = TensorFacts(
            num_bytes=value.numel() * value.element_size(), has_gradient=value.requires_grad
        )
        if value.grad_fn is None:
            return
        value.grad_fn.register_prehook(lambda _: self._enter(layer))
        if not any(source in self.tensors and self.tensors[source].has_gradient for source in own.inputs):
            self.roots.append(get_gradient_edge(value))  # of this moment: a later layer may change the tensor in place

    def _failed(self, where: str, error: Exception) -> InvalidModel:
        layers = self.subject.model.layers
        name = layers[self.running].name if self.running < len(layers) else LOSS
        size = self.subject.target.shape[0] if self.subject.target.dim() else 0
        return InvalidModel(
            f"layer '{name}' failed in its {where} at micro-batch size {size}: {type(error).__name__}: {error}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a profile says of a layer's output."""

    num_bytes: int
    has_gradient: bool


def parameters_of(model: TracedModel) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Returns the parameters that each layer uses, each parameter once in a layer, in the order of `model.layers`."""
    used: dict[str, dict[int, nn.Parameter]] = {layer.name: {} for layer in model.layers}
    for node in model.module.graph.nodes:
        if node.op == "call_module":
            found = list(model.module.get_submodule(str(node.target)).parameters())
            users = [model.layer_of[node]]
        elif node.op == "get_attr":
            value = _attribute(model.module, str(node.target))
            found = [value] if isinstance(value, nn.Parameter) else []
            users = [model.layer_of[user] for user in node.users if user in model.layer_of]
        else:
            continue
        for layer in users:
            used[layer] |= {id(parameter): parameter for parameter in found}
    return tuple(tuple(used[layer.name].values()) for layer in model.layers)


def batch(tensors: Sequence[Tensor], size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the tensors with `size` rows, theirs repeated as often as it takes."""
    return tuple(tensor[torch.arange(size, device=tensor.device) % len(tensor)].to(device) for tensor in tensors)


def _attribute(module: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _instrument(
    model: TracedModel, enter: Callable[[int], None], made: Callable[[int, str, object], None]
) -> fx.GraphModule:
    """Returns the model with calls of `enter` before each layer's operators and of `made` after each of its outputs."""

    def enter_layer(layer: int) -> None:  # torch.fx calls plain functions only
        enter(layer)

    def made_tensor(layer: int, name: str, value: object) -> None:
        made(layer, name, value)

    place = {layer.name: index for index, layer in enumerate(model.layers)}
    name_of = {node: name for name, node in model.node_of.items()}
    graph = fx.Graph()
    copy: dict[fx.Node, fx.Node] = {}
    running = None
    for node in model.module.graph.nodes:
        layer = place[model.layer_of[node]] if node in model.layer_of else None
        if layer is not None and layer != running:
            graph.call_function(enter_layer, (layer,))
            running = layer
        copy[node] = graph.node_copy(node, copy.__getitem__)
        if layer is not None and node in name_of:
            graph.call_function(made_tensor, (layer, name_of[node], copy[node]))
    return fx.GraphModule(model.module, graph)
