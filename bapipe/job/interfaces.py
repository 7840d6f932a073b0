"""The network interface by which gloo connects the ranks of a job."""

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from bapipe.errors import BapipeError, did_you_mean

VARIABLE = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def check_interface() -> None:
    """Raises BapipeError if the variable names an interface that this host does not have: gloo finds out much later."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if name.partition(":")[0] not in there:  # a further address of eth0 may have the name eth0:1
            raise BapipeError(
                f"{VARIABLE} is '{name}', which is no network interface of {socket.gethostname()}: it has "
                f"{', '.join(there)}{did_you_mean(name, there)}"
            )


def choose_interface(address: str) -> None:
    """Makes gloo use the interface that has an address of this host, which ranks of other hosts reach.

    Only if gloo would otherwise take the loopback interface, which no other host reaches: it goes by the name of this
    host, which Debian writes to /etc/hosts as 127.0.1.1.
    """
    if sys.platform != "linux" or os.environ.get(VARIABLE) or is_loopback(address) or not _own_name_is_loopback():
        return
    for name, own in _own_addresses():
        if own == address:
            os.environ[VARIABLE] = name
            return


def is_loopback(address: str) -> bool:
    """Returns whether an address is reached from its own host only."""
    return ip_address(address).is_loopback


def plain_address(address: str) -> str:
    """Returns the IPv4 address of an IPv6 socket's one, if it is such (::ffff:10.0.0.1), else the address."""
    parsed = ip_address(address)
    return str(parsed.ipv4_mapped or parsed) if isinstance(parsed, IPv6Address) else address


def _own_name_is_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # then gloo takes it, too
        return True
    return is_loopback(str(found[0][4][0]))


def _own_addresses() -> Iterator[tuple[str, str]]:
    """Yields the names and addresses of the interfaces of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(answer[20:24])
    with suppress(OSError):  # there is no such file without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ip_address(bytes.fromhex(digits)))
