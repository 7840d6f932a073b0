"""Links between all pairs of ranks, both directions at once, all-reduce, and how receiving slows down computing."""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import combinations, pairwise, permutations
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import RunFailed, one_line
from bapipe.formats.cluster import AllReduce, Bandwidth, Cluster, Device, Link, Probe
from bapipe.job.groups import barrier, gathered, init_proven_group, meet, wait
from bapipe.job.interfaces import check_interface, choose_interface
from bapipe.job.lost_peer import is_lost_peer
from bapipe.job.rendezvous import open_store, outer_address
from bapipe.job.secret import job_secret
from bapipe.profiler.cluster import device_here
from bapipe.profiler.links import fit
from bapipe.profiler.spawn import measure_in_ranks
from bapipe.progress import PartsProgress
from bapipe.torch_device import current_device, is_out_of_memory, visible_place
from bapipe.torchrun import Job

MESSAGE_BYTES = tuple(2**exponent for exponent in (12, 15, 18, 20, 22, 24))
"""4 KB to 16 MB."""

_LONG_NS, _REPEATED_NS = 10**9, 2 * 10**9
"""Messages that seem to take longer are left out, but for two; and about how long those of one size are repeated."""

_JOIN_S = 120.0
"""How long a rank of a job waits for the others."""

_NUM_MESSAGES, _NUM_PRODUCTS = 12, 20
"""Messages that a rank receives while it computes, and products whose times a GPU takes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """What is measured of the link between two ranks.

    Attributes:
        there_ns, back_ns: one-way times of the first messages of `MESSAGE_BYTES`, from the first rank and to it: at
            least of two, of slow links not of all.
        both_ns: of the largest of them that both have, in each direction at the same time.
        slowdown: how much longer the first rank computes while it receives, relative to otherwise.
    """

    there_ns: Sequence[int]
    back_ns: Sequence[int]
    both_ns: float
    slowdown: float

    @property
    def large_bytes(self) -> int:
        """The size of the message that `both_ns` is of."""
        return MESSAGE_BYTES[min(len(self.there_ns), len(self.back_ns)) - 1]


def probe_here(num_devices: int, kind: str, timeout_s: float = 300.0) -> Cluster:
    """Returns this machine's first devices as a cluster, measured by one new process per device.

    Raises:
        RunFailed: a process ended early, or they took longer than `timeout_s`.
    """
    cluster: Cluster = measure_in_ranks(_measure, num_devices, kind, "the links", timeout_s)
    return cluster


def probe_job(job: Job, kind: str, progress: PartsProgress) -> Cluster:
    """Returns the ranks of this process's torchrun job as a cluster; all ranks call it at the same time.

    Raises:
        BapipeError: another process is in the place of a rank, torch does not find the rank's device, or a network
            interface is named that is not there.
        RunFailed: the ranks do not find each other.
    """
    names = [f"{kind}{rank}" for rank in range(job.size)]
    torch.set_num_threads(1)
    if kind == "cuda":
        current_device(torch.device("cuda", visible_place(_local_rank(job.rank))))
    check_interface()
    timeout = timedelta(seconds=_JOIN_S)
    store = open_store(job.rank, names, _JOIN_S)
    with store.in_use():
        meet(store, job.rank, job.size, timeout)
        choose_interface(outer_address(store))
        init_proven_group(kind, store, job.rank, names, job_secret(), timeout)
        try:
            return probe(kind, progress)
        except RuntimeError as error:  # of gloo, NCCL or CUDA
            raise RunFailed(f"the links cannot be measured{_why_failed(error)}: {one_line(error)}") from error
        finally:
            dist.destroy_process_group()


def _why_failed(error: RuntimeError) -> str:
    """Returns what is known of the cause of an error, and of what to do about it."""
    if is_out_of_memory(error):
        return f", as rank {dist.get_rank()} has no memory left: end what else uses its device"
    return ", as another rank has ended or a connection was lost" if is_lost_peer(error) else ""


def probe(kind: str, progress: PartsProgress) -> Cluster:
    """Returns the process group's ranks as a cluster, in rank order; every rank gets the same.

    One pair of ranks is measured after another. A link is the line through its one-way times, see
    `bapipe.profiler.links.fit`; the cluster's links within and between hosts are the median of theirs.
    """
    size, device = dist.get_world_size(), _device(kind)  # before NCCL takes memory, for which there is a figure
    pairs = list(combinations(range(size), 2))
    results: list[PairFigures | None] = []  # of each pair; None if this rank is not in it
    for index, pair in enumerate(pairs):
        progress(index, len(pairs) + 1, f"ranks {pair[0]} and {pair[1]}")
        barrier()
        results.append(_measure_pair(pair, kind) if dist.get_rank() in pair else None)
    progress(len(pairs), len(pairs) + 1, "all-reduce")
    sums_ns = _by_size(partial(_all_reduce_ns, kind)) if size > 1 else []
    reductions = [AllReduce(num_bytes=n, ns=ns) for n, ns in zip(MESSAGE_BYTES, sums_ns, strict=False)]
    progress(len(pairs) + 1, len(pairs) + 1, "done")
    devices, results_of_all = zip(*gathered((device, results)), strict=True)
    by_pair: dict[tuple[int, int], Any] = {pair: results_of_all[pair[0]][index] for index, pair in enumerate(pairs)}
    return _cluster(devices, by_pair, reductions)


def _device(kind: str) -> Device:
    rank, local_size = dist.get_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    host = socket.gethostname() + (f":{group}" if (group := os.environ.get("GROUP_RANK", "0")) != "0" else "")
    return device_here(
        kind,
        torch.cuda.current_device() if kind == "cuda" else 0,
        name=f"{kind}{rank}",
        host=host,
        num_on_host=local_size,
        num_devices=dist.get_world_size(),
    )


def _local_rank(rank: int) -> int:
    """Returns which of its host's GPUs a rank has; where a job does not say so, ranks of a host follow one another."""
    return int(os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))


