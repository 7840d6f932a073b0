"""Signals that ask a program to end: SIGINT (Ctrl-C), SIGTERM (`kill`, schedulers), SIGHUP (a closed terminal)."""

import atexit
import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from bapipe.errors import Stopped
from bapipe.torchrun import is_first_rank

ENDING = (signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """The signals that have asked to end, the first one first."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @property
    def number(self) -> int | None:
        """The first signal, None if there was none."""
        return self.numbers[0] if self.numbers else None


def raise_on_signals() -> None:
    """Makes signals raise KeyboardInterrupt or Stopped, so that what this program has started ends in order.

    While a module is being imported they end the process at once, with the same line and exit code: an exception there
    would be shown as a fault of that module, or be lost in it. Signals that the caller ignores, as `nohup` does, stay
    ignored.
    """
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _raise)


@contextmanager
def noted_signals() -> Iterator[StopRequest]:
    """Yields what notes SIGTERM and SIGHUP; until the context is left they do nothing else.

    Other threads than the main one cannot do that, and a program's own handlers stay: it then notes nothing.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        _leave_closed_terminal()
        request.numbers.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    ours = [number for number, handler in before.items() if handler in (signal.SIG_DFL, _raise)]
    for number in ours:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number in ours:
            signal.signal(number, before[number])


def end_at_once_on_signals(code: int) -> None:
    """Makes further signals end the process at once with this code: it has done its work, or ended in order.

    Python takes its handlers back while it ends, which the system's own would end with another code.
    """
    numbers = [number for number in (signal.SIGINT, *ENDING) if signal.getsignal(number) is _raise]
    for number in numbers:
        signal.signal(number, lambda *_: os._exit(code))

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)


def ignore_signals(_: int) -> None:
    """Lets this process, which loads data for a rank, live until the rank ends it: signals go to whole groups."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _raise(number: int, frame: FrameType | None) -> None:
    _leave_closed_terminal()
    if _is_importing(frame):
        if is_first_rank():  # of a job's ranks the first one says it
            with suppress(OSError):
                os.write(2, f"{Stopped(number)}\n".encode())
        os._exit(128 + number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Stopped(number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


def _leave_closed_terminal() -> None:
    """Sends what this process still prints to nowhere if its terminal was closed: writing there raises OSError."""
    for handle in (1, 2):
        try:
            os.ttyname(handle)
        except OSError as error:
            if error.errno == errno.EIO:  # else it is a file or a pipe
                _discard(handle)


def _discard(handle: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, handle)
    os.close(nowhere)
