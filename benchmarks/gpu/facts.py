"""Facts of the machine: versions, clocks, and how fast its GPU multiplies, copies, launches and records events."""

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bapipe.hardware import num_cores
from bapipe.profiler.timers import instrumentation_overhead_ns
from bapipe.torch_device import describe, environment, framework_bytes

_NUM_LAUNCHES = 300
_SMI = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,compute_mode,mig.mode.current"


def machine_facts(device: torch.device, size: int) -> dict[str, Any]:
    """Returns the facts by name; matrices are [size, size], copies of 16 * size**2 bytes."""
    kind = describe(device)
    found: dict[str, Any] = {"name": kind.name, "memory_bytes": kind.memory_bytes, "cores": num_cores()}
    found |= environment() | {"python": sys.version.split()[0]}
    if device.type == "cuda":
        found |= _gpu_facts(device)
    found |= _rates(device, size)
    if device.type == "cuda":
        found["framework_bytes"] = framework_bytes(device)
        found["allocated_when_idle"] = torch.cuda.memory_allocated(device)
    return found


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    backends: Any = torch.backends
    return {
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nvidia-smi": _output("nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"),
        "mps": _output("sh", "-c", "command -v nvidia-cuda-mps-control"),
    } | _launches(device)


def _output(*command: str) -> str | None:
    """Returns what a command prints; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _launches(device: torch.device) -> dict[str, float]:
    """Returns microseconds of a small kernel and of an event on the device, and of both on the host."""
    x = torch.zeros(1024, device=device)

    def queued_us() -> float:
        torch.cuda._sleep(40_000_000)  # so that the host is ahead: these are times of the device alone
        start, end = _event(), _event()
        start.record()
        for _ in range(_NUM_LAUNCHES):
            x.add_(1)
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) * 1e3 / _NUM_LAUNCHES

    def host_us(run: Callable[[], object]) -> float:
        start_ns = time.perf_counter_ns()
        for _ in range(_NUM_LAUNCHES):
            run()
        took_us = (time.perf_counter_ns() - start_ns) / 1e3 / _NUM_LAUNCHES
        torch.cuda.synchronize(device)
        return took_us

    return {
        "kernel_us": median(queued_us() for _ in range(9)),
        "event_us": instrumentation_overhead_ns(device)[0] / 1e3,
        "event_host_us": host_us(lambda: _event().record()),
        "launch_host_us": host_us(lambda: x.add_(1)),
    }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _rates(device: torch.device, size: int) -> dict[str, float]:
    """Returns GB/s of copies, and TFLOP/s of products by type and by what the matrices hold."""
    found = {}
    num_bytes = 16 * size**2
    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    found["copy_gb_per_s"] = _per_s(device, lambda: here.copy_(torch.empty_like(here)), 2 * num_bytes) / 1e9
    if device.type == "cuda":
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        found["to_device_gb_per_s"] = _per_s(device, lambda: here.copy_(pinned, non_blocking=True), num_bytes) / 1e9
        found["to_host_gb_per_s"] = _per_s(device, lambda: pinned.copy_(here, non_blocking=True), num_bytes) / 1e9
    for name, dtype, allowed in (
        ("float32", torch.float32, False),
        ("tf32", torch.float32, True),
        ("bfloat16", torch.bfloat16, True),
    ):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        for data in ("random", "equal rows", "zeros"):  # the last two take less power, so the clock is higher
            a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
            if data == "equal rows":
                a = a[:1].expand(size, size).contiguous()
            elif data == "zeros":
                a.zero_()
            rate = _per_s(device, lambda a=a, b=b: a @ b, 2 * size**3)  # type: ignore[misc]
            found[f"{name} {data} tflop_per_s"] = rate / 1e12
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def _per_s(device: torch.device, run: Callable[[], object], amount: int, num: int = 10) -> float:
    run()
    _wait(device)
    start_ns = time.perf_counter_ns()
    for _ in range(num):
        run()
    _wait(device)
    return amount * num / (time.perf_counter_ns() - start_ns) * 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
