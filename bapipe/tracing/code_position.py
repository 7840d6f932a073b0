"""Where in the model's own code something happens, for messages."""

import linecache
from dataclasses import dataclass
from types import FrameType

from bapipe.module_state.whose_code import is_package_of_a_library


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of a forward of the model."""

    module: str
    file: str
    number: int

    def __str__(self) -> str:
        """Returns the line and its text, in brackets, with a space before."""
        return f" ({self.in_words})"

    @property
    def in_words(self) -> str:
        """The line and its text."""
        text = linecache.getline(self.file, self.number).strip()
        return f"{self.module}, line {self.number}{f': {text}' if text else ''}"


@dataclass(frozen=True, slots=True)
class FailedLine:
    """A line of a forward of the model, and the one in a function that it calls where an error was raised, if any."""

    forward: CodeLine
    inside: CodeLine | None

    def __str__(self) -> str:
        """Returns the lines and their texts, in brackets, with a space before."""
        inside = "" if self.inside is None else f", which comes to {self.inside.in_words}"
        return f" ({self.forward.in_words}{inside})"


def running_line(frame: FrameType | None) -> CodeLine | None:
    """Returns the line of the innermost forward that is not torch's, among a frame and those that called it."""
    while frame is not None:
        if _is_forward(frame, frame.f_back):
            return _line(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def failed_line(error: BaseException) -> FailedLine | None:
    """Returns the line of the innermost forward that is not torch's in which an error was raised.

    And that of the innermost function which it calls, of any code but torch's, Python's and ours.
    """
    line, inside, caller = None, None, None
    trace = error.__traceback__
    while trace is not None:
        frame, number = trace.tb_frame, trace.tb_lineno
        if _is_forward(frame, caller):
            line, inside = _line(frame, number), None
        elif line is not None and not is_package_of_a_library(_module(frame).partition(".")[0]):
            inside = _line(frame, number)
        caller, trace = frame, trace.tb_next
    return None if line is None else FailedLine(line, inside)


def _is_forward(frame: FrameType, caller: FrameType | None) -> bool:
    """A forward may be a function of another name that was assigned; then a module's call shows that it is one."""
    is_called_as_one = caller is not None and _module(caller) in ("torch.nn.modules.module", "torch.fx._symbolic_trace")
    is_own = not _module(frame).startswith(("torch.", "bapipe.tracing."))
    return is_own and (is_called_as_one or frame.f_code.co_name == "forward")


def _line(frame: FrameType, number: int) -> CodeLine:
    return CodeLine(_module(frame), frame.f_code.co_filename, number)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
