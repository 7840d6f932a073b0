"""What a profile says of each layer besides its measurements: tensors, parameters, optimizer, what may be separated."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from msgspec import UNSET, UnsetType
from torch import Tensor, nn

from bapipe.equivalence.outcome import Loss
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import LOSS, TARGET
from bapipe.graph.reached import reached
from bapipe.optimizers import OPTIMIZERS
from bapipe.profiler.instrument import TrainingPass, layer_error, parameters_of
from bapipe.profiler.layer_calls import callable_layers
from bapipe.profiler.layer_memory import LayerMemory
from bapipe.profiler.optimizer_step import OptimizerStep, time_one_step_of_all, time_optimizer_step
from bapipe.tracing.changing_state import layers_in_one_stage
from bapipe.tracing.layer_shapes import layer_shapes
from bapipe.tracing.model import TracedModel, input_name, unused_state


def layer_profiles(
    training_pass: TrainingPass,
    memory: LayerMemory,
    optimizer: str,
    keep_values: Collection[str],
    *,
    all_on_device: bool,
) -> tuple[LayerProfile, ...]:
    """Returns names, tensors, parameters, buffers and optimizer of each layer, the loss last.

    What several layers share counts for the first of them.

    Args:
        keep_values: the layers in which a forward leaves values that the next one may read.
        all_on_device: whether all parameters are on the device.
    """
    model = training_pass.model
    parameters = parameters_of(model)  # of each layer
    held = [(*used, *buffers) for used, buffers in zip(parameters, _buffers(training_pass), strict=True)]
    first_layer: dict[int, int] = {}  # that holds a parameter or buffer, by its id
    for index, tensors in enumerate(held):
        for tensor in tensors:
            first_layer.setdefault(id(tensor), index)
    counted = [[t for t in tensors if first_layer[id(t)] == index] for index, tensors in enumerate(held)]
    # Buffers do not tie layers: a mask that all of them read would tie all.
    shared = [[p for p in used if first_layer[id(p)] != index] for index, used in enumerate(parameters)]
    updates = _optimizer_steps(training_pass, [_trained(tensors) for tensors in counted], optimizer, all_on_device)
    shapes = layer_shapes(model, training_pass.inputs)
    inseparable = [*layers_in_one_stage(model), *_chains(model, parameters, first_layer)]
    made = []
    for index, layer in enumerate(model.layers):
        ids = {id(parameter) for parameter in parameters[index]}
        together = {other for layers in inseparable if layer.name in layers for other in layers}
        profile = LayerProfile(
            name=layer.name,
            kind=layer.kind,
            inputs=layer.inputs,
            outputs=layer.outputs,
            param_bytes=_num_bytes(counted[index]),
            trained_bytes=_trained_bytes(counted[index]),
            buffer_bytes=_num_bytes([t for t in counted[index] if not isinstance(t, nn.Parameter)]) or UNSET,
            optimizer_state_bytes=updates[index].state_bytes,
            update_ns=updates[index].ns,
            shares=tuple(
                other.name
                for other, used in zip(model.layers, parameters, strict=True)
                if other is not layer and (other.name in together or any(id(parameter) in ids for parameter in used))
            ),
            # Layers that share neither's bytes are never in different stages.
            shared_bytes=0 if together else _num_bytes(shared[index]),
            shared_trained_bytes=UNSET if together else _trained_bytes(shared[index]),
            no_gradient=tuple(tensor for tensor in layer.outputs if not memory.tensors[tensor].has_gradient),
            no_replicas=True if layer.name in keep_values else UNSET,
            shape=shapes.get(layer.name, UNSET),
        )
        made.append(profile)
    return (*made, _loss_profile(model, training_pass.loss))


def _buffers(training_pass: TrainingPass) -> Iterator[tuple[Tensor, ...]]:
    """Yields for each layer the buffers and constants that a stage with it holds, also for what every stage computes.

    What no layer uses is in checkpoints all the same: the first stage holds it, without gradients.
    """
    unused = {id(tensor): tensor.detach() for tensor in unused_state(training_pass.model).values()}
    for layer in callable_layers(training_pass):
        if isinstance(layer.module, nn.Module):  # the loss is a function
            yield (*layer.module.buffers(), *unused.values())
            unused.clear()


def _chains(
    model: TracedModel, parameters: Sequence[Sequence[nn.Parameter]], first_layer: Mapping[int, int]
) -> Iterator[frozenset[str]]:
    """Yields the names of layers that share parameters with each other, of which several layers count some.

    A profile says of a layer how many bytes it shares, and not with which of several layers.
    """
    uses = [(index, first_layer[id(p)]) for index, used in enumerate(parameters) for p in used]
    shared = [(user, counting) for user, counting in uses if user != counting]
    sharing = defaultdict[int, set[int]](set)
    for user, counting in shared:
        sharing[user].add(counting)
        sharing[counting].add(user)
    for layers in {frozenset(reached([user], sharing.__getitem__)) for user, _ in shared}:
        if len({counting for _, counting in shared if counting in layers}) > 1:
            yield frozenset(model.layers[index].name for index in layers)


def _optimizer_steps(
    training_pass: TrainingPass, trained: Sequence[Sequence[nn.Parameter]], optimizer: str, all_on_device: bool
) -> list[OptimizerStep]:
    """Returns the optimizer's step on the trained parameters of each layer."""
    device, rule = training_pass.device, OPTIMIZERS[optimizer]
    make = partial(getattr(torch.optim, rule.torch_class), lr=0.0, **rule.arguments)  # lr 0: parameters keep values
    names, steps = [layer.name for layer in training_pass.model.layers], list[OptimizerStep]()
    try:
        if device.type == "cuda" and all_on_device:
            return time_one_step_of_all(trained, make, device)
        for parameters in trained:
            steps.append(time_optimizer_step(parameters, make, device))
    except Exception as error:  # whatever the optimizer raises
        raise layer_error(names[len(steps)], "update", training_pass, error) from error
    return steps


def _loss_profile(model: TracedModel, loss: Loss) -> LayerProfile:
    function = loss.func if isinstance(loss, partial) else loss
    return LayerProfile(
        name=LOSS,
        kind=getattr(function, "__name__", type(function).__name__),
        inputs=(*model.outputs, input_name(TARGET, [layer.name for layer in model.layers])),
        outputs=(LOSS,),
        param_bytes=0,
        optimizer_state_bytes=0,
    )


def _trained(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]


def _trained_bytes(tensors: Sequence[Tensor]) -> int | UnsetType:
    """Returns the bytes of those parameters and buffers that are trained; UNSET if all are."""
    trained = _trained(tensors)
    return UNSET if len(trained) == len(tensors) else _num_bytes(trained)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
