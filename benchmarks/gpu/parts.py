"""The parts of the work, each with a file for its result: what is there already is not done again."""

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapipe.errors import one_line, root_cause
from bapipe.torch_device import current_device, is_out_of_memory, prepare_cpu
from benchmarks.gpu.correctness import correct_schedules
from benchmarks.gpu.facts import machine_facts
from benchmarks.gpu.layers import layers_at_size
from benchmarks.gpu.steps import predicted_steps
from benchmarks.gpu.two_ranks import nccl_shares_gpus, shared_device
from benchmarks.gpu.workloads import FLOAT32, MODES, TINY, TRAINED, Workload

_SMALL_MODELS = ("gpt2",)

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the work.

    Attributes:
        run: does it, and returns the rows of its result.
        limit_s: after which it is ended.
    """

    name: str
    run: Callable[[], Iterable[dict[str, Any]]]
    limit_s: float


def parts_of(folder: Path, device: torch.device, *, is_small: bool) -> list[Part]:
    """Returns all parts, in the order in which they are worth doing; `is_small`: seconds of work for a CPU."""
    workloads: dict[str, Workload] = {name: TINY[name] for name in _SMALL_MODELS} if is_small else TRAINED
    backends = ["host-memory", *(["nccl"] if device.type == "cuda" and nccl_shares_gpus() else [])]
    seconds = 0.0 if is_small else 4.0
    parts = [Part(name="facts", run=lambda: [machine_facts(device, 64 if is_small else 8192)], limit_s=120)]
    for name in _SMALL_MODELS if is_small else TINY:
        run = partial(correct_schedules, name, device)
        parts.append(Part(name=f"correct.{name}", run=run, limit_s=180))
    for backend in backends:
        parts.append(Part(name=f"two_ranks.{backend}", run=partial(shared_device, backend, device, 120.0), limit_s=180))
    for mode in (FLOAT32,) if is_small else MODES:
        for name, workload in workloads.items():
            for size in workload.sizes:
                measure = partial(_layers, folder, name, mode, size, is_small, seconds, device)
                parts.append(Part(name=f"layers.{name}.{mode}.{size:03}", run=measure, limit_s=180))
            run = partial(predicted_steps, folder, name, mode, is_tiny=is_small, device=device)
            parts.append(Part(name=f"steps.{name}.{mode}", run=run, limit_s=180))
    return parts


def _layers(folder: Path, name: str, mode: str, size: int, is_tiny: bool, seconds: float, device: torch.device) -> Rows:
    return [layers_at_size(folder, name, mode, size, is_tiny=is_tiny, seconds=seconds, device=device)]


def result_path(folder: Path, name: str) -> Path:
    """Returns the file of a part's result."""
    return folder / "results" / f"{name}.json"


def save(folder: Path, name: str, rows: Rows) -> None:
    """Writes the result of a part, whole or not at all."""
    path = result_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(rows, indent=1))
    unfinished.replace(path)


def results(folder: Path) -> dict[str, Rows]:
    """Returns the results that are there, by part."""
    paths = sorted((folder / "results").glob("*.json"))
    return {path.name.removesuffix(".json"): json.loads(path.read_text()) for path in paths}


def work(
    index: int, send: Callable[[object], None], folder: Path, device_name: str, is_small: bool, names: list[str]
) -> None:
    """Does some parts in this process, and sends the name of each before; ends after one that fails.

    A part that has used up the GPU's memory, or broken the connection to it, must not harm the others.
    """
    device = current_device(device_name)
    if device.type == "cpu":
        prepare_cpu(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    parts = {part.name: part for part in parts_of(folder, device, is_small=is_small)}
    for name in names:
        send(name)
        try:
            save(folder, name, list(parts[name].run()))
        except Exception as error:  # whatever a model, or torch, raises
            lack = "out of memory: " if is_out_of_memory(root_cause(error)) else ""
            save(folder, name, [{"error": f"{lack}{one_line(error)}"}])
            return
        gc.collect()  # a model of the part before, its graph in cycles, would count as memory in use
        if device.type == "cuda":
            torch.cuda.empty_cache()
