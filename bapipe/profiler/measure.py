"""Measures a module: traces it, times its layers and their memory at each micro-batch size, and makes a profile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import UNSET, structs
from torch import Tensor, nn

from bapipe.equivalence.loss_state import state_of_loss
from bapipe.equivalence.losses import check_no_parameters
from bapipe.equivalence.outcome import Loss
from bapipe.errors import InvalidModel
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import HOST_OVER_DEVICE, ModelProfile
from bapipe.formats.settings import Settings
from bapipe.module_state.python_random import generators_restored
from bapipe.profiler.instrument import TrainingPass, own_failure
from bapipe.profiler.isolated import measure_isolated
from bapipe.profiler.layer_memory import LayerMemory, layer_memory
from bapipe.profiler.layer_profiles import layer_profiles
from bapipe.profiler.layer_times import LayerTimes, time_layers
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.prepare import check_examples, check_trainable, fits_on_device, prepared
from bapipe.profiler.sample_data import samples_for
from bapipe.profiler.traced import traced
from bapipe.progress import PartsProgress
from bapipe.torch_device import CPU, describe, dtype_name, environment, framework_bytes, prepared_cpu, tensors_on
from bapipe.torch_settings import autocast_dtype, in_memory_format
from bapipe.tracing.bound_inputs import Inputs, check_inputs, only_tensor_inputs, tensor_inputs
from bapipe.tracing.capture import check_has_layers
from bapipe.tracing.model import TracedModel
from bapipe.zoo.data.dataset import PipelineDataset

NUM_PARTS_PER_SIZE = 2
"""Times and memory are reported as a part each."""


def measure_model(
    module: nn.Module,
    inputs: Inputs,
    target: Tensor,
    loss: Loss,
    options: ProfileOptions,
    *,
    name: str,
    device: torch.device = CPU,
    factory: str | None = None,
    arguments: Mapping[str, object] | None = None,
    data: Callable[[], PipelineDataset[Any] | None] | None = None,
    resume_from: ModelProfile | None = None,
    save: Callable[[ModelProfile], None] | None = None,
    progress: PartsProgress | None = None,
) -> ModelProfile:
    """Returns the profile of a model in training, its last layer the loss.

    The model is measured on `data`, or else on the example inputs, repeated to each micro-batch size. The module's
    parameters, buffers, attributes and mode are left as they were, its gradients as None; so are what the loss keeps
    and torch's threads.

    Args:
        data: makes samples like the examples; these are repeated all the same if the model fails on the samples, or is
            measured `layer_by_layer`.
        resume_from: a profile of the same model on the same machine; its sizes are not measured again.
        save: called with the profile so far after each size.
        progress: called with the number of parts done, the number of all parts, and the name of the next one.

    Raises:
        InvalidModel: the module cannot be traced, its stages would not train as it does, or a layer fails or gives
            another layer a value that is not a tensor.
    """
    check_inputs(module, inputs)
    check_examples(tensor_inputs(inputs), target)
    check_has_layers(module)
    check_trainable(module)
    check_no_parameters(loss)
    settings = structs.replace(options.settings, dtype=dtype_name(next(module.parameters()).dtype))
    layer_by_layer = options.layer_by_layer or not fits_on_device(module, device)
    options = replace(options, settings=settings, layer_by_layer=layer_by_layer)
    profile, sizes = resume_from, options.microbatch_sizes
    missing_sizes = [size for size in sizes if profile is None or size not in profile.microbatch_sizes]
    parts = _Parts(progress, 1 + NUM_PARTS_PER_SIZE * len(missing_sizes) + (profile is None))
    parts.begin("trace and check of the split model" if options.check and not layer_by_layer else "trace")
    with generators_restored():
        made_up = None if data is None or layer_by_layer else data()
    with (
        prepared_cpu(settings.threads) if device.type == "cpu" else torch.cuda.device(device),
        prepared(module, device, settings, move=not layer_by_layer),
        state_of_loss(loss, module).restored(),
        tensors_on(loss, device),  # weights of classes are the buffers of a loss that is a module
        only_tensor_inputs(module, inputs) as tensors,
    ):
        found = traced(module, tensors, target, loss, device, options)
        samples = samples_for(module, (*tensors, target), made_up, loss, device)
        for size in missing_sizes:
            training_pass = _training_pass(found.model, loss, samples.batch(size, device), settings)
            times, memory = _times_and_memory(training_pass, size, options, parts)
            measured = _measurement(found.model, size, times, memory)
            if profile is None:
                parts.begin("optimizer")
                profile = ModelProfile(
                    model=name,
                    factory=factory,
                    arguments=dict(arguments or {}),
                    device=describe(device),
                    dtype=settings.dtype,
                    optimizer=settings.optimizer,
                    settings=settings,
                    environment=environment(device) | _framework(device) | found.notes | {"data": samples.name},
                    layers=layer_profiles(
                        training_pass, memory, settings.optimizer, found.keep_values, all_on_device=not layer_by_layer
                    ),
                    measurements=(measured,),
                )
            else:
                measurements = sorted((*profile.measurements, measured), key=lambda m: m.microbatch_size)
                profile = structs.replace(profile, measurements=tuple(measurements))
            profile = _with_quality(profile, size, times)
            if save is not None:
                save(profile)
    parts.finish()
    assert profile is not None
    return structs.replace(profile, measurements=tuple(m for m in profile.measurements if m.microbatch_size in sizes))


class _Parts:
    """The parts of a measurement, reported as each of them begins."""

    def __init__(self, progress: PartsProgress | None, num_parts: int) -> None:
        self._progress, self._num_parts, self._num_done = progress, num_parts, 0

    def begin(self, name: str, num_parts: int = 1) -> None:
        """Reports that so many parts, which have one name, begin."""
        if self._progress is not None:
            self._progress(self._num_done, self._num_parts, name)
        self._num_done += num_parts

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self._num_parts, self._num_parts, "done")


def _times_and_memory(
    training_pass: TrainingPass, size: int, options: ProfileOptions, parts: _Parts
) -> tuple[LayerTimes, LayerMemory]:
    """Returns the times and bytes of every layer at a micro-batch size."""
    how = options.seconds_per_size, options.target_spread, options.exhaustive
    if options.layer_by_layer:
        parts.begin(f"layers one by one at micro-batch size {size}", NUM_PARTS_PER_SIZE)
        return measure_isolated(training_pass, *how)
    try:
        parts.begin(f"times at micro-batch size {size}")
        times = time_layers(training_pass, *how)
        parts.begin(f"memory at micro-batch size {size}")
        return times, layer_memory(training_pass)
    except InvalidModel as error:
        itself = own_failure(training_pass, error)
        if itself is None:
            raise
        raise itself from error


def _training_pass(model: TracedModel, loss: Loss, batch: Sequence[Tensor], settings: Settings) -> TrainingPass:
    """Returns the pass that trains on one micro-batch: the inputs in order, and the target."""
    *inputs, target = batch
    return TrainingPass(
        model=model,
        loss=loss,
        inputs=tuple(in_memory_format(tensor, settings) for tensor in inputs),
        target=target,
        autocast=autocast_dtype(settings),
    )


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
