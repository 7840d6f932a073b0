"""Limits how long a rank waits for another one, without the time for which this process was paused."""

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType

from bapipe.job.lost_peer import COMMUNICATION
from bapipe.job.sockets import OPEN_FILES, open_sockets, shut_down_connections

_TICK_S = 0.5

_UNLIMITED = timedelta(days=30)

_CHECKPOINT = str(Path(__file__).parents[1] / "checkpoint")
"""Folder of code that waits for the thread that writes a checkpoint together with those of the other ranks."""


def can_watch_waiting(kind: str) -> bool:
    """Returns whether `WaitLimit` can end a rank's wait for another one here; if not, the backend's timeout does."""
    return kind == "cpu" and sys.platform == "linux" and OPEN_FILES.is_dir()


class WaitLimit:
    """Ends the waiting of this thread for another rank when it has lasted for `limit_s`.

    gloo's own timeout also counts the time for which a process was paused (SIGSTOP, Ctrl-Z): when a run of paused ranks
    continues, the first rank to wait would take the others for hung. Here a second thread counts in short intervals,
    each of which counts no more than twice its length. The first thread waits if it uses no processor time and is in
    code that waits for other ranks. To end the wait, its connections are shut down. Where the system cannot do that,
    and on CUDA, the timeout of the backend ends it.

    Attributes:
        group_timeout: the timeout for the process groups.
        expired: whether the limit was reached.
    """

    def __init__(self, limit_s: float, kind: str, on_wait: Callable[[], None] = lambda: None) -> None:
        """`on_wait` is called about twice a second, in another thread, while this thread waits."""
        self._watches = can_watch_waiting(kind)
        self.group_timeout = _UNLIMITED if self._watches else timedelta(seconds=limit_s)
        self.expired = False
        self._limit_s, self._tick_s = limit_s, min(_TICK_S, limit_s / 10)
        self._on_wait = on_wait
        self._num_meetings = 0
        self._left = threading.Event()
        self._thread_id = threading.get_ident()
        self._kept = open_sockets()  # not shut down: over the connection to the store ranks tell who failed

    def __enter__(self) -> "WaitLimit":
        if self._watches:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def note_meeting(self) -> None:
        """Notes that the ranks' threads that write a checkpoint have just met: none of the ranks hangs."""
        self._num_meetings += 1

    def _watch(self) -> None:
        clock = time.pthread_getcpuclockid(self._thread_id)
        waited_s, used_ns, num_meetings, last_s = 0.0, -1, 0, time.monotonic()
        while not self._left.wait(self._tick_s):
            passed_s, last_s = min(time.monotonic() - last_s, 2 * self._tick_s), time.monotonic()
            before_ns, used_ns = used_ns, time.clock_gettime_ns(clock)
            meetings_before, num_meetings = num_meetings, self._num_meetings
            have_met = num_meetings > meetings_before
            # No variable holds the frame: it would keep the tensors in the frame's variables until the next interval.
            waits = used_ns == before_ns and _waits_for_rank(sys._current_frames().get(self._thread_id), have_met)
            waited_s = waited_s + passed_s if waits else 0.0
            if waited_s >= self._limit_s:
                self.expired = True
                shut_down_connections(self._kept)
                return
            if waits:
                self._on_wait()


def _waits_for_rank(frame: FrameType | None, have_met: bool) -> bool:
    """Returns whether a thread waits for another rank, itself or through the thread that writes a checkpoint.

    If the ranks `have_met` there since the last interval, that thread waits for a disk, not for a rank.
    """
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return frame is not None and frame.f_code.co_filename.startswith(COMMUNICATION)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return not have_met and frame is not None and frame.f_code.co_filename.startswith(_CHECKPOINT)
