"""Intervals between stamps."""

import torch

from bapipe.profiler.timers import CpuLayerTimer, instrumentation_overhead_ns, make_layer_timer, minor_page_faults


def test_each_stamp_begins_an_interval_that_the_next_one_ends() -> None:
    timer = CpuLayerTimer()
    for layer in (3, 1, 3):
        timer.stamp(layer)
    intervals = list(timer.intervals())
    assert [layer for layer, _ in intervals] == [3, 1, 3]
    assert all(length_ns >= 0 for _, length_ns in intervals)
    assert list(timer.intervals()) == []


def test_the_overhead_of_a_report_is_small() -> None:
    from_python, from_hook = instrumentation_overhead_ns(torch.device("cpu"))
    assert 0 <= from_python < 10**6
    assert 0 <= from_hook < 10**6


def test_a_cpu_has_a_timer_of_this_thread_and_counts_page_faults() -> None:
    assert isinstance(make_layer_timer(torch.device("cpu")), CpuLayerTimer)
    assert minor_page_faults() > 0
