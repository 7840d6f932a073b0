"""Checks files of data before they are read whole: they may never end, or not fit into memory."""

import stat
from pathlib import Path

from bapipe.errors import BapipeError
from bapipe.hardware import memory_bytes

_SHARE = 4
"""A file may take this part of the memory: its texts and their tokens take several times as much."""


def check_can_be_read_whole(path: Path) -> None:
    """Raises BapipeError if a file is none with an end, such as a device or a pipe, or too large for this machine.

    A file that is missing or may not be read is left to its reader.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise BapipeError(f"{path}: a device or a pipe, which may never end; want a file")
    limit = memory_bytes() // _SHARE
    if status.st_size > limit:
        raise BapipeError(
            f"{path}: {status.st_size / 2**30:.1f} GiB; want at most {limit / 2**30:.1f} GiB, a quarter of this "
            "machine's memory"
        )
