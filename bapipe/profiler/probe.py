"""What messages cost between every two ranks of a job, and what they do to one another and to computing."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import combinations, permutations
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.formats.cluster import AllReduce, Bandwidth, Cluster, Device, Link, Probe
from bapipe.profiler.links import fit
from bapipe.profiler.spawn import meet, part, run_ranks
from bapipe.progress import PartsProgress
from bapipe.torch_device import describe

MESSAGE_BYTES = tuple(2**exponent for exponent in (12, 15, 18, 20, 22, 24))
"""4 KB to 16 MB."""

LARGE_BYTES = 2**24


def probe_here(num_devices: int, kind: str, timeout_s: float = 300.0) -> Cluster:
    """Returns this machine's first devices as a cluster, probed by a new process for each.

    Raises:
        RunFailed: a process ended early, or they took longer than `timeout_s`.
    """
    found = run_ranks(__name__, num_devices, kind, "the links", timeout_s)
    return msgspec.convert(found, Cluster)


def probe_job(kind: str, tell: PartsProgress) -> Cluster:
    """Returns the ranks of the torchrun job that this process is one of as a cluster; all ranks call it together."""
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=120))
    try:
        return probe(kind, tell)
    finally:
        dist.destroy_process_group()


def probe(kind: str, tell: PartsProgress) -> Cluster:
    """Returns the process group's ranks as a cluster, in rank order; every rank gets the same.

    Pairs of ranks take turns. Links are lines through one-way times, as in `bapipe.profiler.links.fit`; within and
    between hosts, the middle link's.
    """
    size = dist.get_world_size()
    pairs = list(combinations(range(size), 2))
    everything: list[Any] = []
    for index, pair in enumerate(pairs):
        tell(index, len(pairs) + 1, f"ranks {pair[0]} and {pair[1]}")
        dist.barrier()
        everything.append(_pair(pair, kind) if dist.get_rank() in pair else None)
    tell(len(pairs), len(pairs) + 1, "all-reduce")
    reductions = [AllReduce(num_bytes=n, ns=_all_reduce_ns(n, kind)) for n in MESSAGE_BYTES] if size > 1 else []
    tell(len(pairs) + 1, len(pairs) + 1, "done")
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, (_device(kind), everything))
    found = {pair: gathered[pair[0]][1][index] for index, pair in enumerate(pairs)}
    return _cluster([device for device, _ in gathered], found, reductions)


def _device(kind: str) -> Device:
    rank, here = dist.get_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    local = int(os.environ.get("LOCAL_RANK", rank))
    memory_bytes = describe(torch.device(kind, local) if kind == "cuda" else torch.device("cpu")).memory_bytes
    host = socket.gethostname() + (f":{group}" if (group := os.environ.get("GROUP_RANK", "0")) != "0" else "")
    return Device(
        name=f"{kind}{rank}",
        host=host,
        kind=kind,
        memory_bytes=memory_bytes if kind == "cuda" else memory_bytes // here,
    )


def _pair(pair: tuple[int, int], kind: str) -> dict[str, Any]:
    """What one rank of a pair measures with the other; the first one's figures count."""
    messages = [torch.zeros(n // 4, device=kind) for n in MESSAGE_BYTES]
    answer = messages[0]
    answer_ns = _median(partial(_one_way_ns, pair, answer, answer), 40) / 2
    found: dict[str, Any] = {}
    for name, way in (("there", pair), ("back", pair[::-1])):
        # Timed where the message starts, until a small answer is back; the other end's figures say nothing.
        times = [_median(partial(_one_way_ns, way, message, answer), _num_repeats(message)) for message in messages]
        found[name] = _from(way[0], pair, [max(round(t - answer_ns), 1) for t in times])
    large = torch.zeros(LARGE_BYTES // 4, device=kind), torch.zeros(LARGE_BYTES // 4, device=kind)
    found["both_ns"] = _median(partial(_both_ways_ns, pair, *large), 6)
    found["slowdown"] = _slowdown(pair, large[0])
    return found


def _num_repeats(message: Tensor) -> int:
    return 6 if message.nbytes > 2**20 else 20


def _from(source: int, pair: tuple[int, int], times_ns: list[int]) -> list[int]:
    """Returns the times that rank `source` of a pair has, on both of them."""
    times = torch.tensor(times_ns, dtype=torch.int64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    if dist.get_rank() == source:
        dist.send(times, _other(pair))
    else:
        dist.recv(times, _other(pair))
    return [int(t) for t in times.tolist()]


def _other(pair: tuple[int, int]) -> int:
    return pair[1] if dist.get_rank() == pair[0] else pair[0]


def _median(time_ns: Callable[[], int], num_repeats: int) -> float:
    return median([time_ns() for _ in range(num_repeats + 2)][2:])


def _now_ns() -> int:
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter_ns()


def _one_way_ns(way: tuple[int, int], message: Tensor, answer: Tensor) -> int:
    """A message and its answer, by the clock of the rank that sends the message."""
    start = _now_ns()
    if dist.get_rank() == way[0]:
        dist.send(message, way[1])
        dist.recv(answer, way[1])
    else:
        dist.recv(message, way[0])
        dist.send(answer, way[0])
    return _now_ns() - start


def _both_ways_ns(pair: tuple[int, int], own: Tensor, others: Tensor) -> int:
    """A message each way at the same time; receives come first, as gloo tells the other of one after what it sends."""
    start = _now_ns()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, others, _other(pair)), dist.P2POp(dist.isend, own, _other(pair))]
    )
    for work in works:
        work.wait()
    return _now_ns() - start


def _slowdown(pair: tuple[int, int], message: Tensor, num_messages: int = 12) -> float:
    """How much longer the first rank computes while it receives from the second, relative to computing alone."""
    matrix = torch.randn(256, 256, device=message.device)
    if dist.get_rank() == pair[1]:
        for _ in range(num_messages):
            dist.send(message, pair[0])
        return 0.0
    alone_ns = _median(partial(_compute_ns, matrix), 40)
    received = threading.Thread(target=_receive_all, args=(message, pair[1], num_messages))
    received.start()
    busy = []
    while received.is_alive():
        busy.append(_compute_ns(matrix))
    received.join()
    return max(0.0, median(busy) / alone_ns - 1) if busy else 0.0


def _receive_all(message: Tensor, source: int, num_messages: int) -> None:
    for _ in range(num_messages):
        dist.recv(message, source)


def _compute_ns(matrix: Tensor) -> int:
    start = _now_ns()
    torch.mm(matrix, matrix)
    return _now_ns() - start


def _all_reduce_ns(num_bytes: int, kind: str) -> int:
    """The slowest rank's typical time to sum a tensor over all ranks."""
    tensor = torch.zeros(num_bytes // 4, device=kind)

    def run_ns() -> int:
        start = _now_ns()
        dist.all_reduce(tensor)
        return _now_ns() - start

    dist.barrier()
    slowest = torch.tensor([_median(run_ns, 8)], device=kind)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(float(slowest))


def _cluster(
    devices: Sequence[Device], found: dict[tuple[int, int], dict[str, Any]], reductions: Sequence[AllReduce]
) -> Cluster:
    lines: dict[tuple[int, int], Bandwidth] = {}
    left = []
    for (a, b), measured in found.items():
        lines[a, b], lines[b, a] = fit(MESSAGE_BYTES, measured["there"]), fit(MESSAGE_BYTES, measured["back"])
        alone_ns = max(lines[a, b].transfer_ns(LARGE_BYTES), lines[b, a].transfer_ns(LARGE_BYTES))
        left.append(min(1.0, alone_ns / measured["both_ns"]))
    inner = [lines[p] for p in permutations(range(len(devices)), 2) if devices[p[0]].host == devices[p[1]].host]
    outer = [lines[p] for p in permutations(range(len(devices)), 2) if devices[p[0]].host != devices[p[1]].host]
    alone = [Bandwidth(bytes_per_s=10**12, latency_ns=0)]  # one device: no link is ever used
    return Cluster(
        devices=tuple(devices),
        intra_host=_middle(inner or outer or alone),
        inter_host=_middle(outer or inner or alone),
        intra_host_sum=_sum(devices, reductions),
        links=tuple(
            Link(
                source=devices[a].name,
                target=devices[b].name,
                bytes_per_s=line.bytes_per_s,
                latency_ns=line.latency_ns,
            )
            for (a, b), line in sorted(lines.items())
        ),
        probe=Probe(
            both_ways=round(median(left), 3),
            compute_slowdown=round(median(measured["slowdown"] for measured in found.values()), 3),
            all_reduce=tuple(reductions),
        )
        if found
        else msgspec.UNSET,
    )


def _sum(devices: Sequence[Device], reductions: Sequence[AllReduce]) -> Bandwidth | msgspec.UnsetType:
    """What a message of an all-reduce takes, of the 2(r-1) of an r-th, where CPU devices of one host sum themselves."""
    size = len(devices)
    if not reductions or {device.kind for device in devices} != {"cpu"} or len({d.host for d in devices}) > 1:
        return msgspec.UNSET
    return fit([-(-r.num_bytes // size) for r in reductions], [r.ns // (2 * (size - 1)) for r in reductions])


def _middle(links: Sequence[Bandwidth]) -> Bandwidth:
    return sorted(links, key=lambda link: link.transfer_ns(2**20))[len(links) // 2]


def _rank(rank: int, num_ranks: int, kind: str, folder: str) -> None:
    meet(rank, num_ranks, kind, folder)
    part(rank, folder, msgspec.to_builtins(probe(kind, lambda done, total, what: None)))


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
