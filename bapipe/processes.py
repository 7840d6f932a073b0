"""Processes on this machine that run one function, each with its index: started, listened to and ended together.

The ranks of a run, the ranks that measure links, and the co-runners of a profile are such processes.

Not multiprocessing, whose `spawn` imports the caller's script again in every process: a script without
`if __name__ == "__main__"` could not even measure a link. Here that happens only if something in the job is defined in
the script. Not torch.distributed.elastic either: its error files hold the exception of a process that exits. A run
also has to name a rank that hangs, to distinguish the cause from the ranks that only lost their peer, and to know which
devices were lost, so that it can plan again without them.
"""

import ctypes
import fcntl
import io
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from mmap import ACCESS_READ, mmap
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from types import FunctionType
from typing import Any

from bapipe.errors import BapipeError, one_line
from bapipe.module_path import path_to_run_with, path_to_start_with
from bapipe.stop_signals import ENDING

_PR_SET_PDEATHSIG = 1  # of Linux's prctl

_CHILD = "from bapipe.processes import run_child; run_child()"

_is_importing_script = False
"""Whether this process was started here, and is importing the script of the one that started it."""


@dataclass(frozen=True, slots=True)
class ChildError:
    """Message of a process whose function raised an exception: the exception in one line."""

    text: str


@dataclass(slots=True)
class LocalProcess:
    """A process that was started here.

    Attributes:
        pipe: receives the messages that its function sends.
        is_open: whether messages may still arrive: true until the process has ended.
        log: a file with its stderr, if that is not the parent's.
    """

    index: int
    popen: subprocess.Popen[bytes]
    pipe: Connection
    log: Path | None
    is_open: bool = True

    def exit_code(self, timeout_s: float) -> int | None:
        """Returns its exit code, the negative signal that killed it, or None if it still runs after `timeout_s`."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout_s)
        return self.popen.returncode

    def is_paused(self) -> bool:
        """Returns whether the process was stopped by SIGSTOP or Ctrl-Z, as far as the system tells."""
        try:
            state = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            return False
        return state == "T"

    def ask_to_end(self) -> None:
        """Sends SIGTERM, and wakes the process up if it is paused."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            self.popen.send_signal(number)

    def why_ended(self) -> str:
        """Returns how a process has ended that sent nothing at its end, with the last line of its log."""
        code = self.exit_code(1.0)
        how = f"it ended with code {code}"
        if code is not None and code < 0:
            hint = ", as a system out of memory does" if code == -signal.SIGKILL else ""
            how = f"it was killed by {signal.Signals(-code).name}{hint}"
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log is not None else []
        return f"{how}: {lines[-1]}" if lines else how


@contextmanager
def local_processes(
    function: Callable[..., object],
    num_processes: int,
    arguments: Sequence[object],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    grace_s: float = 0.0,
) -> Iterator[tuple[LocalProcess, ...]]:
    """Runs `function(index, send, *arguments)` in new processes; all have ended when the context is left.

    `send(message)` sends to `receive` here, from any thread. Function, arguments and messages must be picklable.
    `folder` is empty and no other process uses it. The processes have this one's environment, `environment` in
    addition, its import path as `path_to_run_with` says, and no stdin; if `quiet`, no stdout, and a log in the folder
    as stderr. When the context is left without an exception they have `grace_s` to end by themselves. If this process
    dies, however, the kernel ends them.

    Raises:
        BapipeError: as `check_not_imported`, or a function cannot be sent to the processes.
    """
    check_not_imported()
    processes: list[LocalProcess] = []
    try:
        # A file without a name: no other process can put a job of its own in the place of this one.
        with TemporaryFile(dir=folder) as job:
            job.write(_encoded_job(function, arguments))
            job.flush()
            # inherited: only this process reacts to Ctrl-C, and ends the others
            with blocked(signal.SIGINT), _handle_for_child(job.fileno()) as job_fd:
                for index in range(num_processes):
                    processes.append(_start(index, job_fd, folder, dict(environment or {}), quiet))
        yield tuple(processes)
    except BaseException:
        grace_s = 0.0
        raise
    finally:
        _end_all(processes, grace_s)


def check_not_imported() -> None:
    """Raises BapipeError in a process that imports the script which started it, and would now do all of it again."""
    if _is_importing_script:
        raise BapipeError(
            "the processes that a script starts import it if it defines the model, and would profile and run, too: put "
            'what it does, beside defining functions and classes, below `if __name__ == "__main__":`'
        )


def receive(processes: Sequence[LocalProcess], timeout_s: float) -> list[tuple[LocalProcess, object]]:
    """Returns the next message of each process that has sent one, after waiting up to `timeout_s` for the first.

    A process whose pipe is closed, because it has ended, is no longer `is_open`, and its message is None.
    """
    listening = [process for process in processes if process.is_open]
    if not listening:
        time.sleep(timeout_s)
        return []
    ready = wait([process.pipe for process in listening], timeout_s)
    received: list[tuple[LocalProcess, object]] = []
    for process in listening:
        if process.pipe not in ready:
            continue
        try:
            received.append((process, pickle.loads(process.pipe.recv_bytes())))
        except (EOFError, OSError):
            process.is_open = False
            received.append((process, None))
    return received


