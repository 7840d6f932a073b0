"""The rendezvous of a job of torchrun: the store in which its ranks wait for one another and note a failure."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread

from torch.distributed import PrefixStore, TCPStore

from bapipe.errors import RunFailed

_SETTLE_S = 0.7
"""How long a rank that lost its peer waits for another rank to report the cause."""

_ANSWER_S = 2.0
"""How long the store may take to answer; without an answer its host, or the link to it, is gone."""


def open_store(index: int, names: Sequence[str], timeout_s: float) -> PrefixStore:
    """Returns the store of the job that this process is part of, as the environment variables of torchrun say.

    Raises:
        RunFailed: there is no answer for `timeout_s`.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    # Under torchrun its agent hosts the store, else rank 0 does. The agent's store keeps the addresses of an attempt
    # that died (pytorch#135712), so every attempt has a prefix of its own; an elastic restart with fewer processes has
    # the same number, so the prefix also has the size.
    is_host = attempt is None and index == 0
    try:
        shared = TCPStore(address, port, len(names), is_host, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError:
        raise RunFailed(
            f"rank {index} ({names[index]}) cannot reach rank 0 at {address}:{port} after {timeout_s:g} s: start all "
            "ranks, and let this one through"
        ) from None
    return PrefixStore(f"bapipe{attempt or 0}of{len(names)}", shared)


def wait_for_all(store: PrefixStore, index: int, names: Sequence[str], timeout_s: float) -> None:
    """Waits until every rank of the job has called it.

    Before torch's own rendezvous, which would say neither which rank is missing nor that one has failed.

    Raises:
        RunFailed: some ranks have not called it after `timeout_s`, or one failed.
    """
    store.set(f"here{index}", "yes")
    end_s = time.monotonic() + timeout_s
    while missing := [other for other in range(len(names)) if not store.check([f"here{other}"])]:
        others = ", ".join(f"rank {other} ({names[other]})" for other in missing)
        if store.add("failed", 0):
            raise RunFailed(f"{others} did not join the job, of which a rank failed")
        if time.monotonic() > end_s:
            raise RunFailed(
                f"{others} did not join the job in {timeout_s:g} s: start all ranks, and see what ended them"
            )
        time.sleep(0.05)


def another_rank_reports(store: PrefixStore, lost_peer: bool) -> bool:
    """Whether another rank reports the failure, so that this one need not; notes that this rank has failed.

    A rank that only lost its peer waits a moment for the cause to be reported first.
    """
    answers: list[bool] = []

    def ask() -> None:
        end_s = time.monotonic() + (_SETTLE_S if lost_peer else 0.0)
        try:
            while lost_peer and time.monotonic() < end_s and not store.add("failed", 0):
                time.sleep(0.05)
            answers.append(store.add("failed", 1) > 1)
        except RuntimeError:  # the store is gone, with the rank that hosted it
            answers.append(False)

    # In a thread: over a link that is cut the call would never return.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SETTLE_S + _ANSWER_S)
    return bool(answers and answers[0])
