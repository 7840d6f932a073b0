"""How the processes of a pipeline in a loop of the user's own tell one another why a call of it has failed.

In a job of bapipe's own the job does so (`training/launch`). Elsewhere a process that refuses a batch, or whose layer
raises an error, notes that in the store of the default process group. The others wait for its tensors: at once in vain
if it ends, else for as long as the group's timeout, which is half an hour by default. So in each of them a thread looks
into the store while a call lasts, and ends its waiting.

Processes that call different things, as where one evaluates while another one steps, wait for each other in the same
way: their transfers have different tags. So in a call that lasts, the thread also compares with another process.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from secrets import token_hex
from typing import TypeVar
from weakref import finalize

import msgspec
import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, RunFailed, one_line
from bapipe.job.groups import gathered, is_of_a_job
from bapipe.job.lost_peer import lost_ranks_told
from bapipe.runtime.call_order import NUM_TAGS, Call, CallOrder, first_difference
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.torch_private.process_groups import default_store, ends_with_rank_0

_LOOK_S = 0.5
"""Interval at which a process that may be waiting looks whether another one has failed."""

_ANSWER_S = 10.0
"""How long the store may take to answer: over a link that is cut it never does."""

_STAY_S = 10.0
"""How long the process that serves the store waits, when it has failed, until the others have read why."""

_TAG = NUM_TAGS
"""Of a receive that nobody sends to."""

T = TypeVar("T")


class ToldErrors:
    """Tells of errors in the calls of a pipeline, which all of its processes make together.

    Nothing is told in a job, nor if there is one process alone. Under NCCL, where a process does not wait itself, the
    waiting of others ends at the group's timeout, or when this process does; and calls are not compared.
    """

    def __init__(
        self, layout: ProcessLayout, groups: Callable[[], Sequence[dist.ProcessGroup]], order: CallOrder
    ) -> None:
        """All processes of the layout's group call it together; `groups` are the further groups that calls wait in."""
        self._layout, self._order = layout, order
        self._calls: _Calls | None = None
        self._is_in_call = False
        self._fault = ""  # of the call after which no other one can run
        if len(layout.ranks) == 1 or is_of_a_job():
            return
        # Another start of the script may have left its keys in the store, as that of torchrun's agent outlives it.
        prefix = f"bapipe/{gathered(token_hex(8), layout.group)[0]}"
        self._calls = _Calls(default_store(), prefix, layout, order)
        if layout.uses_gloo:
            end = _waiting_ended(layout.group, groups)
            threading.Thread(target=_watch, args=(self._calls, end), daemon=True).start()
            finalize(self, self._calls.closed.set)

    def close(self) -> None:
        """Ends the thread that looks for errors of others."""
        if self._calls is not None:
            self._calls.closed.set()

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """In this context one call of the pipeline runs; contexts inside of it are part of that call.

        `what` is called, as all processes do, in words such as "`evaluate` of 4 samples".

        Raises:
            BapipeError: an earlier call has failed after it had begun to exchange tensors.
            RunFailed: another process has failed, which is named with its reason if it has told that; or has ended or
                hangs, or the link to it is cut; or it has called something else.
        """
        if self._is_in_call:
            yield
            return
        self._check_usable()
        self._is_in_call = True
        try:
            with self._told_to_others(self._order.begin(what)):
                yield
        except Exception as error:
            if isinstance(error, RunFailed) or self._order.is_under_way:
                self._fault = f"{what} has failed: {_reason(error)}"
            raise
        finally:
            self._is_in_call = False

    def _check_usable(self) -> None:
        if self._fault and len(self._layout.ranks) > 1:
            raise BapipeError(
                f"this pipeline can run nothing more, as tensors of an earlier call may still be on their way: "
                f"{self._fault}; begin anew in new processes, from what was saved"
            )

    @contextmanager
    def _told_to_others(self, call: Call) -> Iterator[None]:
        if self._calls is None or self._calls.closed.is_set():
            with lost_ranks_told():
                yield
            return
        calls = self._calls
        calls.begin(call)
        try:
            with lost_ranks_told():
                yield
        except Exception as error:
            calls.end()
            is_symptom = calls.cause is not None or (isinstance(error, RunFailed) and error.__cause__ is not None)
            who = _title(self._layout, self._layout.rank)
            own = f"{who} has {'lost another one' if is_symptom else 'failed'}: {_reason(error)}"
            cause = calls.cause or _answer(lambda: calls.tell(own, is_symptom=is_symptom))
            self._stay_until_heard(calls)
            if is_symptom and cause not in (None, own):
                raise RunFailed(cause) from error
            raise
        finally:
            calls.end()

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

    def __init__(self, store: dist.Store, prefix: str, layout: ProcessLayout, order: CallOrder) -> None:
        self._store, self._prefix, self._layout, self._order = store, prefix, layout, order
        self._lock = threading.Lock()
        self._count = f"{prefix}/heard"  # where those are counted who know why the last failed call has failed
        self.closed = threading.Event()
        self.running: int | None = None
        self.cause: str | None = None

    def begin(self, call: Call) -> None:
        self.running = call.number

    def end(self) -> None:
        with self._lock:
            self.running = None

    def tell(self, text: str, *, is_symptom: bool) -> str:
        """Notes why this process has failed in the last call, if it is the first to do so; returns what was noted.

        If that `is_symptom`, another one may have called something else before, without a wait of this one.
        """
        if is_symptom:
            self._compare(range(len(self._layout.ranks)))
        number = self._order.latest[-1].number
        return self._heard(self._note(number, number, text))

    def compare_with_next(self) -> None:
        """Compares what this process has called with what the next one has; if that differs, all have failed.

        If any two processes differ, two of these do. Only those in a call that lasts say what they have called, and
        each has one place in the store for that.
        """
        own = self._index
        self._store.set(self._place(own), msgspec.json.encode(self._order.latest).decode())
        self._compare([(own + 1) % len(self._layout.ranks)])

    def _compare(self, processes: Iterable[int]) -> None:
        for process in processes:
            if process == self._index or not self._store.check([self._place(process)]):
                continue
            own = self._order.latest
            others = msgspec.json.decode(self._store.get(self._place(process)), type=tuple[Call, ...])
            different = first_difference(own, others)
            if different is not None:
                fault = self._differ({self._index: different[0], process: different[1]})
                numbers = {own[-1].number, others[-1].number}
                for number in numbers:
                    self._note(number, min(numbers), fault)

    def _differ(self, called: Mapping[int, str]) -> str:
        first, second = (
            f"{_title(self._layout, self._layout.ranks[p])} has called {called[p]}" for p in sorted(called)
        )
        return (
            f"{first} where {second}: all processes of a pipeline call `step` and `evaluate` together, in the same "
            "order, also those that get no result of it"
        )

    @property
    def _index(self) -> int:
        return self._layout.ranks.index(self._layout.rank)

    def _place(self, process: int) -> str:
        return f"{self._prefix}/called/{process}"

    def end_if_failed(self, number: int, end_waiting: Callable[[], None]) -> None:
        """Ends the waiting of this process in a call that runs, if another process has failed in it."""
        key = f"{self._prefix}/{number}"
        if not self._store.check([key]):
            return
        noted = self._store.get(key)
        with self._lock:
            if self.running == number:  # else what was read may be what this process itself has told
                self.cause = self._heard(noted)
                end_waiting()

    def num_heard(self) -> int:
        """Returns how many processes know why the last call has failed."""
        return int(self._store.add(self._count, 0))

    def _note(self, number: int, count_in: int, text: str) -> bytes:
        """Notes why a call has failed, unless that is noted; returns what is.

        Those who know are counted in the call `count_in`: that may be an earlier or later one for some of them.
        """
        noted: bytes = self._store.compare_set(f"{self._prefix}/{number}", "", f"{count_in} {text}")
        return noted

    def _heard(self, noted: bytes) -> str:
        """Counts this process among those who know why a call has failed; returns why, from what is noted of it."""
        count_in, _, text = noted.decode().partition(" ")
        self._count = f"{self._prefix}/{count_in}/heard"
        self._store.add(self._count, 1)
        return text


