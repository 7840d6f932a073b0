"""Runs the layers of a model one after another, the loss last, and finds which of them are equal."""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.formats.profile import LOSS, TARGET
from bapipe.module_state.python_state import values_restored
from bapipe.profiler.instrument import TensorInfo, TrainingPass, check_loss, layer_error, parameters_of
from bapipe.torch_device import tensors_on
from bapipe.torch_private.tensors import storage_key
from bapipe.tracing.extract import extract

TARGET_OF_LOSS = f"{TARGET} of the loss"
"""Name of the target among the tensors; no tensor of the model can have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableLayer:
    """A layer, or the loss, as a function from tensors to a tuple of tensors.

    Attributes:
        inputs, outputs: names of the tensors.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: Callable[..., Any]

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Returns the layer's outputs for some inputs."""
        # A call of the module itself would let torch.fx write to stderr if it fails.
        call = self.module.forward if isinstance(self.module, nn.Module) else self.module
        return call(*inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """A layer called on the batch.

    Attributes:
        storages_before: keys of the storages that existed before the call, see `storage_key`.
    """

    layer: CallableLayer
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    storages_before: set[int]


def callable_layers(training_pass: TrainingPass) -> Iterator[CallableLayer]:
    """Yields the model's layers and the loss, as they run on the device of the batch, wherever they were traced."""
    model, device = training_pass.model, training_pass.device
    for layer in model.layers:
        module = extract(model, [layer.name], layer.inputs, layer.outputs, device=device).train()
        yield CallableLayer(name=layer.name, inputs=layer.inputs, outputs=layer.outputs, module=module)

    def loss(*outputs_and_target: Tensor) -> tuple[Tensor]:
        *outputs, target = outputs_and_target
        value = training_pass.loss(model.result.rebuild(outputs), target)
        if torch.is_grad_enabled():
            check_loss(value)
        return (value,)

    yield CallableLayer(name=LOSS, inputs=(*model.outputs, TARGET_OF_LOSS), outputs=(LOSS,), module=loss)


def run_layers(training_pass: TrainingPass, layers: Sequence[CallableLayer]) -> Iterator[LayerCall]:
    """Yields each layer as called in a forward without gradients; one layer at a time is on the device.

    A tensor is freed after the last layer that uses it. Parameters that a layer changes get their values back after it.

    Raises:
        InvalidModel: a layer fails.
    """
    last_use = {source: index for index, layer in enumerate(layers) for source in layer.inputs}
    alive = dict(zip(training_pass.model.inputs, training_pass.inputs, strict=True))
    alive[TARGET_OF_LOSS] = training_pass.target
    for index, layer in enumerate(layers):
        inputs = [alive[source] for source in layer.inputs]
        parameters = layer.module.parameters() if isinstance(layer.module, nn.Module) else ()
        with tensors_on(layer.module, training_pass.device), values_restored(parameters):
            try:
                with training_pass.autocast_context():
                    outputs = _outputs(layer, inputs)
            except Exception as error:  # whatever a layer raises
                raise layer_error(layer.name, "forward", training_pass, error) from error
            storages = {storage_key(tensor) for tensor in alive.values()}
            yield LayerCall(layer=layer, inputs=inputs, outputs=outputs, storages_before=storages)
        alive |= zip(layer.outputs, outputs, strict=True)
        for source in list(alive):
            if last_use.get(source, -1) <= index:
                del alive[source]


def _outputs(layer: CallableLayer, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():
            return tuple(layer.run(inputs))
    except RuntimeError:
        with torch.enable_grad():  # for a forward that computes gradients itself, such as forces of an energy
            return tuple(tensor.detach() for tensor in layer.run([_with_gradient(tensor) for tensor in inputs]))


def _with_gradient(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor as an activation has them: with a gradient, if its type can have one."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_().clone()  # no leaf, which the layer could not change in place


def equal_layer_groups(
    training_pass: TrainingPass, tensors: Mapping[str, TensorInfo], with_backward: Container[int]
) -> tuple[int, ...]:
    """Returns for each layer, and for the loss, the number of the first layer that equals it.

    Layers are equal if they have the same code, shapes, types and settings, and the same inputs need gradients. A layer
    that shares parameters with another layer equals no other.

    Args:
        tensors: the outputs of all layers, by name.
        with_backward: the numbers of the layers with a backward.
    """
    num_users = Counter(id(parameter) for parameters in parameters_of(training_pass.model) for parameter in parameters)
    first_of_key: dict[object, int] = {}
    groups = []
    for index, call in enumerate(run_layers(training_pass, list(callable_layers(training_pass)))):
        needs_gradient = tuple(name in tensors and tensors[name].has_gradient for name in call.layer.inputs)
        module = call.layer.module
        parameters = module.parameters() if isinstance(module, nn.Module) else ()
        shares_parameters = any(num_users[id(parameter)] > 1 for parameter in parameters)
        key = index if shares_parameters else (signature(module, call.inputs), needs_gradient, index in with_backward)
        groups.append(first_of_key.setdefault(key, index))
    return tuple(groups)


def signature(module: Callable[..., Any], inputs: Sequence[Tensor]) -> object:
    """Returns a value that is equal for two layers whose times are expected to be the same.

    It holds the operators and their arguments, the attributes of modules, and shapes and types of inputs and state.
    """
    shapes = tuple((tuple(x.shape), x.dtype, x.stride()) for x in inputs)
    if not isinstance(module, fx.GraphModule):
        return id(module)
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    steps = []
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            target = "; ".join(map(_class_and_attributes, module.get_submodule(target).modules()))
        elif node.op in ("placeholder", "get_attr", "output"):
            target = ""
        # Nodes are written as positions, because their names contain the names of layers.
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{position[n]}")
        steps.append((node.op, target, repr(arguments)))
    state = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (*module.parameters(), *module.buffers()))
    return tuple(steps), state, shapes


def _class_and_attributes(module: nn.Module) -> str:
    """Returns a module's class and plain attributes; `repr` leaves some out, such as the heads of attention."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | tuple | None)}
    return f"{type(module).__module__}.{type(module).__qualname__} {sorted(plain.items(), key=lambda item: item[0])}"
