"""The store of a job as torch knows stores; `server` holds its values.

Not torch's TCPStore: whoever reaches its port can list, change and delete all keys.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import Store

from bapipe.job.interfaces import plain_address
from bapipe.job.messages import Channel, greet_server
from bapipe.job.server import GREETING_S, StoreServer, own_version

_ASK_AGAIN_S = 0.02


class JobStore(Store):
    """A rank's connection to the store's server.

    `timeout_s` is how long an answer or a key is waited for, `connect_s` how long the connection, by default as long.

    Attributes:
        server: the server itself, on the rank that serves it.
        own_address: this side's address of the connection.

    Raises:
        NotOfTheJob: the server does not know the secret.
        OSError: there is no connection, or it ends.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, timeout_s: float, connect_s: float | None = None
    ) -> None:
        super().__init__()
        self.server: StoreServer | None = None
        self._timeout_s = timeout_s
        self._rank: int | None = None
        self._lock = threading.Lock()
        connection = socket.create_connection(address, timeout=timeout_s if connect_s is None else connect_s)
        connection.settimeout(min(timeout_s, GREETING_S))  # who says nothing there is no store
        self.own_address: str = plain_address(connection.getsockname()[0])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._channel: Channel = greet_server(connection, secret)
        connection.settimeout(timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def stop_serving(self) -> None:
        """Frees the port, on the rank that serves the store, for another job of this process."""
        if self.server is not None:
            self.server.close()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Stops serving when the context is left; after an error not before the others have read what they wait for."""
        try:
            yield
        except Exception:
            if self.server is not None:
                self.server.wait_for_others(self._rank)
            raise
        finally:
            self.stop_serving()

    def join(self, rank: int, size: int) -> str:
        """Returns `JOINED` if this process is now that of a rank of a job of `size`.

        Else `TAKEN`, `COMPLETE`, or `OTHER_VERSION` with the version that serves the job.
        """
        self._rank = rank
        return str(self._ask("join", rank, size, own_version()))

    def leave(self) -> None:
        """Ends the connection."""
        self._channel.connection.close()

    def joined(self) -> set[int]:
        """Returns the ranks that have joined and whose processes have not ended since."""
        return set(self._ask("joined"))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes | None] = self._ask("multi_get", list(keys))
        if None in values:  # asked first, as an answer over a slow link takes long
            self.wait(keys)
            values = self._ask("multi_get", list(keys))
        there = [value for value in values if value is not None]
        assert len(there) == len(keys)  # nothing deletes keys that others wait for
        return there

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def which(self, keys: Sequence[str]) -> list[bool]:
        """Returns for each key whether it has a value."""
        return [value is not None for value in self._ask("multi_get", list(keys))]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = [text.encode() if isinstance(text, str) else text for text in (expected, desired)]
        value: bytes = self._ask("compare_set", key, *values)
        return value

    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when there are values for all keys; raises RuntimeError if that takes longer than the timeout."""
        end_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > end_s:
                raise RuntimeError(f"Timed out waiting for the keys {', '.join(keys)}")
            time.sleep(_ASK_AGAIN_S)

    def _ask(self, *request: object) -> Any:
        with self._lock:
            self._channel.send(msgspec.msgpack.encode(request))
            return msgspec.msgpack.decode(self._channel.receive())
