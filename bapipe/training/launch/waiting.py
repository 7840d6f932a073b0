"""How long a rank may wait for another one, in time that this process has run."""

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from bapipe.job.sockets import OPEN_FILES, open_sockets, shut_down_connections

_TICK_S = 0.5

_UNLIMITED = timedelta(days=30)

_WAITING = (
    str(Path(dist.__file__).parent),
    *(str(Path(__file__).parents[2] / package) for package in ("job", "runtime", "training")),
)
"""Where code waits for other ranks. A rank that waits elsewhere, as for its data, is the one that others wait for."""


class WaitLimit:
    """Ends the waiting of this thread for another rank when it has lasted for `limit_s`.

    gloo's own timeout also counts the time for which a process was paused (SIGSTOP, Ctrl-Z): when a run of paused
    ranks continues, the first rank to wait would take the others for hung. Here a thread counts in small steps, and a
    step counts no more than twice its length. A thread waits if it uses no processor time at all. What ends it is that
    its connections are shut down. Where the system cannot do that, and on CUDA, the timeout of the backend holds.

    Attributes:
        group_timeout: for the process groups.
        expired: whether the limit was reached.
    """

    def __init__(self, limit_s: float, kind: str) -> None:
        self._watches = kind == "cpu" and sys.platform == "linux" and OPEN_FILES.is_dir()
        self.group_timeout = _UNLIMITED if self._watches else timedelta(seconds=limit_s)
        self.expired = False
        self._limit_s, self._tick_s = limit_s, min(_TICK_S, limit_s / 10)
        self._left = threading.Event()
        self._thread_id = threading.get_ident()
        self._kept = open_sockets()  # the connection to the store says who failed

    def __enter__(self) -> "WaitLimit":
        if self._watches:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        clock = time.pthread_getcpuclockid(self._thread_id)
        waited_s, used_ns, last_s = 0.0, -1, time.monotonic()
        while not self._left.wait(self._tick_s):
            passed_s, last_s = min(time.monotonic() - last_s, 2 * self._tick_s), time.monotonic()
            before_ns, used_ns = used_ns, time.clock_gettime_ns(clock)
            waits = used_ns == before_ns and _waits_for_rank(sys._current_frames().get(self._thread_id))
            waited_s = waited_s + passed_s if waits else 0.0
            if waited_s >= self._limit_s:
                self.expired = True
                shut_down_connections(self._kept)
                return


def _waits_for_rank(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back  # the thread joins one of ours, which writes a checkpoint with other ranks
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)
