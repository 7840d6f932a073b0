"""Measures a module: traces it, times its layers and their memory at each micro-batch size, and makes a profile."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec import UNSET, UnsetType, structs
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import HOST_OVER_DEVICE, LOSS, TARGET, ModelProfile
from bapipe.formats.settings import Settings
from bapipe.optimizers import OPTIMIZERS, unknown_optimizer
from bapipe.profiler.instrument import TrainingPass, layer_error, parameters_of
from bapipe.profiler.isolated import measure_isolated
from bapipe.profiler.layer_memory import LayerMemory, layer_memory
from bapipe.profiler.layer_shapes import layer_shapes
from bapipe.profiler.layer_times import LayerTimes, time_layers
from bapipe.profiler.optimizer_step import OptimizerStep, time_one_step_of_all, time_optimizer_step
from bapipe.profiler.prepare import (
    check_examples,
    check_trainable,
    fits_on_device,
    prepared,
)
from bapipe.profiler.sample_data import samples_for
from bapipe.profiler.traced import traced
from bapipe.progress import PartsProgress
from bapipe.torch_device import describe, dtype_name, environment, framework_bytes, prepare_cpu
from bapipe.torch_settings import in_memory_format
from bapipe.tracing import Inputs, TracedModel, check_inputs, only_tensor_inputs, tensor_inputs
from bapipe.tracing.changing_state import layers_with_same_changing_buffer
from bapipe.tracing.python_random import generators_restored
from bapipe.zoo.data.dataset import PipelineDataset

CPU = torch.device("cpu")


def measure_model(
    module: nn.Module,
    inputs: Inputs,
    target: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    microbatch_sizes: Sequence[int],
    name: str,
    device: torch.device = CPU,
    factory: str | None = None,
    arguments: Mapping[str, object] | None = None,
    settings: Settings = Settings(),  # noqa: B008
    seconds_per_size: float = 12.0,
    target_spread: float = 0.03,
    layer_by_layer: bool = False,
    exhaustive: bool = False,
    leaf_modules: Sequence[str] = (),
    operator_layers: bool = False,
    check: bool = True,
    data: Callable[[], PipelineDataset[Any] | None] | None = None,
    resume_from: ModelProfile | None = None,
    save: Callable[[ModelProfile], None] | None = None,
    progress: PartsProgress | None = None,
) -> ModelProfile:
    """Returns the profile of a model in training, its last layer the loss.

    The model is measured on `data`, or else on the example inputs, repeated to each micro-batch size. The module's
    parameters, buffers and mode are left as they were, its gradients as None.

    Args:
        settings: how the model is computed; their `dtype` is replaced by the module's.
        seconds_per_size, target_spread: measuring at a size ends when the time of every layer that matters has this
            relative spread, or after about this time.
        leaf_modules, operator_layers: which modules and operators are layers, see `bapipe.tracing.trace`.
        layer_by_layer: measures one layer at a time, see `measure_isolated`. Otherwise layers are measured in passes of
            the whole model, unless its parameters and their gradients do not fit on the device.
        exhaustive: measures every layer, also those that are equal to another one.
        check: compares the split model with the original, see `bapipe.equivalence`; not done `layer_by_layer`.
        data: makes samples like the examples; these are repeated all the same if the model fails on the samples, or is
            measured `layer_by_layer`.
        resume_from: a profile of the same model on the same machine; its sizes are not measured again.
        save: called with the profile so far after each size.
        progress: called with the number of parts done, the number of all parts, and the name of the next one.

    Raises:
        InvalidModel: the module cannot be traced, its stages would not train as it does, or a layer fails or gives
            another layer a value that is not a tensor.
        BapipeError: no micro-batch size, one below 1, or an unknown optimizer.
    """
    sizes = _checked_sizes(microbatch_sizes)
    if settings.optimizer not in OPTIMIZERS:
        raise unknown_optimizer(settings.optimizer, OPTIMIZERS)
    report = progress or (lambda done, total, next_part: None)
    check_inputs(inputs)
    check_examples(tensor_inputs(inputs), target)
    check_trainable(module)
    if device.type == "cpu":
        prepare_cpu(settings.threads)
    settings = structs.replace(settings, dtype=dtype_name(next(module.parameters()).dtype))
    autocast = getattr(torch, settings.autocast) if settings.autocast else None
    profile = resume_from
    missing_sizes = [size for size in sizes if profile is None or size not in profile.microbatch_sizes]
    num_parts = 2 * len(missing_sizes) + (profile is None)
    done = 0
    layer_by_layer = layer_by_layer or not fits_on_device(module, device)
    with generators_restored():
        made_up = None if data is None or layer_by_layer else data()
    with (
        prepared(module, device, settings, move=not layer_by_layer),
        only_tensor_inputs(module, inputs) as tensors,
    ):
        found = traced(
            module,
            tensors,
            target,
            loss,
            device,
            max_size=max(sizes),
            leaf_modules=leaf_modules,
            operator_layers=operator_layers,
            check=check and not layer_by_layer,
        )
        samples = samples_for(module, (*tensors, target), made_up, loss, device)
        for size in missing_sizes:
            *batch, batch_target = samples.batch(size, device)
            batch = [in_memory_format(tensor, settings) for tensor in batch]
            training_pass = TrainingPass(
                model=found.model, loss=loss, inputs=tuple(batch), target=batch_target, autocast=autocast
            )
            if layer_by_layer:
                report(done, num_parts, f"layers one by one at micro-batch size {size}")
                times, memory = measure_isolated(training_pass, seconds_per_size, target_spread, exhaustive)
            else:
                report(done, num_parts, f"times at micro-batch size {size}")
                times = time_layers(training_pass, seconds_per_size, target_spread, exhaustive)
                report(done + 1, num_parts, f"memory at micro-batch size {size}")
                memory = layer_memory(training_pass)
            done += 2
            measured = _measurement(found.model, size, times, memory)
            if profile is None:
                report(done, num_parts, "optimizer")
                done += 1
                profile = ModelProfile(
                    model=name,
                    factory=factory,
                    arguments=dict(arguments or {}),
                    device=describe(device),
                    dtype=settings.dtype,
                    optimizer=settings.optimizer,
                    settings=settings,
                    environment=environment(device) | _framework(device) | found.notes | {"data": samples.name},
                    layers=tuple(
                        _layer_profiles(
                            training_pass,
                            memory,
                            settings.optimizer,
                            found.keep_values,
                            all_on_device=not layer_by_layer,
                        )
                    ),
                    measurements=(measured,),
                )
            else:
                measurements = sorted((*profile.measurements, measured), key=lambda m: m.microbatch_size)
                profile = structs.replace(profile, measurements=tuple(measurements))
            profile = _with_quality(profile, size, times)
            if save is not None:
                save(profile)
    report(num_parts, num_parts, "done")
    assert profile is not None
    return structs.replace(profile, measurements=tuple(m for m in profile.measurements if m.microbatch_size in sizes))


def _framework(device: torch.device) -> dict[str, object]:
    return {"framework_bytes": framework_bytes(device)} if device.type == "cuda" else {}


def _with_quality(profile: ModelProfile, size: int, times: LayerTimes) -> ModelProfile:
    """Records the passes at a size, and the sum of the layers' times relative to the model as a whole."""
    quality: dict[str, object] = {"passes": times.num_passes, "kinds_of_layers": times.num_groups}
    if times.sum_over_whole is not None:
        quality["sum_over_whole"] = round(times.sum_over_whole, 4)
    if times.host_over_device is not None:
        quality[HOST_OVER_DEVICE] = round(times.host_over_device, 4)
    notes: dict[str, Any] = {
        key: {**profile.environment.get(key, {}), str(size): value} for key, value in quality.items()
    }
    return structs.replace(profile, environment=profile.environment | notes)


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if not sizes:
        raise BapipeError("no micro-batch size to measure at: give one or more, such as 1,2,4,8")
    if min(sizes) < 1:
        raise BapipeError(f"micro-batch size {min(sizes)} cannot be measured: want 1 or more")
    return tuple(sorted(set(sizes)))


