"""How the processes of a pipeline in a loop of the user's own tell one another why a call of it has failed.

In a job of bapipe's own the job does so (`training/launch`). Elsewhere a process that refuses a batch, or whose layer
raises an error, notes that in the store of the default process group. The others wait for its tensors: at once in vain
if it ends, else for as long as the group's timeout, which is half an hour by default. So in each of them a thread looks
into the store while a call lasts, and ends its waiting.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from secrets import token_hex
from typing import TypeVar
from weakref import finalize

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, RunFailed, one_line
from bapipe.job.groups import gathered, is_of_a_job
from bapipe.job.lost_peer import lost_ranks_told
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.torch_private.process_groups import default_store, ends_with_rank_0

_LOOK_S = 0.5
"""Interval at which a process that may be waiting looks whether another one has failed."""

_ANSWER_S = 10.0
"""How long the store may take to answer: over a link that is cut it never does."""

_STAY_S = 10.0
"""How long the process that serves the store waits, when it has failed, until the others have read why."""

_TAG = 2**30
"""Of a receive that nobody sends to."""

T = TypeVar("T")


class ToldErrors:
    """Tells of errors in the calls of a pipeline, which all of its processes make together.

    Nothing is told in a job, nor if there is one process alone. Under NCCL, where a process does not wait itself, the
    waiting of others ends at the group's timeout, or when this process does.
    """

    def __init__(self, layout: ProcessLayout, groups: Callable[[], Sequence[dist.ProcessGroup]]) -> None:
        """All processes of the layout's group call it together; `groups` are the further groups that calls wait in."""
        self._layout = layout
        self._calls: _Calls | None = None
        self._depth = 0
        if len(layout.ranks) == 1 or is_of_a_job():
            return
        # Another start of the script may have left its keys in the store, as that of torchrun's agent outlives it.
        self._calls = _Calls(default_store(), f"bapipe/{gathered(token_hex(8), layout.group)[0]}")
        if layout.uses_gloo:
            end = _waiting_ended(layout.group, groups)
            threading.Thread(target=_watch, args=(self._calls, end), daemon=True).start()
            finalize(self, self._calls.closed.set)

    def close(self) -> None:
        """Ends the thread that looks for errors of others."""
        if self._calls is not None:
            self._calls.closed.set()

    @contextmanager
    def told(self) -> Iterator[None]:
        """In this context one call of the pipeline runs; contexts inside of it are part of that call.

        Raises:
            RunFailed: another process has failed, which is named with its reason if it has told that; or has ended or
                hangs, or the link to it is cut.
        """
        if self._depth or self._calls is None or self._calls.closed.is_set():
            with lost_ranks_told():
                yield
            return
        self._depth, calls = 1, self._calls
        calls.begin()
        try:
            with lost_ranks_told():
                yield
        except Exception as error:
            calls.end()
            is_symptom = calls.cause is not None or (isinstance(error, RunFailed) and error.__cause__ is not None)
            own = f"{self._title()} has {'lost another one' if is_symptom else 'failed'}: {_reason(error)}"
            cause = calls.cause or _answer(lambda: calls.tell(own))
            self._stay_until_heard(calls)
            if is_symptom and cause not in (None, own):
                raise RunFailed(cause) from error
            raise
        finally:
            calls.end()
            self._depth = 0

    def _title(self) -> str:
        layout = self._layout
        own = [str(s) for s, ranks in enumerate(layout.schedule.devices) if layout.rank in ranks]
        stages = f"stage{'s' if len(own) > 1 else ''} {', '.join(own)}"
        return f"process {layout.ranks.index(layout.rank)} ({stages})"

    def _stay_until_heard(self, calls: "_Calls") -> None:
        """Waits until all know why the call has failed, if the store ends with this process."""
        serves = dist.is_initialized() and dist.get_rank() == 0 and ends_with_rank_0(default_store())
        end_s, num = time.monotonic() + _STAY_S, len(self._layout.ranks)
        while serves and time.monotonic() < end_s and (_answer(calls.num_heard) or 0) < num:
            time.sleep(_LOOK_S / 10)


class _Calls:
    """The calls of a pipeline, seen from one process, and what the store says of them.

    Attributes:
        closed: set when there are no more calls.
        running: the number of the call that runs, which is the same in all processes; None between calls.
        cause: why another process has failed, for which the waiting of this one has been ended.
    """

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._number, self._lock = 0, threading.Lock()
        self.closed = threading.Event()
        self.running: int | None = None
        self.cause: str | None = None

    def begin(self) -> None:
        self._number += 1
        self.running = self._number

    def end(self) -> None:
        with self._lock:
            self.running = None

    def tell(self, text: str) -> str:
        """Notes why this process has failed in the last call, if it is the first to do so; returns what was noted."""
        first: bytes = self._store.compare_set(self._key, "", text)
        self._store.add(f"{self._key}/heard", 1)
        return first.decode()

    def end_if_failed(self, number: int, end_waiting: Callable[[], None]) -> None:
        """Ends the waiting of this process in a call that runs, if another process has failed in it."""
        key = f"{self._prefix}/{number}"
        if not self._store.check([key]):
            return
        cause = self._store.get(key).decode()
        with self._lock:
            if self.running == number:  # else what was read may be what this process itself has told
                self.cause = cause
                self._store.add(f"{key}/heard", 1)
                end_waiting()

    def num_heard(self) -> int:
        """Returns how many processes know why the last call has failed."""
        return int(self._store.add(f"{self._key}/heard", 0))

    @property
    def _key(self) -> str:
        return f"{self._prefix}/{self._number}"


def _watch(calls: _Calls, end_waiting: Callable[[], None]) -> None:
    """Ends the waiting of the first thread in a call in which another process has failed."""
    last: int | None = None
    while calls.cause is None and not calls.closed.wait(_LOOK_S):
        last, running = calls.running, last
        if running is None or running != last:
            continue  # most calls are shorter than an interval, and never ask the store
        with suppress(RuntimeError, ValueError):  # the store or the group is gone
            calls.end_if_failed(running, end_waiting)


def _waiting_ended(
    group: dist.ProcessGroup | None, others: Callable[[], Sequence[dist.ProcessGroup]]
) -> Callable[[], None]:
    """Returns a function that ends all waiting of this process in its groups of gloo: they cannot be used any more.

    When a receive takes longer than it may, gloo closes all connections of its group.
    """

    def end() -> None:
        for each in (group, *others()):
            own = dist.get_rank(each)
            peer = (own + 1) % dist.get_world_size(each)
            with suppress(RuntimeError):
                work = dist.irecv(torch.zeros(1), group=each, group_src=peer, tag=_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    return end


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, BapipeError) else one_line(error)


def _answer(ask: Callable[[], T]) -> T | None:
    """Returns what the store answers; None if it does not, or not soon."""
    found: list[T] = []

    def call() -> None:
        with suppress(RuntimeError):
            found.append(ask())

    asking = threading.Thread(target=call, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return found[0] if found else None
