"""Latency and bandwidth between two processes of this machine, of messages and of all-reduce."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.formats.cluster import Bandwidth
from bapipe.job.groups import barrier, wait
from bapipe.profiler.spawn import measure_in_ranks

MESSAGE_BYTES = tuple(2**exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 24, 25))
"""1 KB to 32 MB."""


SUM_BYTES = tuple(2**exponent for exponent in (16, 20, 22, 24, 25))
"""64 KB to 32 MB."""


def measure_link(kind: str = "cpu", timeout_s: float = 60.0) -> tuple[Bandwidth, Bandwidth]:
    """Returns the link between two new processes for messages, and the link for sums: see `fit`.

    The processes, of one thread each, communicate by gloo over loopback, or by nccl for `cuda`. They send messages back
    and forth, into tensors that are allocated before, and then run all-reduces; an all-reduce of two ranks counts as
    two messages of half the tensor. The measurement takes a few seconds, mostly for imports.

    Raises:
        RunFailed: a process ended early, or they took longer than `timeout_s`.
    """
    times_ns = measure_in_ranks(_measure, 2, kind, "the link", timeout_s)
    return fit(MESSAGE_BYTES, times_ns["message"]), fit([n // 2 for n in SUM_BYTES], times_ns["sum"])


MAX_SPEEDUP_OVER_FASTEST = 2
"""Upper limit of a link's bandwidth, relative to the fastest message, its latency included."""


MAX_UNDERESTIMATE = 0.1
"""Maximum share of the largest message's time by which a line may be too low; most messages of plans are large."""


def fit(num_bytes: Sequence[int], times_ns: Sequence[int]) -> Bandwidth:
    """Returns the line latency + bytes / bandwidth fitted to one-way times, by least squares of the relative errors.

    - If its latency is negative, the best line without latency.
    - If its bandwidth exceeds `MAX_SPEEDUP_OVER_FASTEST`, that bandwidth, with the latency that fits best.
    - If it underestimates the largest message by more than `MAX_UNDERESTIMATE`, as on a link that is faster in bursts
      than in the long run, the bandwidth between the two largest messages, with the median latency of all.
    """
    # Weighted linear regression: weights 1 / t² make the errors relative.
    weights = [1 / max(t, 1) ** 2 for t in times_ns]
    total = sum(weights)
    mean_bytes = sum(w * n for w, n in zip(weights, num_bytes, strict=True)) / total
    mean_ns = sum(w * t for w, t in zip(weights, times_ns, strict=True)) / total
    points = list(zip(weights, num_bytes, times_ns, strict=True))
    slope = sum(w * (n - mean_bytes) * (t - mean_ns) for w, n, t in points) / sum(
        w * (n - mean_bytes) ** 2 for w, n, _ in points
    )
    latency_ns = mean_ns - slope * mean_bytes  # slope: nanoseconds per byte
    if latency_ns < 0 or slope <= 0:
        latency_ns, slope = 0.0, sum(w * n * t for w, n, t in points) / sum(w * n * n for w, n, _ in points)
    fastest = max(n / t for n, t in zip(num_bytes, times_ns, strict=True) if t)  # bytes per ns
    if slope < 1 / (MAX_SPEEDUP_OVER_FASTEST * fastest):  # noise: large messages seem as fast as small ones
        slope = 1 / (MAX_SPEEDUP_OVER_FASTEST * fastest)
        latency_ns = max(mean_ns - slope * mean_bytes, 0.0)
    (second_bytes, second_ns), (max_bytes, max_ns) = sorted(zip(num_bytes, times_ns, strict=True))[-2:]
    if second_ns < max_ns and latency_ns + slope * max_bytes < (1 - MAX_UNDERESTIMATE) * max_ns:
        slope = (max_ns - second_ns) / (max_bytes - second_bytes)
        latency_ns = max(median(t - slope * n for n, t in zip(num_bytes, times_ns, strict=True)), 0.0)
    return Bandwidth(bytes_per_s=max(round(1e9 / slope), 1), latency_ns=round(latency_ns))


def _measure(rank: int, kind: str) -> dict[str, list[int]]:
    messages = [_half_ns(_round_trip_ns, rank, torch.zeros(n // 4, device=kind)) for n in MESSAGE_BYTES]
    sums = [_half_ns(_sum_ns, rank, torch.zeros(n // 4, device=kind)) for n in SUM_BYTES]
    return {"message": messages, "sum": sums}


def _half_ns(time_ns: Callable[[int, Tensor], int], rank: int, message: Tensor) -> int:
    """Returns half the median time of a round trip, or of an all-reduce of two ranks."""
    num_repeats = 8 if message.nbytes > 2**20 else 40
    return round(median([time_ns(rank, message) for _ in range(num_repeats + 2)][2:]) / 2)


def _sum_ns(_: int, message: Tensor) -> int:
    barrier()
    start = time.perf_counter_ns()
    dist.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start


def _round_trip_ns(rank: int, message: Tensor) -> int:
    start = time.perf_counter_ns()
    for sender in (0, 1):
        work = dist.isend(message, 1 - rank) if rank == sender else dist.irecv(message, 1 - rank)
        wait(work)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start
