"""The sockets that libraries have opened in this process: ended, or closed to newcomers, from outside (Linux only)."""

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

OPEN_FILES = Path("/proc/self/fd")

OpenSocket = tuple[int, str]
"""Its file handle, and the name of its inode, as a handle may be used again."""

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # of the packet filter's instructions: return 0 bytes


def open_sockets() -> frozenset[OpenSocket]:
    """Returns the open sockets of this process; none where the system does not tell."""
    found = set()
    for file in OPEN_FILES.iterdir() if OPEN_FILES.is_dir() else ():
        with suppress(OSError):  # the handle by which the folder itself was read
            target = os.readlink(file)
            if target.startswith("socket:"):
                found.add((int(file.name), target))
    return frozenset(found)


def shut_down_connections(but: Collection[OpenSocket]) -> None:
    """Ends all connections of this process but some: threads that wait for them get an error.

    Sockets that listen are left alone, as gloo would abort the process.
    """
    for connection in _duplicates(but):
        if not _listens(connection):
            with suppress(OSError):  # it was never connected
                connection.shutdown(socket.SHUT_RDWR)


def refuse_newcomers(but: Collection[OpenSocket]) -> None:
    """Lets nothing connect any more to the sockets that listen in this process, but to some.

    The kernel drops what arrives there; connections that there are, are not affected.
    """
    code = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for listener in _duplicates(but):
        if _listens(listener):
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _listens(opened: socket.socket) -> bool:
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _duplicates(but: Collection[OpenSocket]) -> Iterator[socket.socket]:
    """Yields a second handle of each open socket but some."""
    for handle, _ in open_sockets() - frozenset(but):
        try:
            duplicate = socket.socket(fileno=os.dup(handle))
        except OSError:  # it is closed by now
            continue
        with duplicate:
            yield duplicate