def run_child() -> None:
    """Runs the function in a process that `local_processes` has started; never returns."""
    index, job_fd, pipe_fd, parent = sys.argv[1:]
    end_with(int(parent))
    pipe = Connection(int(pipe_fd), readable=False)
    code, one_at_a_time = 0, Lock()

    def send(message: object) -> None:
        # By value: `Connection.send` would share the memory of tensors, which ends with this process.
        pickled = pickle.dumps(message)
        with one_at_a_time:
            pipe.send_bytes(pickled)

    try:
        with mmap(int(job_fd), 0, access=ACCESS_READ) as job:  # not read: the processes share the place in the file
            path, argv, main, pickled = pickle.loads(job)
        os.close(int(job_fd))
        sys.path[:], sys.argv[:] = path, argv
        if main is not None:
            _import_script(main)
        function, arguments = pickle.loads(pickled)
        function(int(index), send, *arguments)
    except BaseException as error:
        code = 1
        with suppress(OSError):
            send(ChildError(one_line(error)))
    pipe.close()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is if the program that started this process had closed it
            stream.flush()
    os._exit(code)  # torch's destructors would complain about peers that have ended


def _import_script(main: dict[str, Any]) -> None:
    global _is_importing_script
    _is_importing_script = True
    multiprocessing.spawn.prepare(main)
    _is_importing_script = False


def _encoded_job(function: Callable[..., object], arguments: Sequence[object]) -> bytes:
    pickled, needs_script = _pickled((function, tuple(arguments)))
    main: dict[str, Any] | None = None
    if needs_script:
        main = multiprocessing.spawn.get_preparation_data(multiprocessing.current_process().name)
        del main["authkey"]  # cannot be pickled, and is not needed
    return pickle.dumps((path_to_run_with(), sys.argv, main, pickled))


class _JobPickler(pickle.Pickler):
    """Notes whether a job refers to a function or class of the caller's script."""

    refers_to_script = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.refers_to_script = True
        return NotImplemented


def _pickled(job: object) -> tuple[bytes, bool]:
    """Returns a job in bytes, and whether a process must import the caller's script to read it.

    Functions that no process can import, as those of a notebook, are in the bytes with their code.

    Raises:
        BapipeError: there are such functions, and the package cloudpickle is not there to put them in; or something
            else cannot be pickled, such as a lock or an open file.
    """
    buffer = io.BytesIO()
    pickler = _JobPickler(buffer)
    try:
        pickler.dump(job)
        if not pickler.refers_to_script or _has_script():
            return buffer.getvalue(), pickler.refers_to_script
        reason = "it is defined in a notebook or an interactive session, which they cannot import"
    except MemoryError:
        raise
    except Exception as error:  # whatever a value's own code raises when it is pickled
        reason = one_line(error)
    try:
        by_value: bytes = import_module("cloudpickle").dumps(job)
        return by_value, False
    except MemoryError:
        raise
    except ModuleNotFoundError as error:
        advice = ", or install cloudpickle" if error.name == "cloudpickle" else ""
    except Exception as error:
        reason, advice = one_line(error), ""
    raise BapipeError(
        f"what processes run cannot be sent to them ({reason}): define functions at the top level of a module or "
        f"script{advice}; let data leave out open files and locks when they are pickled (`__getstate__`), and open "
        "them anew; or start the processes by torchrun, where each one makes its own data"
    )


class _Nowhere:
    """A file that keeps nothing of what is written to it."""

    def write(self, data: object) -> None:
        pass


def can_be_pickled(value: object) -> bool:
    """Returns whether multiprocessing can send a value to a process: it cannot if its class is of a notebook."""
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except Exception:  # whatever the value's own code raises
        return False
    return True


def _has_script() -> bool:
    """Returns whether this process runs a script or module that another process can import."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", None) or "").is_file()


def _start(index: int, job_fd: int, folder: Path, environment: dict[str, str], quiet: bool) -> LocalProcess:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    log = folder / f"log{index}" if quiet else None
    with open(log or os.devnull, "wb") as stderr, _handle_for_child(sender.fileno()) as sender_fd:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, *map(str, (index, job_fd, sender_fd, os.getpid()))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path_to_start_with())} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=stderr if quiet else None,
            pass_fds=[job_fd, sender_fd],
        )
    sender.close()  # so that the pipe ends with the process
    return LocalProcess(index, popen, receiver, log)


@contextmanager
def _handle_for_child(handle: int) -> Iterator[int]:
    """Yields another handle of an open file: not 0 to 2, which a process has with its standard streams closed.

    In the child those are its own standard streams.
    """
    other = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        yield other
    finally:
        os.close(other)


def _end_all(processes: Sequence[LocalProcess], grace_s: float) -> None:
    """Ends the processes that still run after `grace_s` in all; a second signal does not stop it."""
    with blocked(signal.SIGINT, *ENDING):
        until = time.monotonic() + grace_s
        for process in processes:
            if process.exit_code(max(0, until - time.monotonic())) is None:
                process.popen.kill()
        for process in processes:
            process.popen.wait()
            process.pipe.close()


@contextmanager
def blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Lets some signals wait until the context is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with(parent: int) -> None:
    """Makes the kernel end this process when its parent ends, even if the parent was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)
