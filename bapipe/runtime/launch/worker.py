"""What a process of a run does: it joins the process group, runs the worker, and reports how that ended.

A run is either launched here (`processes.launch`, `run_rank`), or part of a job of torchrun (`join_job`).
"""

import contextlib
import logging
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, LayerFailed, RunFailed
from bapipe.processes import one_line
from bapipe.runtime.launch.rendezvous import another_rank_reports, open_store, wait_for_all
from bapipe.torch_device import prepare_cpu

_JOIN_S = 300.0
"""The longest time that a rank of a job waits for others to start."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of the group, as its worker sees it.

    Attributes:
        index, size: its rank in the process group, and the group's size.
        name: of its device in the plan.
    """

    index: int
    size: int
    name: str
    device: torch.device
    _send: Callable[[object], None]

    def enter_step(self, step: int) -> None:
        """Reports that a step begins: if this rank dies in it, the error names the step."""
        self._send(StepStarted(step))

    def report(self, message: object) -> None:
        """Sends a message to `on_message` of the process that launched the ranks."""
        self._send(Message(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank of a group runs.

    Attributes:
        worker: called with a `Rank` and `arguments`.
        names: of the ranks' devices in the plan.
        kind: `cpu` (gloo) or `cuda` (NCCL).
        timeout_s: how long a rank may wait for another.
    """

    worker: Callable[..., Any]
    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    kind: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The process has started."""


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The rank has begun a step."""

    step: int


@dataclass(frozen=True, slots=True)
class Message:
    """For `on_message`."""

    value: object


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has returned."""

    result: object


@dataclass(frozen=True, slots=True)
class Failure:
    """The worker has raised an error.

    Attributes:
        expected: it is a BapipeError whose text is complete without rank and step.
        lost_peer: it only shows that another rank has gone, or is too slow.
        timed_out: the latter.
    """

    text: str
    expected: bool
    lost_peer: bool = False
    timed_out: bool = False


def run_rank(index: int, send: Callable[[object], None], job: RankJob, store: str) -> None:
    """Runs the worker as one rank of a group of processes on this machine, which meet in a file.

    Sends `Started`, what the worker sends, and in the end `Finished` or `Failure`.
    """
    try:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
        send(Started())
        device, size = _prepare(job.kind, index), len(job.names)
        _init(job, store=dist.FileStore(store, size), rank=index, world_size=size)
        result = job.worker(Rank(index, size, job.names[index], device, send), *job.arguments)
        _send_result(send, result)
        dist.destroy_process_group()
    except BaseException as error:  # the parent puts any kind of error into one line
        with contextlib.suppress(OSError):
            send(_failure_of(error, job.timeout_s))


def _send_result(send: Callable[[object], None], result: object) -> None:
    try:
        pickle.dumps(result)
    except Exception as error:
        raise BapipeError(f"the worker's result cannot be sent to the parent: {error}") from error
    send(Finished(result))


def _prepare(kind: str, local_index: int) -> torch.device:
    # When an action fails torch prints the whole schedule; the error itself is enough.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    if kind != "cuda":
        prepare_cpu(1)
        return torch.device("cpu")
    if local_index >= torch.cuda.device_count():
        raise BapipeError(f"this rank wants CUDA device {local_index}; this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(local_index)
    return torch.device("cuda", local_index)


def _init(job: RankJob, **rendezvous: Any) -> None:
    backend = "nccl" if job.kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=job.timeout_s), **rendezvous)


def _failure_of(error: BaseException, timeout_s: float) -> Failure:
    if isinstance(error, LayerFailed):
        return Failure(text=str(error), expected=False)
    if isinstance(error, BapipeError):
        return Failure(text=str(error), expected=True)
    if any(sign in str(error) for sign in ("Timed out", "timed out", "timeout")) and isinstance(error, RuntimeError):
        text = f"waited more than {timeout_s:g} s for another rank"
        return Failure(text=text, expected=False, lost_peer=True, timed_out=True)
    return Failure(text=one_line(error), expected=False, lost_peer=_is_lost_peer(error))


def _is_lost_peer(error: BaseException) -> bool:
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def join_job(job: RankJob, on_message: Callable[[int, Any], None] | None) -> Any:
    """Runs the worker as a rank of the job of torchrun that this process is part of; returns its result.

    Raises:
        BapipeError: the job has another number of processes.
        RunFailed: the worker raised an error, or the job did not meet.
    """
    index, size, names = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), job.names
    if size != len(names):
        raise BapipeError(
            f"the plan has a stage on {len(names)} devices but the job has {size} processes: start {len(names)}, on "
            f"one host with nproc-per-node={len(names)} for torchrun, or plan for {size} devices"
        )
    rendezvous_s = min(job.timeout_s, _JOIN_S)
    store = open_store(index, names, rendezvous_s)
    steps: list[int] = []

    def send(message: object) -> None:
        if isinstance(message, StepStarted):
            steps[:] = [message.step]
        elif isinstance(message, Message) and on_message is not None:
            on_message(index, message.value)

    try:
        device = _prepare(job.kind, int(os.environ.get("LOCAL_RANK", index)))
        wait_for_all(store, index, names, rendezvous_s)
        _init(job, store=store, rank=index, world_size=size)
        result = job.worker(Rank(index, size, names[index], device, send), *job.arguments)
        dist.destroy_process_group()
        return result
    except Exception as error:
        failure = _failure_of(error, job.timeout_s)
        at = f" at step {steps[0]}" if steps else ""
        told = another_rank_reports(store, failure.lost_peer)
        raise RunFailed(describe_failure(failure, index, names[index], at), told=told) from None


def describe_failure(failure: Failure, index: int, name: str, at: str) -> str:
    """Returns the message for the user about a rank that failed."""
    if failure.expected:
        return failure.text
    if failure.timed_out:
        return f"rank {index} ({name}) {failure.text}{at}: that one hangs, or the link to it is cut"
    if failure.lost_peer:
        return f"rank {index} ({name}) lost another rank{at}: {failure.text}"
    return f"rank {index} ({name}) failed{at}: {failure.text}"
