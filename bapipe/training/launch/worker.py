"""What each process of a run does: it joins the process group, runs the worker, and reports how that ended.

A run is either launched here (`processes.launch`, `run_rank`), or part of a job of torchrun (`join_job`).
"""

import contextlib
import gc
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, LayerFailed, RunFailed, Stopped, one_line, root_cause
from bapipe.formats.cluster import Device
from bapipe.job.groups import init_proven_group, meet, use_loopback
from bapipe.job.interfaces import check_interface, choose_interface
from bapipe.job.lost_peer import has_waited_too_long, is_lost_peer, shows_a_lost_rank
from bapipe.job.rendezvous import OtherRanks, Refused, open_store, outer_address, tell_failure, wait_for_all
from bapipe.job.secret import job_secret
from bapipe.job.store import JobStore
from bapipe.stop_signals import StopRequest, noted_signals
from bapipe.torch_device import CPU, current_device, is_out_of_memory, prepare_cpu, visible_place
from bapipe.torchrun import Job
from bapipe.training.launch.gpus_of_job import check_one_rank_per_gpu, gpus_of_all, unlike_the_plan
from bapipe.training.launch.waiting import WaitLimit

_log = logging.getLogger(__name__)

_START = timedelta(days=1)
"""Longest time that a rank waits for the others to start. On one machine the parent notices earlier if one does not; in
a job `timeout_s` may be shorter."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of the group, as its worker sees it.

    Attributes:
        index, size: its rank in the process group, and the group's size.
        name: name of its device in the plan.
        group_timeout: timeout for process groups that the worker makes.
    """

    index: int
    size: int
    name: str
    device: torch.device
    group_timeout: timedelta
    _send: Callable[[object], None]
    _stop: StopRequest
    _limit: WaitLimit

    @property
    def stop_signal(self) -> int:
        """The signal that has asked this rank to stop after the current step, 0 if there was none."""
        return self._stop.number or 0

    def enter_step(self, step: int) -> None:
        """Reports that a step begins: if this rank dies in it, the error names the step."""
        self._send(StepStarted(step))

    def report(self, message: object) -> None:
        """Sends a message to `on_message` of the process that launched the ranks."""
        self._send(Message(message))

    def note_meeting(self) -> None:
        """Notes that the ranks' threads that write a checkpoint have just met: no rank hangs."""
        self._limit.note_meeting()
        self._send(Heartbeat())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank of a group runs.

    Attributes:
        worker: called with a `Rank` and `arguments`.
        names: names of the ranks' devices in the plan.
        places: each device's index among those of its host, which is its CUDA index.
        kind: `cpu` (gloo) or `cuda` (NCCL).
        timeout_s: how long a rank may wait for another.
        stops_between_steps: whether the worker checks `rank.stop_signal`; else signals end it at once.
        facts: values that must be the same in all ranks of a job, by name.
        memory_advice: for each rank, what to say if it runs out of memory; may be empty.
        devices: the ranks' devices in the plan's cluster; empty without a plan.
    """

    worker: Callable[..., Any]
    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    places: tuple[int, ...]
    kind: str
    timeout_s: float
    stops_between_steps: bool
    facts: Mapping[str, str]
    memory_advice: tuple[str, ...]
    devices: tuple[Device, ...] = ()

    def advice_of(self, index: int) -> str:
        """Returns what to say if a rank runs out of memory."""
        return self.memory_advice[index] if self.memory_advice else "plan with less memory"


@dataclass(frozen=True, slots=True)
class StepStarted:
    """Sent when the rank begins a step."""

    step: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent when the rank has started, while it waits for others, or when it has met them to write a checkpoint.

    It says that the rank does not hang.
    """


@dataclass(frozen=True, slots=True)
class Message:
    """Sent by the worker, for `on_message`."""

    value: object


@dataclass(frozen=True, slots=True)
class Finished:
    """Sent when the worker has returned."""

    result: object


