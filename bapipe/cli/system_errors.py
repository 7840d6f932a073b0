"""Errors of the system in one line, with what to try: a full disk, too few file handles, too little memory."""

import errno

_ADVICE = {
    errno.ENOSPC: "free some space, or write elsewhere; TMPDIR names the folder for temporary files",
    errno.EDQUOT: "free some space, or write elsewhere; TMPDIR names the folder for temporary files",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "choose a folder that can be written; TMPDIR names the one for temporary files",
    errno.EACCES: "choose a folder that can be written; TMPDIR names the one for temporary files",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs: the system has too many open files",
    errno.EAGAIN: "allow more processes (ulimit -u)",
    errno.ENOMEM: "allow more memory (ulimit -v), or use less",
}
"""What to try after an error of the system."""


def system_error_text(error: OSError | MemoryError) -> str:
    """Returns an error of the system in one line, with what to try."""
    if isinstance(error, MemoryError):
        return f"out of memory: {_ADVICE[errno.ENOMEM]}"
    place = f"{error.filename}: " if error.filename is not None else ""
    advice = _ADVICE.get(error.errno or 0)
    return f"{place}{error.strerror or error}" + (f": {advice}" if advice else "")
