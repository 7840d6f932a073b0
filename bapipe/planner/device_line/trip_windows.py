"""Compiled: sliding-window minima of costs over boundaries, in amortized constant time per boundary."""

import numpy as np

from bapipe.planner.compute.arrays import Floats, Ints
from bapipe.planner.compute.compiled import inlined
from bapipe.planner.device_line.trip_tables import Scratch, Window


@inlined
def least_of_begins(scratch: Scratch, window: Window, found: Floats) -> None:
    """Finds for each end the minimum of `costs` over the begins of the stages that end there, infinite if none."""
    starts, values, positions = scratch.starts, scratch.values, scratch.positions
    head, tail, pushed = 0, 0, window.first_begin - 1
    for j in range(window.first_end, window.last_end + 1):
        found[j] = np.inf
        if starts[j] == j:
            continue
        pushed = max(pushed, starts[j] - 1)
        while pushed < min(j - 1, window.last_begin):
            pushed += 1
            tail = _push(values, positions, head, tail, pushed, scratch.costs[pushed])
        head = _drop(positions, head, tail, starts[j], 1)
        found[j] = values[head]


@inlined
def least_of_ends(scratch: Scratch, window: Window, found: Floats) -> None:
    """Finds for each begin the minimum of `costs` over the ends of the stages that begin there, infinite if none."""
    starts, values = scratch.starts, scratch.values
    head = tail = 0
    pushed = window.last_end + 1
    for i in range(window.last_begin, window.first_begin - 1, -1):
        found[i] = np.inf
        if starts[i] == i:
            continue
        head, tail, pushed = move_back(scratch, window, head, tail, pushed, i)
        found[i] = values[head]


@inlined
def move_back(scratch: Scratch, window: Window, head: int, tail: int, pushed: int, i: int) -> tuple[int, int, int]:
    """Moves the window, which slides backwards, to the ends of the stages that begin at i; returns the new queue.

    Args:
        head, tail: the begin and the end of the monotonic queue of `costs`, in which `values` rise.
        pushed: the end that was added last.
    """
    start, positions = scratch.starts[i], scratch.positions
    pushed = min(pushed, start + 1)
    while pushed > max(i + 1, window.first_end):
        pushed -= 1
        tail = _push(scratch.values, positions, head, tail, pushed, scratch.costs[pushed])
    return _drop(positions, head, tail, start, -1), tail, pushed


@inlined
def _push(values: Floats, positions: Ints, head: int, tail: int, position: int, value: float) -> int:
    """Adds a value to a queue in which values rise, dropping those that are no smaller; returns the queue's end."""
    while tail > head and values[tail - 1] >= value:
        tail -= 1
    values[tail], positions[tail] = value, position
    return tail + 1


@inlined
def _drop(positions: Ints, head: int, tail: int, edge: int, sign: int) -> int:
    """Drops the positions that the window has left; returns the begin of the queue."""
    while head < tail and (positions[head] - edge) * sign < 0:
        head += 1
    return head