@dataclass(frozen=True, slots=True)
class Failure:
    """Sent when the worker has raised an error.

    Attributes:
        expected: whether it is a BapipeError, whose text is complete without rank and step.
        lost_peer: whether it only shows that another rank has gone, or is too slow.
        timed_out: whether it only shows that another rank is too slow.
        stopped: the number of the signal that made all ranks stop, and details; None if none did.
        out_of_memory: whether there was not enough memory, of the machine or by a limit.
    """

    text: str
    expected: bool
    lost_peer: bool = False
    timed_out: bool = False
    stopped: tuple[int, str] | None = None
    out_of_memory: bool = False


def run_rank(index: int, send: Callable[[object], None], job: RankJob, store: str, secret: bytes) -> None:
    """Runs the worker as one rank of a group of processes on this machine, whose rendezvous is the file `store`.

    Sends `Heartbeat` when it starts and while it waits, what the worker sends, and in the end `Finished` or `Failure`.
    """
    limit = WaitLimit(job.timeout_s, job.kind, on_wait=lambda: send(Heartbeat()))
    try:
        use_loopback()
        send(Heartbeat())
        gc.freeze()  # objects made by imports live as long as this process: no collection need visit them
        shared = dist.FileStore(store, len(job.names))
        meet(shared, index, len(job.names), _START)
        result = _work(job, index, _prepare(job, index), send, limit, store=shared, secret=secret)
        _send_result(send, result)
        dist.destroy_process_group()
    except BaseException as error:  # the parent puts any kind of error into one line
        with contextlib.suppress(OSError):
            send(_failure_of(error, job.timeout_s, limit))


def _work(
    job: RankJob,
    index: int,
    device: torch.device,
    send: Callable[[object], None],
    limit: WaitLimit,
    *,
    store: dist.Store,
    secret: bytes,
) -> Any:
    """Joins the process group, which `store` connects, and runs the worker; returns its result."""
    with limit, noted_signals() if job.stops_between_steps else nullcontext(StopRequest()) as stop:
        init_proven_group(job.kind, store, index, job.names, secret, limit.group_timeout)
        rank = Rank(index, len(job.names), job.names[index], device, limit.group_timeout, send, stop, limit)
        return job.worker(rank, *job.arguments)


def _send_result(send: Callable[[object], None], result: object) -> None:
    try:
        pickle.dumps(result)
    except Exception as error:
        raise BapipeError(f"the worker's result cannot be sent to the parent: {error}") from error
    send(Finished(result))


def _prepare(job: RankJob, index: int) -> torch.device:
    """Sets this process up for a rank; returns the rank's device."""
    # When an action fails torch prints the whole schedule; the error itself is enough.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    if job.kind != "cuda":
        prepare_cpu(1)
        return CPU
    num_devices, place = torch.cuda.device_count(), visible_place(job.places[index])
    if place >= num_devices:
        raise BapipeError(
            f"'{job.names[index]}' is device {place} of its host in the plan's cluster, counted from 0; torch finds "
            f"{num_devices} CUDA devices here: plan for a cluster with this machine's devices"
        )
    return current_device(torch.device("cuda", place))


def _failure_of(error: BaseException, timeout_s: float, limit: WaitLimit | None) -> Failure:
    if isinstance(error, Stopped):
        return Failure(text=str(error), expected=True, stopped=(error.number, error.detail))
    if limit is not None and limit.expired:
        return waited_too_long(timeout_s)
    if is_out_of_memory(root_cause(error)):
        text = str(error) if isinstance(error, LayerFailed) else one_line(error)
        return Failure(text=text, expected=False, out_of_memory=True)
    if isinstance(error, LayerFailed):
        return Failure(text=str(error), expected=False)
    if (
        isinstance(error, RunFailed)
        and isinstance(error.__cause__, RuntimeError)
        and shows_a_lost_rank(error.__cause__)
    ):
        error = error.__cause__  # the job knows which rank is lost
    if isinstance(error, BapipeError):
        return Failure(text=str(error), expected=True)
    if has_waited_too_long(error):
        return waited_too_long(timeout_s)
    return Failure(text=one_line(error), expected=False, lost_peer=is_lost_peer(error))


def waited_too_long(timeout_s: float) -> Failure:
    """Returns the failure that a rank reports if it has waited for another one for longer than `timeout_s`."""
    text = f"waited more than {timeout_s:g} s for another rank"
    return Failure(text=text, expected=False, lost_peer=True, timed_out=True)


