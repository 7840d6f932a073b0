"""Timers that say how long each layer of a running model takes, and the time that reporting to them costs."""

import resource
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

import torch

from bapipe.torch_device import CPU
from bapipe.torch_private.measuring import occupy_gpu

T = TypeVar("T")

HEAD_START_CYCLES = 20_000_000
"""For which a GPU waits so that the host gets ahead of it: about 10 ms, more while its clock is low."""

HEAD_START_NS = 5_000_000
"""For which the host uses a head start: a layer that begins within it has as long again to be enqueued."""

LONG_HEAD_START_CYCLES = 50_000_000
"""The same for work that is timed as a whole, such as a pass of a model: about 25 ms."""

_NO_LAYER = -1
"""Of stamps at which no layer begins."""

_NUM_ELEMENTS, _NUM_REPORTS, _NUM_ROUNDS = 2**18, 50, 15


def now_ns(device: torch.device) -> int:
    """Returns the processor time of this thread if no other thread computes, else the wall-clock time."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time_ns()
    return time.perf_counter_ns()


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def minor_page_faults() -> int:
    """Returns how many pages of memory the kernel has given this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class LayerTimer(Protocol):
    """Takes a time stamp when a layer begins, and returns the times between stamps."""

    def stamp(self, layer: int) -> None:
        """Records that a layer begins now."""
        ...

    def intervals(self) -> Iterable[tuple[int, int]]:
        """Returns (layer, nanoseconds) from each stamp to the next one, and forgets the stamps."""
        ...

    def host_intervals(self) -> Iterable[tuple[int, int]]:
        """Returns the host's times for the stamps of the last call of `intervals`; empty if the device is the CPU."""
        ...


def make_layer_timer(device: torch.device) -> LayerTimer:
    """Returns the timer for work on a device."""
    return CudaLayerTimer(device) if device.type == "cuda" else CpuLayerTimer()


def get_host_ahead(device: torch.device) -> None:
    """Makes a GPU wait, so that the host enqueues what comes meanwhile."""
    if device.type == "cuda":
        occupy_gpu(device, LONG_HEAD_START_CYCLES)


def timed(timer: LayerTimer, prepare: Callable[[], None], run: Callable[[], T]) -> tuple[T, int]:
    """Returns the result of `run` and its time in nanoseconds; `prepare` runs before, when all earlier work is done."""
    timer.intervals()
    prepare()
    timer.stamp(0)
    result = run()
    return result, sum(length_ns for _, length_ns in timer.intervals())


class CpuLayerTimer:
    """Times of this thread, by `now_ns`."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, int]] = []

    def stamp(self, layer: int) -> None:
        self.stamps.append((layer, now_ns(CPU)))

    def intervals(self) -> Iterable[tuple[int, int]]:
        stamps, self.stamps = [*self.stamps, (-1, now_ns(CPU))], []
        return [(layer, after - at) for (layer, at), (_, after) in pairwise(stamps)]

    def host_intervals(self) -> Iterable[tuple[int, int]]:
        return ()


class CudaLayerTimer:
    """Times of the current stream of a device, on which a layer begins when the work queued before it is done.

    Events are used again, because making one takes longer than a small kernel, and a layer that is running gets no
    second one. Now and then the device waits before a layer begins, so that the host is ahead of it all the time: else
    a layer of small kernels would last as long as the host needs to enqueue them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stamps: list[_CudaStamp] = []
        self._free: list[torch.cuda.Event] = []
        self._host: list[tuple[int, int]] = []
        self._wait: _CudaStamp | None = None  # the last one of the device
        self._is_ahead_until_ns = 0

    def stamp(self, layer: int) -> None:
        if self._stamps and self._stamps[-1].layer == layer:
            return
        begin_ns = time.perf_counter_ns()
        if not self._stamps or begin_ns > self._is_ahead_until_ns:
            self._is_ahead_until_ns = begin_ns + HEAD_START_NS
            # If the last wait has not begun, all of it is still ahead; more would fill the queue, and the host wait.
            if self._wait is None or self._wait.event.query():  # type: ignore[no-untyped-call]
                self._wait = self._record(_NO_LAYER, begin_ns)
                occupy_gpu(self.device, HEAD_START_CYCLES)
        self._record(layer, begin_ns)

    def intervals(self) -> Iterable[tuple[int, int]]:
        self._record(_NO_LAYER, time.perf_counter_ns())
        torch.cuda.synchronize(self.device)
        stamps, self._stamps, self._wait = self._stamps, [], None
        pairs = list(pairwise(stamps))
        self._free += [stamp.event for stamp in stamps]
        self._host = [(a.layer, max(b.begin_ns - a.end_ns, 0)) for a, b in pairs if a.layer != _NO_LAYER]
        return [(a.layer, round(a.event.elapsed_time(b.event) * 1e6)) for a, b in pairs if a.layer != _NO_LAYER]

    def host_intervals(self) -> Iterable[tuple[int, int]]:
        return self._host

    def _record(self, layer: int, begin_ns: int) -> "_CudaStamp":
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        stamp = _CudaStamp(layer, event, begin_ns, time.perf_counter_ns())
        self._stamps.append(stamp)
        return stamp


