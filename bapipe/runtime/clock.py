"""Clocks that stamp actions on a CPU or a CUDA stream, and the offset between the clocks of two ranks."""

import platform
import time
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from bapipe.job.groups import gathered, wait

_NUM_ROUND_TRIPS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Takes stamps, cheaply, and converts them to nanoseconds of `time.perf_counter_ns` after the step."""

    def restart(self) -> None:
        """Begins a step: `ns` takes only stamps from after the last call of this."""

    def stamp(self) -> object: ...

    def ns(self, stamp: object) -> int: ...

    def length_ns(self, start: object, end: object) -> int:
        """Returns the time between two stamps of the same or different steps; waits until the device is at `end`."""


class CpuClock:
    """Stamps are nanoseconds: on a CPU an action is done when its call returns."""

    def restart(self) -> None:
        pass

    def stamp(self) -> object:
        return time.perf_counter_ns()

    def ns(self, stamp: object) -> int:
        assert isinstance(stamp, int)
        return stamp

    def length_ns(self, start: object, end: object) -> int:
        return self.ns(end) - self.ns(start)


class CudaClock:
    """Stamps are events on the device's current stream, because a call returns before the device has done its work.

    CUDA gives the time between two events as a float32 of milliseconds, which an hour after the origin is no finer than
    0.25 ms, and its clock drifts from the host's. So every step has an origin of its own. Its time on the host's clock
    is measured only when the first stamp is read, because the device must be idle for that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        self._origin = self._event()
        self._origin_ns: int | None = None

    def stamp(self) -> object:
        return self._event()

    def ns(self, stamp: object) -> int:
        assert isinstance(stamp, torch.cuda.Event)
        if self._origin_ns is None:
            torch.cuda.synchronize(self._device)
            now = self._event()
            now.synchronize()
            self._origin_ns = time.perf_counter_ns() - self.length_ns(self._origin, now)
        return self._origin_ns + self.length_ns(self._origin, stamp)

    def length_ns(self, start: object, end: object) -> int:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_for(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def clock_offset_ns(device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Returns this rank's clock minus rank 0's, in ns; all ranks of the group call it together.

    On one host all processes read the same clock, and the offset is 0. Between hosts it is estimated from the fastest
    of a few round trips, assuming that both directions take equally long; the error is at most half their difference
    (as in NTP, RFC 5905).
    """
    hosts = gathered(this_host(), group)
    if all(host == hosts[0] for host in hosts):
        return 0
    if device.type == "cuda":
        torch.cuda.empty_cache()  # NCCL connects rank 0 to each of the others now, which needs memory
    rank, offset_ns = dist.get_rank(group), 0
    for peer in range(1, len(hosts)):
        if rank == 0:
            _answer_with_time(peer, device, group)
        elif rank == peer:
            offset_ns = _offset_to_rank_0(device, group)
    return offset_ns


def this_host() -> tuple[str, str]:
    """Returns what tells this machine, since its last start, from others."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    return platform.node(), boot


def _answer_with_time(peer: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    message = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_NUM_ROUND_TRIPS):
        wait(dist.irecv(message, group=group, group_src=peer), group)
        message.item()  # waits until the message has arrived: NCCL's `wait` returns earlier
        message.fill_(time.perf_counter_ns())
        wait(dist.isend(message, group=group, group_dst=peer), group)


def _offset_to_rank_0(device: torch.device, group: dist.ProcessGroup | None) -> int:
    message = torch.zeros(1, dtype=torch.int64, device=device)
    best: tuple[int, int] | None = None  # (round trip, offset), of the shortest round trip
    for _ in range(_NUM_ROUND_TRIPS):
        start_ns = time.perf_counter_ns()
        wait(dist.isend(message, group=group, group_dst=0), group)
        wait(dist.irecv(message, group=group, group_src=0), group)
        remote_ns = int(message.item())
        end_ns = time.perf_counter_ns()
        sample = (end_ns - start_ns, (start_ns + end_ns) // 2 - remote_ns)
        best = sample if best is None else min(best, sample)
    assert best is not None
    return best[1]