def join_job(job: RankJob, joined: Job, on_message: Callable[[int, Any], None] | None) -> Any:
    """Runs the worker as a rank of the job of torchrun that this process is part of, `joined`; returns its result.

    Raises:
        BapipeError: the job has another number of processes, or the network interface that it is to use does not exist.
        RunFailed: this process cannot join, the worker raised an error, not all ranks joined in time, or two ranks have
            the same GPU.
    """
    index, size, names = joined.rank, joined.size, job.names
    if size != len(names):
        raise BapipeError(
            f"the plan has a stage on {len(names)} devices but the job has {size} processes: start {len(names)}, "
            f"{_on_hosts(job)}, or plan for {size} devices"
        )
    check_interface()
    rendezvous_s = min(job.timeout_s, _START.total_seconds())
    try:
        store = open_store(index, names, rendezvous_s)
    except BapipeError as error:
        raise RunFailed(str(error)) from None
    steps: list[int] = []

    def send(message: object) -> None:
        if isinstance(message, StepStarted):
            steps[:] = [message.step]
        elif isinstance(message, Message) and on_message is not None:
            on_message(index, message.value)

    limit: WaitLimit | None = None
    with store.in_use():
        try:
            device = _prepare(job, index)
            wait_for_all(store, index, names, rendezvous_s, job.facts)
            _compare_gpus(job, store, index, device)
            choose_interface(outer_address(store))
            limit = WaitLimit(job.timeout_s, job.kind)  # made here: it leaves connections open that exist by now
            result = _work(job, index, device, send, limit, store=store, secret=job_secret())
            dist.destroy_process_group()
            return result
        except Refused:
            raise
        except Exception as error:
            failure = _failure_of(error, job.timeout_s, limit)
            at = f" at step {steps[0]}" if steps else ""
            others = tell_failure(store, index, size, failure.lost_peer)
            raise RunFailed(describe_failure(failure, job, index, at, others), told=others.report) from None


def _on_hosts(job: RankJob) -> str:
    """Says how many processes to start on each host of the plan, with hosts in the order of their ranks."""
    counts = Counter(device.host for device in job.devices)
    if len(counts) <= 1:
        return f"on one host with nproc-per-node={len(job.names)} for torchrun"
    return ", ".join(f"{count} on host '{host}'" for host, count in counts.items())


def _compare_gpus(job: RankJob, store: JobStore, index: int, device: torch.device) -> None:
    """Raises BapipeError if two ranks have the same GPU; rank 0 warns if they are not those of the plan's cluster."""
    if job.kind != "cuda" or not job.devices:
        return
    found = gpus_of_all(store, index, len(job.names), device)
    check_one_rank_per_gpu(job.devices, found)
    for difference in unlike_the_plan(job.devices, found) if index == 0 else ():
        _log.warning("%s", difference)


_NOTHING_KNOWN = OtherRanks()

_MAX_NAMED = 5
"""Ranks that a message lists."""


def describe_failure(failure: Failure, job: RankJob, index: int, at: str, others: OtherRanks = _NOTHING_KNOWN) -> str:
    """Returns the message for the user about a rank that failed."""
    title = f"rank {index} ({job.names[index]})"
    if failure.expected:
        return failure.text
    if failure.out_of_memory:
        return f"{title} ran out of memory{at}: {failure.text}; {job.advice_of(index)}"
    if failure.lost_peer and others.gone:
        gone = _titles(others.gone, job)
        return f"{gone} ended without a word, as a killed process does: {title} lost the connection to it{at}"
    if failure.timed_out:
        one_of = "one of " if len(others.silent) > 1 else ""
        which = one_of + _titles(others.silent, job) if others.silent else "that one"
        return f"{title} {failure.text}{at}: {which} hangs, or the link to it is cut"
    if failure.lost_peer:
        return f"{title} lost another rank{at}: {failure.text}"
    return f"{title} failed{at}: {failure.text}"


def _titles(ranks: Sequence[int], job: RankJob) -> str:
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return ", ".join(f"rank {rank} ({job.names[rank]})" for rank in ranks[:_MAX_NAMED]) + more
