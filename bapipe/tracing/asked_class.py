"""What stands for a tensor while torch.fx traces, and does not answer of which class it is."""

import sys
from types import FrameType
from typing import Any

from torch import fx

_ASK_FOR_OTHERS = frozenset(("torch.jit", "torch._jit_internal"))
"""Modules of torch whose functions ask of which class a value is for the code that calls them, as Python's own do."""


class ClassIsAsked(Exception):
    """A forward asks of which class a value is, which is not known: a layer may return a tensor, a tuple or another."""

    def __init__(self) -> None:
        super().__init__("it asks of which class a value is")


class UnknownValue(fx.Proxy):
    """A value that a traced operator returns.

    It would be neither a tensor nor a tuple to `isinstance`, and a forward would do something else than in training.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Its own class, for code of torch and bapipe.

        Raises:
            ClassIsAsked: other code asks.
        """
        if _is_models(sys._getframe(1)):
            raise ClassIsAsked
        return type(self)


def _is_models(frame: FrameType | None) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names and name not in _ASK_FOR_OTHERS:
            return package not in ("torch", "bapipe")
        frame = frame.f_back
    return False
