"""Work in several threads: answers in order, and one deadline for all of it."""

import time
from collections.abc import Callable
from functools import partial

import pytest

from bapipe.planner.deadline import DEFAULT_LIMIT_S, Deadline, OutOfTime, deadline_of
from bapipe.planner.threads import in_threads


def compute(seconds: float, answer: int, deadline: Deadline) -> int:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        deadline.check()
    return answer


@pytest.mark.parametrize("num_threads", [1, 3])
def test_answers_are_in_the_order_of_the_work(num_threads: int) -> None:
    work = [partial(compute, 0.02 * (3 - number), number) for number in range(num_threads)]
    assert in_threads(work, Deadline(None)) == list(range(num_threads))


def test_what_other_threads_compute_counts_where_compute_time_is_limited() -> None:
    """In the deadline that they were given and in all that it is within."""
    deadline = deadline_of(None)
    in_threads([partial(compute, 0.2, 0), partial(compute, 0.1, 1)], deadline.share(2))
    assert deadline.remaining_s is not None
    assert 0.2 <= DEFAULT_LIMIT_S - deadline.remaining_s < 0.35


@pytest.mark.parametrize("clock", [time.monotonic, time.thread_time])
def test_all_threads_end_at_the_deadline(clock: Callable[[], float]) -> None:
    deadline = Deadline(0.1, clock=clock)
    with pytest.raises(OutOfTime):
        in_threads([partial(compute, 60.0, 0), partial(compute, 60.0, 1)], deadline)
    assert deadline.is_over


def test_all_threads_end_when_the_deadline_is_stopped() -> None:
    deadline = Deadline(None)

    def stop(_: Deadline) -> int:
        deadline.stop()
        return 0

    work: list[Callable[[Deadline], int]] = [partial(compute, 60.0, 0), stop]
    with pytest.raises(OutOfTime):
        in_threads(work, deadline)
