"""Gloo uses an interface that other hosts reach, and a name that is wrong is found at once."""

import os
import socket

import pytest

from bapipe.errors import BapipeError
from bapipe.job.interfaces import VARIABLE, check_interface, choose_interface, plain_address


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for right in ("eth0", "lo,eth0", "eth0:1", ""):
        monkeypatch.setenv(VARIABLE, right)
        check_interface()
    monkeypatch.setenv(VARIABLE, "lo,eth7")
    with pytest.raises(BapipeError) as caught:
        check_interface()
    assert str(caught.value) == (
        f"GLOO_SOCKET_IFNAME is 'eth7', which is no network interface of {socket.gethostname()}: it has lo, eth0; did you "
        "mean 'eth0'?"
    )


@pytest.mark.parametrize(
    ("address", "own_name", "given", "chosen"),
    [
        ("10.0.0.5", "127.0.1.1", "", "eth0"),  # as Debian writes the name of a host to /etc/hosts
        ("10.0.0.5", None, "", "eth0"),
        ("fd00::5", "::1", "", "eth1"),
        ("10.0.0.5", "10.0.0.5", "", ""),  # gloo finds it by itself
        ("10.0.0.5", "127.0.1.1", "eth1", "eth1"),
        ("127.0.0.1", "127.0.1.1", "", ""),  # no other hosts
        ("10.9.9.9", "127.0.1.1", "", ""),
    ],
)
def test_gloo_gets_the_interface_that_other_hosts_reach_if_it_would_take_loopback(
    monkeypatch: pytest.MonkeyPatch, address: str, own_name: str | None, given: str, chosen: str
) -> None:
    def resolved(*_: object, **__: object) -> list[object]:
        if own_name is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (own_name, 0))]

    addresses = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth1", "fd00::5")]
    monkeypatch.setattr("bapipe.job.interfaces._own_addresses", lambda: iter(addresses))
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setenv(VARIABLE, given)
    choose_interface(address)
    assert os.environ[VARIABLE] == chosen


def test_the_loopback_interface_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapipe.job.interfaces.is_loopback", lambda address: address == "own")
    monkeypatch.setattr("bapipe.job.interfaces._own_name_is_loopback", lambda: True)
    monkeypatch.setenv(VARIABLE, "")
    choose_interface("127.0.0.1")
    assert os.environ[VARIABLE] == "lo"


def test_an_address_of_an_ipv6_socket_is_the_ipv4_one_that_it_stands_for() -> None:
    assert [plain_address(text) for text in ("::ffff:10.0.0.5", "fd00::5", "10.0.0.5")] == [
        "10.0.0.5",
        "fd00::5",
        "10.0.0.5",
    ]
