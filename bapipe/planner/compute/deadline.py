"""When a search must end: one object, made where planning begins and asked by every long loop of every phase."""

import threading
import time
from collections.abc import Callable

from bapipe.errors import BapipeError

DEFAULT_LIMIT_S = 54.0
"""Compute seconds after which planning ends if no time limit is given and its fixed amount of work is not done yet."""


class Compiling(threading.local):
    """The seconds that this thread has compiled code for; the code is cached, so they do not count as search time.

    Attributes:
        of_all_s: the sum over all threads.
        num_threads: how many threads compile now.
    """

    of_all_s, num_threads, _lock = 0.0, 0, threading.Lock()

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self) -> None:
        """Records that this thread begins to compile."""
        with self._lock:
            Compiling.num_threads += 1

    def end(self, seconds: float) -> None:
        """Records that this thread has compiled for `seconds`."""
        self.seconds += seconds
        with self._lock:
            Compiling.num_threads -= 1
            Compiling.of_all_s += seconds


COMPILING = Compiling()


def compute_s() -> float:
    """Returns this thread's compute time in seconds, without the time in which it compiled code."""
    return time.thread_time() - COMPILING.seconds


class OutOfTime(BapipeError):
    """The deadline has passed; a caller that has a plan and a bound by then returns them.

    Attributes:
        lower_bound_ns: a lower bound on every plan of the space, as far as it was searched.
    """

    def __init__(self, message: str, lower_bound_ns: int = 0) -> None:
        super().__init__(message)
        self.lower_bound_ns = lower_bound_ns


class NothingFoundError(BapipeError):
    """A search has done its work without a plan that fits, and without a proof that there is none."""


class Deadline:
    """A time on a clock, or none; `stop` ends it at once, as Ctrl-C does.

    Attributes:
        is_given: whether the user chose it: a search then goes on until it has passed, instead of doing a fixed amount
            of work.
        counted_s: see `count`.
    """

    def __init__(
        self,
        limit_s: float | None,
        *,
        is_given: bool = True,
        clock: Callable[[], float] = time.monotonic,
        within: "Deadline | None" = None,
        stopped_with: "Deadline | None" = None,
    ) -> None:
        """`within` also ends this deadline when it has passed; `stopped_with` only when it is stopped."""
        self.is_given, self._clock, self._within, self._is_stopped = is_given, clock, within, False
        self._stopped_with, self.counted_s, self._left_alone_s = stopped_with, 0.0, 0.0
        self._end_s = None if limit_s is None else clock() + limit_s

    @property
    def is_over(self) -> bool:
        if self.is_stopped or (self._end_s is not None and self._clock() >= self._end_s):
            return True
        return self._within is not None and self._within.is_over

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called on it, or on a deadline that it depends on."""
        others = (other for other in (self._within, self._stopped_with) if other is not None)
        return self._is_stopped or any(other.is_stopped for other in others)

    @property
    def remaining_s(self) -> float | None:
        """The remaining seconds of its clock, None if they are not limited."""
        if self.is_stopped:
            return 0.0
        own_s = None if self._end_s is None else max(0.0, self._end_s - self._clock())
        within_s = None if self._within is None else self._within.remaining_s
        return min((left_s for left_s in (own_s, within_s) if left_s is not None), default=None)

    def check(self) -> None:
        """Raises OutOfTime if the deadline has passed."""
        if self.is_over:
            raise OutOfTime(f"the search ended before it had a plan that fits: {self.advice}")

    @property
    def advice(self) -> str:
        """What the user can try if the search that this deadline ended has found too little."""
        if self.is_stopped:
            return "let it go on for longer (it was interrupted)"
        return "choose a longer `time_limit_s`"

    def stop(self) -> None:
        """Ends the deadline now."""
        self._is_stopped = True

    def in_thread(self, left_s: float | None, computed_s: float) -> "Deadline":
        """Returns the deadline of work that begins now in another thread; that thread must call it.

        Args:
            left_s: the time that remained when the work was handed out.
            computed_s: what this thread has computed since then.
        """
        if self._clock is not compute_s:
            left_s = self.remaining_s
        elif left_s is not None:
            left_s -= computed_s
        return Deadline(left_s, is_given=self.is_given, clock=self._clock, stopped_with=self)

    def leave(self, seconds: float) -> None:
        """Reserves `seconds` at the end: the deadline passes that much earlier. Replaces an earlier reservation."""
        if self._end_s is not None:
            self._end_s += self._left_alone_s - seconds
            self._left_alone_s = seconds

    def has_time_for(self, num_actions: float, actions_per_s: float) -> bool:
        """Returns whether about `num_actions` actions can be simulated before the deadline."""
        left_s = self.remaining_s
        return left_s is None or num_actions < actions_per_s * left_s

    def count(self, seconds: float) -> None:
        """Adds the time that this thread waited for others that compute; it counts if the clock is compute time."""
        self.counted_s += seconds
        if self._end_s is not None and self._clock is compute_s:
            self._end_s -= seconds
        if self._within is not None:
            self._within.count(seconds)

    def earlier(self, seconds: float) -> "Deadline":
        """Returns a deadline `seconds` before this one."""
        left_s = self.remaining_s
        return self._ending_in(None if left_s is None else max(0.0, left_s - seconds))

    def share(self, num_parts: float) -> "Deadline":
        """Returns a deadline after 1/`num_parts` of the remaining time."""
        left_s = self.remaining_s
        return self._ending_in(None if left_s is None else left_s / num_parts)

    def share_of_limit(self, num_parts: float) -> "Deadline":
        """Returns a share of a limit that the user chose; else this deadline, so that the clock changes no result."""
        return self.share(num_parts) if self.is_given else self

    def _ending_in(self, left_s: float | None) -> "Deadline":
        return Deadline(left_s, is_given=self.is_given, clock=self._clock, within=self)


def deadline_of(time_limit_s: float | None) -> Deadline:
    """Returns a deadline `time_limit_s` from now; without a limit, `DEFAULT_LIMIT_S` of this thread's compute time.

    That is compute time, so that neither other programs nor compilation at first use change the result.
    """
    if time_limit_s is None:
        return Deadline(DEFAULT_LIMIT_S, is_given=False, clock=compute_s)
    return Deadline(time_limit_s)


UNLIMITED = Deadline(None, is_given=False)
"""For callers that bound the work in another way."""
