"""Memory of layers: the stash that they keep for their backward, and the workspace that they need while they run."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from bapipe.profiler.instrument import InstrumentedModel, TensorInfo, TrainingPass, parameters_of
from bapipe.torch_private.measuring import memory_events, saved_tensors_watched
from bapipe.torch_private.tensors import storage_key
from bapipe.tracing.model import TracedModel

T = TypeVar("T")

_MARK = "bapipe:layer:"
_NO_LAYER = -1

_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of the layers of a model, and of the loss after them; each tuple has one value for each of these.

    Attributes:
        stash_bytes: kept from F to the backward.
        gradient_stash_bytes: gradients that I keeps for W.
        workspace_bytes: allocated during F or the backward only.
        tensors: the layers' outputs by name.
    """

    stash_bytes: tuple[int, ...]
    gradient_stash_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    tensors: dict[str, TensorInfo]


def layer_memory(training_pass: TrainingPass) -> LayerMemory:
    """Returns the bytes that autograd saves and that the allocator hands out, while gradients are accumulated.

    Stash: every storage that autograd saves, except parameters and buffers, counted for the first layer that saves it.
    Gradient stash: every storage of a gradient that arrives where W begins, counted for the layer at which it arrives,
    for the first one of several; torch keeps the whole stash until the end of W as well.
    Workspace: in the forward, the peak of the bytes allocated while a layer runs, above the larger of before and after;
    in the backward, the peak above before, plus the bytes that are allocated before and only for this layer: gradients
    of its outputs and `pending_gradient_bytes`.
    """
    stash, gradient_stash, tensors = _stash(training_pass)
    forward, backward = (_cuda_usage if training_pass.device.type == "cuda" else _cpu_usage)(training_pass)
    workspace = [0] * (len(stash) + 1)  # the last one is that of the instrumentation
    for use in forward:
        workspace[use.layer] = max(workspace[use.layer], use.peak_bytes - max(use.before_bytes, use.after_bytes))
    gradients = [  # allocated before a layer's backward, and only for it
        pending + sum(tensors[name].num_bytes for name in layer.outputs if tensors[name].has_gradient)
        for pending, layer in zip(pending_gradient_bytes(training_pass.model), training_pass.model.layers, strict=True)
    ]
    for use in backward:
        before = gradients[use.layer] if use.layer < len(gradients) else 0
        workspace[use.layer] = max(workspace[use.layer], use.peak_bytes - use.before_bytes + before)
    return LayerMemory(
        stash_bytes=tuple(stash),
        gradient_stash_bytes=tuple(gradient_stash),
        workspace_bytes=tuple(workspace[:-1]),
        tensors=tensors,
    )


def pending_gradient_bytes(model: TracedModel) -> tuple[int, ...]:
    """Returns for each layer the bytes of gradients from later layers that also use its parameters.

    Autograd sums the gradients of one parameter before it stores the sum. So a gradient of the parameter's
    size is allocated from the backward of the last layer that uses the parameter to that of the first, to which the
    bytes count.
    """
    num_users = Counter(id(parameter) for parameters in parameters_of(model) for parameter in parameters)
    seen: set[int] = set()
    pending = []
    for parameters in parameters_of(model):
        new = [p for p in parameters if id(p) not in seen]
        seen.update(map(id, new))
        pending.append(sum(p.nbytes for p in new if p.requires_grad and num_users[id(p)] > 1))
    return tuple(pending)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes allocated before an uninterrupted piece of a layer's work, at its peak, and after it."""

    layer: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def _stash(training_pass: TrainingPass) -> tuple[list[int], list[int], dict[str, TensorInfo]]:
    """Returns stash bytes and gradient stash bytes of each layer and the loss, and the layers' outputs."""
    module = training_pass.model.module
    counted = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
    num_layers = len(training_pass.model.layers)
    stash, gradient_stash = [0] * (num_layers + 1), [0] * (num_layers + 1)
    instrumented = InstrumentedModel(training_pass=training_pass, enter=lambda _: None)

    def count(tensor: Tensor, into: list[int], layer: int) -> None:
        if storage_key(tensor) not in counted:
            counted.add(storage_key(tensor))
            into[layer] += allocated_bytes(tensor.untyped_storage().nbytes(), training_pass.device)

    with saved_tensors_watched(lambda tensor: count(tensor, stash, instrumented.running)):
        loss = instrumented.forward()
        tensors = dict(instrumented.tensors)
        for group in instrumented.backward_inputs(loss, with_tied=True):
            for gradient, layer in group.saved_gradients:
                count(gradient, gradient_stash, instrumented.layer_of(group) if layer is None else layer)
    return stash, gradient_stash, tensors


