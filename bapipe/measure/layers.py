"""From a module to its profile: every layer run and measured on a device of this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from bapipe.errors import BapipeError, InvalidModel
from bapipe.machine import describe, environment, framework_bytes, prepare_cpu
from bapipe.measure.alone import measure_alone
from bapipe.measure.memory import LayerMemory, layer_memory
from bapipe.measure.timing import LayerTimes, time_layers
from bapipe.measure.updates import Update, time_update
from bapipe.measure.watch import Subject, batch, layer_failed, parameters_of
from bapipe.profile import LOSS, TARGET, LayerMeasurement, LayerProfile, Measurement, ModelProfile
from bapipe.settings import Settings
from bapipe.trace import TracedModel, trace

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.0, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.0),
    "adamw": partial(torch.optim.AdamW, lr=0.0),
}

CPU = torch.device("cpu")


def measure(
    module: nn.Module,
    inputs: Sequence[Tensor],
    target: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    microbatch_sizes: Sequence[int],
    name: str,
    device: torch.device = CPU,
    factory: str | None = None,
    arguments: Mapping[str, object] | None = None,
    settings: Settings = Settings(),  # noqa: B008
    seconds_per_size: float = 20.0,
    spread: float = 0.03,
    layer_by_layer: bool = False,
    exhaustive: bool = False,
    whole: Sequence[str] = (),
    fine: bool = False,
    so_far: ModelProfile | None = None,
    keep: Callable[[ModelProfile], None] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> ModelProfile:
    """Returns the profile of a model in training, its last layer the loss.

    Example inputs of any batch size are repeated to each micro-batch size. The module's parameters, buffers and mode
    are left as they were, its gradients as None. `progress` is called with the number of
    parts done, the number of all parts, and what comes next.

    Args:
        settings: how the model is computed; `dtype` is the module's own, whatever they say.
        seconds_per_size, spread: passes at a size end when every layer that matters is sure to this relative spread, or
            after about this time.
        whole, fine: what is a layer, see `bapipe.trace.trace`.
        layer_by_layer: see `measure_alone`; without, layers are measured in passes of the whole model, unless its
            parameters and their gradients are more than the device holds.
        exhaustive: whether each layer has figures of its own, those of equal layers too.
        so_far: a profile of the same model on the same machine; its sizes are not measured again.
        keep: called with the profile so far after each size.

    Raises:
        InvalidModel: the module cannot be traced, or a layer fails or gives another something else than a tensor.
        BapipeError: no micro-batch size, one below 1, or an unknown optimizer.
    """
    sizes = _checked_sizes(microbatch_sizes)
    if settings.optimizer not in OPTIMIZERS:
        raise BapipeError(f"unknown optimizer '{settings.optimizer}'; want one of {', '.join(OPTIMIZERS)}")
    tell = progress or (lambda done, total, what: None)
    _check_examples(inputs, target)
    _check_trainable(module)
    if device.type == "cpu":
        prepare_cpu(settings.threads)
    settings = structs.replace(settings, dtype=str(next(module.parameters()).dtype).removeprefix("torch."))
    autocast = getattr(torch, settings.autocast) if settings.autocast else None
    made = so_far
    todo = [size for size in sizes if made is None or size not in made.microbatch_sizes]
    num_parts = 2 * len(todo) + (made is None)
    done = 0
    layer_by_layer = layer_by_layer or not _fits(module, device)
    if not layer_by_layer:
        module.to(device)
    with _ready(module, device, settings):
        model = _traced(module, inputs, whole, fine)
        for size in todo:
            *own, wanted = _batch((*inputs, target), size, device)
            own = [_laid_out(tensor, settings) for tensor in own]
            subject = Subject(model=model, loss=loss, inputs=tuple(own), target=wanted, autocast=autocast)
            if layer_by_layer:
                tell(done, num_parts, f"layers one by one at micro-batch size {size}")
                times, memory = measure_alone(subject, seconds_per_size, spread, exhaustive)
            else:
                tell(done, num_parts, f"times at micro-batch size {size}")
                times = time_layers(subject, seconds_per_size, spread, exhaustive)
                tell(done + 1, num_parts, f"memory at micro-batch size {size}")
                memory = layer_memory(subject)
            done += 2
            measured = _measurement(model, size, times, memory)
            if made is None:
                tell(done, num_parts, "optimizer")
                done += 1
                made = ModelProfile(
                    model=name,
                    factory=factory,
                    arguments=dict(arguments or {}),
                    device=describe(device),
                    dtype=settings.dtype,
                    optimizer=settings.optimizer,
                    settings=settings,
                    environment=environment() | _framework(device),
                    layers=(*_layers(subject, memory, settings.optimizer), _loss_layer(model, loss)),
                    measurements=(measured,),
                )
            else:
                every = (*made.measurements, measured)
                made = structs.replace(made, measurements=tuple(sorted(every, key=lambda m: m.microbatch_size)))
            made = _with_check(made, size, times)
            if keep is not None:
                keep(made)
    tell(num_parts, num_parts, "done")
    assert made is not None
    return structs.replace(made, measurements=tuple(m for m in made.measurements if m.microbatch_size in sizes))


def _framework(device: torch.device) -> dict[str, object]:
    return {"framework_bytes": framework_bytes(device)} if device.type == "cuda" else {}


def _with_check(profile: ModelProfile, size: int, times: LayerTimes) -> ModelProfile:
    """Notes how often a size was repeated, and how the sum of its layers compares with the model alone."""
    found: dict[str, object] = {"passes": times.num_passes, "kinds_of_layers": times.num_kinds}
    if times.sum_over_whole is not None:
        found["sum_over_whole"] = round(times.sum_over_whole, 4)
    notes: dict[str, Any] = {
        key: {**profile.environment.get(key, {}), str(size): value} for key, value in found.items()
    }
    return structs.replace(profile, environment=profile.environment | notes)


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if not sizes:
        raise BapipeError("no micro-batch size to measure at: give one or more, such as 1,2,4,8")
    if min(sizes) < 1:
        raise BapipeError(f"micro-batch size {min(sizes)} cannot be measured: want 1 or more")
    return tuple(sorted(set(sizes)))


def _check_examples(inputs: Sequence[object], target: object) -> None:
    named = [(f"input {index}", example) for index, example in enumerate(inputs)]
    for name, example in (*named, ("the target", target)):
        if not isinstance(example, Tensor):
            raise InvalidModel(
                f"{name} is {_shortened(repr(example))} ({type(example).__name__}); examples must be tensors, batch "
                "first: keep what is no tensor inside the module"
            )
        if example.dim() == 0 or len(example) == 0:
            raise InvalidModel(
                f"{name} has shape {tuple(example.shape)}: want an example of one sample or more, batch first"
            )


def _shortened(text: str, length: int = 60) -> str:
    """Returns a text on one line, its end left out where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}..."


