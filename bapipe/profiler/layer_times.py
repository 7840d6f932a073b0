"""Times of layers, taken while the whole model runs, so that caches and memory are as in training."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import TypeVar

from bapipe.profiler.instrument import InstrumentedModel, TrainingPass, layer_error
from bapipe.profiler.layer_calls import equal_layer_groups
from bapipe.profiler.layer_timers import (
    LayerTimer,
    instrumentation_overhead_ns,
    make_layer_timer,
    minor_page_faults,
    now_ns,
    synchronize,
)

T = TypeVar("T")

MIN_PASSES, MAX_PASSES = 5, 60

MIN_RELEVANT_SHARE = 0.005
"""Share of a pass below which a layer's spread does not matter for how often passes are repeated."""


MAX_WAIT_SHARE = 0.05
"""Share of a pass that a thread may wait for the processor before the pass does not count."""


MAX_NEW_PAGES = 1000
"""Pages of memory that a pass may take from the kernel and still be like those of a long training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of the layers of a model, and of the loss after them.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns, backward_ns: F, I, W and B of the typical pass.
        spreads: half the width of the 95 % confidence interval of the median of a layer's F + B, relative to it.
        num_passes: how many there were.
        sum_over_whole: what the layers' F + B add up to, relative to F + B of the model without anything watching it;
            None where the model did not run as a whole.
        num_groups: how many layers, the loss among them, were measured by themselves.
    """

    forward_ns: tuple[int, ...]
    input_grad_ns: tuple[int, ...]
    weight_grad_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    spreads: tuple[float, ...]
    num_passes: int
    sum_over_whole: float | None
    num_groups: int


