"""Computations for CUDA devices that can be tested without one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapipe.formats.profile import DeviceKind
from bapipe.profiler import cluster as cluster_module
from bapipe.profiler import layer_times
from bapipe.profiler.layer_memory import allocated_bytes
from bapipe.profiler.timers import CudaLayerTimer, instrumentation_overhead_ns
from bapipe.torch_device import framework_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("num_bytes", "on_cpu", "on_cuda"), [(0, 0, 0), (1, 1, 512), (512, 512, 512), (513, 513, 1024), (5120, 5120, 5120)]
)
def test_storages_take_whole_blocks(num_bytes: int, on_cpu: int, on_cuda: int) -> None:
    assert (allocated_bytes(num_bytes, CPU), allocated_bytes(num_bytes, CUDA)) == (on_cpu, on_cuda)


def test_framework_bytes_exclude_free_memory_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1800))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    assert framework_bytes(CUDA) == 500
    assert framework_bytes(CPU) == 0


class Event:
    """An event of a device that does a millisecond of work between any two."""

    made, recorded = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: object) -> None:
        Event.recorded += 1
        self.at_ms = float(Event.recorded)

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def test_intervals_are_those_between_events_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock = CudaLayerTimer(CUDA)
    for layer in (3, 1, 1, 3):
        clock.stamp(layer)
    assert waits == []  # nothing waits for the device before all is queued
    assert list(clock.intervals()) == [(3, 10**6), (1, 10**6), (3, 10**6)]
    assert waits == [CUDA]
    assert list(clock.intervals()) == []
    clock.stamp(5)
    assert list(clock.intervals()) == [(5, 10**6)]
    assert Event.made == 4  # events are used again
    assert instrumentation_overhead_ns(CUDA) == (0, 0)


def test_a_gpu_warms_up_until_two_passes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "WARM_UP_S", 0.0)
    for device, num_passes in ((CPU, 1), (CUDA, 5)):
        times = iter([100, 90, 70, 50, 50, 50])
        runner: Any = SimpleNamespace(model=SimpleNamespace(training_pass=SimpleNamespace(device=device)))
        runner.run = lambda times=times: SimpleNamespace(totals=[next(times)])
        layer_times._warm_up(runner)
        assert len(list(times)) == 6 - num_passes


def test_a_cuda_device_s_memory_leaves_room_for_context_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DeviceKind(kind="cuda", name="small", memory_bytes=10 * 2**30)
    monkeypatch.setattr(cluster_module, "describe", lambda _: kind)
    monkeypatch.setattr(cluster_module, "framework_bytes", lambda _: 3 * 2**30)
    assert cluster_module._memory_bytes("cuda", 0, 1) == 7 * 2**30
    assert cluster_module._memory_bytes("cuda", 1, 2) == 6 * 2**30


def test_the_model_as_a_whole_is_timed_by_the_host_and_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(layer_times, "occupy_gpu", lambda device, cycles: done.append("waits"))
    monkeypatch.setattr(layer_times, "synchronize", lambda device: done.append("done"))
    monkeypatch.setattr(layer_times, "now_ns", lambda device: 1000 * len(done))
    loss = SimpleNamespace(backward=lambda: done.append("runs"))
    training_pass = SimpleNamespace(device=CUDA, model_loss=lambda: loss)
    timer = SimpleNamespace(stamp=lambda layer: done.append("stamp"), intervals=lambda: [(0, 7), (0, 5)])
    monkeypatch.setattr(layer_times, "instrumentation_overhead_ns", lambda device: (0, 0))
    model: Any = SimpleNamespace(training_pass=training_pass)
    runner = layer_times._PassRunner(model, timer, (0,))
    assert (runner._model_ns(), done) == (2000, ["done", "runs", "done"])
    done.clear()
    assert (runner._model_on_gpu_ns(), done) == (12, ["waits", "stamp", "runs", "done"])


def test_a_pass_on_a_gpu_compares_the_host_with_it() -> None:
    times = [2, 4]
    passes = [
        layer_times._Pass(
            forward=times, backward=times, split_forward=times, input_grad=times, weight_grad=times,
            model_ns=10, model_wall_ns=wall_ns, disturbance=0.0,
        )
        for wall_ns in (14, 15, 16)
    ]  # fmt: skip
    runner: Any = SimpleNamespace(model=SimpleNamespace(sharing_layers=()), groups=(0, 1))
    found = layer_times._layer_times(passes, runner)
    assert (found.host_over_device, found.sum_over_whole) == (1.5, 1.2)
