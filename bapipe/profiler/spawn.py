"""Processes on this machine that run a module of measurements together, and what the first of them writes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapipe.errors import RunFailed

_RESULT = "result.json"


def run_ranks(module: str, num_ranks: int, kind: str, what: str, timeout_s: float) -> Any:
    """Returns what rank 0 wrote of `python -m module RANK NUM_RANKS KIND FOLDER`, one process a rank.

    They meet in a file, so no port is chosen, and they have ended when this returns.

    Raises:
        RunFailed: a process ended early, or they took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="bapipe-ranks-") as folder:
        ranks = [_start(module, rank, num_ranks, kind, folder) for rank in range(num_ranks)]
        try:
            _wait(ranks, what, time.monotonic() + timeout_s, timeout_s)
            return json.loads(Path(folder, _RESULT).read_text())
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                assert rank.stderr is not None
                rank.stderr.close()


def _start(module: str, rank: int, num_ranks: int, kind: str, folder: str) -> subprocess.Popen[str]:
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-m", module, str(rank), str(num_ranks), kind, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait(ranks: Sequence[subprocess.Popen[str]], what: str, end: float, timeout_s: float) -> None:
    """Returns when all have ended well."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            break
        if time.monotonic() > end:
            raise RunFailed(f"measuring {what} took longer than {timeout_s:g} s: try again on a quieter machine")
        time.sleep(0.02)
    for number, rank in enumerate(ranks):
        if rank.returncode:
            assert rank.stderr is not None
            lines = rank.stderr.read().strip().splitlines()
            raise RunFailed(
                f"measuring {what}: process {number} ended with code {rank.returncode}: {lines[-1] if lines else ''}"
            )


def meet(rank: int, num_ranks: int, kind: str, folder: str) -> None:
    """Joins the process group of the ranks that were started with a folder."""
    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )


def part(rank: int, folder: str, result: object) -> None:
    """Leaves the process group; rank 0's result is what `run_ranks` returns."""
    if rank == 0:
        Path(folder, _RESULT).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
