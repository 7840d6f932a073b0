"""The server of a job's store: keeps keys and values, answers ranks that know the secret, and no one else."""

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from bapipe.job.interfaces import is_loopback, plain_address
from bapipe.job.messages import Channel, greet_client

GREETING_S = 5.0
"""How long a connection may take to prove that it belongs to the job."""

_MAX_GREETINGS = 64
"""Connections that may be doing so at a time; another one ends the oldest."""


_QUIET_S = 1.0
"""How long a rank has to ask for something when the job has failed, and then again: over any link it takes less."""

_LEAVE_S = 10.0
"""How long the server outlives its job at most."""

_LOOK_AGAIN_S = 0.02

JOINED, TAKEN, COMPLETE = "joined", "taken", "complete"
"""Answers to a process that joins as a rank: it is that rank now; another process is; or all ranks have been there, so
that this one belongs to another start of the job."""

OTHER_VERSION = "version "
"""Begins another answer, which ends with the version of bapipe that serves the job: the place of the rank is free, but
the process runs another version."""


def own_version() -> str:
    """Returns the version of bapipe that is installed here."""
    return version("bapipe")


@dataclass(slots=True)
class _Joined:
    """A rank that has joined: this host's address that it has connected to, and when it asked for something."""

    address: str
    asked_s: float


class StoreServer:
    """Serves the store at an address, in threads, until it is closed.

    Requests are `[name, *arguments]` in MessagePack, answered at once: a rank that waits asks again.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._values: dict[str, bytes] = {}
        self._joined: dict[int, _Joined] = {}
        self._is_complete = False  # whether all ranks have been there at a time
        self._lock = threading.Lock()
        self._greeted: OrderedDict[socket.socket, None] = OrderedDict()  # being greeted, the oldest first
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        number: int = self._listener.getsockname()[1]
        return number

    def outer_address(self) -> str:
        """Returns the address of this host by which ranks of other hosts have joined, empty if there are none."""
        with self._lock:
            addresses = {joined.address for joined in self._joined.values()}
        return min((address for address in addresses if not is_loopback(address)), default="")

    def wait_for_others(self, own: int | None) -> None:
        """Returns when all other ranks have left, or ask for nothing any more, as one that hangs."""
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + _LEAVE_S and self._any_asks(own, begin_s):
            time.sleep(_LOOK_AGAIN_S)

    def _any_asks(self, own: int | None, begin_s: float) -> bool:
        since_s = time.monotonic() - _QUIET_S
        with self._lock:
            others = [joined for rank, joined in self._joined.items() if rank != own]
        return any(max(begin_s, joined.asked_s) > since_s for joined in others)

    def close(self) -> None:
        """Accepts no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too few file handles, for the moment
                continue
            with self._lock:
                if len(self._greeted) >= _MAX_GREETINGS:
                    oldest, _ = self._greeted.popitem(last=False)
                    _shut_down(oldest)
                self._greeted[connection] = None
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rank: list[int] = []
        try:
            with connection, suppress(OSError):
                channel = self._greet(connection)
                address = plain_address(connection.getsockname()[0])
                while True:
                    request = msgspec.msgpack.decode(channel.receive(), type=list[Any])
                    channel.send(msgspec.msgpack.encode(self._answer(request, rank, address)))
        finally:  # whatever ended it, the rank may join again
            with self._lock:
                self._greeted.pop(connection, None)
                for one in rank:
                    del self._joined[one]

    def _greet(self, connection: socket.socket) -> Channel:
        timer = threading.Timer(GREETING_S, _shut_down, (connection,))  # in all: a byte now and then is no excuse
        timer.daemon = True
        timer.start()
        try:
            return greet_client(connection, self._secret)
        finally:
            timer.cancel()
            with self._lock:
                self._greeted.pop(connection, None)

    def _answer(self, request: Sequence[Any], rank: list[int], address: str) -> object:
        name, *arguments = request
        with self._lock:
            for one in rank:
                self._joined[one].asked_s = time.monotonic()
            if name == "join":
                number, size, *versions = arguments
                if number in self._joined:
                    return TAKEN
                if self._is_complete:
                    return COMPLETE
                # Last, as this answer ends the job: a process that has no place in it is refused alone. One that says
                # no version, as earlier ones do, would not know the answer: it joins, and `wait_for_all` refuses it.
                if versions not in ([], [own_version()]):
                    return f"{OTHER_VERSION}{own_version()}"
                self._joined[number] = _Joined(address, time.monotonic())
                self._is_complete = len(self._joined) == size
                rank.append(number)
                return JOINED
            if name == "joined":
                return sorted(self._joined)
            if name not in _EVALUATE:
                raise ConnectionError(f"a request '{name}', of another version")  # ends the connection
            return _EVALUATE[name](self._values, *arguments)


def _set(values: dict[str, bytes], key: str, value: bytes) -> None:
    values[key] = value


def _multi_get(values: dict[str, bytes], keys: Sequence[str]) -> list[bytes | None]:
    return [values.get(key) for key in keys]


def _add(values: dict[str, bytes], key: str, number: int) -> int:
    total = int(values.get(key, b"0")) + number
    values[key] = str(total).encode()
    return total


def _check(values: dict[str, bytes], keys: Sequence[str]) -> bool:
    return all(key in values for key in keys)


def _delete(values: dict[str, bytes], key: str) -> bool:
    return values.pop(key, None) is not None


def _compare_set(values: dict[str, bytes], key: str, expected: bytes, desired: bytes) -> bytes:
    if values.get(key, b"") == expected:
        values[key] = desired
    return values.get(key, expected)


def _num_keys(values: dict[str, bytes]) -> int:
    return len(values)


_EVALUATE: dict[str, Callable[..., object]] = {
    "set": _set,
    "multi_get": _multi_get,
    "add": _add,
    "check": _check,
    "delete_key": _delete,
    "compare_set": _compare_set,
    "num_keys": _num_keys,
}


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
