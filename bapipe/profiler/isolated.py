"""Layers measured one by one, equal ones once, for models that do not fit as a whole."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from bapipe.errors import BapipeError
from bapipe.profiler.instrument import TensorInfo, TrainingPass, layer_error
from bapipe.profiler.layer_calls import CallableLayer, callable_layers, run_layers, signature, storage
from bapipe.profiler.layer_memory import LayerMemory, memory_use, pending_gradient_bytes
from bapipe.profiler.layer_timers import LayerTimer, make_layer_timer
from bapipe.profiler.layer_times import MAX_PASSES, MIN_PASSES, LayerTimes, spread

T = TypeVar("T")

_FLUSH_BYTES = 2**26
"""Written between repeats, so that a layer finds in the caches what it would find there in training: its input."""

_CUDA_WRITES = 32
"""How often, so that a CUDA device is busy until a layer's operators wait in its queue, as they do in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerFigures:
    """What a layer alone takes.

    Attributes:
        saved_inputs, saved_outputs: places of those whose storage its backward needs.
        own_stash_bytes: what its backward needs besides.
        has_gradient: of each output.
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
    left_bytes: int
    workspace_bytes: int
    has_gradient: tuple[bool, ...]


def measure_isolated(
    training_pass: TrainingPass, seconds: float, target: float, exhaustive: bool
) -> tuple[LayerTimes, LayerMemory]:
    """Returns times and bytes of every layer and the loss.

    Layers of the same code, shapes, types and settings are measured once, unless `exhaustive`. Each runs on the real
    inputs, which come from a forward that keeps only what later layers use. Times are those of a layer whose input is
    in the caches and whose parameters and stash are not.

    Raises:
        InvalidModel: a layer fails.
    """
    known: dict[object, _LayerFigures] = {}
    found: list[_LayerFigures] = []
    facts: dict[str, TensorInfo] = {}
    stash: list[int] = []
    charged: set[int] = set()
    parts = list(callable_layers(training_pass))
    num_measured = 0
    for call in run_layers(training_pass, parts):
        charged &= call.living
        graded = tuple(source in facts and facts[source].has_gradient for source in call.part.inputs)
        key = (signature(call.part.module, call.inputs), graded)
        if exhaustive or key not in known:
            num_measured += 1
            try:
                known[key] = _measure_layer(training_pass, call.part, call.inputs, graded, seconds / len(parts), target)
            except BapipeError:
                raise
            except Exception as error:  # whatever a layer raises
                raise layer_error(call.part.name, "forward or backward", training_pass, error) from error
        figures = known[key]
        found.append(figures)
        saved = [call.inputs[i] for i in figures.saved_inputs] + [call.outputs[i] for i in figures.saved_outputs]
        new = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved if storage(tensor) not in charged}
        charged |= new.keys()
        stash.append(figures.own_stash_bytes + sum(new.values()))
        for name, tensor, has_gradient in zip(call.part.outputs, call.outputs, figures.has_gradient, strict=True):
            facts[name] = TensorInfo(num_bytes=tensor.nbytes, has_gradient=has_gradient)
    times = LayerTimes(
        forward_ns=tuple(f.forward_ns for f in found),
        input_grad_ns=tuple(f.input_grad_ns for f in found),
        weight_grad_ns=tuple(f.weight_grad_ns for f in found),
        backward_ns=tuple(f.backward_ns for f in found),
        spreads=tuple(f.spread for f in found),
        num_passes=min(f.num_repeats for f in found),
        sum_over_whole=None,
        num_groups=num_measured,
    )
    memory = LayerMemory(
        stash_bytes=tuple(stash),
        gradient_stash_bytes=tuple(f.left_bytes for f in found),
        workspace_bytes=tuple(
            f.workspace_bytes + 2 * waiting  # the gradient that waits, and its sum with the layer's own
            for f, waiting in zip(found, (*pending_gradient_bytes(training_pass.model), 0), strict=True)
        ),
        tensors=facts,
    )
    return times, memory


def _measure_layer(
    training_pass: TrainingPass,
    part: CallableLayer,
    inputs: Sequence[Tensor],
    graded: tuple[bool, ...],
    seconds: float,
    target: float,
) -> _LayerFigures:
    device = training_pass.device
    module = part.module
    parameters = [p for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []

    def forward() -> tuple[list[Tensor], tuple[Tensor, ...]]:
        leaves = [x.detach().requires_grad_(g) for x, g in zip(inputs, graded, strict=True)]
        with training_pass.computing():
            return leaves, part.run(leaves)

    leaves, outputs = forward()
    has_gradient = tuple(o.requires_grad for o in outputs)
    gradients = [torch.ones_like(o) for o in outputs if o.requires_grad]
    clock, flush = make_layer_timer(device), _flush(device, inputs)

    def backward(outputs: Sequence[Tensor]) -> None:
        if gradients:
            torch.autograd.backward([o for o in outputs if o.requires_grad], gradients)

    backward(outputs)  # makes the gradients to add to
    repeats: list[tuple[int, int, int, int]] = []
    left_bytes = 0
    end = time.monotonic() + seconds
    while len(repeats) < MIN_PASSES or (
        len(repeats) < MAX_PASSES and time.monotonic() < end and _wide(repeats, target)
    ):
        (_, outputs), forward_ns = _timed(clock, flush, forward)
        _, backward_ns = _timed(clock, flush, lambda made=outputs: backward(made))  # type: ignore[misc]
        input_ns, weight_ns = 0, backward_ns
        if any(graded):
            leaves, outputs = forward()
            own = [o.clone() if o._is_view() else o for o in outputs if o.requires_grad]  # torch detaches in place
            (_, groups), input_ns = _timed(
                clock,
                flush,
                lambda own=own, leaves=leaves: stage_backward_input(own, gradients, leaves, iter(parameters)),  # type: ignore[misc]
            )
            left_bytes = _left_bytes(groups)
            _, weight_ns = _timed(clock, flush, lambda groups=groups: stage_backward_weight(iter(parameters), groups))  # type: ignore[misc]
            weight_ns = weight_ns if parameters else 0
        repeats.append((forward_ns, input_ns, weight_ns, backward_ns))
    if not any(graded) and parameters:
        left_bytes = sum(g.nbytes for g in gradients)
    saved = _saved(module, forward)
    del leaves, outputs
    (_, made), ran = memory_use(device, forward)
    workspace = ran.peak_bytes - max(ran.before_bytes, ran.after_bytes)
    _, ran = memory_use(device, lambda: backward(made))
    given = sum(g.nbytes for g in gradients)
    for parameter in parameters:
        parameter.grad = None
    typical = [round(median(column)) for column in zip(*repeats, strict=True)]
    return _LayerFigures(
        forward_ns=typical[0],
        input_grad_ns=typical[1],
        weight_grad_ns=typical[2],
        backward_ns=typical[3],
        spread=spread([f + b for f, _, _, b in repeats]),
        num_repeats=len(repeats),
        saved_inputs=saved[0],
        saved_outputs=saved[1],
        own_stash_bytes=saved[2],
        left_bytes=left_bytes,
        workspace_bytes=max(workspace, ran.peak_bytes - ran.before_bytes + given),
        has_gradient=has_gradient,
    )


def _wide(repeats: Sequence[tuple[int, int, int, int]], target: float) -> bool:
    return spread([f + b for f, _, _, b in repeats]) > target


def _saved(
    module: Callable[..., Any], forward: Callable[[], tuple[list[Tensor], tuple[Tensor, ...]]]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Places of the inputs and outputs whose storage is saved, and the bytes of all other storages that are."""
    own = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
    fixed = {storage(tensor) for tensor in own}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage(tensor) not in fixed:
            found[storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        inputs, outputs = forward()
    ins = tuple(i for i, x in enumerate(inputs) if storage(x) in found)
    outs = tuple(i for i, x in enumerate(outputs) if storage(x) in found)
    seen = {storage(inputs[i]) for i in ins} | {storage(outputs[i]) for i in outs}
    return ins, outs, sum(num_bytes for key, num_bytes in found.items() if key not in seen)


def _left_bytes(groups: Sequence[dict[str, Any]]) -> int:
    kept = {
        storage(g): g.untyped_storage().nbytes()
        for group in groups
        for gradients in group.get("grads") or ()
        for g in gradients or ()
        if g is not None
    }
    return sum(kept.values())


def _flush(device: torch.device, inputs: Sequence[Tensor]) -> Callable[[], None]:
    filler = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    num_writes = _CUDA_WRITES if device.type == "cuda" else 1

    def flush() -> None:
        for _ in range(num_writes):
            filler.fill_(1)
        for x in inputs:
            x.count_nonzero()

    return flush


def _timed(clock: LayerTimer, flush: Callable[[], None], run: Callable[[], T]) -> tuple[T, int]:
    clock.intervals()
    flush()
    clock.stamp(0)
    result = run()
    return result, sum(length_ns for _, length_ns in clock.intervals())
