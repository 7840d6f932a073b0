"""What commands take for granted of the process that they run in: open streams, and the size of the terminal."""

import os
import re
import sys

_STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}
_SIZE = re.compile("[1-9][0-9]{0,3}")


def open_closed_streams() -> None:
    """Takes what is printed to a closed stream to nowhere; a file opened later would get its number, and the text.

    So it is in the processes that this one starts.
    """
    for name, mode in _STREAMS.items():  # each gets the lowest number that is free, which is its own
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(handle, True)
            setattr(sys, name, os.fdopen(handle, mode))


def forget_wrong_sizes() -> None:
    """Removes a size of the terminal that is none from the environment: rich takes ² for a number, and ends."""
    for name in ("COLUMNS", "LINES"):
        if not _SIZE.fullmatch(os.environ.get(name, "")):
            os.environ.pop(name, None)
