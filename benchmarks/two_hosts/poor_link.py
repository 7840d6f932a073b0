"""A slow and lossy link between two network namespaces: packets wait, or are dropped, in this process.

    python -m benchmarks.two_hosts.poor_link DELAY_MS LOSS_PERCENT SPACE INTERFACE SPACE INTERFACE

Linux's netem does that in the kernel, but many kernels are built without it. Each namespace gets a TAP interface; they
end with this process.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MAX_PACKET = 65_536


def open_tap(space: str, interface: str) -> int:
    """Returns the handle of a new TAP interface in a namespace; this process is in that namespace afterwards."""
    with open(f"/var/run/netns/{space}") as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle


def forward(handles: tuple[int, int], delay_s: float, loss: float) -> None:
    """Passes packets from each handle on to the other, in order, until the process is ended."""
    draw = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []  # (when, number, to, packet)
    number = 0
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(handles, [], [], timeout_s)
        for handle in ready:
            packet = os.read(handle, _MAX_PACKET)
            number += 1
            if draw.random() >= loss:
                other = handles[1] if handle == handles[0] else handles[0]
                heapq.heappush(waiting, (time.monotonic() + delay_s, number, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, packet = heapq.heappop(waiting)
            with suppress(OSError):  # that end is not up yet
                os.write(other, packet)


if __name__ == "__main__":
    delay_ms, loss_percent, *ends = sys.argv[1:]
    both = open_tap(ends[0], ends[1]), open_tap(ends[2], ends[3])
    print("ready", flush=True)
    forward(both, float(delay_ms) / 1000, float(loss_percent) / 100)