def _layer_profiles(
    training_pass: TrainingPass,
    memory: LayerMemory,
    optimizer: str,
    keep_values: Collection[str],
    *,
    all_on_device: bool,
) -> Iterator[LayerProfile]:
    """Yields names, tensors, parameters and optimizer of each layer, the loss last.

    A shared parameter counts for its first layer.

    Args:
        keep_values: the layers in which a forward leaves values that the next one may read.
        all_on_device: whether all parameters are on the device.
    """
    model = training_pass.model
    parameters = parameters_of(model)  # of each layer
    first_layer: dict[int, int] = {}  # that uses a parameter, by the parameter's id
    for index, used in enumerate(parameters):
        for parameter in used:
            first_layer.setdefault(id(parameter), index)
    counted = [[p for p in used if first_layer[id(p)] == index] for index, used in enumerate(parameters)]
    trained = [[p for p in used if p.requires_grad] for used in counted]
    shared = [[p for p in used if first_layer[id(p)] != index] for index, used in enumerate(parameters)]
    updates = _optimizer_steps(training_pass, trained, optimizer, all_on_device)
    shapes = layer_shapes(training_pass)
    inseparable = layers_with_same_changing_buffer(model)
    for index, layer in enumerate(model.layers):
        ids = {id(parameter) for parameter in parameters[index]}
        same_buffer = {other for layers in inseparable if layer.name in layers for other in layers}
        yield LayerProfile(
            name=layer.name,
            kind=layer.kind,
            inputs=layer.inputs,
            outputs=layer.outputs,
            param_bytes=_num_bytes(counted[index]),
            trained_bytes=_trained_bytes(counted[index]),
            optimizer_state_bytes=updates[index].state_bytes,
            update_ns=updates[index].ns,
            shares=tuple(
                other.name
                for other, used in zip(model.layers, parameters, strict=True)
                if other is not layer and (other.name in same_buffer or any(id(parameter) in ids for parameter in used))
            ),
            # Layers that share neither's bytes are never in different stages.
            shared_bytes=0 if same_buffer else _num_bytes(shared[index]),
            shared_trained_bytes=_trained_bytes(shared[index]),
            no_gradient=tuple(tensor for tensor in layer.outputs if not memory.tensors[tensor].has_gradient),
            no_replicas=True if layer.name in keep_values else UNSET,
            shape=shapes.get(layer.name, UNSET),
        )
    yield _loss_profile(model, training_pass.loss)


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