def _watch(calls: _Calls, end_waiting: Callable[[], None]) -> None:
    """Ends the waiting of the first thread in a call in which another process has failed."""
    last: int | None = None
    while calls.cause is None and not calls.closed.wait(_LOOK_S):
        last, running = calls.running, last
        if running is None or running != last:
            continue  # most calls are shorter than an interval, and never ask the store
        with suppress(RuntimeError, ValueError):  # the store or the group is gone
            calls.compare_with_next()
            calls.end_if_failed(running, end_waiting)


def _title(layout: ProcessLayout, rank: int) -> str:
    """Returns what a process is called in errors, by the rank of the schedule that it runs."""
    own = [str(s) for s, ranks in enumerate(layout.schedule.devices) if rank in ranks]
    return f"process {layout.ranks.index(rank)} (stage{'s' if len(own) > 1 else ''} {', '.join(own)})"


def _waiting_ended(
    group: dist.ProcessGroup | None, others: Callable[[], Sequence[dist.ProcessGroup]]
) -> Callable[[], None]:
    """Returns a function that ends all waiting of this process in its groups of gloo: they cannot be used any more.

    When a receive takes longer than it may, gloo closes all connections of its group. One over a connection that the
    other process has closed fails at once, and closes no other: so a receive from each is tried.
    """

    def end() -> None:
        for each in (group, *others()):
            for peer in {*range(dist.get_world_size(each))} - {dist.get_rank(each)}:
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
