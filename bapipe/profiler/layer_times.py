"""Times of layers, taken in passes of the whole model, so that caches and memory are as in training."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import median
from typing import NamedTuple, TypeVar

from bapipe.formats.host_times import HostTimes
from bapipe.profiler.instrument import InstrumentedModel, TrainingPass, layer_error
from bapipe.profiler.layer_calls import equal_layer_groups
from bapipe.profiler.timers import (
    LayerTimer,
    get_host_ahead,
    instrumentation_overhead_ns,
    make_layer_timer,
    minor_page_faults,
    now_ns,
    synchronize,
    timed,
)

T = TypeVar("T")

MIN_PASSES, MAX_PASSES = 5, 60

WARM_UP_S, WARM_UP_CHANGE = 1.0, 0.02
"""A GPU warms up for this time at least, and until a pass takes as long as the one before, to this relative change."""

MIN_RELEVANT_SHARE = 0.005
"""Layers below this share of a pass do not affect how often passes are repeated."""

MAX_WAIT_SHARE = 0.05
"""Share of a pass that this thread may wait for the processor; a pass that waits longer counts as disturbed."""

MAX_NEW_PAGES = 1000
"""Pages of memory that a pass may take from the kernel; passes of a long training do not take more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of the layers of a model, and of the loss after them; each tuple has one value for each of these.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns, backward_ns: F, I, W and B of the typical pass.
        spreads: half the width of the 95 % confidence interval of the median of a layer's F + B, relative to it.
        num_passes: how many passes count.
        sum_over_whole: sum of F + B over all layers, relative to F + B of the model without instrumentation; None if
            the model did not run as a whole.
        host_over_device: F + B of that model by the clock on the wall, relative to the time a GPU works on them; above
            1, the host takes longer to enqueue the work. None on a CPU.
        num_groups: how many layers, the loss among them, were measured, each for all that are equal to it.
        host: what the host needs to enqueue the work of each layer and of the loss; None on a CPU.
    """

    forward_ns: tuple[int, ...]
    input_grad_ns: tuple[int, ...]
    weight_grad_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    spreads: tuple[float, ...]
    num_passes: int
    sum_over_whole: float | None
    num_groups: int
    host_over_device: float | None = None
    host: tuple[HostTimes, ...] | None = None


def time_layers(training_pass: TrainingPass, seconds: float, target_spread: float, exhaustive: bool) -> LayerTimes:
    """Returns the times of every layer, from at least five passes of the whole model.

    Passes end when no layer that takes `MIN_RELEVANT_SHARE` of a pass or more has a spread above `target_spread`, or
    after about `seconds`. A pass runs F and then B of all layers, adding to existing gradients, as every micro-batch of
    a step but the first does; then F, I and W of all layers, split as the runtime splits them; then F and B of the
    model without instrumentation. In each pass, equal layers (see `equal_layer_groups`) all get the mean of their
    times; with `exhaustive` each layer has its own time.

    On a CPU with one thread, times are processor times, so they exclude what other processes use. A pass in which these
    use much does not count, because they also empty the caches. Nor does a pass that takes new memory from the kernel,
    which is slow and happens only at the start of a training. If there are only such passes, measuring takes twice as
    long, and the less disturbed half of the passes counts. The overhead of instrumentation is measured and subtracted.
    """
    timer = make_layer_timer(training_pass.device)
    model = InstrumentedModel(training_pass=training_pass, enter=timer.stamp)
    groups = tuple(range(model.num_layers + 1)) if exhaustive else _groups(training_pass)
    runner = _PassRunner(model, timer, groups)
    _warm_up(runner)
    start, passes = time.monotonic(), [runner.run()]

    def needs_another_pass() -> bool:
        undisturbed, elapsed = _undisturbed(passes), time.monotonic() - start
        if len(undisturbed) < MIN_PASSES:
            return len(passes) < MIN_PASSES or (len(passes) < 2 * MAX_PASSES and elapsed < 2 * seconds)
        return len(passes) < MAX_PASSES and elapsed < seconds and _max_spread(undisturbed) > target_spread

    while needs_another_pass():
        passes.append(runner.run())
    counted = _undisturbed(passes)
    if len(counted) < MIN_PASSES:
        counted = sorted(passes, key=lambda one: one.disturbance)[: max(MIN_PASSES, len(passes) // 2)]
    return _layer_times(counted, runner)


def _warm_up(runner: "_PassRunner") -> None:
    """Runs passes that do not count, and creates the gradients to add to.

    A GPU raises its clocks, and torch loads its kernels, in the first second of work.
    """
    start, total_ns = time.monotonic(), [sum(runner.run().totals)]
    if runner.model.training_pass.device.type == "cpu":
        return
    while len(total_ns) < MAX_PASSES and (
        len(total_ns) < 3
        or time.monotonic() - start < WARM_UP_S
        or abs(total_ns[-1] - total_ns[-2]) > WARM_UP_CHANGE * total_ns[-1]
    ):
        total_ns.append(sum(runner.run().totals))


def _groups(training_pass: TrainingPass) -> tuple[int, ...]:
    """Returns `equal_layer_groups` of a model; a layer has a backward if it reports in one."""
    reported: list[int] = []
    model = InstrumentedModel(training_pass=training_pass, enter=reported.append)
    loss = model.forward()
    reported.clear()
    model.backward(loss)
    return equal_layer_groups(training_pass, model.tensors, set(reported))


class _PhaseTimes(NamedTuple):
    """The times of a pass by phase, in lists of one time for each layer, the loss last.

    Attributes:
        forward, backward: F and B, run one after the other.
        split_forward, input_grad, weight_grad: F, I and W, run after those.
    """

    forward: list[int]
    backward: list[int]
    split_forward: list[int]
    input_grad: list[int]
    weight_grad: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The times of one pass.

    Attributes:
        device, host: of each layer; those of the host are 0 on a CPU.
        model_ns: F + B of the model without instrumentation, on a GPU with the host ahead.
        model_wall_ns: the same by the clock on the wall, with an empty queue at first; on a CPU 0.
        disturbance: the share of the time in which this thread waited for the processor, 1 if it took new memory from
            the kernel; 0 on devices that do not measure it.
    """

    device: _PhaseTimes
    host: _PhaseTimes
    model_ns: int
    model_wall_ns: int
    disturbance: float

    @property
    def totals(self) -> list[int]:
        """F + B of each layer."""
        return [f + b for f, b in zip(self.device.forward, self.device.backward, strict=True)]


