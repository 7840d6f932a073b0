"""One process for each rank on this machine; all end together, and one line says why."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from bapipe.errors import BapipeError, RunFailed
from bapipe.runtime.launch.worker import (
    Failure,
    Finished,
    Message,
    Result,
    StepStarted,
    describe_failure,
    join_job,
    run_child,
)

_SETTLE_S = 0.7
"""How long the first failure waits for others: a rank that lost its peer often reports before the peer's end shows."""

_START_S = 120.0
"""How much longer a rank may be silent while it starts; importing torch takes its time."""

_END_S = 1.0


@dataclass(slots=True)
class _Child:
    """What the parent knows of a rank."""

    index: int
    name: str
    process: SpawnProcess
    pipe: Connection
    step: int | None = None
    done: Finished | None = None
    failed: Failure | None = None
    signal: int | None = None
    lost: bool = False
    open: bool = True
    heard_s: float = field(default_factory=lambda: time.monotonic() + _START_S)

    @property
    def broken(self) -> bool:
        return self.failed is not None or self.signal is not None or self.lost


def launch(
    worker: Callable[..., Result],
    names: Sequence[str],
    *arguments: Any,
    kind: str = "cpu",
    timeout_s: float = 600.0,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Result]:
    """Runs `worker(rank, *arguments)` in a process for each of `names`; returns what each returned, in rank order.

    Under torchrun it joins that job and runs the worker in this process; the list then holds this rank's result alone,
    and `on_message` sees this rank's messages alone. `kind` is `cpu` (gloo, one thread a process) or `cuda` (NCCL).
    The worker, its arguments and its result must be picklable. `on_message(index, message)` gets what the workers
    report, in this process.

    Raises:
        BapipeError: what a worker raised as one, or torchrun started another number of processes.
        RunFailed: a rank raised, was killed, or neither ended nor said anything for `timeout_s`.
        KeyboardInterrupt: on Ctrl-C, when all ranks have ended.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return [join_job(worker, names, arguments, kind, timeout_s, on_message)]
    with tempfile.TemporaryDirectory(prefix="bapipe-") as folder:
        children: list[_Child] = []
        try:
            _start_all(children, worker, names, arguments, kind, timeout_s, Path(folder) / "store")
            _follow(children, timeout_s, on_message)
        finally:
            _end_all(children)
    return [_result(child) for child in children]


def _result(child: _Child) -> Any:
    assert child.done is not None
    return child.done.result


def _start_all(
    children: list[_Child],
    worker: Callable[..., object],
    names: Sequence[str],
    arguments: tuple[Any, ...],
    kind: str,
    timeout_s: float,
    store: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    with _interrupts_blocked():  # the children inherit it: Ctrl-C is for the parent, which ends them
        for index, name in enumerate(names):
            receiver, sender = context.Pipe(duplex=False)
            job = (worker, arguments, index, len(names), name, kind, timeout_s, str(store), sender, os.getpid())
            process = context.Process(target=run_child, args=job, name=f"bapipe rank {index}", daemon=True)
            process.start()
            sender.close()
            children.append(_Child(index=index, name=name, process=process, pipe=receiver))


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(children: Sequence[_Child], timeout_s: float, on_message: Callable[[int, Any], None] | None) -> None:
    """Returns when every rank is done; raises when one is not going to be."""
    deadline_s: float | None = None
    while any(child.done is None for child in children):
        _poll(children, 0.2, on_message)
        now_s = time.monotonic()
        if deadline_s is None and any(child.broken for child in children):
            deadline_s = now_s + _SETTLE_S
        if deadline_s is not None and (now_s >= deadline_s or all(c.broken or c.done for c in children)):
            raise _error(children)
        waiting = [child for child in children if child.done is None and not child.broken]
        if deadline_s is None and waiting and all(now_s - child.heard_s > timeout_s + _END_S for child in waiting):
            raise RunFailed(
                f"{_title(waiting[0])} neither ended nor reported anything for {timeout_s:g} s{_at(waiting[0])}: "
                "if a step takes longer, raise the timeout"
            )


def _poll(children: Sequence[_Child], timeout_s: float, on_message: Callable[[int, Any], None] | None) -> None:
    live = [child for child in children if child.open]
    ready = wait([child.pipe for child in live], timeout_s) if live else []
    for child in live:
        if child.pipe not in ready:
            continue
        try:
            message = child.pipe.recv()
        except (EOFError, OSError):
            child.open = False
            _note_end(child)
            continue
        child.heard_s = time.monotonic()
        if isinstance(message, StepStarted):
            child.step = message.step
        elif isinstance(message, Finished):
            child.done = message
        elif isinstance(message, Failure):
            child.failed = message
        elif isinstance(message, Message) and on_message is not None:
            on_message(child.index, message.value)
    if not live:
        time.sleep(timeout_s)


def _note_end(child: _Child) -> None:
    if child.done is not None or child.failed is not None:
        return
    child.process.join(_END_S)
    code = child.process.exitcode
    child.signal = -code if code is not None and code < 0 else None
    child.lost = child.signal is None


def _error(children: Sequence[_Child]) -> BapipeError:
    """Returns what to tell the user: a cause rather than a rank that only noticed that another had gone."""
    gone = tuple(child.name for child in children if child.signal is not None or child.lost)
    for child in children:
        if child.signal is not None:
            cause = signal.Signals(child.signal).name
            hint = "; a system out of memory does that: plan with less memory" if cause == "SIGKILL" else ""
            return RunFailed(f"{_title(child)} was killed by {cause}{_at(child)}{hint}", lost=gone)
    told = [child for child in children if child.failed is not None]
    cause_first = sorted(told, key=_suspicion)
    lost = [child for child in children if child.lost]
    if lost and (not told or _is_symptom(cause_first[0])):
        code = lost[0].process.exitcode
        return RunFailed(f"{_title(lost[0])} ended{_at(lost[0])} without a word (exit code {code})", lost=gone)
    child = cause_first[0]
    assert child.failed is not None
    silent = [other for other in children if not other.broken and other.done is None]
    if child.failed.timed_out and len(silent) == 1:
        hangs = f"{_title(silent[0])} hangs{_at(silent[0])}"
        return RunFailed(f"{hangs}: {_title(child)} {child.failed.text}", lost=(silent[0].name,))
    return RunFailed(describe_failure(child.failed, child.index, child.name, _at(child)))


def _is_symptom(child: _Child) -> bool:
    return child.failed is not None and child.failed.lost_peer


def _suspicion(child: _Child) -> tuple[bool, bool, int]:
    assert child.failed is not None
    return child.failed.lost_peer, not child.failed.expected, child.index


def _title(child: _Child) -> str:
    return f"rank {child.index} ({child.name})"


def _at(child: _Child) -> str:
    return "" if child.step is None else f" at step {child.step}"


def _end_all(children: Sequence[_Child]) -> None:
    """Ends what still runs, by force if need be; a second Ctrl-C does not stop it."""
    with _interrupts_blocked():
        running = all(child.done is not None for child in children)
        for child in children:
            if running:
                child.process.join(_END_S)
            if child.process.is_alive():
                child.process.kill()
        for child in children:
            child.process.join()
            child.pipe.close()
            child.process.close()
