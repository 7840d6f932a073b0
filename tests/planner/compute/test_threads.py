"""Work in several threads: answers in order, and one deadline for all of it."""

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from bapipe.planner.compute import threads
from bapipe.planner.compute.deadline import DEFAULT_LIMIT_S, Compiling, Deadline, OutOfTime, compute_s, deadline_of
from bapipe.planner.compute.threads import in_threads, in_waves


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


def test_what_threads_of_threads_compute_counts() -> None:
    def more(seconds: float, deadline: Deadline) -> None:
        in_threads([partial(compute, seconds, number) for number in range(2)], deadline)

    deadline = deadline_of(None)
    in_threads([partial(more, 0.2), partial(more, 0.1)], deadline)
    assert deadline.remaining_s is not None
    assert 0.2 <= DEFAULT_LIMIT_S - deadline.remaining_s < 0.45


def test_code_that_is_compiled_takes_no_time_where_compute_time_is_limited() -> None:
    """Nor does it in other threads, and where one waits for another that compiles."""
    from numba import njit

    import_module("bapipe.planner.compute.compiled")  # it listens to numba

    twice: Any = njit(lambda number: 2 * number)

    def row(number: int, begin: Callable[[int], None], _: Deadline) -> bool:
        if number == 0:
            assert twice(21.0) == 42.0
            assert Compiling.num_threads == 0
        return number == 0

    deadline, before_s = deadline_of(None), Compiling.of_all_s
    started_s = time.monotonic()
    in_waves(row, 2, deadline, 2)
    compiled_s, took_s = Compiling.of_all_s - before_s, time.monotonic() - started_s
    assert deadline.remaining_s is not None
    assert compiled_s > 0.02
    assert DEFAULT_LIMIT_S - deadline.remaining_s < took_s - 0.8 * compiled_s + 0.02


@pytest.mark.parametrize("clock", [time.monotonic, compute_s])
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


@pytest.mark.parametrize("max_threads", [1, 2, 5])
def test_rows_follow_the_row_before_column_by_column(max_threads: int) -> None:
    """Sums along a grid, each of what is left of it and above it; without waiting some are read before they are set."""
    num_rows, num_columns = 7, 5
    sums = np.zeros((num_rows + 1, num_columns + 1), dtype=np.int64)
    sums[0, 0] = 1

    def run(row: int, begin: Callable[[int], None], deadline: Deadline) -> bool:
        for column in range(num_columns):
            begin(column)
            compute(0.0003 * (column + row % 2), 0, deadline)
            above = sums[row, column : column + 2].sum() if row > 0 else 1
            sums[row + 1, column + 1] = above + sums[row + 1, column]
        return True

    assert in_waves(run, num_rows, Deadline(None), max_threads) == num_rows
    expected = np.zeros_like(sums)
    expected[0, 0] = 1
    for row in range(num_rows):
        for column in range(num_columns):
            above = expected[row, column : column + 2].sum() if row > 0 else 1
            expected[row + 1, column + 1] = above + expected[row + 1, column]
    np.testing.assert_array_equal(sums, expected)


def test_a_row_is_not_far_ahead_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    begun: list[tuple[int, int]] = []

    def run(row: int, begin: Callable[[int], None], deadline: Deadline) -> bool:
        for column in range(20):
            begin(column)
            begun.append((row, column))
            compute(0.002 * row, 0, deadline)
        return True

    assert in_waves(run, 2, Deadline(None), 2, most_ahead=2) == 2
    at = {each: number for number, each in enumerate(begun)}
    assert all(at[0, column] < at[1, column] for column in range(20))
    # The second row has begun a column once those before it are done.
    assert all(at[1, column - 3] < at[0, column] for column in range(3, 20))


@pytest.mark.parametrize("max_threads", [1, 2])
def test_no_row_follows_the_last_one(max_threads: int) -> None:
    ended = []

    def run(row: int, begin: Callable[[int], None], deadline: Deadline) -> bool:
        begin(0)
        begin(1)
        ended.append(row)
        return row < 3

    assert in_waves(run, 9, Deadline(None), max_threads) == 4
    assert sorted(ended)[:4] == [0, 1, 2, 3]


def test_rows_end_when_another_fails() -> None:
    def run(row: int, begin: Callable[[int], None], deadline: Deadline) -> bool:
        begin(0)
        if row == 1:
            raise OutOfTime("over")
        begin(1)
        return True

    with pytest.raises(OutOfTime):
        in_waves(run, 9, Deadline(None), 2)
