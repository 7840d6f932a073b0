"""Errors of the system in one line, with what to try: a full disk, too few file handles, too little memory."""

import errno
import os
import stat
import sys
from contextlib import suppress
from typing import TextIO

from bapipe.errors import MORE_PROCESSES, is_without_memory

_ADVICE = {
    errno.ENOSPC: "free some space, or write elsewhere; TMPDIR names the folder for temporary files",
    errno.EDQUOT: "free some space, or write elsewhere; TMPDIR names the folder for temporary files",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "choose a folder that can be written; TMPDIR names the one for temporary files",
    errno.EACCES: "choose a folder that can be written; TMPDIR names the one for temporary files",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs: the system has too many open files",
    errno.EAGAIN: MORE_PROCESSES,
    errno.ENOMEM: "allow more memory (ulimit -v), or use less",
}
"""What to try after an error of the system."""


_FULL = {errno.ENOSPC, errno.EDQUOT}


def system_error_text(error: OSError | MemoryError | ImportError) -> str:
    """Returns an error of the system in one line, with what to try; an ImportError is one where memory is lacking."""
    if not isinstance(error, OSError) or (error.errno is None and is_without_memory(error)):
        return f"out of memory: {_ADVICE[errno.ENOMEM]}"
    if error.errno in _FULL and error.filename is None and _is_full(sys.stdout):
        return f"the output cannot be written: {error.strerror}: send it elsewhere, or free some space there"
    place = f"{error.filename}: " if error.filename is not None else ""
    advice = _ADVICE.get(error.errno or 0)
    return f"{place}{error.strerror or error}" + (f": {advice}" if advice else "")


def _is_full(stream: TextIO) -> bool:
    """Returns whether nothing more can be written where a stream goes: to a full disk, or to /dev/full."""
    with suppress(OSError, ValueError):  # the stream is no file, or is closed
        status = os.fstat(stream.fileno())
        if stat.S_ISCHR(status.st_mode):
            return status.st_rdev == os.stat("/dev/full").st_rdev
        return stat.S_ISREG(status.st_mode) and os.fstatvfs(stream.fileno()).f_bavail == 0
    return False