def time_layers(training_pass: TrainingPass, seconds: float, target: float, exhaustive: bool) -> LayerTimes:
    """Returns the times of every layer, from whole passes: at least five, until spreads are small or time is over.

    Passes end when no layer that takes a two-hundredth of a pass has a spread above `target`, or after about `seconds`.
    A pass runs F and then B of all layers, parameter gradients added to those that are there, as in all micro-batches
    of a step but the first; then F, I and W of all layers, as the runtime splits them; then F and B of the model alone.
    Equal layers (see `equal_layer_groups`) count as one measured several times: in each pass, each gets their mean.
    With `exhaustive` each has its own time.

    On a CPU with one thread, times are those of the processor, without what other processes take of it. A pass in which
    they take much does not count, for they empty the caches too; nor one that takes new memory from the kernel, which
    is slow and soon ends in a long training. Where such passes are all there are, twice as long is spent, and the least
    disturbed half counts. What watching adds to a layer's time is measured and taken off.
    """
    clock = make_layer_timer(training_pass.device)
    instrumented = InstrumentedModel(training_pass=training_pass, enter=clock.stamp)
    runner = _Runner(
        instrumented, clock, tuple(range(instrumented.num_layers + 1)) if exhaustive else _kinds(training_pass)
    )
    runner.run()  # warms up, and makes the gradients to add to
    start, passes = time.monotonic(), [runner.run()]

    def wants_more() -> bool:
        kept, elapsed = _undisturbed(passes), time.monotonic() - start
        if len(kept) < MIN_PASSES:
            return len(passes) < MIN_PASSES or (len(passes) < 2 * MAX_PASSES and elapsed < 2 * seconds)
        return len(passes) < MAX_PASSES and elapsed < seconds and _widest(kept) > target

    while wants_more():
        passes.append(runner.run())
    kept = _undisturbed(passes)
    if len(kept) < MIN_PASSES:
        kept = sorted(passes, key=lambda one: one.disturbed)[: max(MIN_PASSES, len(passes) // 2)]
    return _times(kept, runner)


def _kinds(training_pass: TrainingPass) -> tuple[int, ...]:
    reported: list[int] = []
    instrumented = InstrumentedModel(training_pass=training_pass, enter=reported.append)
    loss = instrumented.forward()
    reported.clear()
    instrumented.backward(loss)
    return equal_layer_groups(training_pass, instrumented.tensors, set(reported))


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass: the time of each layer in each part, the loss after them.

    Attributes:
        alone_ns: F + B of the model as it is.
        disturbed: the share of the time in which this thread waited for the processor, 1 where it took new memory from
            the kernel; 0 where that is not known.
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
    """Runs passes of a instrumented model.

    Attributes:
        kinds: of each layer and the loss, see `equal_layer_groups`.
    """

    def __init__(self, instrumented: InstrumentedModel, clock: LayerTimer, kinds: Sequence[int]) -> None:
        self.instrumented, self.clock, self.kinds = instrumented, clock, kinds
        self.called_ns, self.hooked_ns = instrumentation_overhead_ns(instrumented.training_pass.device)

    def run(self) -> _Pass:
        instrumented = self.instrumented
        start_ns, own_ns, pages = time.perf_counter_ns(), time.thread_time_ns(), minor_page_faults()
        whole, forward = self._timed(instrumented.forward, self.called_ns)
        _, backward = self._timed(lambda: instrumented.backward(whole), self.hooked_ns)
        split, again = self._timed(instrumented.forward, self.called_ns)
        groups, inputs = self._timed(lambda: instrumented.backward_inputs(split), self.hooked_ns, watching=True)
        _, weights = self._timed(lambda: instrumented.backward_weights(groups), self.called_ns)
        alone_ns = self._alone_ns()
        waited_ns = time.perf_counter_ns() - start_ns - (time.thread_time_ns() - own_ns)
        inner = [group for group in groups if not group.at_root and not instrumented.is_shared(group)]
        _share(inputs, {instrumented.layer_of(group) for group in inner})
        on_cpu = instrumented.training_pass.device.type == "cpu"
        new_memory = minor_page_faults() - pages > MAX_NEW_PAGES
        return _Pass(
            forward=pooled(forward, self.kinds),
            whole=pooled(backward, self.kinds),
            forward_again=pooled(again, self.kinds),
            inputs=pooled(inputs, self.kinds),
            weights=pooled(weights, self.kinds),
            alone_ns=alone_ns,
            disturbed=(1.0 if new_memory else waited_ns / (time.perf_counter_ns() - start_ns)) if on_cpu else 0.0,
        )

    def _alone_ns(self) -> int:
        training_pass = self.instrumented.training_pass
        synchronize(training_pass.device)
        start = now_ns(training_pass.device)
        try:
            training_pass.whole_loss().backward()  # type: ignore[no-untyped-call]
            synchronize(training_pass.device)
        except Exception as error:  # whatever the model raises
            name = type(training_pass.model.root).__name__
            raise layer_error(name, "forward and backward as a whole", training_pass, error) from error
        return now_ns(training_pass.device) - start

    def _timed(self, run: Callable[[], T], report_ns: int, watching: bool = False) -> tuple[T, list[int]]:
        """Returns what `run` returns and the time of each layer in it, that of watching where asked for."""
        self.clock.intervals()
        result = run()
        total = [0] * (self.instrumented.num_layers + 2)
        for layer, length_ns in self.clock.intervals():
            total[layer] += max(length_ns - report_ns, 0)
        if not watching:
            total[-1] = 0
        return result, total


def pooled(times: Sequence[int], kinds: Sequence[int]) -> list[int]:
    """Returns for each layer the mean over those of its kind."""
    totals, counts = Counter[int](), Counter(kinds)
    for kind, time_ns in zip(kinds, times, strict=False):  # what follows them is watching
        totals[kind] += time_ns
    return [round(totals[kind] / counts[kind]) for kind in kinds]


def _share(times: list[int], layers: set[int]) -> None:
    """Gives what torch takes to look for where W begins to the layers where one does, in equal parts."""
    search_ns, times[-1] = times[-1], 0
    for layer in layers:
        times[layer] += search_ns // len(layers)


def _undisturbed(passes: Sequence[_Pass]) -> list[_Pass]:
    return [one for one in passes if one.disturbed <= MAX_WAIT_SHARE]


def _spreads(passes: Sequence[_Pass]) -> list[float]:
    return [spread(own) for own in zip(*(one.totals for one in passes), strict=True)]


def _widest(passes: Sequence[_Pass]) -> float:
    """The largest spread among layers that matter."""
    typical = _medians([one.totals for one in passes])
    least = MIN_RELEVANT_SHARE * sum(typical)
    return max(own for own, ns in zip(_spreads(passes), typical, strict=True) if ns >= least)


def _times(passes: Sequence[_Pass], runner: _Runner) -> LayerTimes:
    forward = _typical([times for one in passes for times in (one.forward, one.forward_again)])
    whole, inputs = _typical([one.whole for one in passes]), _typical([one.inputs for one in passes])
    weights = list(_typical([one.weights for one in passes]))
    for layer in runner.instrumented.sharing_layers:  # their W was not run, and splitting costs such layers little
        weights[layer] = max(whole[layer] - inputs[layer], 0)
    return LayerTimes(
        forward_ns=forward,
        input_grad_ns=inputs,
        weight_grad_ns=tuple(weights),
        backward_ns=whole,
        spreads=tuple(_spreads(passes)),
        num_passes=len(passes),
        sum_over_whole=median(sum(one.totals) for one in passes) / median(one.alone_ns for one in passes),
        num_groups=len(set(runner.kinds)),
    )


def spread(values: Sequence[int]) -> float:
    """Returns half the width of the 95 % confidence interval of the median, relative to the median.

    By the sign test, which assumes nothing of the distribution; below six values the interval is all of them.
    """
    ordered = sorted(values)
    low = max(0, int((len(ordered) - 1.96 * sqrt(len(ordered))) / 2)) if len(ordered) >= 6 else 0
    middle = median(ordered)
    return (ordered[-1 - low] - ordered[low]) / 2 / middle if middle else 0.0


def _typical(passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the medians, scaled to add up to the median pass; alone they add up to less, being skewed."""
    medians = _medians(passes)
    whole, total = median(map(sum, passes)), sum(medians)
    return tuple(round(time_ns * whole / total) for time_ns in medians) if total else medians


def _medians(passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(round(median(times)) for times in zip(*passes, strict=True))
