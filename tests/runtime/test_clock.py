"""Clocks of CUDA streams and of other hosts, without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapipe.runtime import clock
from bapipe.runtime.clock import CudaClock

CUDA = torch.device("cuda", 1)


class Event:
    """An event of a device that does a millisecond of work between any two."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == f"stream of {CUDA}"
        Event.recorded += 1
        self.at_ms = float(Event.recorded)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def test_every_step_has_an_origin_of_its_own_on_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond passes from each event to the next; the host reads its clock when all are done."""
    now_ns, waits = iter([10 * 10**6, 20 * 10**6]), list[object]()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr("bapipe.runtime.clock.time.perf_counter_ns", lambda: next(now_ns))
    cuda = CudaClock(CUDA)
    first, second = cuda.stamp(), cuda.stamp()
    assert cuda.length_ns(first, second) == 10**6
    assert waits == []  # a step that nobody reads the times of does not wait for the device
    # The origin, two stamps and now: the origin was 3 ms before the host's clock is read.
    assert [cuda.ns(first), cuda.ns(second)] == [8 * 10**6, 9 * 10**6]
    cuda.restart()
    third = cuda.stamp()
    assert cuda.ns(third) == 19 * 10**6
    assert cuda.length_ns(second, third) == 3 * 10**6  # also of two steps
    assert waits == [CUDA, CUDA]


def test_memory_is_freed_before_hosts_are_connected_to_compare_their_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(clock, "dist", SimpleNamespace(get_rank=lambda _: 0))
    monkeypatch.setattr(clock, "gathered", lambda host, _: ["a", "b"])
    monkeypatch.setattr(clock, "_answer_with_time", lambda *_: log.append("connected"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("freed"))
    assert clock.clock_offset_ns(CUDA, None) == 0
    assert log == ["freed", "connected"]


def test_the_time_is_read_when_the_message_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL `recv` returns before that; only reading the value waits."""
    log: list[str] = []

    class Message:
        def item(self) -> int:
            log.append("wait")
            return 0

        def fill_(self, value: int) -> None:
            log.append("fill")

    class Dist:
        def irecv(self, message: Message, **_: Any) -> str:
            return "recv"

        def isend(self, message: Message, **_: Any) -> str:
            return "send"

    def now_ns() -> int:
        log.append("time")
        return 0

    monkeypatch.setattr(clock, "dist", Dist())
    monkeypatch.setattr(clock, "wait", lambda work, _: log.append(work))
    monkeypatch.setattr("bapipe.runtime.clock.torch.zeros", lambda *_, **__: Message())
    monkeypatch.setattr("bapipe.runtime.clock.time.perf_counter_ns", now_ns)
    clock._answer_with_time(1, CUDA, None)
    assert log == ["recv", "wait", "time", "fill", "send"] * clock._NUM_ROUND_TRIPS
