"""What the parent of the ranks makes of what they tell, and of their silence."""

from queue import SimpleQueue
from typing import Any

import pytest

from bapipe.errors import RunFailed
from bapipe.stop_signals import StopRequest
from bapipe.training.launch import processes
from bapipe.training.launch.processes import _Batches, _RankState
from bapipe.training.launch.worker import RankJob, waited_too_long


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