def _loss_profile(model: TracedModel, loss: Callable[[Tensor, Tensor], Tensor]) -> LayerProfile:
    function = loss.func if isinstance(loss, partial) else loss
    return LayerProfile(
        name=LOSS,
        kind=getattr(function, "__name__", type(function).__name__),
        inputs=(*model.outputs, TARGET),
        outputs=(LOSS,),
        param_bytes=0,
        optimizer_state_bytes=0,
    )


def _measurement(model: TracedModel, size: int, times: LayerTimes, memory: LayerMemory) -> Measurement:
    outputs = [tuple(memory.tensors[tensor].num_bytes for tensor in layer.outputs) for layer in model.layers]
    return Measurement(
        microbatch_size=size,
        layers=tuple(
            LayerMeasurement(
                forward_ns=times.forward_ns[index],
                input_grad_ns=times.input_grad_ns[index],
                weight_grad_ns=times.weight_grad_ns[index],
                backward_ns=times.backward_ns[index],
                stash_bytes=memory.stash_bytes[index],
                gradient_stash_bytes=memory.gradient_stash_bytes[index],
                workspace_bytes=memory.workspace_bytes[index],
                output_bytes=output_bytes,
                spread=round(times.spreads[index], 4),
                host=UNSET if times.host is None else times.host[index],
            )
            for index, output_bytes in enumerate([*outputs, (0,)])
        ),
    )


def _trained_bytes(parameters: Sequence[nn.Parameter]) -> int | UnsetType:
    """Returns the bytes of those parameters that are trained; UNSET if all are."""
    trained = [p for p in parameters if p.requires_grad]
    return UNSET if len(trained) == len(parameters) else _num_bytes(trained)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
