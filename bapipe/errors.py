"""Every error bapipe raises on purpose; the command line prints them without a traceback.

BapipeError
  + InvalidFile      a file with missing or wrong contents
  + UnreadableFile   a file that the system does not let us read, whatever it holds
  + InvalidSchedule  an order of actions that cannot run
  + Infeasible       no plan fits the memory of the devices (exit code 3)
  + ConstraintsUnmet no plan keeps the constraints
  + InvalidModel     a model that cannot be built, traced or cut, or is not the one a plan was made for
      + LayerFailed  a layer's own code, or its backward, raised an error while a stage ran
  + RunFailed        a rank died or hung

Stopped is not an error: a signal asked the program to end.
"""

import signal
from collections.abc import Iterable


class BapipeError(Exception):
    """An error that a user can cause and fix; the message says what was wrong, what was wanted and what to try."""


class InvalidFile(BapipeError, ValueError):
    """A file that cannot be decoded; `where` is the path inside it, such as `$.layers[3].param_bytes`."""

    def __init__(self, message: str, where: str = "$") -> None:
        super().__init__(f"{message} - at `{where}`")
        self.message, self.where = message, where

    def __reduce__(self) -> tuple[type["InvalidFile"], tuple[str, str]]:
        return type(self), (self.message, self.where)  # the text alone would get a second path


class UnreadableFile(BapipeError):
    """A file that is there and cannot be read, now or by this user: nothing is known of what it holds."""


class InvalidSchedule(BapipeError):
    """An order of actions that is incomplete, on the wrong device, or can never make progress."""


class Infeasible(BapipeError):
    """No plan in the searched space fits; the message names the closest one and what it lacks.

    Attributes:
        is_proven: whether no plan fits, cut along the orders of the layers that the message names, if it does; else
            none was found, or only some devices, or orders of devices or actions, were tried, or some plans are counted
            with more bytes than they need.
    """

    def __init__(self, message: str, *, is_proven: bool = True) -> None:
        super().__init__(message)
        self.is_proven = is_proven


class ConstraintsUnmet(BapipeError):
    """No plan keeps the constraints, or has the number of stages asked for, whatever its memory.

    Attributes:
        is_proven: false where that was found along some orders of the layers, and there are more.
    """

    def __init__(self, message: str, *, is_proven: bool = True) -> None:
        super().__init__(message)
        self.is_proven = is_proven


class InvalidModel(BapipeError):
    """A model that cannot be built, traced or cut, or whose layers differ from the plan's."""


class LayerFailed(InvalidModel):
    """The code of a layer, or its backward, raised an error while a stage ran; the message names layer and action."""


class RunFailed(BapipeError):
    """A pipelined run ended before its last step; the message names the rank and the cause.

    `told`: in a torchrun job, another rank reports this error. `lost`: the devices whose processes died or hang.
    """

    def __init__(self, message: str, told: bool = False, lost: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.told, self.lost = told, lost


class Stopped(SystemExit):
    """A signal asked the program to end, and it did so in order; the exit code is the one that shells give for it.

    As with KeyboardInterrupt, `except Exception` does not catch it.
    """

    def __init__(self, number: int, detail: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.detail = number, detail

    def __reduce__(self) -> tuple[type["Stopped"], tuple[int, str]]:
        return type(self), (self.number, self.detail)  # the exit code would be taken for a signal

    def __str__(self) -> str:
        what = "interrupted" if self.number == signal.SIGINT else f"stopped by {signal.Signals(self.number).name}"
        return what + self.detail


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns a question for the known name that is most like another one; empty if none is as similar as `cutoff`."""
    from difflib import get_close_matches  # loads `re`: signals are handled once this module is imported

    close = get_close_matches(name, [*known], n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""


MORE_PROCESSES = "allow more processes (ulimit -u, or the limit of the container)"

_NO_THREADS = "can't start new thread", "Resource temporarily unavailable"

_NO_MEMORY = "failed to map segment", "annot allocate memory"
"""What the dynamic linker and the system say where memory is lacking for a library."""

_NCCL_REASON = "Last error:"
"""What torch writes before NCCL's own words; the lines before say where NCCL was called, and the kind of its error."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text that is not blank, or the name of its class if there is none.

    Its words are one blank apart. Of NCCL's errors it is the line that says why. Where a process or a thread could not
    be started, it says what to do.
    """
    text = str(error)
    reason = text.partition(_NCCL_REASON)[2]
    lines = (" ".join(line.split()) for line in (reason.strip() or text).splitlines())
    line = next(filter(None, lines), type(error).__name__)
    return f"{line}: {MORE_PROCESSES}" if is_without_threads(error) else line


def is_without_threads(error: BaseException) -> bool:
    """Returns whether an error says that no thread can be started: Python and torch raise a RuntimeError then."""
    return isinstance(error, RuntimeError) and str(error).strip() in _NO_THREADS


def is_without_memory(error: BaseException) -> bool:
    """Returns whether an error, or one that it came from, says that memory is lacking.

    Where a module needs a library that no memory is left for, importing it raises ImportError or OSError.
    """
    cause: BaseException | None = error
    while cause is not None:
        is_of_system = isinstance(cause, ImportError | OSError)
        if isinstance(cause, MemoryError) or (is_of_system and any(sign in str(cause) for sign in _NO_MEMORY)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def root_cause(error: BaseException) -> BaseException:
    """Returns the error that an error came from, through all those in between."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def one_line(error: BaseException) -> str:
    """Returns type and first line of the root cause of an error, which torch wraps in a long list of its arguments."""
    error = root_cause(error)
    kind, text = type(error).__name__, first_line(error)
    return kind if text == kind else f"{kind}: {text}"
