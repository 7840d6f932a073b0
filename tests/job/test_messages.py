"""Frames arrive as they were sent, or are refused: repeated, left out, sent back, changed and too long ones."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from bapipe.job.messages import Channel, NotOfTheJob, greet_client, greet_server
from bapipe.job.secret import digest
from bapipe.job.store import JobStore

SECRET = b"known to the job only"
HEAD_BYTES = 4 + 32

Relayed = tuple[Channel, socket.socket, socket.socket, Channel]
"""Client, its other end, the server's other end, and server."""


@pytest.fixture
def relayed() -> Iterator[Relayed]:
    """Two sides that have greeted one another; what passes between the ends is up to the test."""
    (client, by_client), (by_server, server) = socket.socketpair(), socket.socketpair()
    ends = (client, by_client, by_server, server)
    for end in ends:
        end.settimeout(20)
    greeted: list[Channel] = []
    greeting = threading.Thread(target=lambda: greeted.append(greet_client(server, SECRET)))
    greeting.start()
    passing = threading.Thread(target=_pass_the_greeting, args=(by_client, by_server))
    passing.start()
    own = greet_server(client, SECRET)
    for thread in (greeting, passing):
        thread.join(20)
    yield own, by_client, by_server, greeted[0]
    for end in ends:
        end.close()


def _pass_the_greeting(by_client: socket.socket, by_server: socket.socket) -> None:
    by_client.sendall(by_server.recv(32, socket.MSG_WAITALL))
    by_server.sendall(by_client.recv(64, socket.MSG_WAITALL))
    by_client.sendall(by_server.recv(32, socket.MSG_WAITALL))


def _frame(sender: Channel, end: socket.socket, payload: bytes) -> bytes:
    """The bytes that a side sends for a payload."""
    sender.send(payload)
    return end.recv(HEAD_BYTES + len(payload), socket.MSG_WAITALL)


def test_frames_arrive_in_both_directions(relayed: Relayed) -> None:
    client, by_client, by_server, server = relayed
    for payload in (b"first", b"", b"second"):
        by_server.sendall(_frame(client, by_client, payload))
        assert server.receive() == payload
        by_client.sendall(_frame(server, by_server, payload * 2))
        assert client.receive() == payload * 2


def test_a_frame_is_not_taken_twice(relayed: Relayed) -> None:
    client, by_client, by_server, server = relayed
    by_server.sendall(_frame(client, by_client, b"add 1") * 2)
    assert server.receive() == b"add 1"
    with pytest.raises(NotOfTheJob, match="a wrong code"):
        server.receive()


def test_a_frame_is_not_left_out(relayed: Relayed) -> None:
    client, by_client, by_server, server = relayed
    _frame(client, by_client, b"first")
    by_server.sendall(_frame(client, by_client, b"second"))
    with pytest.raises(NotOfTheJob, match="a wrong code"):
        server.receive()


def test_a_frame_is_not_taken_by_its_sender(relayed: Relayed) -> None:
    client, by_client, _, _ = relayed
    by_client.sendall(_frame(client, by_client, b"value"))
    with pytest.raises(NotOfTheJob, match="a wrong code"):
        client.receive()


@pytest.mark.parametrize("place", [4, HEAD_BYTES - 1, HEAD_BYTES, -1])  # of the code and of the payload
def test_a_changed_frame_is_refused(relayed: Relayed, place: int) -> None:
    client, by_client, by_server, server = relayed
    frame = bytearray(_frame(client, by_client, b"value"))
    frame[place] ^= 1
    by_server.sendall(frame)
    with pytest.raises(NotOfTheJob, match="a wrong code"):
        server.receive()


def test_a_frame_that_is_too_long_is_refused_by_its_head(relayed: Relayed) -> None:
    _, _, by_server, server = relayed
    by_server.sendall((2**24 + 1).to_bytes(4, "big") + bytes(32))
    with pytest.raises(NotOfTheJob, match="a frame of 16777217 bytes"):
        server.receive()


@pytest.mark.parametrize("answer", ["zeros", "the code of the client"])
def test_a_server_that_does_not_know_the_secret_is_not_the_store(answer: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        served: list[socket.socket] = []

        def serve() -> None:
            connection, _ = listener.accept()
            served.append(connection)
            connection.sendall(bytes(32))
            received = connection.recv(64, socket.MSG_WAITALL)
            connection.sendall(bytes(32) if answer == "zeros" else received[32:])

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(NotOfTheJob, match="a wrong answer"):
            JobStore(listener.getsockname(), SECRET, 5.0)
        serving.join(20)
        served[0].close()


@pytest.mark.parametrize("answer", [bytes(64), b"y" * 64])
def test_a_client_that_does_not_know_the_secret_is_not_served(answer: bytes) -> None:
    client, server = socket.socketpair()
    with closing(client), closing(server):
        client.sendall(answer)
        with pytest.raises(NotOfTheJob, match="a wrong answer"):
            greet_client(server, SECRET)


def test_digests_tell_apart_where_one_part_ends() -> None:
    assert digest(SECRET, b"ab", b"c") != digest(SECRET, b"a", b"bc")
