"""A model's profile at one micro-batch size, beside its whole step and what the allocator has given out."""

import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bapipe.formats.codec import read, write
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.torch_settings import autocast_dtype, tf32
from bapipe.zoo import resolve
from bapipe.zoo.example import Example
from benchmarks import fidelity
from benchmarks.gpu.workloads import MODES, TINY, TRAINED, example_of, random_batch

_HEAD_START_CYCLES = 100_000_000  # of the GPU, about 50 ms: the host enqueues a step meanwhile


def profile_path(folder: Path, name: str, mode: str) -> Path:
    """Returns where the profile of a model is kept, with all sizes that were measured so far."""
    return folder / "profiles" / f"{name}.{mode}.json"


def layers_at_size(
    folder: Path, name: str, mode: str, size: int, *, is_tiny: bool, seconds: float, device: torch.device
) -> dict[str, Any]:
    """Measures a model at a size, adds that to its profile, and returns the profile's errors."""
    example, path = example_of(name, is_tiny), profile_path(folder, name, mode)
    *inputs, target = batch = random_batch(name, example, size)
    start_s = time.monotonic()
    so_far = read(path, ModelProfile) if path.exists() else None
    sizes = {size, *(so_far.microbatch_sizes if so_far is not None else ())}
    profile = measure_model(
        example.module,
        inputs,
        target,
        example.loss,
        ProfileOptions(microbatch_sizes=sorted(sizes), settings=MODES[mode], seconds_per_size=seconds, check=False),
        name=name,
        device=device,
        factory=resolve(name),
        arguments=(TINY if is_tiny else TRAINED)[name].arguments,
        resume_from=so_far,
    )
    path.parent.mkdir(exist_ok=True)
    write(path, profile)
    measured_in_s = time.monotonic() - start_s
    with tf32(MODES[mode].tf32):
        whole = _whole_model(profile, example, batch, size, device)
    return {"model": name, "mode": mode, "size": size, "measured_in_s": measured_in_s} | whole


def _whole_model(
    profile: ModelProfile, example: Example, batch: tuple[Tensor, ...], size: int, device: torch.device
) -> dict[str, Any]:
    """Returns the profile's figures relative to those of the model as a whole."""
    autocast = autocast_dtype(profile.settings or Settings())
    module = example.module.to(device).train()
    try:
        *inputs, target = (tensor.to(device) for tensor in batch)

        def forward() -> Tensor:
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                return example.loss(module(*inputs), target)

        forward().backward()  # the gradients that every other one adds to
        loaded = sum(tensor.nbytes for tensor in (*inputs, target))
        return _times(profile, size, forward, device) | _memory(profile, size, forward, loaded, device)
    finally:
        module.zero_grad()
        module.to("cpu")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _times(profile: ModelProfile, size: int, forward: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    layers = profile.at(size)
    layers_ns = sum(layer.forward_backward_ns for layer in layers)
    wall_ns, device_ns = _whole_step_ns(forward, device)
    split_ns = sum(layer.input_grad_ns + layer.weight_grad_ns for layer in layers)
    return {
        "layers_ms": layers_ns / 1e6,
        "wall_ms": wall_ns / 1e6,
        "device_ms": None if device_ns is None else device_ns / 1e6,
        "layers_over_whole": layers_ns / (wall_ns if device_ns is None else device_ns),
        "wall_over_device": None if device_ns is None else wall_ns / device_ns,
        "split_over_backward": split_ns / max(sum(layer.whole_backward_ns for layer in layers), 1),
        "update_ms": sum(layer.update_ns for layer in profile.layers) / 1e6,
        "passes": profile.environment["passes"][str(size)],
    }


def _whole_step_ns(forward: Callable[[], Tensor], device: torch.device, num: int = 8) -> tuple[float, float | None]:
    """Returns how long F and B take by the clock on the wall, and on a GPU on the device, with the host ahead of it."""

    def run() -> None:
        forward().backward()

    run()
    if device.type != "cuda":
        return median(_timed_ns(run) for _ in range(num)), None
    wall_ns, device_ns = [], []
    for _ in range(num):
        torch.cuda.synchronize(device)
        wall_ns.append(_timed_ns(run, lambda: torch.cuda.synchronize(device)))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        device_ns.append(start.elapsed_time(end) * 1e6)
    return median(wall_ns), median(device_ns)


def _timed_ns(run: Callable[[], None], wait: Callable[[], None] = lambda: None) -> int:
    start_ns = time.perf_counter_ns()
    run()
    wait()
    return time.perf_counter_ns() - start_ns


def _memory(
    profile: ModelProfile, size: int, forward: Callable[[], Tensor], loaded_bytes: int, device: torch.device
) -> dict[str, Any]:
    """Returns predicted bytes over those of the allocator, which it was asked for, gave out, and has reserved.

    `loaded_bytes` are those of the batch: in the stash if a layer saves it, and on the device before F.
    """
    layers = profile.at(size)
    stashed = list(accumulate(layer.stash_bytes for layer in layers))
    peak = max(before + layer.workspace_bytes for before, layer in zip(stashed, layers, strict=True))
    held, _ = taken(forward, device)
    _, most = taken(lambda: forward().backward(), device)
    return {
        "stash_bytes": stashed[-1],
        "peak_bytes": peak,
        "stash_over": {name: stashed[-1] / (num_bytes + loaded_bytes) for name, num_bytes in held.items()},
        "peak_over": {name: peak / (num_bytes + loaded_bytes) for name, num_bytes in most.items()},
    }


def taken(run: Callable[[], object], device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes that `run` leaves, and takes at its peak, beyond those before: requested, allocated, reserved.

    On a CPU torch's allocator gives out what it is asked for, and reserves nothing.
    """
    if device.type != "cuda":
        held, most = fidelity.allocated(run, device)
        return {"requested": held}, {"requested": most}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what is reserved beyond would else be what earlier work has left
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    kept = run()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    del kept

    def beyond(kind: str) -> dict[str, int]:
        names = ("requested", "allocated", "reserved")
        return {n: after[f"{n}_bytes.all.{kind}"] - before[f"{n}_bytes.all.current"] for n in names}

    return beyond("current"), beyond("peak")
