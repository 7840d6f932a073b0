"""What the parent of the ranks makes of what they tell, and of their silence."""

from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from bapipe.errors import RunFailed
from bapipe.job.groups import meet
from bapipe.stop_signals import StopRequest
from bapipe.training.launch import processes
from bapipe.training.launch.processes import _Batches, _RankState
from bapipe.training.launch.worker import RankJob, _failure_of, waited_too_long


class Runs:
    """A process that has not ended."""

    def __init__(self, index: int) -> None:
        self.index = index

    def is_paused(self) -> bool:
        return False


def job_of(size: int, timeout_s: float) -> RankJob:
    return RankJob(
        worker=print,
        arguments=(),
        names=tuple(f"cpu{rank}" for rank in range(size)),
        places=tuple(range(size)),
        kind="cpu",
        timeout_s=timeout_s,
        stops_between_steps=False,
        facts={},
        memory_advice=(),
    )


def ranks_of(job: RankJob, *silent_s: float) -> list[_RankState]:
    running: list[Any] = [Runs(index) for index in range(len(job.names))]
    given = zip(job.names, running, silent_s, strict=True)
    return [_RankState(name, process, silent_s=silence_s) for name, process, silence_s in given]


def test_the_rank_that_hangs_has_not_even_told_that_it_waits() -> None:
    job = job_of(4, 60.0)
    ranks = ranks_of(job, 0.7, 61.0, 0.4, 20.0)
    ranks[0].failure = waited_too_long(60.0)
    error = processes._error(ranks, job, StopRequest())
    assert str(error) == "rank 1 (cpu1) hangs: rank 0 (cpu0) waited more than 60 s for another rank"
    assert getattr(error, "lost", None) == ("cpu1",)


@pytest.mark.parametrize(("tells", "allowed_s"), [(True, "0.2"), (False, "0.4")])
def test_a_rank_that_cannot_tell_that_it_waits_may_be_silent_for_twice_as_long(
    tells: bool, allowed_s: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have computed for almost the timeout before it began to wait, which the backend then ends."""
    monkeypatch.setattr(processes, "can_watch_waiting", lambda kind: tells)
    monkeypatch.setattr(processes, "_END_S", 0.0)
    batches: _Batches = SimpleQueue()
    job = job_of(1, 0.2)
    with pytest.raises(
        RunFailed, match=rf"^rank 0 \(cpu0\) neither ended nor reported anything for {allowed_s} s: if a"
    ):
        processes._follow(ranks_of(job, 0.0), batches, job, None, StopRequest())


def test_a_rank_that_is_paused_in_a_message_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    is_continued, has_ended = Event(), Event()

    def receive(*_: object, **__: object) -> None:
        is_continued.wait(20)
        has_ended.set()

    monkeypatch.setattr(processes, "receive", receive)
    monkeypatch.setattr(processes, "_END_S", 0.1)
    paused: Any = Runs(0)
    paused.is_open = True
    with processes._listening([paused]):
        pass
    assert not has_ended.is_set()
    is_continued.set()


def error_of(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def in_the_users_code() -> None:
    raise RuntimeError("timeout of my dataset")


def test_only_communication_that_times_out_shows_that_another_rank_hangs() -> None:
    waiting = error_of(lambda: meet(dist.HashStore(), 0, 2, timedelta(seconds=0.1)))
    for error, timed_out in (
        (waiting, True),
        (dist.DistBackendError("NCCL communicator was aborted: timeout"), True),
        (error_of(in_the_users_code), False),
        (TimeoutError("timed out"), False),
    ):
        assert _failure_of(error, 60.0, None).timed_out == timed_out
    assert _failure_of(error_of(in_the_users_code), 60.0, None).text == "RuntimeError: timeout of my dataset"
