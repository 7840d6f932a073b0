"""Launches one process per rank on this machine; if one fails, ends all of them and explains why in one line."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from bapipe.errors import BapipeError, RunFailed, Stopped
from bapipe.formats.cluster import Device
from bapipe.job.secret import new_secret
from bapipe.processes import ChildError, LocalProcess, local_processes, receive
from bapipe.stop_signals import StopRequest, noted_signals
from bapipe.torchrun import current_job
from bapipe.training.launch.waiting import can_watch_waiting
from bapipe.training.launch.worker import (
    Failure,
    Finished,
    Message,
    RankJob,
    Result,
    StepStarted,
    describe_failure,
    join_job,
    run_rank,
    waited_too_long,
)

_SETTLE_S = 0.7
"""How long to wait for more failures after the first: a rank often reports a lost peer before the peer's end shows."""

_NCCL_SETTLE_S = 5.0
"""The same on CUDA: NCCL's watchdogs end the ranks that wait for a hanging one, one after another."""

_NCCL_ABORT_S = 10.0
"""How long after the timeout NCCL's watchdogs take to end the first process, at most."""

_START_S = 120.0
"""How much longer a rank may be silent while it starts, because importing torch takes long."""

_Batches = SimpleQueue[list[tuple[LocalProcess, object]] | Exception]
"""What `receive` has returned, or raised."""

_NO_FACTS: Mapping[str, str] = {}

_RECEIVE_S = 0.2

_LONGEST_WAIT_S = 1.0
"""The most that a round of `_follow` counts for: it takes longer only if this process was paused."""

_END_S = 1.0
"""How long a rank that has reported its result, or closed its pipe, may take to exit."""


@dataclass(slots=True)
class _RankState:
    """What the parent knows of a rank.

    Attributes:
        step: the last step that it has started.
        killed_by: the signal that killed its process.
        vanished: whether its process ended without a report.
        silent_s: how long it has run without sending a message; less than 0 while it may still start.
    """

    name: str
    process: LocalProcess
    step: int | None = None
    finished: Finished | None = None
    failure: Failure | None = None
    killed_by: int | None = None
    vanished: bool = False
    silent_s: float = -_START_S

    @property
    def broken(self) -> bool:
        return self.failure is not None or self.killed_by is not None or self.vanished

    @property
    def title(self) -> str:
        return f"rank {self.process.index} ({self.name})"

    @property
    def at_step(self) -> str:
        return "" if self.step is None else f" at step {self.step}"


def launch(
    worker: Callable[..., Result],
    names: Sequence[str],
    *arguments: Any,
    kind: str = "cpu",
    timeout_s: float = 600.0,
    on_message: Callable[[int, Any], None] | None = None,
    stops_between_steps: bool = False,
    facts: Mapping[str, str] = _NO_FACTS,
    memory_advice: Sequence[str] = (),
    places: Sequence[int] | None = None,
    devices: Sequence[Device] = (),
) -> list[Result]:
    """Runs `worker(rank, *arguments)` in a process for each of `names`; returns what each returned, in rank order.

    Under torchrun it joins that job and runs the worker in this process; the list then holds this rank's result alone,
    and `on_message` gets only this rank's messages. `kind` is `cpu` (gloo, one thread per process) or `cuda` (NCCL).
    The worker, its arguments and its result must be picklable. `on_message(index, message)` gets the workers' reports,
    in this process. `facts` are values that must be the same in all ranks of a job, by name; `memory_advice` says for
    each rank what to do if it runs out of memory; `places` are the ranks' CUDA devices on their hosts, by default
    numbered as the ranks; `devices` are the ranks' devices in the plan's cluster, with which a job compares the
    machines and GPUs that it has.

    SIGTERM and SIGHUP end the ranks with this process. With `stops_between_steps` the worker is asked to stop first: it
    checks `rank.stop_signal`, and raises `Stopped` in every rank. A second signal, or one before the first step, ends
    the ranks at once.

    Raises:
        BapipeError: a worker raised it, or torchrun started another number of processes.
        RunFailed: a rank raised an error, was killed, or kept another one waiting for `timeout_s`; or for that time no
            rank ended, reported anything or was known to wait. That time is twice as long on CUDA and outside of Linux,
            where ranks do not tell that they wait.
        KeyboardInterrupt: on Ctrl-C, when all ranks have ended.
        Stopped: the ranks were asked to stop, and have ended.
    """
    job = RankJob(
        worker=worker,
        arguments=arguments,
        names=tuple(names),
        places=tuple(range(len(names)) if places is None else places),
        kind=kind,
        timeout_s=timeout_s,
        stops_between_steps=stops_between_steps,
        facts=facts,
        memory_advice=tuple(memory_advice),
        devices=tuple(devices),
    )
    if (joined := current_job()) is not None:
        return [join_job(job, joined, on_message)]
    with tempfile.TemporaryDirectory(prefix="bapipe-") as name:
        folder = Path(name)
        to_every_rank = job, str(folder / "store"), new_secret()
        with (
            noted_signals() if stops_between_steps else nullcontext(StopRequest()) as stop,
            local_processes(
                run_rank,
                len(names),
                to_every_rank,
                folder=folder,
                environment={} if kind == "cpu" else _cuda_environment(),
                grace_s=_END_S,
            ) as processes,
            _listening(processes) as batches,
        ):
            ranks = [_RankState(device, process) for device, process in zip(names, processes, strict=True)]
            _follow(ranks, batches, job, on_message, stop)
    return [rank.finished.result for rank in ranks if rank.finished is not None]  # type: ignore[misc]


