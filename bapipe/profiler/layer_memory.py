"""What layers keep for their backward, and what they need only while they run."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function

from bapipe.profiler.instrument import InstrumentedModel, TensorInfo, TrainingPass, parameters_of
from bapipe.profiler.layer_calls import storage
from bapipe.tracing import TracedModel

T = TypeVar("T")

_MARK = "bapipe:layer:"

_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of the layers of a model, and of the loss after them.

    Attributes:
        stash_bytes: kept from F to the backward.
        gradient_stash_bytes: what I leaves for W besides.
        tensors: the layers' outputs by name.
    """

    stash_bytes: tuple[int, ...]
    gradient_stash_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    tensors: dict[str, TensorInfo]


def layer_memory(training_pass: TrainingPass) -> LayerMemory:
    """Returns what autograd keeps and what the allocator gives out, gradients being added up.

    Stash: every storage that autograd saves, parameters and buffers aside, for the first layer that saves it. What I
    leaves for W: every storage of a gradient that arrives where W begins, for the first layer that W works on; torch
    keeps the whole stash until the end of W as well.
    Workspace: forward, the most allocated while a layer runs beyond the larger of before and after; backward, the most
    beyond before, plus what is there before for it: gradients of its outputs and `pending_gradient_bytes`.
    """
    stash, left, tensors = _stash(training_pass)
    forward, backward = (_cuda_usage if training_pass.device.type == "cuda" else _cpu_usage)(training_pass)
    workspace = [0] * (len(stash) + 1)  # and one for what watching needs
    for use in forward:
        workspace[use.layer] = max(workspace[use.layer], use.peak_bytes - max(use.before_bytes, use.after_bytes))
    gradients = [
        waiting + sum(tensors[name].num_bytes for name in layer.outputs if tensors[name].has_gradient)
        for waiting, layer in zip(pending_gradient_bytes(training_pass.model), training_pass.model.layers, strict=True)
    ]
    for use in backward:
        given = gradients[use.layer] if use.layer < len(gradients) else 0
        workspace[use.layer] = max(workspace[use.layer], use.peak_bytes - use.before_bytes + given)
    return LayerMemory(
        stash_bytes=tuple(stash),
        gradient_stash_bytes=tuple(left),
        workspace_bytes=tuple(workspace[:-1]),
        tensors=tensors,
    )


def pending_gradient_bytes(model: TracedModel) -> tuple[int, ...]:
    """Returns for each layer the bytes of gradients that wait for it, from later layers that use its parameters too.

    Autograd adds what layers give to the gradient of one parameter up before it goes anywhere, so from the backward of
    the last layer that uses the parameter to that of the first one a whole gradient is held.
    """
    users = Counter(id(parameter) for own in parameters_of(model) for parameter in own)
    seen: set[int] = set()
    waiting = []
    for own in parameters_of(model):
        new = [p for p in own if id(p) not in seen]
        seen.update(map(id, new))
        waiting.append(sum(p.nbytes for p in new if p.requires_grad and users[id(p)] > 1))
    return tuple(waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes allocated before, at the most during, and after a stretch of a layer's work."""

    layer: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def _stash(training_pass: TrainingPass) -> tuple[list[int], list[int], dict[str, TensorInfo]]:
    module = training_pass.model.module
    counted = {storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    stash, left = [0] * (len(training_pass.model.layers) + 1), [0] * (len(training_pass.model.layers) + 1)
    instrumented = InstrumentedModel(training_pass=training_pass, enter=lambda _: None)

    def count(tensor: Tensor, into: list[int], layer: int) -> None:
        if storage(tensor) not in counted:
            counted.add(storage(tensor))
            into[layer] += allocated_bytes(tensor.untyped_storage().nbytes(), training_pass.device)

    def pack(tensor: Tensor) -> Tensor:
        count(tensor, stash, instrumented.running)
        return tensor  # so that the storage lives on, and no other gets its address

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = instrumented.forward()
        tensors = dict(instrumented.tensors)
        for group in instrumented.backward_inputs(loss):
            for gradient in group.kept:
                count(gradient, left, instrumented.layer_of(group))
    return stash, left, tensors


def allocated_bytes(num_bytes: int, device: torch.device) -> int:
    """Returns what an allocator gives out for a storage: on CUDA whole blocks of 512 bytes."""
    return -(-num_bytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES if device.type == "cuda" else num_bytes


def memory_use(device: torch.device, run: Callable[[], T]) -> tuple[T, MemoryUse]:
    """Returns what `run` returns, and the bytes it takes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return result, MemoryUse(layer=0, before_bytes=before, peak_bytes=peak, after_bytes=after)

    def marked() -> T:
        with record_function(f"{_MARK}0"):
            pass
        return run()

    result, uses = _profiled(marked)
    return result, uses[0]


def _cpu_usage(training_pass: TrainingPass) -> tuple[list[MemoryUse], list[MemoryUse]]:
    """Reads the allocator's events between marks in a profile of the pass."""

    def mark(layer: int) -> None:
        with record_function(f"{_MARK}{layer}"):
            pass

    instrumented = InstrumentedModel(training_pass=training_pass, enter=mark)
    instrumented.backward(instrumented.forward())
    loss, forward = _profiled(instrumented.forward)
    _, backward = _profiled(lambda: instrumented.backward(loss))
    return forward, backward


def _profiled(run: Callable[[], T]) -> tuple[T, list[MemoryUse]]:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():  # torch 2.13 writes two lines there for each profile
        profiler.start()
    result = run()
    with _silent_stderr():
        profiler.stop()
    inner = profiler.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    events = sorted(inner.kineto_results.events(), key=lambda event: event.start_ns())
    changes: list[tuple[int | None, int]] = []  # (layer that begins, 0) or (None, bytes)
    for event in events:
        if event.name() == "[memory]":
            changes.append((None, event.nbytes()))  # type: ignore[attr-defined]
        elif event.name().startswith(_MARK):
            changes.append((int(event.name().removeprefix(_MARK)), 0))
    return result, list(_uses(changes))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards what C++ code writes to stderr."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _uses(changes: Sequence[tuple[int | None, int]]) -> Iterable[MemoryUse]:
    """Yields the stretches between two marks."""
    running: int | None = None
    held = before = peak = 0
    for layer, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
        if layer is None:
            continue
        if running is not None:
            yield MemoryUse(layer=running, before_bytes=before, peak_bytes=peak, after_bytes=held)
        running, before, peak = layer, held, held
    if running is not None:
        yield MemoryUse(layer=running, before_bytes=before, peak_bytes=peak, after_bytes=held)


def _cuda_usage(training_pass: TrainingPass) -> tuple[list[MemoryUse], list[MemoryUse]]:
    """Reads the caching allocator's counters at marks."""
    device = training_pass.device
    stretches: list[tuple[int, int]] = []  # (layer that begins, bytes before)
    uses: list[MemoryUse] = []

    def mark(layer: int) -> None:
        held = torch.cuda.memory_allocated(device)
        if stretches:
            running, before = stretches[-1]
            peak = torch.cuda.max_memory_allocated(device)
            uses.append(MemoryUse(layer=running, before_bytes=before, peak_bytes=peak, after_bytes=held))
        torch.cuda.reset_peak_memory_stats(device)
        stretches.append((layer, held))

    instrumented = InstrumentedModel(training_pass=training_pass, enter=mark)
    instrumented.backward(instrumented.forward())
    stretches.clear()
    uses.clear()
    loss = instrumented.forward()
    mark(-1)
    forward = uses.copy()
    stretches.clear()
    uses.clear()
    instrumented.backward(loss)
    mark(-1)
    return forward, uses
