"""Tells the ranks on other hosts that this one is refused before it joins its job: they would wait for it."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bapipe.errors import BapipeError, RunFailed, Stopped, first_line
from bapipe.torchrun import Job, current_job

_TELL_S = 20.0
"""How long rank 0, which serves the store, waits for others that are about to start."""

_ASK_AGAIN_S = 0.05


@contextmanager
def refusals_told(tell_s: float = _TELL_S) -> Iterator[None]:
    """Tells the job that this process is part of, if any, why it does not join.

    Nothing is told of errors in joining, nor in the job itself: those are RunFailed. Nor if all ranks are on this host:
    torchrun ends them.
    """
    try:
        yield
    except RunFailed:
        raise
    except (BapipeError, OSError, MemoryError) as error:
        job = current_job()
        if job is not None and os.environ.get("LOCAL_WORLD_SIZE", "1") != str(job.size):
            # Whatever ends the telling, the error itself is what is said here.
            with suppress(BapipeError, OSError, RuntimeError, ImportError, Stopped, KeyboardInterrupt):
                _tell(job, first_line(error), tell_s)
        raise


def _tell(job: Job, reason: str, tell_s: float) -> None:
    from bapipe.job.rendezvous import HEARD, REFUSED, open_store  # imports torch

    index, size, end_s = job.rank, job.size, time.monotonic() + tell_s
    store = open_store(index, [""] * size, tell_s)
    try:
        store.set(REFUSED, f"rank {index} on {socket.gethostname()} is refused: {reason}")
        store.set(f"{HEARD}{index}", "")
        store.add("failed", 1)
        while index == 0 and time.monotonic() < end_s and not store.check([f"{HEARD}{other}" for other in range(size)]):
            time.sleep(_ASK_AGAIN_S)
    finally:
        store.stop_serving()
