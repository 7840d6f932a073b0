"""Frames over a socket that only processes with the job's secret can send: challenge, response, and a code per frame.

Nothing is encrypted: who can read the network reads what is sent, but cannot change it or add to it.
"""

import hmac
import secrets
import socket
from dataclasses import dataclass

from bapipe.job.secret import digest

_NONCE_BYTES = _CODE_BYTES = 32
_LENGTH_BYTES = 4
_MAX_BYTES = 2**24


class NotOfTheJob(ConnectionError):
    """The other side does not know the job's secret, or does not speak this protocol."""


@dataclass(slots=True)
class Channel:
    """One side of a connection; `is_server` tells the sides apart.

    Each frame is its length, its code and its payload. The code also covers the direction and the number of the frame,
    so a frame cannot be repeated, left out or sent back.
    """

    connection: socket.socket
    key: bytes
    is_server: bool
    num_sent: int = 0
    num_received: int = 0

    def send(self, payload: bytes) -> None:
        """Sends a frame.

        Raises:
            OSError: the connection is closed.
        """
        code = self._code(self.is_server, self.num_sent, payload)
        self.num_sent += 1
        self.connection.sendall(len(payload).to_bytes(_LENGTH_BYTES, "big") + code + payload)

    def receive(self) -> bytes:
        """Returns the payload of the next frame.

        Raises:
            OSError: the connection is closed, the frame is too long, or its code is wrong.
        """
        head = receive_exactly(self.connection, _LENGTH_BYTES + _CODE_BYTES)
        length = int.from_bytes(head[:_LENGTH_BYTES], "big")
        if length > _MAX_BYTES:
            raise NotOfTheJob(f"a frame of {length} bytes")
        payload = receive_exactly(self.connection, length)
        if not hmac.compare_digest(head[_LENGTH_BYTES:], self._code(not self.is_server, self.num_received, payload)):
            raise NotOfTheJob("a frame with a wrong code")
        self.num_received += 1
        return payload

    def _code(self, from_server: bool, number: int, payload: bytes) -> bytes:
        return digest(self.key, b"server" if from_server else b"client", number.to_bytes(8, "big"), payload)


def greet_client(connection: socket.socket, secret: bytes) -> Channel:
    """Returns the server's side of a connection, when both sides have proved that they know the secret.

    Raises:
        OSError: it has not.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own)
    answer = receive_exactly(connection, _NONCE_BYTES + _CODE_BYTES)
    theirs, code = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(code, digest(secret, b"client", own, theirs)):
        raise NotOfTheJob("a wrong answer")
    connection.sendall(digest(secret, b"server", own, theirs))
    return Channel(connection, digest(secret, b"frames", own, theirs), is_server=True)


def greet_server(connection: socket.socket, secret: bytes) -> Channel:
    """Returns the client's side of a connection, when both sides have proved that they know the secret.

    Raises:
        NotOfTheJob: the server does not know the secret.
        OSError: the connection fails.
    """
    theirs = receive_exactly(connection, _NONCE_BYTES)
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own + digest(secret, b"client", theirs, own))
    try:
        code = receive_exactly(connection, _CODE_BYTES)
    except ConnectionError:  # the server closes the connection after a wrong answer
        raise NotOfTheJob("no answer") from None
    if not hmac.compare_digest(code, digest(secret, b"server", theirs, own)):
        raise NotOfTheJob("a wrong answer")
    return Channel(connection, digest(secret, b"frames", theirs, own), is_server=False)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns the next bytes of a connection; raises OSError if it ends before."""
    received = bytearray()
    while len(received) < num_bytes:
        block = connection.recv(min(num_bytes - len(received), 2**16))
        if not block:
            raise ConnectionError("the connection was closed")
        received += block
    return bytes(received)