class _PassRunner:
    """Runs passes of an instrumented model.

    Attributes:
        groups: for each layer and the loss, see `equal_layer_groups`.
        python_report_ns, hook_report_ns: see `instrumentation_overhead_ns`.
    """

    def __init__(self, model: InstrumentedModel, timer: LayerTimer, groups: Sequence[int]) -> None:
        self.model, self.timer, self.groups = model, timer, groups
        self.python_report_ns, self.hook_report_ns = instrumentation_overhead_ns(model.training_pass.device)

    def run(self) -> _Pass:
        start_ns, start_thread_ns, start_faults = time.perf_counter_ns(), time.thread_time_ns(), minor_page_faults()
        device, host = self._run_layers()
        on_cpu = self.model.training_pass.device.type == "cpu"
        model_wall_ns, model_ns = (0, self._model_ns()) if on_cpu else (self._model_ns(), self._model_on_gpu_ns())
        # Wall time minus processor time is how long this thread waited, on a CPU with one thread.
        waited_ns = time.perf_counter_ns() - start_ns - (time.thread_time_ns() - start_thread_ns)
        has_new_memory = minor_page_faults() - start_faults > MAX_NEW_PAGES
        wait_share = waited_ns / (time.perf_counter_ns() - start_ns)
        return _Pass(
            device=device,
            host=host,
            model_ns=model_ns,
            model_wall_ns=model_wall_ns,
            disturbance=(1.0 if has_new_memory else wait_share) if on_cpu else 0.0,
        )

    def _run_layers(self) -> tuple[_PhaseTimes, _PhaseTimes]:
        """Returns the device's and the host's times of each layer.

        What is kept for a backward is freed at the end, so that a GPU has room for the model's own.
        """
        model = self.model
        loss, forward, host_forward = self._timed(model.forward, self.python_report_ns)
        _, backward, host_backward = self._timed(lambda: model.backward(loss), self.hook_report_ns)
        split_loss, split_forward, host_split_forward = self._timed(model.forward, self.python_report_ns)
        groups, input_grad, host_input_grad = self._timed(
            lambda: model.backward_inputs(split_loss), self.hook_report_ns, with_overhead=True
        )
        _, weight_grad, host_weight_grad = self._timed(lambda: model.backward_weights(groups), self.python_report_ns)
        layers_with_search = {
            model.layer_of(group) for group in groups if not group.starts_at_root and not model.is_shared(group)
        }
        if model.training_pass.device.type == "cpu":
            _spread_search_time(input_grad, layers_with_search)
        else:
            input_grad[-1] = 0  # the device waited for the search, which is the host's work
            _spread_search_time(host_input_grad, layers_with_search)
        mean = partial(group_means, groups=self.groups)  # of the times of equal layers
        device = forward, backward, split_forward, input_grad, weight_grad
        host = host_forward, host_backward, host_split_forward, host_input_grad, host_weight_grad
        return _PhaseTimes(*map(mean, device)), _PhaseTimes(*map(mean, host))

    def _model_ns(self) -> int:
        """Returns the time of F + B of the model's own code."""
        device = self.model.training_pass.device
        synchronize(device)
        start = now_ns(device)
        self._run_model()
        return now_ns(device) - start

    def _model_on_gpu_ns(self) -> int:
        """Returns how long a GPU works on F + B of the model's own code, if the host is ahead of it."""
        device = self.model.training_pass.device
        return timed(self.timer, lambda: get_host_ahead(device), self._run_model)[1]

    def _run_model(self) -> None:
        training_pass = self.model.training_pass
        try:
            training_pass.model_loss().backward()  # type: ignore[no-untyped-call]
            synchronize(training_pass.device)
        except Exception as error:  # whatever the model raises
            name = type(training_pass.model.root).__name__
            raise layer_error(name, "forward and backward as a whole", training_pass, error) from error

    def _timed(
        self, run: Callable[[], T], report_ns: int, with_overhead: bool = False
    ) -> tuple[T, list[int], list[int]]:
        """Returns the result of `run`, the time of each layer in it, less `report_ns` for each report, and the host's.

        The last time of each list, after that of the loss, is that of instrumentation itself: on the device 0 unless
        `with_overhead`.
        """
        self.timer.intervals()
        result = run()
        total = [0] * (self.model.num_layers + 2)
        for layer, length_ns in self.timer.intervals():
            total[layer] += max(length_ns - report_ns, 0)
        if not with_overhead:
            total[-1] = 0
        of_host = [0] * (self.model.num_layers + 2)
        for layer, length_ns in self.timer.host_intervals():
            of_host[layer] += length_ns
        return result, total, of_host


