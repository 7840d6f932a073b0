"""Times of layers, taken while the whole model runs, so that caches and memory are as in training."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn

from bapipe.measure.watch import Subject, Watched

T = TypeVar("T")

MIN_PASSES, MAX_PASSES = 3, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of the layers of a model, and of the loss after them.

    Attributes:
        forward_ns, input_grad_ns, backward_ns: of the typical pass; `backward_ns` is I and W together.
        num_passes: how many there were.
    """

    forward_ns: tuple[int, ...]
    input_grad_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    num_passes: int


def time_layers(subject: Subject, seconds: float) -> LayerTimes:
    """Returns the times of every layer, from whole passes for about `seconds`, at least three.

    A pass runs F and then B of all layers, parameter gradients added to those that are there, as in all micro-batches
    of a step but the first; then F and then I of all layers.
    """
    clock = _CudaClock() if subject.device.type == "cuda" else _CpuClock()
    watched = Watched(subject=subject, enter=clock.stamp)
    watched.backward(watched.forward())  # warms up, and makes the gradients to add to
    watched.backward(watched.forward())
    forward: list[list[int]] = []
    whole: list[list[int]] = []
    inputs: list[list[int]] = []
    end = time.monotonic() + seconds
    while len(whole) < MIN_PASSES or (len(whole) < MAX_PASSES and time.monotonic() < end):
        for run, times in ((watched.backward, whole), (watched.backward_inputs, inputs)):
            loss, forward_ns = _timed(clock, watched.forward, watched.num_layers + 1)
            forward.append(forward_ns)
            times.append(_timed(clock, _call(run, loss), watched.num_layers + 1)[1])
            del loss
    return LayerTimes(
        forward_ns=_typical(forward), input_grad_ns=_typical(inputs), backward_ns=_typical(whole), num_passes=len(whole)
    )


def time_updates(
    groups: Sequence[Sequence[nn.Parameter]], make: Callable[..., torch.optim.Optimizer]
) -> tuple[int, ...]:
    """Returns the time of an optimizer's step on each group of parameters, setting their gradients to None included.

    The parameters keep their values: the learning rate is 0.
    """
    optimizers = [make(group) if group else None for group in groups]
    rounds = [[_update_ns(optimizer) for optimizer in optimizers] for _ in range(MIN_PASSES + 1)]
    return _medians(rounds[1:])  # the first one makes the optimizer's state


def _update_ns(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    _synchronize(parameters[0].device)
    start = time.perf_counter_ns()
    optimizer.step()
    optimizer.zero_grad()
    _synchronize(parameters[0].device)
    return time.perf_counter_ns() - start


class _CpuClock:
    """Stamps of the layer that begins, and the times between them."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, int]] = []

    def stamp(self, layer: int) -> None:
        self.stamps.append((layer, time.perf_counter_ns()))

    def intervals(self) -> Iterable[tuple[int, int]]:
        """Returns the layer and the length of each interval so far, and forgets them."""
        stamps, self.stamps = [*self.stamps, (-1, time.perf_counter_ns())], []
        return [(layer, after - at) for (layer, at), (_, after) in pairwise(stamps)]


class _CudaClock:
    """The same on the current CUDA stream, where a layer begins when the work before it is done."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, torch.cuda.Event]] = []

    def stamp(self, layer: int) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.stamps.append((layer, event))

    def intervals(self) -> Iterable[tuple[int, int]]:
        self.stamp(-1)
        torch.cuda.synchronize()
        stamps, self.stamps = self.stamps, []
        return [(layer, round(at.elapsed_time(after) * 1e6)) for (layer, at), (_, after) in pairwise(stamps)]


def _timed(clock: _CpuClock | _CudaClock, run: Callable[[], T], num_layers: int) -> tuple[T, list[int]]:
    """Returns what `run` returns and the time of each layer in it."""
    clock.intervals()
    result = run()
    total = [0] * num_layers
    for layer, length_ns in clock.intervals():
        total[layer] += length_ns
    return result, total


def _call(run: Callable[[Tensor], None], loss: Tensor) -> Callable[[], None]:
    return lambda: run(loss)


def _typical(passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the medians, scaled to add up to the median pass; alone they add up to less, being skewed."""
    medians = _medians(passes)
    whole, total = median(map(sum, passes)), sum(medians)
    return tuple(round(time_ns * whole / total) for time_ns in medians) if total else medians


def _medians(passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(round(median(times)) for times in zip(*passes, strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
