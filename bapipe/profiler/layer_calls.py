"""The layers of a model one by one, the loss the last, and which of them are alike."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.formats.profile import LOSS, TARGET
from bapipe.profiler.instrument import TensorInfo, TrainingPass, check_loss, layer_error, parameters_of
from bapipe.tracing import extract


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableLayer:
    """A layer, or the loss, as what maps tensors to a tuple of tensors.

    Attributes:
        inputs, outputs: names of the tensors.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: Callable[..., Any]

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Returns what it maps the inputs to."""
        call = self.module.forward if isinstance(self.module, nn.Module) else self.module
        return call(*inputs)  # torch.fx writes to stderr where a module that is called fails


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """A part called on the batch.

    Attributes:
        living: storages of the tensors that were there before it.
    """

    part: CallableLayer
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    living: set[int]


def callable_layers(training_pass: TrainingPass) -> Iterator[CallableLayer]:
    """Yields the model's layers and the loss."""
    model = training_pass.model
    for layer in model.layers:
        module = extract(model, [layer.name], layer.inputs, layer.outputs).train()
        yield CallableLayer(name=layer.name, inputs=layer.inputs, outputs=layer.outputs, module=module)

    def loss(*given: Tensor) -> tuple[Tensor]:
        *outputs, target = given
        value = training_pass.loss(model.result.rebuild(outputs), target)
        if torch.is_grad_enabled():
            check_loss(value)
        return (value,)

    yield CallableLayer(name=LOSS, inputs=(*model.outputs, TARGET_OF_LOSS), outputs=(LOSS,), module=loss)


TARGET_OF_LOSS = f"{TARGET} of the loss"
"""Not the name of any tensor of the model."""


def run_layers(training_pass: TrainingPass, parts: Sequence[CallableLayer]) -> Iterator[LayerCall]:
    """Yields every part as it is called in a forward that keeps only what later parts use, and one part on the device.

    Raises:
        InvalidModel: a part fails.
    """
    last_use = {source: index for index, part in enumerate(parts) for source in part.inputs}
    alive = dict(zip(training_pass.model.inputs, training_pass.inputs, strict=True)) | {
        TARGET_OF_LOSS: training_pass.target
    }
    for index, part in enumerate(parts):
        inputs = [alive[source] for source in part.inputs]
        with _resident(part.module, training_pass.device):
            try:
                with torch.no_grad(), training_pass.computing():
                    made = part.run(inputs)
            except Exception as error:  # whatever a layer raises
                raise layer_error(part.name, "forward", training_pass, error) from error
            yield LayerCall(
                part=part, inputs=inputs, outputs=made, living={storage(tensor) for tensor in alive.values()}
            )
        alive |= zip(part.outputs, made, strict=True)
        for source in list(alive):
            if last_use.get(source, -1) <= index:
                del alive[source]


@contextmanager
def _resident(module: Callable[..., Any], device: torch.device) -> Iterator[None]:
    """Has a part's parameters and buffers on the device within; those that live elsewhere go back there."""
    home = next((p.device for p in module.parameters()), device) if isinstance(module, nn.Module) else device
    if not isinstance(module, nn.Module) or home.type == device.type:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


def storage(tensor: Tensor) -> int:
    """Returns what tells a storage that lives from others."""
    return tensor.untyped_storage().data_ptr()


def equal_layer_groups(
    training_pass: TrainingPass, tensors: Mapping[str, TensorInfo], reached: Container[int]
) -> tuple[int, ...]:
    """Returns for each layer, and the loss, the first of those of its kind.

    Layers are of one kind that have the same code, shapes, types and settings, and the same inputs that need gradients;
    `reached` are those with a backward. One that shares parameters with another is of its own kind.
    """
    users: dict[int, int] = {}
    for own in parameters_of(training_pass.model):
        for parameter in own:
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    first: dict[object, int] = {}
    kinds = []
    for index, call in enumerate(run_layers(training_pass, list(callable_layers(training_pass)))):
        graded = tuple(source in tensors and tensors[source].has_gradient for source in call.part.inputs)
        module = call.part.module
        held = module.parameters() if isinstance(module, nn.Module) else ()
        shares = any(users[id(parameter)] > 1 for parameter in held)
        key = index if shares else (signature(module, call.inputs), graded, index in reached)
        kinds.append(first.setdefault(key, index))
    return tuple(kinds)


def signature(module: Callable[..., Any], inputs: Sequence[Tensor]) -> object:
    """Returns what two parts have in common where their times are the same."""
    shapes = tuple((tuple(x.shape), x.dtype, x.stride()) for x in inputs)
    if not isinstance(module, fx.GraphModule):
        return id(module)
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    steps = []
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            target = "; ".join(map(_code, module.get_submodule(target).modules()))
        elif node.op in ("placeholder", "get_attr", "output"):
            target = ""
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")
        steps.append((node.op, target, repr(arguments)))
    held = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (*module.parameters(), *module.buffers()))
    return tuple(steps), held, shapes


def _code(module: nn.Module) -> str:
    """A module's class and its plain attributes; not all of them show in its `repr`, such as heads of attention."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | tuple | None)}
    return f"{type(module).__module__}.{type(module).__qualname__} {sorted(plain.items(), key=lambda item: item[0])}"
