"""Runs compiled work in up to as many threads as there are processors."""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from bapipe.hardware import num_cores
from bapipe.planner.compute.deadline import Compiling, Deadline, compute_s

Answer = TypeVar("Answer")


def in_threads(work: Sequence[Callable[[Deadline], Answer]], deadline: Deadline) -> list[Answer]:
    """Calls each function of `work` with a deadline of its own, in up to `num_cores` threads; returns their answers.

    Raises:
        OutOfTime: if any of them does, after all threads have ended.
    """
    if len(work) == 1:
        return [work[0](deadline)]
    left_s, computed_s = deadline.remaining_s, defaultdict[int, float](float)

    def run(each: Callable[[Deadline], Answer]) -> Answer:
        thread, started_s = threading.get_ident(), compute_s()
        own = deadline.in_thread(left_s, computed_s[thread])
        try:
            return each(own)
        finally:
            computed_s[thread] += compute_s() - started_s + own.counted_s

    try:
        with ThreadPoolExecutor(min(len(work), num_cores())) as pool:
            return list(pool.map(run, work))
    finally:
        deadline.count(max(computed_s.values(), default=0.0))


Row = Callable[[int, Callable[[int], None], Deadline], bool]
"""Runs one row of a wavefront: (row number, `begin`, deadline) -> whether another row follows.

It begins when the first column of the row before is done. Before each column it calls `begin(column)`, which waits
until the row before is past that column, or has ended.
"""


def in_waves(row: Row, max_rows: int, deadline: Deadline, max_threads: int, most_ahead: int = sys.maxsize) -> int:
    """Runs the rows as a wavefront in several threads: a row may do a column once the row before it has done it.

    Args:
        most_ahead: how many columns a row may be ahead of the next one; if limited, all rows must run at the same time.

    Returns:
        The number of rows, at most `max_rows`.

    Raises:
        OutOfTime: if any row does, after all threads have ended.
    """
    waves, at_once = _Waves(max_rows, most_ahead), min(num_cores(), max_rows, max(max_threads, 1))
    in_threads([partial(waves.run, row, first, at_once) for first in range(at_once)], deadline)
    return waves.num_rows


class _NotNeededError(Exception):
    """The row is not needed, or another one has failed."""


class _Waves:
    """The state of a wavefront: rows that wait for one another.

    Attributes:
        num_rows: an upper bound on the number of rows, exact once the last row has ended.
    """

    def __init__(self, num_rows: int, most_ahead: int) -> None:
        self.num_rows, self._most_ahead = num_rows, most_ahead
        self._changed, self._num_done, self._has_failed = threading.Condition(), [0] * num_rows, False

    def run(self, row: Row, first: int, at_once: int, deadline: Deadline) -> None:
        """Runs every `at_once`-th row from `first` on."""
        try:
            for number in range(first, len(self._num_done), at_once):
                begin = partial(self._begin, deadline, number)
                begin(0)
                self._end(number, row(number, begin, deadline))
        except _NotNeededError:
            pass
        except BaseException:
            with self._changed:
                self._has_failed = True
                self._changed.notify_all()
            raise

    def _begin(self, deadline: Deadline, number: int, column: int) -> None:
        """Waits until row `number` may begin `column`; those before it are done. The wait counts as compute time."""
        started_s = time.monotonic() - Compiling.of_all_s
        with self._changed:
            self._num_done[number] = column
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over(number) or self._is_ready(number, column))
            deadline.count(max(0.0, time.monotonic() - Compiling.of_all_s - started_s))
            if self._is_over(number):
                raise _NotNeededError

    def _is_over(self, number: int) -> bool:
        return self._has_failed or number >= self.num_rows

    def _is_ready(self, number: int, column: int) -> bool:
        follows = number == 0 or self._num_done[number - 1] > column
        leads = number + 1 == len(self._num_done) or column - self._num_done[number + 1] <= self._most_ahead
        return follows and leads

    def _end(self, number: int, is_followed: bool) -> None:
        with self._changed:
            self._num_done[number] = sys.maxsize
            self.num_rows = self.num_rows if is_followed else min(self.num_rows, number + 1)
            self._changed.notify_all()
