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


DISTURBED = 0.05
"""Share of a pass that a thread may wait for the processor before the pass does not count."""


CPU = torch.device("cpu")


def now_ns(device: torch.device) -> int:
    """Returns the time of this thread on the processor where it alone computes, else that of the clock."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time_ns()
    return time.perf_counter_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of the layers of a model, and of the loss after them.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns, backward_ns: F, I, W and B of the typical pass.
        spreads: half the width of the 95 % confidence interval of the median of a layer's F + B, relative to it.
        num_passes: how many there were.
        sum_over_whole: what the layers' F + B add up to, relative to F + B of the model without anything watching it;
            None where the model did not run as a whole.
    """

    forward_ns: tuple[int, ...]
    input_grad_ns: tuple[int, ...]
    weight_grad_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    spreads: tuple[float, ...]
    num_passes: int
    sum_over_whole: float | None


def time_layers(subject: Subject, seconds: float, target: float) -> LayerTimes:
    """Returns the times of every layer, from whole passes: at least three, until spreads are small or time is over.

    Passes end when no layer that takes a two-hundredth of a pass has a spread above `target`, or after about `seconds`.
    A pass runs F and then B of all layers, parameter gradients added to those that are there, as in all micro-batches
    of a step but the first; then F, I and W of all layers, as the runtime splits them; then F and B of the model alone.

    On a CPU with one thread, times are those of the processor, without what other processes take of it. A pass in which
    they take much does not count, for they empty the caches too; where such passes are all there are, twice as long
    is spent, and the least disturbed half counts.
    """
    clock = _CudaClock() if subject.device.type == "cuda" else _CpuClock()
    runner = _Runner(Watched(subject=subject, enter=clock.stamp), clock)
    runner.warm_up()
    start, passes = time.monotonic(), [runner.run()]

    def wants_more() -> bool:
        kept, elapsed = _undisturbed(passes), time.monotonic() - start
        if len(kept) < MIN_PASSES:
            return len(passes) < MIN_PASSES or elapsed < 2 * seconds
        return len(passes) < MAX_PASSES and elapsed < seconds and _widest(kept) > target

    while wants_more():
        passes.append(runner.run())
    kept = _undisturbed(passes)
    if len(kept) < MIN_PASSES:
        kept = sorted(passes, key=lambda one: one.disturbed)[: max(MIN_PASSES, len(passes) // 2)]
    return _times(kept, runner.watched)


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass: the time of each layer in each part, the loss and the time of watching after them.

    Attributes:
        alone_ns: F + B of the model as it is.
        disturbed: the share of the time in which this thread waited for the processor; 0 where that is not known.
    """

    forward: list[int]
    whole: list[int]
    forward_again: list[int]
    inputs: list[int]
    weights: list[int]
    alone_ns: int
    disturbed: float

    @property
    def totals(self) -> list[int]:
        """F + B of each layer."""
        return [f + b for f, b in zip(self.forward, self.whole, strict=True)]


class _Runner:
    """Runs passes of a watched model."""

    def __init__(self, watched: Watched, clock: "_CpuClock | _CudaClock") -> None:
        self.watched, self.clock = watched, clock

    def warm_up(self) -> None:
        """Runs everything once, which makes the gradients to add to."""
        self.watched.backward(self.watched.forward())
        self.watched.backward_weights(self.watched.backward_inputs(self.watched.forward()))
        self.clock.intervals()

    def run(self) -> _Pass:
        watched = self.watched
        start_ns, own_ns = time.perf_counter_ns(), time.thread_time_ns()
        whole, forward = self._timed(watched.forward)
        _, backward = self._timed(lambda: watched.backward(whole))
        split, again = self._timed(watched.forward)
        groups, inputs = self._timed(lambda: watched.backward_inputs(split), watching=True)
        _, weights = self._timed(lambda: watched.backward_weights(groups))
        alone_ns = self._alone_ns()
        waited_ns = time.perf_counter_ns() - start_ns - (time.thread_time_ns() - own_ns)
        inner = [group for group in groups if not group.at_root and not watched.is_shared(group)]
        _share(inputs, {watched.layer_of(group) for group in inner})
        on_cpu = watched.subject.device.type == "cpu"
        return _Pass(
            forward=forward,
            whole=backward,
            forward_again=again,
            inputs=inputs,
            weights=weights,
            alone_ns=alone_ns,
            disturbed=waited_ns / (time.perf_counter_ns() - start_ns) if on_cpu else 0.0,
        )

    def _alone_ns(self) -> int:
        subject = self.watched.subject
        _synchronize(subject.device)
        start = now_ns(subject.device)
        subject.whole_loss().backward()  # type: ignore[no-untyped-call]
        _synchronize(subject.device)
        return now_ns(subject.device) - start

    def _timed(self, run: Callable[[], T], watching: bool = False) -> tuple[T, list[int]]:
        """Returns what `run` returns and the time of each layer in it, that of watching where asked for."""
        self.clock.intervals()
        result = run()
        total = [0] * (self.watched.num_layers + 2)
        for layer, length_ns in self.clock.intervals():
            total[layer] += length_ns
        if not watching:
            total[-1] = 0
        return result, total


def _share(times: list[int], layers: set[int]) -> None:
    """Gives what torch takes to look for where W begins to the layers where one does, in equal parts."""
    search_ns, times[-1] = times[-1], 0
    for layer in layers:
        times[layer] += search_ns // len(layers)


def _undisturbed(passes: Sequence[_Pass]) -> list[_Pass]:
    return [one for one in passes if one.disturbed <= DISTURBED]


def _spreads(passes: Sequence[_Pass]) -> list[float]:
    return [spread(own) for own in zip(*(one.totals for one in passes), strict=True)]


def _widest(passes: Sequence[_Pass]) -> float:
    """The largest spread among layers that matter."""
    typical = _medians([one.totals for one in passes])
    least = SMALL * sum(typical)
    return max(own for own, ns in zip(_spreads(passes), typical, strict=True) if ns >= least)


def _times(passes: Sequence[_Pass], watched: Watched) -> LayerTimes:
    num = watched.num_layers + 1
    forward = _typical([times for one in passes for times in (one.forward, one.forward_again)])
    whole, inputs = _typical([one.whole for one in passes]), _typical([one.inputs for one in passes])
    weights = list(_typical([one.weights for one in passes]))
    for layer in watched.sharing_layers:  # their W was not run, and splitting costs such layers little
        weights[layer] = max(whole[layer] - inputs[layer], 0)
    return LayerTimes(
        forward_ns=forward[:num],
        input_grad_ns=inputs[:num],
        weight_grad_ns=tuple(weights[:num]),
        backward_ns=whole[:num],
        spreads=tuple(_spreads(passes)[:num]),
        num_passes=len(passes),
        sum_over_whole=median(sum(one.totals) for one in passes) / median(one.alone_ns for one in passes),
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
    start = now_ns(parameters[0].device)
    optimizer.step()
    optimizer.zero_grad()
    _synchronize(parameters[0].device)
    return now_ns(parameters[0].device) - start


class _CpuClock:
    """Stamps of the layer that begins, and the times between them."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, int]] = []

    def stamp(self, layer: int) -> None:
        self.stamps.append((layer, now_ns(CPU)))

    def intervals(self) -> Iterable[tuple[int, int]]:
        """Returns the layer and the length of each interval so far, and forgets them."""
        stamps, self.stamps = [*self.stamps, (-1, now_ns(CPU))], []
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
