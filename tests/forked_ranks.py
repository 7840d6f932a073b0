"""Ranks that tests start are copies of a process that has imported torch: importing it takes a rank five seconds.

Those of commands are started as users' are, and so are all in tests of how ranks start and end, and those for which
an environment is given, which libraries read when they are loaded.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bapipe import processes
from bapipe.processes import LocalProcess, run_child
from tests.forkserver import SERVER

start_anew = processes._start


class ForkedProcess:
    """What `LocalProcess` uses of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked rank", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # The server may have seen the process end, and freed its id, just before its exit status is read here.
        with suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(index: int, job_fd: int, folder: Path, environment: dict[str, str], quiet: bool) -> LocalProcess:
    """Takes the place of the function that `local_processes` starts a process with."""
    if environment:
        return start_anew(index, job_fd, folder, environment, quiet)
    receiver, sender = Pipe(duplex=False)
    job = Connection(os.dup(job_fd), writable=False)  # as such it reaches the other process
    log = folder / f"log{index}" if quiet else None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    process = SERVER.Process(target=_run, args=(index, job, sender, log, dict(os.environ), blocked))
    process.start()
    job.close()
    sender.close()
    forked: Any = ForkedProcess(process)
    return LocalProcess(index, forked, receiver, log)


def _run(
    index: int,
    job: Connection,
    sender: Connection,
    log: Path | None,
    environment: Mapping[str, str],
    blocked: Iterable[signal.Signals],
) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((0, os.devnull), *(((1, os.devnull), (2, log)) if log is not None else ())):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["-c", *map(str, (index, job.fileno(), os.dup(sender.fileno()), os.getppid()))]
    run_child()
