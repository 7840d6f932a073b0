"""Computations for CUDA devices that can be tested without one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapipe.formats.host_times import HostTimes
from bapipe.formats.profile import DeviceKind
from bapipe.profiler import cluster as cluster_module
from bapipe.profiler import layer_times, optimizer_step, probe, timers
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


class Gpu:
    """A GPU of 2 GHz and its host on one clock, in milliseconds: `launch` enqueues a kernel.

    The host takes 0.25 ms for each, and waits while the GPU is more than `queue_ms` behind; an event takes `event_ms`
    of the GPU.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, event_ms: float = 0.0, queue_ms: float = 1e9) -> None:
        self.host_ms = self.done_ms = 0.0
        self.event_ms, self.queue_ms = event_ms, queue_ms
        self.num_events = 0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.synchronize())
        monkeypatch.setattr(timers, "occupy_gpu", lambda device, cycles: self.launch(cycles / 2e6, host_ms=0.0))
        monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter_ns=lambda: round(self.host_ms * 1e6)))

    def launch(self, ms: float, host_ms: float = 0.25) -> None:
        self.host_ms = max(self.host_ms + host_ms, self.done_ms - self.queue_ms)
        self.done_ms = max(self.done_ms, self.host_ms) + ms

    def synchronize(self) -> None:
        self.host_ms = max(self.host_ms, self.done_ms)


class Event:
    """An event of it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        gpu.num_events += 1

    def record(self, stream: object) -> None:
        self.at_ms = max(self.gpu.done_ms, self.gpu.host_ms)
        self.gpu.done_ms = self.at_ms + self.gpu.event_ms

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms

    def query(self) -> bool:
        return self.at_ms <= self.gpu.host_ms


def test_layers_are_timed_on_the_device_and_on_the_host_with_the_host_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    clock = CudaLayerTimer(CUDA)

    def layer(number: int, *kernels_ms: float) -> None:
        clock.stamp(number)
        for ms in kernels_ms:
            gpu.launch(ms)

    for _ in range(2):
        layer(3, 0.125, 0.125)  # the host takes 0.5 ms to enqueue it
        layer(1, 1.0)
        clock.stamp(1)  # again, which is no new stamp
        layer(2, 0.125)
        assert gpu.host_ms < gpu.done_ms  # nothing waits for the device before all is queued
        assert list(clock.intervals()) == [(3, 250_000), (1, 1_000_000), (2, 125_000)]
        assert list(clock.host_intervals()) == [(3, 500_000), (1, 250_000), (2, 250_000)]
    assert gpu.num_events == 5  # three layers, the wait before them, and the end; which are used again
    assert (list(clock.intervals()), list(clock.host_intervals())) == ([], [])


def test_the_host_stays_ahead_of_a_device_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty kernels of a quarter of the host's time: by themselves they would run as the host launches them."""
    gpu = Gpu(monkeypatch)
    clock = CudaLayerTimer(CUDA)
    for number in range(60):
        clock.stamp(number)
        gpu.launch(0.0625)
    assert list(clock.intervals()) == [(number, 62_500) for number in range(60)]
    assert list(clock.host_intervals()) == [(number, 250_000) for number in range(60)]


def test_a_host_that_is_far_ahead_gets_no_further_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ahead by two waits of 10 ms and what lies between at most, so its times are those that it needs itself."""
    gpu = Gpu(monkeypatch, queue_ms=25.0)
    clock = CudaLayerTimer(CUDA)
    for number in range(400):
        clock.stamp(number)
        gpu.launch(0.0625)
    assert list(clock.intervals()) == [(number, 62_500) for number in range(400)]
    assert list(clock.host_intervals()) == [(number, 250_000) for number in range(400)]


def test_a_report_costs_what_an_event_takes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, event_ms=0.002)
    x = SimpleNamespace(device=CUDA, mul_=lambda _: gpu.launch(0.005, host_ms=0.0))
    monkeypatch.setattr(torch, "ones", lambda num, device: x)
    assert instrumentation_overhead_ns(CUDA) == (2000, 2000)


def test_an_optimizer_s_step_is_timed_on_the_device_with_the_host_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ten kernels, which the host takes 2.5 ms to enqueue."""
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(torch, "zeros_like", lambda parameter: None)
    parameter = SimpleNamespace(is_cuda=True, device=CUDA, grad=None)
    optimizer: Any = SimpleNamespace(param_groups=[{"params": [parameter]}], zero_grad=lambda: None)

    def step() -> None:
        for _ in range(10):
            gpu.launch(0.125)

    optimizer.step = step
    assert optimizer_step._step_ns(optimizer, CudaLayerTimer(CUDA)) == 1_250_000


def test_a_gpu_warms_up_until_two_passes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "WARM_UP_S", 0.0)
    for device, num_passes in ((CPU, 1), (CUDA, 5)):
        times = iter([100, 90, 70, 50, 50, 50])
        runner: Any = SimpleNamespace(model=SimpleNamespace(training_pass=SimpleNamespace(device=device)))
        runner.run = lambda times=times: SimpleNamespace(totals=[next(times)])
        layer_times._warm_up(runner)
        assert len(list(times)) == 6 - num_passes


def test_ranks_without_a_local_rank_have_the_gpus_of_their_host_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [probe._local_rank(rank) for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert probe._local_rank(7) == 2


def test_a_cuda_device_s_memory_leaves_room_for_context_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DeviceKind(kind="cuda", name="small", memory_bytes=10 * 2**30)
    monkeypatch.setattr(cluster_module, "describe", lambda _: kind)
    monkeypatch.setattr(cluster_module, "framework_bytes", lambda _: 3 * 2**30)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    for num_devices, gib in ((1, 7), (2, 6)):
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda num_devices=num_devices: num_devices)
        probed = probe._device("cuda")
        assert (probed.memory_bytes, probed.model) == (gib * 2**30, "small")
        listed = cluster_module.device_here(
            "cuda", 0, name="cuda0", host=probed.host, num_on_host=num_devices, num_devices=num_devices
        )
        assert listed == probed


def test_the_model_as_a_whole_is_timed_by_the_host_and_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(timers, "occupy_gpu", lambda device, cycles: done.append("waits"))
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
    device = layer_times._PhaseTimes(
        forward=times, backward=times, split_forward=times, input_grad=times, weight_grad=times
    )
    passes = [
        layer_times._Pass(
            device=device,
            host=layer_times._PhaseTimes(
                forward=[wall_ns, 1], backward=[9, 9], split_forward=[0, 0], input_grad=[5, 5], weight_grad=[0, 9]
            ),
            model_ns=10,
            model_wall_ns=wall_ns,
            disturbance=0.0,
        )
        for wall_ns in (14, 15, 16)
    ]
    model = SimpleNamespace(sharing_layers=(0,), training_pass=SimpleNamespace(device=CUDA))
    runner: Any = SimpleNamespace(model=model, groups=(0, 1))
    found = layer_times._layer_times(passes, runner)
    assert found.host == (
        HostTimes(forward_ns=15, input_grad_ns=5, weight_grad_ns=4, backward_ns=9),
        HostTimes(forward_ns=1, input_grad_ns=5, weight_grad_ns=9, backward_ns=9),
    )
    model.training_pass.device = CPU
    assert layer_times._layer_times(passes, runner).host is None
    assert (found.host_over_device, found.sum_over_whole) == (1.5, 1.2)
