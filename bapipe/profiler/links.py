"""What messages between two processes of this machine cost, and summing with them."""

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.formats.cluster import Bandwidth
from bapipe.profiler.spawn import meet, part, run_ranks

MESSAGE_BYTES = tuple(2**exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 24, 25))
"""1 KB to 32 MB."""


SUM_BYTES = tuple(2**exponent for exponent in (16, 20, 22, 24, 25))
"""64 KB to 32 MB."""


def measure_link(kind: str = "cpu", timeout_s: float = 60.0) -> tuple[Bandwidth, Bandwidth]:
    """Returns latency and bandwidth between two new processes, gloo over loopback or nccl for `cuda`, and of summing.

    The processes, of one thread each, send messages to and fro into tensors that are there, and all-reduce others; an
    all-reduce counts as two messages of half the tensor. See `fit`. It takes a few seconds, most of it imports.

    Raises:
        RunFailed: a process ended early, or they took longer than `timeout_s`.
    """
    found = run_ranks(__name__, 2, kind, "the link", timeout_s)
    return fit(MESSAGE_BYTES, found["message"]), fit([n // 2 for n in SUM_BYTES], found["sum"])


MAX_SPEEDUP_OVER_FASTEST = 2
"""How many times faster than the fastest message, its latency included, a link can be thought to be."""


MAX_UNDERESTIMATE = 0.1
"""The part of the largest message's time that a line may leave out; plans are mostly about large messages."""


def fit(num_bytes: Sequence[int], times_ns: Sequence[int]) -> Bandwidth:
    """Returns the line through one-way times with the least sum of squared relative errors.

    Where that line would start below 0, the best one without latency. Where it would hurry the largest message by more
    than `MAX_UNDERESTIMATE`, as on a link that lets bursts through faster than it can go on, the one that the two
    largest messages are on, with the latency that is left for the others.
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
    fastest = max(n / t for n, t in zip(num_bytes, times_ns, strict=True) if t)  # bytes a nanosecond, all included
    if slope < 1 / (MAX_SPEEDUP_OVER_FASTEST * fastest):  # so much noise that large messages seem to cost nothing more
        slope = 1 / (MAX_SPEEDUP_OVER_FASTEST * fastest)
        latency_ns = max(mean_ns - slope * mean_bytes, 0.0)
    (fewer, fewer_ns), (most, most_ns) = sorted(zip(num_bytes, times_ns, strict=True))[-2:]
    if fewer_ns < most_ns and latency_ns + slope * most < (1 - MAX_UNDERESTIMATE) * most_ns:
        slope = (most_ns - fewer_ns) / (most - fewer)
        latency_ns = max(median(t - slope * n for n, t in zip(num_bytes, times_ns, strict=True)), 0.0)
    return Bandwidth(bytes_per_s=max(round(1e9 / slope), 1), latency_ns=round(latency_ns))


def _rank(rank: int, num_ranks: int, kind: str, folder: str) -> None:
    meet(rank, num_ranks, kind, folder)
    messages = [_half_ns(_round_trip_ns, rank, torch.zeros(n // 4, device=kind)) for n in MESSAGE_BYTES]
    sums = [_half_ns(_sum_ns, rank, torch.zeros(n // 4, device=kind)) for n in SUM_BYTES]
    part(rank, folder, {"message": messages, "sum": sums})


def _half_ns(time_ns: Callable[[int, Tensor], int], rank: int, message: Tensor) -> int:
    """Returns half the median time of a message to and fro, or of two that sum it."""
    num_repeats = 8 if message.nbytes > 2**20 else 40
    return round(median([time_ns(rank, message) for _ in range(num_repeats + 2)][2:]) / 2)


def _sum_ns(_: int, message: Tensor) -> int:
    dist.barrier()
    start = time.perf_counter_ns()
    dist.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start


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
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
