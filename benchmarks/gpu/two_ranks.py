"""Two ranks on one device: their losses, gradients and memory, with transfers through host memory, or by NCCL.

NCCL allows two ranks on a GPU from 2.30 on. The two take turns on the GPU, so their times say nothing about two GPUs.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import bapipe
from bapipe.formats.plan import Plan
from bapipe.processes import ChildError, local_processes, receive
from bapipe.torch_device import current_device
from benchmarks.gpu.correctness import (
    MICROBATCH_SIZE,
    NUM_MICROBATCHES,
    errors_of,
    pipelined_step,
    quick_profile,
    whole_step,
)
from benchmarks.gpu.host_memory_group import BACKEND, register
from benchmarks.gpu.one_device import alike_devices
from benchmarks.gpu.workloads import example_of, random_batch, without_dropout

MODEL, SCHEDULES = "gpt2", ("1f1b", "zb-h1", "interleaved-1f1b", "dualpipe-v")
_NUM_STEPS = 4


def nccl_shares_gpus() -> bool:
    """Returns whether two ranks of NCCL may use one GPU, as from version 2.30 on."""
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version >= (2, 30)


def shared_device(backend: str, device: torch.device, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields a row for each schedule and rank; `backend` is host-memory or nccl."""
    example = example_of(MODEL, is_tiny=True)
    without_dropout(example.module)
    batch = random_batch(MODEL, example, MICROBATCH_SIZE * NUM_MICROBATCHES)
    profile = quick_profile(MODEL, example, batch, device)
    plans = [
        bapipe.make(
            profile,
            alike_devices(profile, 2),
            minibatch_size=MICROBATCH_SIZE * NUM_MICROBATCHES,
            microbatch_size=MICROBATCH_SIZE,
            schedule=schedule,
        )
        for schedule in SCHEDULES
    ]
    state = {name: tensor.cpu() for name, tensor in example.module.state_dict().items()}
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    end_s = time.monotonic() + limit_s
    with (
        TemporaryDirectory() as folder,
        local_processes(
            _rank, 2, (backend, folder, str(device), plans, state, batch), folder=Path(folder), environment=environment
        ) as ranks,
    ):
        while any(rank.is_open for rank in ranks):
            if time.monotonic() > end_s:
                yield {"backend": backend, "error": f"not done after {limit_s:.0f} s"}
                return
            for rank, message in receive(ranks, 1.0):
                if isinstance(message, ChildError):
                    yield {"backend": backend, "rank": rank.index, "error": message.text}
                    return
                if isinstance(message, dict):
                    yield message


def _rank(
    index: int,
    send: Callable[[object], None],
    backend: str,
    folder: str,
    device_name: str,
    plans: list[Plan],
    state: Mapping[str, torch.Tensor],
    batch: tuple[torch.Tensor, ...],
) -> None:
    """Runs one of the two ranks, with every plan."""
    torch.set_num_threads(1)
    device = current_device(device_name)
    register()
    dist.init_process_group(
        BACKEND if backend == "host-memory" else backend,
        init_method=f"file://{folder}/store",
        rank=index,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    example = example_of(MODEL, is_tiny=True)
    without_dropout(example.module)
    example.module.load_state_dict(state)
    reference = whole_step(example, batch, device)
    for plan in plans:
        row: dict[str, Any] = {"backend": backend, "rank": index, "schedule": plan.schedule}
        pipeline, got = pipelined_step(example, plan, batch, device)
        send(row | errors_of(got, reference) | _figures(pipeline, plan, batch, index))
    dist.barrier()


def _figures(pipeline: bapipe.Pipeline, plan: Plan, batch: tuple[torch.Tensor, ...], index: int) -> dict[str, Any]:
    """Returns how long further steps take, and what memory they need."""
    *inputs, target = batch
    steps_ns = []
    for _ in range(_NUM_STEPS):
        dist.barrier()
        start_ns = time.perf_counter_ns()
        pipeline.step(*inputs, target=target)
        pipeline.busy_ns()  # waits for the device
        steps_ns.append(time.perf_counter_ns() - start_ns)
    return {
        "step_ms": median(steps_ns) / 1e6,
        "predicted_peak_bytes": plan.prediction.ranks[index].peak_bytes,
        "measured_peak_bytes": pipeline.peak_bytes(),
    }
