"""Clocks of CUDA streams and of other hosts, without a GPU."""

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
    now_ns = iter([1000, 2000])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("bapipe.runtime.clock.time.perf_counter_ns", lambda: next(now_ns))
    cuda = CudaClock(CUDA)
    assert [cuda.ns(cuda.stamp()) for _ in range(2)] == [1000 + 10**6, 1000 + 2 * 10**6]
    cuda.restart()
    assert cuda.ns(cuda.stamp()) == 2000 + 10**6


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
        def recv(self, message: Message, **_: Any) -> None:
            log.append("recv")

        def send(self, message: Message, **_: Any) -> None:
            log.append("send")

    def now_ns() -> int:
        log.append("time")
        return 0

    monkeypatch.setattr(clock, "dist", Dist())
    monkeypatch.setattr("bapipe.runtime.clock.torch.zeros", lambda *_, **__: Message())
    monkeypatch.setattr("bapipe.runtime.clock.time.perf_counter_ns", now_ns)
    clock._answer_with_time(1, CUDA, None)
    assert log == ["recv", "wait", "time", "fill", "send"] * clock._NUM_ROUND_TRIPS