class _CudaStamp(NamedTuple):
    """`begin_ns` and `end_ns` are the host's clock before and after it took the stamp."""

    layer: int
    event: torch.cuda.Event
    begin_ns: int
    end_ns: int


def instrumentation_overhead_ns(device: torch.device) -> tuple[int, int]:
    """Returns the time that one report adds to a layer: a report called from Python, and one from a hook of autograd.

    It is the difference of loops with and without reports. Their operators are large enough to clear Python's data from
    the nearest caches, as real layers do. On CUDA it is what an event adds between two kernels, 2 us on an H100.
    """
    if device.type == "cuda":
        event_ns = _event_ns(device)
        return event_ns, event_ns
    timer = CpuLayerTimer()
    from_python = [_forward_loop_ns(timer.stamp) - _forward_loop_ns(None) for _ in range(_NUM_ROUNDS)]
    from_hook = [_backward_loop_ns(timer.stamp) - _backward_loop_ns(None) for _ in range(_NUM_ROUNDS)]
    return max(round(median(from_python) / _NUM_REPORTS), 0), max(round(median(from_hook) / _NUM_REPORTS), 0)


def _event_ns(device: torch.device) -> int:
    """Returns the time that an event takes on a GPU's stream: the kernel after it starts later."""
    x = torch.ones(_NUM_ELEMENTS, device=device)
    _kernels_ns(x, with_events=True)  # loads the kernel
    times = [_kernels_ns(x, with_events=True) - _kernels_ns(x, with_events=False) for _ in range(_NUM_ROUNDS)]
    return max(round(median(times) / _NUM_REPORTS), 0)


def _kernels_ns(x: torch.Tensor, *, with_events: bool) -> float:
    stream = torch.cuda.current_stream(x.device)
    start, *between, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(_NUM_REPORTS + 2)
    )
    occupy_gpu(x.device, HEAD_START_CYCLES)
    start.record(stream)
    for event in between:
        x.mul_(1.0)
        if with_events:
            event.record(stream)
    end.record(stream)
    torch.cuda.synchronize(x.device)
    took_ms: float = start.elapsed_time(end)
    return took_ms * 1e6


def _forward_loop_ns(report: Callable[[int], None] | None) -> int:
    x = torch.ones(_NUM_ELEMENTS, device=CPU)
    start = now_ns(CPU)
    for _ in range(_NUM_REPORTS):
        x = x * 1.0
        if report is not None:
            report(0)
    return now_ns(CPU) - start


def _backward_loop_ns(report: Callable[[int], None] | None) -> int:
    x = y = torch.ones(_NUM_ELEMENTS, device=CPU, requires_grad=True)
    for _ in range(_NUM_REPORTS):
        y = y * 1.0
        if report is not None:
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda _: report(0))
    start = now_ns(CPU)
    torch.autograd.backward(y, torch.ones_like(x))
    return now_ns(CPU) - start
