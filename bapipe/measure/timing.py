"""Times of layers, taken while the whole model runs, so that caches and memory are as in training."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn

from bapipe.measure.watch import Subject, Watched

T = TypeVar("T")

MIN_PASSES, MAX_PASSES = 3, 60

SMALL = 0.005
"""Share of a pass below which a layer's spread does not matter for how often passes are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of the layers of a model, and of the loss after them.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns, backward_ns: F, I, W and B of the typical pass.
        spreads: half the width of the 95 % confidence interval of the median of a layer's F + B, relative to it.
        num_passes: how many there were.
        sum_over_whole: what the layers' F + B add up to, relative to F + B of the model without anything watching it.
    """

    forward_ns: tuple[int, ...]
    input_grad_ns: tuple[int, ...]
    weight_grad_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    spreads: tuple[float, ...]
    num_passes: int
    sum_over_whole: float


def time_layers(subject: Subject, seconds: float, target: float) -> LayerTimes:
    """Returns the times of every layer, from whole passes: at least three, until spreads are small or time is over.

    Passes end when no layer that takes a two-hundredth of a pass has a spread above `target`, or after about `seconds`.
    A pass runs F and then B of all layers, parameter gradients added to those that are there, as in all micro-batches
    of a step but the first; then F, I and W of all layers, as the runtime splits them; then F and B of the model alone.
    """
    clock = _CudaClock() if subject.device.type == "cuda" else _CpuClock()
    passes = _Passes(Watched(subject=subject, enter=clock.stamp), clock)
    passes.warm_up()
    end = time.monotonic() + seconds
    while len(passes.whole) < MIN_PASSES or (
        len(passes.whole) < MAX_PASSES and time.monotonic() < end and passes.widest > target
    ):
        passes.run()
    return passes.times()


class _Passes:
    """The times of each layer in each pass so far."""

    def __init__(self, watched: Watched, clock: "_CpuClock | _CudaClock") -> None:
        self.watched, self.clock = watched, clock
        self.forward: list[list[int]] = []
        self.whole: list[list[int]] = []
        self.inputs: list[list[int]] = []
        self.weights: list[list[int]] = []
        self.alone_ns: list[int] = []

    def warm_up(self) -> None:
        """Runs everything once, which makes the gradients to add to."""
        self.watched.backward(self.watched.forward())
        self.watched.backward_weights(self.watched.backward_inputs(self.watched.forward()))
        self.clock.intervals()

    def run(self) -> None:
        watched = self.watched
        whole = self._timed(self.forward, watched.forward)
        self._timed(self.whole, lambda: watched.backward(whole))
        split = self._timed(self.forward, watched.forward)
        groups = self._timed(self.inputs, lambda: watched.backward_inputs(split))
        self._timed(self.weights, lambda: watched.backward_weights(groups))
        self.alone_ns.append(self._alone_ns())
        self._share_search(
            {watched.layer_of(group) for group in groups if not group.at_root and not watched.is_shared(group)}
        )

    def _alone_ns(self) -> int:
        """F + B of the model as it is."""
        subject = self.watched.subject
        _synchronize(subject.device)
        start = time.perf_counter_ns()
        subject.whole_loss().backward()  # type: ignore[no-untyped-call]
        _synchronize(subject.device)
        return time.perf_counter_ns() - start

    def _timed(self, into: list[list[int]], run: Callable[[], T]) -> T:
        """Returns what `run` returns, and adds the time of each layer in it."""
        self.clock.intervals()
        result = run()
        total = [0] * (self.watched.num_layers + 2)
        for layer, length_ns in self.clock.intervals():
            total[layer] += length_ns
        if into is not self.inputs:
            total[-1] = 0  # the time of watching
        into.append(total)
        return result

    def _share_search(self, layers: set[int]) -> None:
        """Gives what torch takes to look for where W begins to the layers where one does, in equal parts."""
        times = self.inputs[-1]
        search_ns, times[-1] = times[-1], 0
        for layer in layers:
            times[layer] += search_ns // len(layers)

    @property
    def widest(self) -> float:
        """The largest spread among layers that matter."""
        totals = self._totals()
        least = SMALL * sum(median(own) for own in totals)
        return max((spread(own) for own in totals if median(own) >= least), default=0.0)

    def _totals(self) -> list[list[int]]:
        """F + B of each layer in each pass."""
        rounds = zip(self.forward[::2], self.whole, strict=True)
        return [
            list(own) for own in zip(*([f + b for f, b in zip(*both, strict=True)] for both in rounds), strict=True)
        ]

    def times(self) -> LayerTimes:
        num = self.watched.num_layers + 1
        whole, inputs, weights = _typical(self.whole), _typical(self.inputs), list(_typical(self.weights))
        for layer in self.watched.sharing_layers:  # their W was not run, and splitting costs such layers little
            weights[layer] = max(whole[layer] - inputs[layer], 0)
        return LayerTimes(
            forward_ns=_typical(self.forward)[:num],
            input_grad_ns=inputs[:num],
            weight_grad_ns=tuple(weights[:num]),
            backward_ns=whole[:num],
            spreads=tuple(spread(own) for own in self._totals())[:num],
            num_passes=len(self.whole),
            sum_over_whole=median(sum(f) + sum(b) for f, b in zip(self.forward[::2], self.whole, strict=True))
            / median(self.alone_ns),
        )


def spread(values: Sequence[int]) -> float:
    """Returns half the width of the 95 % confidence interval of the median, relative to the median.

    By the sign test, which assumes nothing of the distribution; below six values the interval is all of them.
    """
    ordered = sorted(values)
    low = max(0, int((len(ordered) - 1.96 * sqrt(len(ordered))) / 2)) if len(ordered) >= 6 else 0
    middle = median(ordered)
    return (ordered[-1 - low] - ordered[low]) / 2 / middle if middle else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An optimizer's step on the parameters of a layer.

    Attributes:
        state_bytes: what the optimizer keeps of them between steps.
    """

    ns: int
    state_bytes: int


def time_updates(
    groups: Sequence[Sequence[nn.Parameter]], make: Callable[..., torch.optim.Optimizer]
) -> tuple[Update, ...]:
    """Returns what an optimizer's step costs on each group of parameters, setting their gradients to None included.

    The parameters keep their values: the learning rate is 0.
    """
    optimizers = [make(group) if group else None for group in groups]
    rounds = [[_update_ns(optimizer) for optimizer in optimizers] for _ in range(MIN_PASSES + 1)]
    times = _medians(rounds[1:])  # the first one makes the optimizer's state
    return tuple(
        Update(ns=ns, state_bytes=_state_bytes(optimizer)) for ns, optimizer in zip(times, optimizers, strict=True)
    )


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


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
