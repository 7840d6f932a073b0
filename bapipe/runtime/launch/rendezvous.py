"""The store in which the ranks of a job find one another, and tell that one of them has failed."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread

from torch._C._distributed_c10d import PrefixStore, TCPStore

from bapipe.errors import RunFailed

_SETTLE_S = 0.7
"""How long a rank that lost its peer waits for another to say why."""

_ANSWER_S = 2.0
"""How long the store may take to answer: it is gone with the rank that held it, or with the link to it."""


def open_store(index: int, names: Sequence[str], patience_s: float) -> PrefixStore:
    """Returns the store of the job that torchrun, or whoever sets its variables, started this process for.

    Raises:
        RunFailed: nobody answers for `patience_s`.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    # torchrun's agent holds the store, where the addresses of an attempt that died stay (pytorch#135712); one that goes
    # on with fewer processes has the same number.
    holds = attempt is None and index == 0
    try:
        shared = TCPStore(address, port, len(names), holds, timedelta(seconds=patience_s), wait_for_workers=False)
    except RuntimeError:
        raise RunFailed(
            f"rank {index} ({names[index]}) cannot reach rank 0 at {address}:{port} after {patience_s:g} s: start all "
            "ranks, and let this one through"
        ) from None
    return PrefixStore(f"bapipe{attempt or 0}of{len(names)}", shared)


def meet(store: PrefixStore, index: int, names: Sequence[str], patience_s: float) -> None:
    """Returns when every rank of the job has called it.

    Raises:
        RunFailed: some have not after `patience_s`, or one failed.
    """
    store.set(f"here{index}", "yes")
    end_s = time.monotonic() + patience_s
    while missing := [other for other in range(len(names)) if not store.check([f"here{other}"])]:
        others = ", ".join(f"rank {other} ({names[other]})" for other in missing)
        if store.add("failed", 0):
            raise RunFailed(f"{others} did not join the job, of which a rank failed")
        if time.monotonic() > end_s:
            raise RunFailed(
                f"{others} did not join the job in {patience_s:g} s: start all ranks, and see what ended them"
            )
        time.sleep(0.05)


def is_told(store: PrefixStore, lost_peer: bool) -> bool:
    """Whether another rank tells the user why; one that only lost its peer gives it a moment to."""
    told: list[bool] = []

    def ask() -> None:
        end_s = time.monotonic() + (_SETTLE_S if lost_peer else 0.0)
        try:
            while lost_peer and time.monotonic() < end_s and not store.add("failed", 0):
                time.sleep(0.05)
            told.append(store.add("failed", 1) > 1)
        except RuntimeError:  # the store has gone with the rank that held it
            told.append(False)

    asking = Thread(target=ask, daemon=True)  # over a link that is cut it would wait for ever
    asking.start()
    asking.join(_SETTLE_S + _ANSWER_S)
    return bool(told and told[0])
