"""Progress of long work on stderr: bars and lines that change on a terminal, else a line now and then."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bapipe import report
from bapipe.cli.printing import err, note
from bapipe.planner.compute.deadline import Compiling, Deadline
from bapipe.printable import counted, printable
from bapipe.progress import PartsProgress, SearchProgress
from bapipe.units import percent_up

SILENT_S = 10.0
"""After which work that says nothing of itself is named again."""

COMPILING_TOO = " (compiling its code, once after an installation)"
"""What is added while a search waits for that, up to a minute and a half."""


class _Lines:
    """What is being done, as lines on stderr if that is no terminal, on which one line would change."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._printed_s = every_s, time.monotonic()

    def show(self, text: str) -> None:
        """Prints a text if the last one was printed some seconds ago."""
        if not err.is_terminal and time.monotonic() - self._printed_s > self._every_s:
            self._printed_s = time.monotonic()
            note(text)

    @contextmanager
    def shown_while_silent(self, text: Callable[[], str]) -> Iterator[None]:
        """Shows what is being done also while nobody says so: soon, and then every `SILENT_S`."""
        if err.is_terminal:
            yield
            return
        is_done = threading.Event()

        def show() -> None:
            wait_s = self._every_s
            while not is_done.wait(max(self._printed_s + wait_s - time.monotonic(), 0.01)):
                if time.monotonic() - self._printed_s > wait_s:
                    self.show(text())
                    wait_s = SILENT_S

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()


class _Now:
    """What is being done now: a text, and whether code is being compiled for it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text + (COMPILING_TOO if Compiling.num_threads else "")

    def __rich__(self) -> Text:
        return Text(str(self))


@contextmanager
def parts_bar(verb: str = "profiling") -> Iterator[PartsProgress]:
    """Shows how much is done of work in named parts: a bar on a terminal, else a line about every ten seconds."""
    part, lines, now = TextColumn(verb + " {task.fields[what]}", markup=False), _Lines(SILENT_S), _Now(verb)
    columns = part, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
        lines.shown_while_silent(lambda: str(now)),
    ):
        task = bar.add_task("", total=None, what="")

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, what=printable(what))
            now.text = f"{verb} {what}: {done} of {total}"
            lines.show(str(now))

        yield progress


@contextmanager
def named_while_silent(text: str) -> Iterator[Callable[[], None]]:
    """Names work of which nothing else is shown, a line every ten seconds where stderr is no terminal.

    The function that it yields ends that before the context does.
    """
    with ExitStack() as shown:
        shown.enter_context(_Lines(SILENT_S).shown_while_silent(lambda: text))
        yield shown.close


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done: a line that changes on a terminal, else a line every two seconds at most."""
    lines, now = _Lines(2), _Now(text)
    with err.status(now), lines.shown_while_silent(lambda: str(now)):

        def update(text: str) -> None:
            now.text = text
            lines.show(str(now))

        yield update


@contextmanager
def planning_status() -> Iterator[SearchProgress]:
    """Shows the state of a search; see `status`."""
    with status("planning") as update:

        def progress(num_simulated: int, best_ns: int, bound_ns: int) -> None:
            gap = best_ns / bound_ns - 1 if bound_ns else 0.0
            update(
                f"planning: {counted(num_simulated, 'plan')} simulated, best {report.ms(best_ns)}, "
                f"lower bound {report.number_down(bound_ns / 1e6)} ms, gap {percent_up(gap)}"
            )

        yield progress


@contextmanager
def stops_on_interrupt(deadline: Deadline) -> Iterator[None]:
    """Lets the first Ctrl-C end searches with the best plan so far; a second one ends the command."""
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return

    def stop(signal_number: int, frame: FrameType | None) -> None:
        deadline.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        note("ending with the best plan found; press Ctrl-C again to end without one")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