def _measure_pair(pair: tuple[int, int], kind: str) -> PairFigures:
    """Returns the figures of a link, measured by both ranks of a pair together; those of the first rank are used."""
    answer = torch.zeros(MESSAGE_BYTES[0] // 4, device=kind)
    answer_ns = _median(partial(_one_way_ns, pair, answer, answer), 40) / 2

    def message_ns(direction: tuple[int, int], num_bytes: int, num_repeats: int) -> int:
        # The sender's clock counts: from the start of the message until a small answer has come back.
        message = torch.zeros(num_bytes // 4, device=kind)
        time_ns = _median(partial(_one_way_ns, direction, message, answer), num_repeats)
        return _broadcast_in_pair(direction[0], pair, max(round(time_ns - answer_ns), 1))

    there_ns, back_ns = (_by_size(partial(message_ns, direction)) for direction in (pair, pair[::-1]))
    one_ns = min(there_ns, back_ns, key=len)[-1]
    figures = PairFigures(there_ns=there_ns, back_ns=back_ns, both_ns=0.0, slowdown=0.0)
    sent, received = (torch.zeros(figures.large_bytes // 4, device=kind) for _ in range(2))
    both_ns = _median(partial(_both_ways_ns, pair, sent, received), _num_within(one_ns, 6))
    slowdown = _slowdown(pair, received, _num_within(one_ns, _NUM_MESSAGES))
    return replace(figures, both_ns=both_ns, slowdown=slowdown)


def _by_size(time_ns: Callable[[int, int], int]) -> list[int]:
    """Returns the times of the first of `MESSAGE_BYTES`: as far as the next one seems to take less than `_LONG_NS`.

    Args:
        time_ns: (number of bytes, of repetitions) -> the time, which is the same on all ranks that measure it.
    """
    times_ns: list[int] = []
    for num_bytes in MESSAGE_BYTES:
        expected_ns = _next_ns(MESSAGE_BYTES[: len(times_ns)], times_ns, num_bytes)
        if len(times_ns) >= 2 and expected_ns > _LONG_NS:
            break
        times_ns.append(time_ns(num_bytes, _num_within(expected_ns, 6 if num_bytes > 2**20 else 20)))
    return times_ns


def _next_ns(sizes: Sequence[int], times_ns: Sequence[int], num_bytes: int) -> float:
    """Returns about how long a larger message will take, by the line through the last two; 0 if nothing is known."""
    if not times_ns:
        return 0.0
    if len(times_ns) == 1:
        return times_ns[-1] * num_bytes / sizes[-1]
    ns_per_byte = max(0.0, (times_ns[-1] - times_ns[-2]) / (sizes[-1] - sizes[-2]))
    return times_ns[-1] + ns_per_byte * (num_bytes - sizes[-1])


def _num_within(one_ns: float, most: int) -> int:
    """Returns how often to repeat what takes so long: at least twice."""
    return max(2, min(most, int(_REPEATED_NS / max(one_ns, 1.0))))


def _broadcast_in_pair(source: int, pair: tuple[int, int], time_ns: int) -> int:
    """Returns the time of rank `source` of a pair, on both ranks."""
    shared = torch.tensor([time_ns], dtype=torch.int64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    if dist.get_rank() == source:
        wait(dist.isend(shared, _other(pair)))
    else:
        wait(dist.irecv(shared, _other(pair)))
    return int(shared)


def _other(pair: tuple[int, int]) -> int:
    return pair[1] if dist.get_rank() == pair[0] else pair[0]


def _median(time_ns: Callable[[], int], num_repeats: int) -> float:
    return median([time_ns() for _ in range(num_repeats + 2)][2:])


def _now_ns() -> int:
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter_ns()


def _one_way_ns(direction: tuple[int, int], message: Tensor, answer: Tensor) -> int:
    """Returns the time of a message and its answer; only the sender's value is meaningful."""
    start = _now_ns()
    if dist.get_rank() == direction[0]:
        wait(dist.isend(message, direction[1]))
        wait(dist.irecv(answer, direction[1]))
    else:
        wait(dist.irecv(message, direction[0]))
        wait(dist.isend(answer, direction[0]))
    return _now_ns() - start


def _both_ways_ns(pair: tuple[int, int], sent: Tensor, received: Tensor) -> int:
    """Returns the time of a message in each direction at the same time.

    The receive is posted first: gloo announces a receive to the sender only after the messages that it sends itself.
    """
    start = _now_ns()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, received, _other(pair)), dist.P2POp(dist.isend, sent, _other(pair))]
    )
    for work in works:
        wait(work)
    return _now_ns() - start


def _slowdown(pair: tuple[int, int], message: Tensor, num_messages: int) -> float:
    """Returns how much longer the first rank computes while it receives from the second, relative to otherwise."""
    matrix = torch.randn(256, 256, device=message.device)
    if dist.get_rank() == pair[1]:
        for _ in range(num_messages):
            wait(dist.isend(message, pair[0]))
        return 0.0
    if message.is_cuda:
        return _slowdown_on_cuda(message, num_messages, pair[1], matrix)
    alone_ns = _median(partial(_compute_ns, matrix), 40)
    receiver = threading.Thread(target=_receive_all, args=(message, num_messages, pair[1]))
    receiver.start()
    receiving_ns = []
    while receiver.is_alive():
        receiving_ns.append(_compute_ns(matrix))
    receiver.join()
    return max(0.0, median(receiving_ns) / alone_ns - 1) if receiving_ns else 0.0


def _slowdown_on_cuda(message: Tensor, num_messages: int, source: int, matrix: Tensor) -> float:
    """Returns the same for CUDA, where calls return before their work is done: NCCL receives on a stream of its own."""
    alone_ns = median(_compute_times_ns(matrix))
    works = [dist.irecv(message, source) for _ in range(num_messages)]
    receiving_ns: list[int] = []
    while not all(work is None or work.is_completed() for work in works):
        receiving_ns += _compute_times_ns(matrix)
    torch.cuda.synchronize()
    return max(0.0, median(receiving_ns) / alone_ns - 1) if receiving_ns else 0.0


def _compute_times_ns(matrix: Tensor) -> list[int]:
    """Returns the device's times of some products; waits for the last of them, not for other streams."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_PRODUCTS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        torch.mm(matrix, matrix)
        event.record()
    events[-1].synchronize()
    return [round(before.elapsed_time(after) * 1e6) for before, after in pairwise(events)]


def _receive_all(message: Tensor, num_messages: int, source: int) -> None:
    for _ in range(num_messages):
        wait(dist.irecv(message, source))


def _compute_ns(matrix: Tensor) -> int:
    start = _now_ns()
    torch.mm(matrix, matrix)
    return _now_ns() - start


def _all_reduce_ns(kind: str, num_bytes: int, num_repeats: int) -> int:
    """Returns the slowest rank's median time of an all-reduce."""
    tensor = torch.zeros(num_bytes // 4, device=kind)

    def run_ns() -> int:
        start = _now_ns()
        dist.all_reduce(tensor)
        return _now_ns() - start

    barrier()
    slowest = torch.tensor([_median(run_ns, min(num_repeats, 8))], device=kind)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(float(slowest))


def _cluster(
    devices: Sequence[Device], by_pair: Mapping[tuple[int, int], PairFigures], reductions: Sequence[AllReduce]
) -> Cluster:
    lines: dict[tuple[int, int], Bandwidth] = {}
    both_ways = []  # of each pair, the share of its bandwidth that a link has if both directions are used
    for (a, b), figures in by_pair.items():
        for direction, times_ns in (((a, b), figures.there_ns), ((b, a), figures.back_ns)):
            lines[direction] = fit(MESSAGE_BYTES[: len(times_ns)], times_ns)
        alone_ns = max(lines[direction].transfer_ns(figures.large_bytes) for direction in ((a, b), (b, a)))
        both_ways.append(min(1.0, alone_ns / figures.both_ns))
    intra_host = [lines[p] for p in permutations(range(len(devices)), 2) if devices[p[0]].host == devices[p[1]].host]
    inter_host = [lines[p] for p in permutations(range(len(devices)), 2) if devices[p[0]].host != devices[p[1]].host]
    unused = [Bandwidth(bytes_per_s=10**12, latency_ns=0)]  # for a cluster of one device, which has no link
    return Cluster(
        devices=tuple(devices),
        intra_host=_median_link(intra_host or inter_host or unused),
        inter_host=_median_link(inter_host or intra_host or unused),
        intra_host_sum=_sum_link(devices, reductions),
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
            both_ways=round(median(both_ways), 3),
            compute_slowdown=round(median(figures.slowdown for figures in by_pair.values()), 3),
            all_reduce=tuple(reductions),
        )
        if by_pair
        else msgspec.UNSET,
    )


def _sum_link(devices: Sequence[Device], reductions: Sequence[AllReduce]) -> Bandwidth | msgspec.UnsetType:
    """Returns the link for the messages of an all-reduce, if CPU devices of one host sum gradients themselves.

    A ring all-reduce over r ranks is 2 (r - 1) messages, each an r-th of the tensor.
    """
    size = len(devices)
    if not reductions or {device.kind for device in devices} != {"cpu"} or len({d.host for d in devices}) > 1:
        return msgspec.UNSET
    return fit([-(-r.num_bytes // size) for r in reductions], [r.ns // (2 * (size - 1)) for r in reductions])


def _median_link(links: Sequence[Bandwidth]) -> Bandwidth:
    return sorted(links, key=lambda link: link.transfer_ns(2**20))[len(links) // 2]


def _measure(_: int, kind: str) -> Cluster:
    return probe(kind, lambda done, total, next_part: None)