def _check_trainable(module: nn.Module) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        raise InvalidModel(f"{type(module).__name__} is on the meta device, so it cannot run: build it on a real one")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidModel(f"{type(module).__name__} has no parameter to train: set requires_grad on those to train")


def _fits(module: nn.Module, device: torch.device) -> bool:
    """Whether the device holds the parameters and a gradient of each."""
    return 2 * _num_bytes(list(module.parameters())) < describe(device).memory_bytes


def _traced(module: nn.Module, inputs: Sequence[Tensor], whole: Sequence[str], fine: bool) -> TracedModel:
    model = trace(module, inputs, whole=whole, fine=fine)
    if any(layer.name == LOSS for layer in model.layers):
        raise InvalidModel(f"a layer of the model is named '{LOSS}', as the loss itself is: rename it")
    return model


@contextmanager
def _ready(module: nn.Module, device: torch.device, settings: Settings) -> Iterator[None]:
    """Puts the module in training mode without gradients, and restores it and the random state after."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    training = {part: part.training for part in module.modules()}
    module.train()
    if settings.channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    module.zero_grad()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        module.zero_grad()
        if settings.channels_last:
            module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        for part, mode in training.items():
            part.training = mode


def _batch(examples: Sequence[Tensor], size: int, device: torch.device) -> tuple[Tensor, ...]:
    try:
        return batch(examples, size, device)
    except RuntimeError as error:
        raise BapipeError(
            f"no memory for a batch of {size} samples: measure smaller sizes with --microbatch-size "
            f"({_shortened(str(error), 100)})"
        ) from error


def _laid_out(tensor: Tensor, settings: Settings) -> Tensor:
    if settings.channels_last and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _layers(subject: Subject, memory: LayerMemory, optimizer: str) -> Iterator[LayerProfile]:
    model = subject.model
    parameters = parameters_of(model)
    first: dict[int, int] = {}
    for index, own in enumerate(parameters):
        for parameter in own:
            first.setdefault(id(parameter), index)
    # A shared parameter counts for the first layer that uses it.
    counted = [[p for p in own if first[id(p)] == index] for index, own in enumerate(parameters)]
    trained = [[p for p in own if p.requires_grad] for own in counted]
    updates = [_update(subject, layer.name, own, optimizer) for layer, own in zip(model.layers, trained, strict=True)]
    for index, layer in enumerate(model.layers):
        ids = {id(parameter) for parameter in parameters[index]}
        yield LayerProfile(
            name=layer.name,
            kind=layer.kind,
            inputs=layer.inputs,
            outputs=layer.outputs,
            param_bytes=_num_bytes(counted[index]),
            optimizer_state_bytes=updates[index].state_bytes,
            update_ns=updates[index].ns,
            shares=tuple(
                other.name
                for other, own in zip(model.layers, parameters, strict=True)
                if other is not layer and any(id(parameter) in ids for parameter in own)
            ),
            shared_bytes=_num_bytes([p for p in parameters[index] if p.requires_grad and first[id(p)] != index]),
            no_gradient=tuple(tensor for tensor in layer.outputs if not memory.tensors[tensor].has_gradient),
        )


def _update(subject: Subject, name: str, parameters: Sequence[nn.Parameter], optimizer: str) -> Update:
    try:
        return time_update(parameters, OPTIMIZERS[optimizer], subject.device)
    except Exception as error:  # whatever the optimizer raises
        raise layer_failed(name, "update", subject, error) from error


def _loss_layer(model: TracedModel, loss: Callable[[Tensor, Tensor], Tensor]) -> LayerProfile:
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
            )
            for index, output_bytes in enumerate([*outputs, (0,)])
        ),
    )


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
