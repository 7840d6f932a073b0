"""Where in the model's own code something happens, for messages."""

import linecache
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of a forward of the model."""

    module: str
    file: str
    number: int

    def __str__(self) -> str:
        """Returns the line and its text, in brackets, with a space before."""
        text = linecache.getline(self.file, self.number).strip()
        return f" ({self.module}, line {self.number}{f': {text}' if text else ''})"


def running_line(frame: FrameType | None) -> CodeLine | None:
    """Returns the line of the innermost forward that is not torch's, among a frame and those that called it."""
    while frame is not None:
        if _is_forward(frame, frame.f_back):
            return _line(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def failed_line(error: BaseException) -> CodeLine | None:
    """Returns the line of the innermost forward that is not torch's in which an error was raised."""
    line, caller = None, None
    trace = error.__traceback__
    while trace is not None:
        if _is_forward(trace.tb_frame, caller):
            line = _line(trace.tb_frame, trace.tb_lineno)
        caller, trace = trace.tb_frame, trace.tb_next
    return line


def _is_forward(frame: FrameType, caller: FrameType | None) -> bool:
    """A forward may be a function of another name that was assigned; then a module's call shows that it is one."""
    is_called_as_one = caller is not None and _module(caller) in ("torch.nn.modules.module", "torch.fx._symbolic_trace")
    is_own = not _module(frame).startswith(("torch.", "bapipe.tracing."))
    return is_own and (is_called_as_one or frame.f_code.co_name == "forward")


def _line(frame: FrameType, number: int) -> CodeLine:
    return CodeLine(_module(frame), frame.f_code.co_filename, number)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