def _cuda_environment() -> dict[str, str]:
    """Returns the environment variables for ranks on GPUs that are not set in this process.

    With them the allocator grows its blocks instead of leaving gaps between them, and streams have hardware queues of
    their own, so that a receive which waits on the GPU holds up no stream but its own.
    """
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    names = {"PYTORCH_ALLOC_CONF": ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}  # the latter before torch 2.10
    return {key: value for key, value in wanted.items() if not any(map(os.environ.get, names.get(key, (key,))))}


@contextmanager
def _listening(processes: Sequence[LocalProcess]) -> Iterator[_Batches]:
    """Receives messages in a thread: else a rank with a full pipe would wait for `on_message`, and others for it."""
    batches, leaves = _Batches(), Event()

    def listen() -> None:
        try:
            while not leaves.is_set() and any(process.is_open for process in processes):
                if received := receive(processes, timeout_s=_RECEIVE_S):
                    batches.put(received)
        except Exception as error:  # of a message that cannot be unpickled here
            batches.put(error)

    listener = Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield batches
    finally:
        leaves.set()
        listener.join(_END_S)  # not for ever: a rank may be paused in a message, until it is ended


def _follow(
    ranks: Sequence[_RankState],
    batches: _Batches,
    job: RankJob,
    on_message: Callable[[int, Any], None] | None,
    stop: StopRequest,
) -> None:
    """Returns when every rank has finished; raises when one is not going to."""
    deadline_s: float | None = None
    num_signals, last_s = 0, time.monotonic()
    # A rank that does not tell that it waits may have computed for almost `timeout_s` before it began to wait.
    allowed_s = job.timeout_s if can_watch_waiting(job.kind) else 2 * job.timeout_s
    silence_s = allowed_s + (_NCCL_ABORT_S if job.kind == "cuda" else _END_S)
    while any(rank.finished is None for rank in ranks):
        _take(batches, ranks, job, on_message)
        now_s = time.monotonic()
        if deadline_s is None and any(rank.broken for rank in ranks):
            deadline_s = now_s + (_NCCL_SETTLE_S if job.kind == "cuda" else _SETTLE_S)
        if deadline_s is not None and (now_s >= deadline_s or all(rank.broken or rank.finished for rank in ranks)):
            raise _error(ranks, job, stop)
        if stop.number is not None and num_signals < len(stop.numbers):
            num_signals = len(stop.numbers)
            _ask_to_stop(ranks, stop.number, is_first=num_signals == 1)
        _count_silence(ranks, min(now_s - last_s, _LONGEST_WAIT_S))
        last_s = now_s
        running = [rank for rank in ranks if rank.finished is None and not rank.broken]
        # While one rank still reports, the others may be waiting for it; one that waits ends itself at the timeout.
        if deadline_s is None and running and all(rank.silent_s > silence_s for rank in running):
            raise RunFailed(
                f"{running[0].title} neither ended nor reported anything for {allowed_s:g} s{running[0].at_step}: "
                "if a step takes longer, raise the timeout"
            )


