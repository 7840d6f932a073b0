"""Clocks that tell how long each layer of a running model takes, and what telling costs."""

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
    """Returns the time of this thread on the processor where it alone computes, else that of the clock."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time_ns()
    return time.perf_counter_ns()


def synchronize(device: torch.device) -> None:
    """Waits for what the device still computes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def minor_page_faults() -> int:
    """Returns how many pages of memory this process has taken from the kernel so far; 0 where nobody counts them."""
    return 0 if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class LayerTimer(Protocol):
    """Stamps of the layer that begins, and the times between them."""

    def stamp(self, layer: int) -> None:
        """Notes that a layer begins now."""
        ...

    def intervals(self) -> Iterable[tuple[int, int]]:
        """Returns the layer and the length of each interval so far, and forgets them."""
        ...


def make_layer_timer(device: torch.device) -> LayerTimer:
    """Returns the clock for what runs on a device."""
    return CudaLayerTimer(device) if device.type == "cuda" else CpuLayerTimer()


class CpuLayerTimer:
    """The clock of this thread."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, int]] = []

    def stamp(self, layer: int) -> None:
        self.stamps.append((layer, now_ns(CPU)))

    def intervals(self) -> Iterable[tuple[int, int]]:
        stamps, self.stamps = [*self.stamps, (-1, now_ns(CPU))], []
        return [(layer, after - at) for (layer, at), (_, after) in pairwise(stamps)]


class CudaLayerTimer:
    """The current stream of a device, where a layer begins when the work before it is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stamps: list[tuple[int, torch.cuda.Event]] = []

    def stamp(self, layer: int) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self.stamps.append((layer, event))

    def intervals(self) -> Iterable[tuple[int, int]]:
        self.stamp(-1)
        torch.cuda.synchronize(self.device)
        stamps, self.stamps = self.stamps, []
        return [(layer, round(at.elapsed_time(after) * 1e6)) for (layer, at), (_, after) in pairwise(stamps)]


def instrumentation_overhead_ns(device: torch.device) -> tuple[int, int]:
    """Returns what a report adds to the time of a layer: one called from Python, and one from a hook of autograd.

    Measured with and without, between operators that leave nothing of Python in the nearest caches, as layers do; 0 on
    CUDA, whose clock runs on the device.
    """
    if device.type != "cpu":
        return 0, 0
    clock = CpuLayerTimer()
    called = [_forward_ns(clock.stamp) - _forward_ns(None) for _ in range(_NUM_ROUNDS)]
    hooked = [_backward_ns(clock.stamp) - _backward_ns(None) for _ in range(_NUM_ROUNDS)]
    return max(round(median(called) / _NUM_REPORTS), 0), max(round(median(hooked) / _NUM_REPORTS), 0)


def _forward_ns(report: Callable[[int], None] | None) -> int:
    x = torch.ones(_NUM_ELEMENTS)
    start = now_ns(CPU)
    for _ in range(_NUM_REPORTS):
        x = x * 1.0
        if report is not None:
            report(0)
    return now_ns(CPU) - start


def _backward_ns(report: Callable[[int], None] | None) -> int:
    x = y = torch.ones(_NUM_ELEMENTS, requires_grad=True)
    for _ in range(_NUM_REPORTS):
        y = y * 1.0
        if report is not None:
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda _: report(0))
    start = now_ns(CPU)
    torch.autograd.backward(y, torch.ones_like(x))
    return now_ns(CPU) - start
