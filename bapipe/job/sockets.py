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

_SO_ATTACH_FILTER, _IP_MINTTL, _IPV6_MINHOPCOUNT = 26, 21, 73
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a packet filter: return 0 bytes
_MAX_TTL = struct.pack("i", 255)

REFUSALS = (
    ((socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))),),
    ((socket.IPPROTO_IP, _IP_MINTTL, _MAX_TTL), (socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, _MAX_TTL)),
)
"""Options after which the kernel drops what arrives at a socket that listens: all of it, which some kernels allow the
administrator alone; or, by IPv4 and by IPv6, what does not have the greatest time to live, as nothing has that others
send without asking for it."""


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

    The kernel drops what arrives there; connections that there are, are not affected. Where it allows none of the
    `REFUSALS`, as in some sandboxes, sockets stay as they are: no rank takes a stranger for another rank all the same.
    """
    for listener in _duplicates(but):
        if _listens(listener):
            _refuse_at(listener)


def _refuse_at(listener: socket.socket) -> None:
    for options in REFUSALS:
        num_set = 0
        for option in options:
            with suppress(OSError):
                listener.setsockopt(*option)
                num_set += 1
        if num_set > 0:
            return


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
