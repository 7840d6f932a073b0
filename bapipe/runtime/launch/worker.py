"""A process of a group that trains together: how it starts, what it says, and how it ends."""

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, RunFailed
from bapipe.runtime.launch.rendezvous import another_rank_reports, open_store, wait_for_all
from bapipe.torch_device import prepare_cpu
from bapipe.torch_private import FileStore

_PR_SET_PDEATHSIG = 1

_JOIN_S = 300.0
"""How long a rank of a job waits at most for others to start."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of the group, as its worker sees it.

    Attributes:
        index, size: its place in the process group, and the group's size.
        name: of its device in the plan.
    """

    index: int
    size: int
    name: str
    device: torch.device
    _send: Callable[[object], None]

    def enter_step(self, step: int) -> None:
        """Says that a step begins, for the message should this rank die in it."""
        self._send(StepStarted(step))

    def report(self, message: object) -> None:
        """Hands a message to `on_message` of whoever launched the ranks."""
        self._send(Message(message))


@dataclass(frozen=True, slots=True)
class Started:
    """The process has started."""


@dataclass(frozen=True, slots=True)
class StepStarted:
    step: int


@dataclass(frozen=True, slots=True)
class Message:
    value: object


@dataclass(frozen=True, slots=True)
class Finished:
    result: object


@dataclass(frozen=True, slots=True)
class Failure:
    """`expected` errors are a user's; `lost_peer` ones only say that another rank has gone, or is too slow."""

    text: str
    expected: bool
    lost_peer: bool = False
    timed_out: bool = False


def run_child(
    worker: Callable[..., object],
    arguments: tuple[Any, ...],
    index: int,
    size: int,
    name: str,
    kind: str,
    timeout_s: float,
    store: str,
    pipe: Connection,
    parent: int,
) -> None:
    _die_with(parent)
    code = 0
    try:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        pipe.send(Started())
        device = _prepare(kind, index)
        _init(kind, timeout_s, store=FileStore(store, size), rank=index, world_size=size)
        result = worker(Rank(index, size, name, device, pipe.send), *arguments)
        _send_result(pipe, result)
        dist.destroy_process_group()
    except BaseException as error:  # whatever it is, the parent says it in one line
        code = 1
        with contextlib.suppress(OSError):
            pipe.send(_failure_of(error, timeout_s))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's destructors would complain about peers that have gone


def _send_result(pipe: Connection, result: object) -> None:
    try:
        pickle.dumps(result)
    except Exception as error:
        raise BapipeError(f"the worker's result cannot be sent to the parent: {error}") from error
    pipe.send(Finished(result))


def _die_with(parent: int) -> None:
    """Makes the kernel end this process when its parent is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prepare(kind: str, local_index: int) -> torch.device:
    # When an action fails torch prints the whole schedule; the error itself says enough.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    if kind != "cuda":
        prepare_cpu(1)
        return torch.device("cpu")
    if local_index >= torch.cuda.device_count():
        raise BapipeError(f"this rank wants CUDA device {local_index}; this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(local_index)
    return torch.device("cuda", local_index)


def _init(kind: str, timeout_s: float, **where: Any) -> None:
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)


def _failure_of(error: BaseException, timeout_s: float) -> Failure:
    if isinstance(error, BapipeError):
        return Failure(text=str(error), expected=True)
    if any(sign in str(error) for sign in ("Timed out", "timed out", "timeout")) and isinstance(error, RuntimeError):
        text = f"waited more than {timeout_s:g} s for another rank"
        return Failure(text=text, expected=False, lost_peer=True, timed_out=True)
    return Failure(text=_one_line(error), expected=False, lost_peer=_is_lost_peer(error))


def _one_line(error: BaseException) -> str:
    root = error
    while root.__cause__ is not None:  # torch wraps what a layer raises in a long account of its arguments
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    return f"{type(root).__name__}: {lines[0]}" if lines else type(root).__name__


def _is_lost_peer(error: BaseException) -> bool:
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def join_job(
    worker: Callable[..., Result],
    names: Sequence[str],
    arguments: tuple[Any, ...],
    kind: str,
    timeout_s: float,
    on_message: Callable[[int, Any], None] | None,
) -> Result:
    """Runs the worker as a rank of the job that torchrun started this process for."""
    index, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != len(names):
        raise BapipeError(
            f"the plan has a stage on {len(names)} devices but the job has {size} processes: start {len(names)}, as "
            f"with torchrun --nproc-per-node {len(names)} on one host, or plan for {size} devices"
        )
    rendezvous_s = min(timeout_s, _JOIN_S)
    store = open_store(index, names, rendezvous_s)
    steps: list[int] = []

    def send(message: object) -> None:
        if isinstance(message, StepStarted):
            steps[:] = [message.step]
        elif isinstance(message, Message) and on_message is not None:
            on_message(index, message.value)

    try:
        device = _prepare(kind, int(os.environ.get("LOCAL_RANK", index)))
        wait_for_all(store, index, names, rendezvous_s)
        _init(kind, timeout_s, store=store, rank=index, world_size=size)
        result = worker(Rank(index, size, names[index], device, send), *arguments)
        dist.destroy_process_group()
        return result
    except Exception as error:
        failure = _failure_of(error, timeout_s)
        at = f" at step {steps[0]}" if steps else ""
        told = another_rank_reports(store, failure.lost_peer)
        raise RunFailed(describe_failure(failure, index, names[index], at), told=told) from None


def describe_failure(failure: Failure, index: int, name: str, at: str) -> str:
    """Returns what to tell the user of a rank that failure."""
    if failure.expected:
        return failure.text
    if failure.timed_out:
        return f"rank {index} ({name}) {failure.text}{at}: that one hangs, or the link to it is cut"
    if failure.lost_peer:
        return f"rank {index} ({name}) lost another rank{at}: {failure.text}"
    return f"rank {index} ({name}) failed{at}: {failure.text}"