def group_means(times: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Returns for each layer the mean of the times of its group."""
    totals, counts = Counter[int](), Counter(groups)
    for group, time_ns in zip(groups, times, strict=False):  # `times` has one more, that of instrumentation
        totals[group] += time_ns
    return [round(totals[group] / counts[group]) for group in groups]


def _spread_search_time(times: list[int], layers: set[int]) -> None:
    """Adds torch's time for finding where W begins to the layers in which it begins, in equal parts."""
    search_ns, times[-1] = times[-1], 0
    for layer in layers:
        times[layer] += search_ns // len(layers)


def _undisturbed(passes: Sequence[_Pass]) -> list[_Pass]:
    return [one for one in passes if one.disturbance <= MAX_WAIT_SHARE]


def _spreads(passes: Sequence[_Pass]) -> list[float]:
    return [spread(times_of_layer) for times_of_layer in zip(*(one.totals for one in passes), strict=True)]


def _max_spread(passes: Sequence[_Pass]) -> float:
    """Returns the largest spread among layers that take a relevant share of a pass."""
    typical = _medians([one.totals for one in passes])
    min_ns = MIN_RELEVANT_SHARE * sum(typical)
    return max(spread for spread, ns in zip(_spreads(passes), typical, strict=True) if ns >= min_ns)


def _layer_times(passes: Sequence[_Pass], runner: _PassRunner) -> LayerTimes:
    device = [one.device for one in passes]
    forward = _typical([times for one in device for times in (one.forward, one.split_forward)])
    backward, input_grad, weight_grad = _backward_times(device, _typical, runner)
    model_ns, wall_ns = median(one.model_ns for one in passes), median(one.model_wall_ns for one in passes)
    on_cpu = runner.model.training_pass.device.type == "cpu"
    return LayerTimes(
        forward_ns=forward,
        input_grad_ns=input_grad,
        weight_grad_ns=weight_grad,
        backward_ns=backward,
        spreads=tuple(_spreads(passes)),
        num_passes=len(passes),
        sum_over_whole=median(sum(one.totals) for one in passes) / model_ns,
        host_over_device=wall_ns / model_ns if wall_ns else None,
        num_groups=len(set(runner.groups)),
        host=None if on_cpu else _host_times([one.host for one in passes], runner),
    )


def _host_times(passes: Sequence[_PhaseTimes], runner: _PassRunner) -> tuple[HostTimes, ...]:
    """Returns the medians of the host's times of each layer."""
    times = _medians([one.forward for one in passes]), *_backward_times(passes, _medians, runner)
    return tuple(
        HostTimes(forward_ns=f, input_grad_ns=i, weight_grad_ns=w, backward_ns=b)
        for f, b, i, w in zip(*times, strict=True)
    )


def _backward_times(
    passes: Sequence[_PhaseTimes], middle: Callable[[Sequence[Sequence[int]]], tuple[int, ...]], runner: _PassRunner
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns B, I and W of each layer, in the middle of some passes."""
    backward, input_grad, weight_grad = (
        list(middle(times))
        for times in zip(*((one.backward, one.input_grad, one.weight_grad) for one in passes), strict=True)
    )
    for layer in runner.model.sharing_layers:  # their W was not run; splitting adds little to their B
        weight_grad[layer] = max(backward[layer] - input_grad[layer], 0)
    return tuple(backward), tuple(input_grad), tuple(weight_grad)


def spread(values: Sequence[int]) -> float:
    """Returns half the width of the 95 % confidence interval of the median, relative to the median.

    It is the interval of the sign test, which assumes nothing about the distribution: between the order statistics at
    n / 2 ± 1.96 sqrt(n) / 2. Below six values it is the whole range.
    """
    ordered = sorted(values)
    low = max(0, int((len(ordered) - 1.96 * sqrt(len(ordered))) / 2)) if len(ordered) >= 6 else 0
    middle = median(ordered)
    return (ordered[-1 - low] - ordered[low]) / 2 / middle if middle else 0.0


def _typical(passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the medians of the layers, scaled to add up to the median pass.

    The distribution of times is skewed to long ones, so the medians of the layers add up to less than the median pass.
    """
    medians = _medians(passes)
    median_total, total = median(map(sum, passes)), sum(medians)
    return tuple(round(time_ns * median_total / total) for time_ns in medians) if total else medians


def _medians(passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(round(median(times)) for times in zip(*passes, strict=True))
