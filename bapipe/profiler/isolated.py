"""Measures layers one at a time, and only one of equal layers: for models that do not fit on a device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.profiler.instrument import TensorInfo, TrainingPass, layer_error
from bapipe.profiler.layer_calls import CallableLayer, callable_layers, run_layers, signature
from bapipe.profiler.layer_memory import LayerMemory, memory_of_passes, pending_gradient_bytes
from bapipe.profiler.layer_times import MAX_PASSES, MIN_PASSES, LayerTimes, spread
from bapipe.profiler.timers import make_layer_timer, timed
from bapipe.torch_private.measuring import saved_tensors_watched
from bapipe.torch_private.split_backward import stage_backward_input, stage_backward_weight
from bapipe.torch_private.tensors import is_view, storage_key

_FLUSH_BYTES = 2**26
"""Bytes written before each measurement, so that the caches hold the same as in training: only the layer's input."""

_CUDA_WRITES = 32
"""How often they are written on CUDA. Meanwhile the layer's operators wait in the device's queue, as in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerFigures:
    """Times and bytes of one layer.

    Attributes:
        saved_inputs, saved_outputs: positions of the inputs and outputs whose storage the backward needs.
        own_stash_bytes: other storages that the backward needs.
        has_gradient: whether each output has a gradient.
    """

    forward_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    backward_ns: int
    spread: float
    num_repeats: int
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    own_stash_bytes: int
    gradient_stash_bytes: int
    workspace_bytes: int
    has_gradient: tuple[bool, ...]


def measure_isolated(
    training_pass: TrainingPass, seconds: float, target_spread: float, exhaustive: bool
) -> tuple[LayerTimes, LayerMemory]:
    """Returns times and bytes of every layer and the loss.

    Layers of the same code, shapes, types and settings are measured once, unless `exhaustive`. Each runs on its real
    inputs, from a forward that keeps only what later layers use. Times are those of a layer whose input is in the
    caches and whose parameters and stash are not.

    Raises:
        InvalidModel: a layer fails.
    """
    measured: dict[object, _LayerFigures] = {}  # by signature
    figures_of_layer: list[_LayerFigures] = []
    tensors: dict[str, TensorInfo] = {}
    stash: list[int] = []
    counted: set[int] = set()  # storages that are in the stash of a layer so far
    layers = list(callable_layers(training_pass))
    num_measured = 0
    for call in run_layers(training_pass, layers):
        counted &= call.storages_before
        needs_gradient = tuple(name in tensors and tensors[name].has_gradient for name in call.layer.inputs)
        key = (signature(call.layer.module, call.inputs), needs_gradient)
        if exhaustive or key not in measured:
            num_measured += 1
            try:
                measured[key] = _measure_layer(
                    training_pass, call.layer, call.inputs, needs_gradient, seconds / len(layers), target_spread
                )
            except BapipeError:
                raise
            except Exception as error:  # whatever a layer raises
                raise layer_error(call.layer.name, "forward or backward", training_pass, error) from error
        figures = measured[key]
        figures_of_layer.append(figures)
        saved = [call.inputs[i] for i in figures.saved_inputs] + [call.outputs[i] for i in figures.saved_outputs]
        new = {storage_key(t): t.untyped_storage().nbytes() for t in saved if storage_key(t) not in counted}
        counted |= new.keys()
        stash.append(figures.own_stash_bytes + sum(new.values()))
        for name, tensor, has_gradient in zip(call.layer.outputs, call.outputs, figures.has_gradient, strict=True):
            tensors[name] = TensorInfo(num_bytes=tensor.nbytes, has_gradient=has_gradient)
    pending = (*pending_gradient_bytes(training_pass.model), 0)  # the loss has no parameters
    memory = LayerMemory(
        stash_bytes=tuple(stash),
        gradient_stash_bytes=tuple(f.gradient_stash_bytes for f in figures_of_layer),
        # Twice: the gradient from later layers, and its sum with the layer's own.
        workspace_bytes=tuple(f.workspace_bytes + 2 * p for f, p in zip(figures_of_layer, pending, strict=True)),
        tensors=tensors,
    )
    return _layer_times(figures_of_layer, num_measured), memory


def _layer_times(figures: Sequence[_LayerFigures], num_measured: int) -> LayerTimes:
    return LayerTimes(
        forward_ns=tuple(f.forward_ns for f in figures),
        input_grad_ns=tuple(f.input_grad_ns for f in figures),
        weight_grad_ns=tuple(f.weight_grad_ns for f in figures),
        backward_ns=tuple(f.backward_ns for f in figures),
        spreads=tuple(f.spread for f in figures),
        num_passes=min(f.num_repeats for f in figures),
        sum_over_whole=None,
        num_groups=num_measured,
    )


class _LayerRun:
    """A layer that runs on its real inputs, its gradients added to those that are there.

    Attributes:
        parameters: those that are trained.
        needs_gradient, has_gradient: whether each input, and each output, has a gradient.
        gradients: of the outputs that have one.
    """

    def __init__(
        self,
        training_pass: TrainingPass,
        layer: CallableLayer,
        inputs: Sequence[Tensor],
        needs_gradient: tuple[bool, ...],
    ) -> None:
        self._training_pass, self._layer = training_pass, layer
        self.device, self.inputs, self.needs_gradient = training_pass.device, inputs, needs_gradient
        module = layer.module
        self.parameters = [p for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []
        _, outputs = self.forward()
        self.has_gradient = tuple(o.requires_grad for o in outputs)
        self.gradients = [torch.ones_like(o) for o in outputs if o.requires_grad]
        self.backward(outputs)  # creates the gradients to add to

    def forward(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Returns the inputs and the outputs."""
        leaves = [x.detach().requires_grad_(needs) for x, needs in zip(self.inputs, self.needs_gradient, strict=True)]
        with self._training_pass.autocast_context():
            return leaves, self._layer.run(leaves)

    def backward(self, outputs: Sequence[Tensor]) -> None:
        if self.gradients:
            torch.autograd.backward([o for o in outputs if o.requires_grad], self.gradients)


