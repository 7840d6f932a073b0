"""Runs compiled work in several threads, as far as there are processors."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bapipe.planner.deadline import Deadline

Answer = TypeVar("Answer")


def num_threads() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Sequence[Callable[[Deadline], Answer]], deadline: Deadline) -> list[Answer]:
    """Returns the answers of some work, as much of it at a time as there are processors; each is given its deadline.

    Raises:
        OutOfTime: if any work does, when all threads have ended.
    """
    if len(work) == 1:
        return [work[0](deadline)]
    left_s, computed_s = deadline.remaining_s, defaultdict[int, float](float)

    def run(each: Callable[[Deadline], Answer]) -> Answer:
        thread, started_s = threading.get_ident(), time.thread_time()
        try:
            return each(deadline.in_thread(left_s, computed_s[thread]))
        finally:
            computed_s[thread] += time.thread_time() - started_s

    try:
        with ThreadPoolExecutor(min(len(work), num_threads())) as pool:
            return list(pool.map(run, work))
    finally:
        deadline.count(max(computed_s.values(), default=0.0))
