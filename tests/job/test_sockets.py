"""Sockets that listen in this process are closed to newcomers by what the kernel allows."""

import socket

import pytest

from bapipe.job import sockets
from bapipe.job.sockets import REFUSALS, open_sockets, refuse_newcomers

NOT_THERE = ((socket.SOL_SOCKET, 9999, b"\0\0\0\0"),)
"""As where the option needs rights, or is none of the kernel."""


def connects(listener: socket.socket) -> bool:
    with socket.socket(listener.family) as newcomer:
        newcomer.settimeout(0.3)
        try:
            newcomer.connect(listener.getsockname())
        except OSError:
            return False
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(
    ("refusals", "is_open"),
    [
        (REFUSALS, False),
        ((NOT_THERE, *REFUSALS[1:]), False),  # an ordinary user, on kernels where filters are the administrator's
        ((NOT_THERE,), True),  # a sandbox that allows nothing of this: the run goes on
    ],
)
def test_newcomers_are_refused_by_what_the_kernel_allows(
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    refusals: tuple[tuple[tuple[int, int, bytes], ...], ...],
    is_open: bool,
) -> None:
    monkeypatch.setattr(sockets, "REFUSALS", refusals)
    before = open_sockets()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener, socket.create_connection(listener.getsockname()[:2]) as earlier:
        accepted, _ = listener.accept()
        with accepted:
            refuse_newcomers(before)
            assert connects(listener) == is_open
            earlier.sendall(b"still")
            assert accepted.recv(5) == b"still"