def _measure_layer(
    training_pass: TrainingPass,
    layer: CallableLayer,
    inputs: Sequence[Tensor],
    needs_gradient: tuple[bool, ...],
    seconds: float,
    target_spread: float,
) -> _LayerFigures:
    run = _LayerRun(training_pass, layer, inputs, needs_gradient)
    repeats, gradient_stash_bytes = _times(run, seconds, target_spread)
    saved_inputs, saved_outputs, own_stash_bytes = _stash(layer.module, run.forward)
    workspace_bytes = _workspace_bytes(run)
    for parameter in run.parameters:
        parameter.grad = None
    forward_ns, input_ns, weight_ns, backward_ns = (round(median(column)) for column in zip(*repeats, strict=True))
    return _LayerFigures(
        forward_ns=forward_ns,
        input_grad_ns=input_ns,
        weight_grad_ns=weight_ns,
        backward_ns=backward_ns,
        spread=_total_spread(repeats),
        num_repeats=len(repeats),
        saved_inputs=saved_inputs,
        saved_outputs=saved_outputs,
        own_stash_bytes=own_stash_bytes,
        gradient_stash_bytes=gradient_stash_bytes,
        workspace_bytes=workspace_bytes,
        has_gradient=run.has_gradient,
    )


def _times(run: _LayerRun, seconds: float, target_spread: float) -> tuple[list[tuple[int, int, int, int]], int]:
    """Returns times of F, I, W and B, and the bytes of the gradients that are kept between I and W."""
    timer, flush = make_layer_timer(run.device), _flush(run.device, run.inputs)
    parameters = run.parameters
    repeats: list[tuple[int, int, int, int]] = []
    gradient_stash_bytes = 0
    end = time.monotonic() + seconds
    while len(repeats) < MIN_PASSES or (
        len(repeats) < MAX_PASSES and time.monotonic() < end and _total_spread(repeats) > target_spread
    ):
        (_, outputs), forward_ns = timed(timer, flush, run.forward)
        _, backward_ns = timed(timer, flush, lambda outputs=outputs: run.backward(outputs))  # type: ignore[misc]
        input_ns, weight_ns = 0, backward_ns
        if any(run.needs_gradient):
            leaves, outputs = run.forward()
            # Views are cloned, because torch's I detaches outputs in place.
            roots = [o.clone() if is_view(o) else o for o in outputs if o.requires_grad]
            (_, groups), input_ns = timed(
                timer,
                flush,
                lambda roots=roots, leaves=leaves: stage_backward_input(roots, run.gradients, leaves, iter(parameters)),  # type: ignore[misc]
            )
            gradient_stash_bytes = _saved_gradient_bytes(groups)
            _, weight_ns = timed(timer, flush, lambda groups=groups: stage_backward_weight(iter(parameters), groups))  # type: ignore[misc]
            weight_ns = weight_ns if parameters else 0
        repeats.append((forward_ns, input_ns, weight_ns, backward_ns))
    if not any(run.needs_gradient) and parameters:  # there is no I: W needs the gradients of the outputs
        gradient_stash_bytes = sum(g.nbytes for g in run.gradients)
    return repeats, gradient_stash_bytes