def allocated_bytes(num_bytes: int, device: torch.device) -> int:
    """Returns the bytes that the allocator reserves for a storage: on CUDA a multiple of 512 bytes."""
    return -(-num_bytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES if device.type == "cuda" else num_bytes


def memory_of_passes(
    device: torch.device, forward: Callable[[], T], backward: Callable[[T], object]
) -> tuple[MemoryUse, MemoryUse]:
    """Returns the bytes allocated before, during and after a forward, and those of the backward of its result."""
    if device.type == "cuda":
        result, forward_use = _cuda_use(device, forward)
        _, backward_use = _cuda_use(device, lambda: backward(result))
        return forward_use, backward_use

    def passes() -> None:
        _mark(0)
        result = forward()
        _mark(1)
        backward(result)

    forward_use, backward_use = _uses_in_profile(passes)
    return forward_use, backward_use


def _cuda_use(device: torch.device, run: Callable[[], T]) -> tuple[T, MemoryUse]:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return result, MemoryUse(layer=0, before_bytes=before, peak_bytes=peak, after_bytes=after)


def _cpu_usage(training_pass: TrainingPass) -> tuple[list[MemoryUse], list[MemoryUse]]:
    """Returns the memory use of the forward and of the backward, from allocations in a profile with marks of layers."""
    instrumented = InstrumentedModel(training_pass=training_pass, enter=_mark)
    instrumented.backward(instrumented.forward())

    def passes() -> None:
        loss = instrumented.forward()
        _mark(_NO_LAYER)
        instrumented.backward(loss)

    uses = _uses_in_profile(passes)
    num_forward = [use.layer for use in uses].index(_NO_LAYER)
    return uses[:num_forward], uses[num_forward + 1 :]


def _mark(layer: int) -> None:
    """Notes in a profile that the work of a layer begins."""
    with record_function(f"{_MARK}{layer}"):
        pass


def _uses_in_profile(run: Callable[[], object]) -> list[MemoryUse]:
    """Returns the memory use of `run` on the CPU from each mark to the next, that of the last one to its end."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():  # torch 2.13 writes two lines to stderr for each profile
        profiler.start()
    run()
    with _silent_stderr():
        profiler.stop()
    changes: list[tuple[int | None, int]] = []
    for name, num_bytes in memory_events(profiler):
        if name.startswith(_MARK):
            changes.append((int(name.removeprefix(_MARK)), 0))
        else:
            changes.append((None, num_bytes))
    return list(_memory_uses(changes))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards output to stderr, also that of C++ code; a daemon may have closed it."""
    try:
        stderr = os.dup(2)
    except OSError:
        yield
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def _memory_uses(changes: Sequence[tuple[int | None, int]]) -> Iterable[MemoryUse]:
    """Yields the memory use between each mark and the next, the last one up to the end.

    Args:
        changes: (layer that begins, 0) or (None, bytes allocated, or freed if negative).
    """
    running: int | None = None
    allocated = before = peak = 0
    for layer, num_bytes in changes:
        allocated += num_bytes
        peak = max(peak, allocated)
        if layer is None:
            continue
        if running is not None:
            yield MemoryUse(layer=running, before_bytes=before, peak_bytes=peak, after_bytes=allocated)
        running, before, peak = layer, allocated, allocated
    if running is not None:
        yield MemoryUse(layer=running, before_bytes=before, peak_bytes=peak, after_bytes=allocated)


def _cuda_usage(training_pass: TrainingPass) -> tuple[list[MemoryUse], list[MemoryUse]]:
    """Returns the memory use of the forward and of the backward, from the caching allocator's counters."""
    device = training_pass.device
    marks: list[tuple[int, int]] = []  # (layer that begins, bytes allocated then)
    uses: list[MemoryUse] = []

    def mark(layer: int) -> None:
        allocated = torch.cuda.memory_allocated(device)
        if marks:
            running, before = marks[-1]
            peak = torch.cuda.max_memory_allocated(device)
            uses.append(MemoryUse(layer=running, before_bytes=before, peak_bytes=peak, after_bytes=allocated))
        torch.cuda.reset_peak_memory_stats(device)
        marks.append((layer, allocated))

    instrumented = InstrumentedModel(training_pass=training_pass, enter=mark)
    instrumented.backward(instrumented.forward())
    marks.clear()
    uses.clear()
    loss = instrumented.forward()
    mark(-1)
    forward = uses.copy()
    marks.clear()
    uses.clear()
    instrumented.backward(loss)
    mark(-1)
    return forward, uses
