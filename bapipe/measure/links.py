"""What a message between two processes of this machine costs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.cluster import Bandwidth
from bapipe.errors import RunFailed

MESSAGE_BYTES = tuple(2**exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 24, 25))
"""1 KB to 32 MB."""

_TIMES = "times.json"


def measure_link(kind: str = "cpu", timeout_s: float = 60.0) -> Bandwidth:
    """Returns latency and bandwidth between two new processes: gloo over loopback, or nccl for `cuda`.

    The processes, of one thread each, send messages to and fro into tensors that are there; see `fit`. They meet in a
    file, so no port is chosen, and they have ended when this returns. It takes a few seconds, most of it imports.

    Raises:
        RunFailed: a process ended early, or they took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="bapipe-link-") as folder:
        ranks = [_start(rank, kind, folder) for rank in range(2)]
        try:
            _wait(ranks, time.monotonic() + timeout_s, timeout_s)
            times_ns = json.loads(Path(folder, _TIMES).read_text())
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    return fit(MESSAGE_BYTES, times_ns)


def fit(num_bytes: Sequence[int], times_ns: Sequence[int]) -> Bandwidth:
    """Returns the line through one-way times with the least sum of squared relative errors.

    Where that line would start below 0, the best one without latency.
    """
    weights = [1 / max(t, 1) ** 2 for t in times_ns]
    total = sum(weights)
    mean_bytes = sum(w * n for w, n in zip(weights, num_bytes, strict=True)) / total
    mean_ns = sum(w * t for w, t in zip(weights, times_ns, strict=True)) / total
    points = list(zip(weights, num_bytes, times_ns, strict=True))
    slope = sum(w * (n - mean_bytes) * (t - mean_ns) for w, n, t in points) / sum(
        w * (n - mean_bytes) ** 2 for w, n, _ in points
    )
    latency_ns = mean_ns - slope * mean_bytes
    if latency_ns < 0 or slope <= 0:
        latency_ns, slope = 0.0, sum(w * n * t for w, n, t in points) / sum(w * n * n for w, n, _ in points)
    return Bandwidth(bytes_per_s=max(round(1e9 / slope), 1), latency_ns=round(latency_ns))


def _start(rank: int, kind: str, folder: str) -> subprocess.Popen[str]:
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-m", "bapipe.measure.links", str(rank), kind, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait(ranks: Sequence[subprocess.Popen[str]], end: float, timeout_s: float) -> None:
    """Returns when both have ended well."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            break
        if time.monotonic() > end:
            raise RunFailed(f"measuring the link took longer than {timeout_s:g} s: try again on a quieter machine")
        time.sleep(0.02)
    for number, rank in enumerate(ranks):
        if rank.returncode:
            lines = rank.communicate()[1].strip().splitlines()
            raise RunFailed(
                f"measuring the link: process {number} ended with code {rank.returncode}: {lines[-1] if lines else ''}"
            )


def _rank(rank: int, kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    times_ns = [_one_way_ns(rank, torch.zeros(n // 4, device=kind)) for n in MESSAGE_BYTES]
    if rank == 0:
        (folder / _TIMES).write_text(json.dumps(times_ns))
    dist.barrier()
    dist.destroy_process_group()


def _one_way_ns(rank: int, message: Tensor) -> int:
    """Returns half the median time of a message to and fro."""
    num_repeats = 8 if message.nbytes > 2**20 else 40
    return round(median([_round_trip_ns(rank, message) for _ in range(num_repeats + 2)][2:]) / 2)


def _round_trip_ns(rank: int, message: Tensor) -> int:
    start = time.perf_counter_ns()
    for sender in (0, 1):
        work = dist.isend(message, 1 - rank) if rank == sender else dist.irecv(message, 1 - rank)
        assert work is not None
        work.wait()
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