def _workspace_bytes(run: _LayerRun) -> int:
    """Returns the bytes that a forward or a backward needs beside what it finds or leaves."""
    forward, backward = memory_of_passes(run.device, lambda: run.forward()[1], run.backward)
    forward_bytes = forward.peak_bytes - max(forward.before_bytes, forward.after_bytes)
    backward_bytes = backward.peak_bytes - backward.before_bytes + sum(g.nbytes for g in run.gradients)
    return max(forward_bytes, backward_bytes)


def _total_spread(repeats: Sequence[tuple[int, int, int, int]]) -> float:
    """Returns the spread of F + B."""
    return spread([f + b for f, _, _, b in repeats])


def _stash(
    module: Callable[..., Any], forward: Callable[[], tuple[list[Tensor], tuple[Tensor, ...]]]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Returns positions of the inputs and outputs whose storage is saved, and the bytes of all other saved storages."""
    state = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
    state_storages = {storage_key(tensor) for tensor in state}
    saved: dict[int, int] = {}  # bytes, by key of the storage

    def watch(tensor: Tensor) -> None:
        if storage_key(tensor) not in state_storages:
            saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()

    with saved_tensors_watched(watch):
        inputs, outputs = forward()
    saved_inputs = tuple(i for i, x in enumerate(inputs) if storage_key(x) in saved)
    saved_outputs = tuple(i for i, x in enumerate(outputs) if storage_key(x) in saved)
    outside = {storage_key(inputs[i]) for i in saved_inputs} | {storage_key(outputs[i]) for i in saved_outputs}
    return saved_inputs, saved_outputs, sum(num_bytes for key, num_bytes in saved.items() if key not in outside)


def _saved_gradient_bytes(groups: Sequence[dict[str, Any]]) -> int:
    """Returns the bytes of the gradients that torch keeps for W in its parameter groups."""
    num_bytes = {
        storage_key(g): g.untyped_storage().nbytes()
        for group in groups
        for gradients in group.get("grads") or ()
        for g in gradients or ()
        if g is not None
    }
    return sum(num_bytes.values())


def _flush(device: torch.device, inputs: Sequence[Tensor]) -> Callable[[], None]:
    """Returns a function that empties the caches, and then loads a layer's inputs into them."""
    filler = torch.empty(_flush_bytes(device), dtype=torch.uint8, device=device)
    num_writes = _CUDA_WRITES if device.type == "cuda" else 1

    def flush() -> None:
        for _ in range(num_writes):
            filler.fill_(1)
        for x in inputs:
            x.count_nonzero()

    return flush


def _flush_bytes(device: torch.device) -> int:
    """Returns how many bytes to write, twice the largest cache of a GPU at least."""
    if device.type != "cuda":
        return _FLUSH_BYTES
    return max(_FLUSH_BYTES, 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
