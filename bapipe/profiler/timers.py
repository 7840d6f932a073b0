"""Timers that say how long each layer of a running model takes, and the time that reporting to them costs."""

import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

if sys.platform != "win32":
    import resource

CPU = torch.device("cpu")

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
    """Returns how many pages of memory the kernel has given this process so far; 0 on systems that do not count."""
    return 0 if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class LayerTimer(Protocol):
    """Takes a time stamp when a layer begins, and returns the times between stamps."""

    def stamp(self, layer: int) -> None:
        """Records that a layer begins now."""
        ...

    def intervals(self) -> Iterable[tuple[int, int]]:
        """Returns (layer, nanoseconds) from each stamp to the next one, and forgets the stamps."""
        ...


def make_layer_timer(device: torch.device) -> LayerTimer:
    """Returns the timer for work on a device."""
    return CudaLayerTimer(device) if device.type == "cuda" else CpuLayerTimer()


class CpuLayerTimer:
    """Times of this thread, by `now_ns`."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, int]] = []

    def stamp(self, layer: int) -> None:
        self.stamps.append((layer, now_ns(CPU)))

    def intervals(self) -> Iterable[tuple[int, int]]:
        stamps, self.stamps = [*self.stamps, (-1, now_ns(CPU))], []
        return [(layer, after - at) for (layer, at), (_, after) in pairwise(stamps)]


class CudaLayerTimer:
    """Times of the current stream of a device, on which a layer begins when the work queued before it is done.

    Events are used again, because making one takes longer than a small kernel, and a layer that is running gets no
    second one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stamps: list[tuple[int, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    def stamp(self, layer: int) -> None:
        if self.stamps and self.stamps[-1][0] == layer:
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self.stamps.append((layer, event))

    def intervals(self) -> Iterable[tuple[int, int]]:
        self.stamp(-1)
        torch.cuda.synchronize(self.device)
        stamps, self.stamps = self.stamps, []
        self._free += [event for _, event in stamps]
        return [(layer, round(at.elapsed_time(after) * 1e6)) for (layer, at), (_, after) in pairwise(stamps)]


def instrumentation_overhead_ns(device: torch.device) -> tuple[int, int]:
    """Returns the time that one report adds to a layer: a report called from Python, and one from a hook of autograd.

    It is the difference of loops with and without reports. Their operators are large enough to clear Python's data from
    the nearest caches, as real layers do. It is 0 on CUDA, whose stamps are taken on the device.
    """
    if device.type != "cpu":
        return 0, 0
    timer = CpuLayerTimer()
    from_python = [_forward_loop_ns(timer.stamp) - _forward_loop_ns(None) for _ in range(_NUM_ROUNDS)]
    from_hook = [_backward_loop_ns(timer.stamp) - _backward_loop_ns(None) for _ in range(_NUM_ROUNDS)]
    return max(round(median(from_python) / _NUM_REPORTS), 0), max(round(median(from_hook) / _NUM_REPORTS), 0)


def _forward_loop_ns(report: Callable[[int], None] | None) -> int:
    x = torch.ones(_NUM_ELEMENTS)
    start = now_ns(CPU)
    for _ in range(_NUM_REPORTS):
        x = x * 1.0
        if report is not None:
            report(0)
    return now_ns(CPU) - start


def _backward_loop_ns(report: Callable[[int], None] | None) -> int:
    x = y = torch.ones(_NUM_ELEMENTS, requires_grad=True)
    for _ in range(_NUM_REPORTS):
        y = y * 1.0
        if report is not None:
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda _: report(0))
    start = now_ns(CPU)
    torch.autograd.backward(y, torch.ones_like(x))
    return now_ns(CPU) - start