def _ask_to_stop(ranks: Sequence[_RankState], number: int, is_first: bool) -> None:
    """Asks the ranks to stop after their step; raises Stopped if they are not to be waited for."""
    if not is_first or any(rank.step is None for rank in ranks):
        raise Stopped(number, ": all ranks have ended")
    for rank in ranks:
        rank.process.ask_to_end()


def _count_silence(ranks: Sequence[_RankState], passed_s: float) -> None:
    """Adds to the time that ranks have run without a message, unless all of them are paused."""
    if not all(rank.process.is_paused() for rank in ranks if rank.finished is None):
        for rank in ranks:
            rank.silent_s += passed_s


def _take(
    batches: _Batches, ranks: Sequence[_RankState], job: RankJob, on_message: Callable[[int, Any], None] | None
) -> None:
    """Waits up to `_RECEIVE_S` for messages, notes them, and passes on those for `on_message`."""
    try:
        batch = batches.get(timeout=_RECEIVE_S)
    except Empty:
        return
    if isinstance(batch, Exception):
        raise batch
    for process, message in batch:
        rank = ranks[process.index]
        if message is None:
            _note_end(rank, job)
            continue
        rank.silent_s = 0.0
        if isinstance(message, StepStarted):
            rank.step = message.step
        elif isinstance(message, Finished):
            rank.finished = message
        elif isinstance(message, Failure):
            rank.failure = message
        elif isinstance(message, ChildError):  # before the worker ran, as when the job cannot be unpickled
            rank.failure = Failure(text=message.text, expected=False)
        elif isinstance(message, Message) and on_message is not None:
            on_message(process.index, message.value)


def _note_end(rank: _RankState, job: RankJob) -> None:
    """Notes how a process ended that has closed its pipe without a report."""
    if rank.finished is not None or rank.failure is not None:
        return
    code = rank.process.exit_code(_END_S)
    if job.kind == "cuda" and code == -signal.SIGABRT:  # NCCL's watchdog ends the process that waits for another
        rank.failure = waited_too_long(job.timeout_s)
        return
    rank.killed_by = -code if code is not None and code < 0 else None
    rank.vanished = rank.killed_by is None


def _error(ranks: Sequence[_RankState], job: RankJob, stop: StopRequest) -> BapipeError | Stopped:
    """Returns the error for the user: of the rank that is the cause, not of one that only lost its peer."""
    for rank in ranks:
        if rank.failure is not None and rank.failure.stopped is not None:
            number, detail = rank.failure.stopped
            return Stopped(stop.number or number, detail)
    gone = tuple(rank.name for rank in ranks if rank.killed_by is not None or rank.vanished)
    for rank in ranks:
        if rank.killed_by is not None:
            cause = signal.Signals(rank.killed_by).name
            advice = job.advice_of(rank.process.index)
            hint = f"; a system out of memory does that: {advice}" if cause == "SIGKILL" else ""
            return RunFailed(f"{rank.title} was killed by {cause}{rank.at_step}{hint}", lost=gone)
    reported = sorted((rank for rank in ranks if rank.failure is not None), key=_causes_first)
    vanished = [rank for rank in ranks if rank.vanished]
    if vanished and (not reported or _is_symptom(reported[0])):
        code = vanished[0].process.exit_code(0.0)
        return RunFailed(f"{vanished[0].title} ended{vanished[0].at_step} without a word (exit code {code})", lost=gone)
    first = reported[0]
    assert first.failure is not None
    others = [rank for rank in ranks if not rank.broken and rank.finished is None]
    # A rank that hangs does not tell that it waits: it has been silent for about as long as the first one has waited.
    silent = [rank for rank in others if rank.silent_s > job.timeout_s / 2] or others
    if first.failure.timed_out and len(silent) == 1:
        hangs = f"{silent[0].title} hangs{silent[0].at_step}"
        return RunFailed(f"{hangs}: {first.title} {first.failure.text}", lost=(silent[0].name,))
    return RunFailed(describe_failure(first.failure, job, first.process.index, first.at_step))


def _is_symptom(rank: _RankState) -> bool:
    return rank.failure is not None and rank.failure.lost_peer


def _causes_first(rank: _RankState) -> tuple[bool, bool, int]:
    assert rank.failure is not None
    return rank.failure.lost_peer, not rank.failure.expected, rank.process.index
