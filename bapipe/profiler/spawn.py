"""Measurements that take several processes of this machine, in a process group of their own."""

import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapipe.errors import RunFailed
from bapipe.job.groups import barrier, init_proven_group, meet, use_loopback
from bapipe.job.secret import new_secret
from bapipe.processes import ChildError, LocalProcess, local_processes, receive

_JOIN = timedelta(seconds=60)


def measure_in_ranks(
    measure: Callable[[int, str], object], num_ranks: int, kind: str, subject: str, timeout_s: float
) -> Any:
    """Returns what `measure(rank, kind)` returns on rank 0 of a new process group, one process of one thread per rank.

    They find each other through a file, so no port is needed. All have ended when this returns.

    Args:
        kind: `cpu` (gloo) or `cuda` (NCCL).
        subject: names the measurement in messages.

    Raises:
        RunFailed: a process failed, or they took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="bapipe-") as name:
        folder = Path(name)
        job = measure, num_ranks, kind, str(folder / "store"), new_secret()
        one_thread = {"OMP_NUM_THREADS": "1"}
        with local_processes(_run_rank, num_ranks, job, folder=folder, environment=one_thread, quiet=True) as processes:
            return _wait(processes, subject, timeout_s)


def _wait(processes: Sequence[LocalProcess], subject: str, timeout_s: float) -> Any:
    """Returns rank 0's result when every rank has ended."""
    end_s = time.monotonic() + timeout_s
    result: Any = None
    while any(process.is_open for process in processes):
        for process, message in receive(processes, timeout_s=0.1):
            if isinstance(message, ChildError):
                raise RunFailed(f"measuring {subject}: process {process.index} failed: {message.text}")
            if process.is_open:
                result = message
            elif process.exit_code(1.0):
                raise RunFailed(f"measuring {subject}: process {process.index} ended early: {process.why_ended()}")
        if time.monotonic() > end_s:
            raise RunFailed(f"measuring {subject} took longer than {timeout_s:g} s: try again on a quieter machine")
    return result


def _run_rank(
    rank: int,
    send: Callable[[object], None],
    measure: Callable[[int, str], object],
    num_ranks: int,
    kind: str,
    store: str,
    secret: bytes,
) -> None:
    torch.set_num_threads(1)
    use_loopback()
    if kind == "cuda":
        torch.cuda.set_device(rank)
    shared, names = dist.FileStore(store, num_ranks), [f"{kind}{index}" for index in range(num_ranks)]
    meet(shared, rank, num_ranks, _JOIN)
    init_proven_group(kind, shared, rank, names, secret, _JOIN)
    result = measure(rank, kind)
    if rank == 0:
        send(result)
    barrier()
    dist.destroy_process_group()
